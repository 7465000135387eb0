"""Files that are whole or absent, whatever happens while they are written."""

import hashlib
import os
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a file and flush it to disk; a crash can leave half of it."""
    with path.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, text: str) -> None:
    """Write a file, or replace it, in one step: a crash leaves the old one or the new one."""
    temp = path.with_name(f".{path.name}.tmp")
    write(temp, text)
    temp.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk; Windows cannot do the latter."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256, as hexadecimal, of a file, read in pieces."""
    sha = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
            size += len(piece)
    return size, sha.hexdigest()
