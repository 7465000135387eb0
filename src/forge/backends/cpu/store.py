"""Compiled kernels on disk: one file each, with a name that makes a stale one impossible.

`$XDG_CACHE_HOME/forge/kernels/<module>.<function>-<key>.kernel`, where the key hashes the kernel's
module, all modules of this package that it imports, by itself or through others, the versions of
Python, Numba and llvmlite, and the processor. A file is complete or absent, and carries a checksum.
"""

import functools
import hashlib
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

import llvmlite
import llvmlite.binding
import numba

# Files of a kernel that are kept, the newest; each is 30 to 300 kB.
_KEEP = 8
_IMPORT = re.compile(
    rf"^\s*(?:from|import) {re.escape(__package__)}(?:\.(\w+))?(?: import (\([^)]*\)|.*))?$", re.M
)


def root() -> Path:
    """The folder of all compiled kernels of this user."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "forge" / "kernels"


def file(module: Path, function: str, signature: str) -> Path:
    """Where the kernel of this signature in the source file `module` is stored."""
    digest = hashlib.sha256(f"{_machine()}\0{function}\0{signature}".encode())
    for source in sorted(_closure(module)):
        digest.update(f"\0{source.name}\0".encode() + _text(source).encode())
    return root() / f"{module.stem}.{function}-{digest.hexdigest()[:16]}.kernel"


def read(path: Path) -> bytes | None:
    """What is stored there; None where nothing is, or where a disk has damaged it."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    checksum, data = content[:32], content[32:]
    return data if checksum == hashlib.sha256(data).digest() else None


def write(path: Path, data: bytes) -> None:
    """Store it at once and whole, and remove the oldest files of the same kernel."""
    check()
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
        try:
            part.write(hashlib.sha256(data).digest() + data)
            part.close()
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise
    kernel = path.name.rpartition("-")[0]
    for old in sorted(path.parent.glob(f"{kernel}-*.kernel"), key=_age)[_KEEP:]:
        old.unlink(missing_ok=True)


def check() -> None:
    """Raise `OSError` where the folder can't be written."""
    root().mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=root()).close()


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # another process has just removed it


@functools.cache
def _closure(module: Path) -> frozenset[Path]:
    """The source file and those of this package that it imports, directly or not."""
    found = {module}
    waiting = [module]
    while waiting:
        for one, several in _IMPORT.findall(_text(waiting.pop())):
            names = [one] if one else re.findall(r"\w+", several)
            paths = {Path(__file__).parent / f"{name}.py" for name in names} - found
            existing = [path for path in paths if path.is_file()]
            found.update(existing)
            waiting += existing
    return frozenset(found)


@functools.cache
def _text(source: Path) -> str:
    return source.read_text(encoding="utf-8")


@functools.cache
def _machine() -> str:
    """The compiler and the processor it compiles for."""
    config = numba.config
    features = config.CPU_FEATURES
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    return "\0".join(
        [
            platform.python_implementation(),
            sys.version,
            numba.__version__,
            llvmlite.__version__,
            config.CPU_NAME or llvmlite.binding.get_host_cpu_name(),
            features,
            *(
                str(getattr(config, name))
                for name in ("ENABLE_AVX", "LOOP_VECTORIZE", "SLP_VECTORIZE")
            ),
        ]
    )
