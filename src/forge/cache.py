"""The user's cache on disk: what takes long to make, and can be made again.

`$XDG_CACHE_HOME/forge`, by default `~/.cache/forge`. A file is whole or absent, and carries a
checksum: a disk that lost power may leave one of the right name and other content.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_CHECKSUM = hashlib.sha256().digest_size


def folder() -> Path:
    """Where everything of this user is."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "forge"


def read(path: Path) -> bytes | None:
    """What `write` stored there; None where nothing is, or where it was damaged."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    checksum, data = content[:_CHECKSUM], content[_CHECKSUM:]
    return data if checksum == hashlib.sha256(data).digest() else None


def write(path: Path, data: bytes) -> None:
    """Store it with a checksum; raises `OSError`."""
    put(path, hashlib.sha256(data).digest() + data)


def put(path: Path, content: bytes) -> None:
    """Make a file, or replace it, in one step, and the folders that it is in; raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
        try:
            part.write(content)
            part.close()
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise
