"""Compiled kernels on disk: one file each, with a name that makes a stale one impossible.

`$XDG_CACHE_HOME/forge/kernels/<module>.<function>-<key>.kernel`, where the key hashes the kernel's
module, all modules of this package that it imports, by itself or through others, the versions of
Python, Numba and llvmlite, and the processor.
"""

import functools
import hashlib
import platform
import re
import sys
import tempfile
from pathlib import Path

import llvmlite
import llvmlite.binding
import numba

from forge import cache

# Files of a kernel that are kept, the newest; each is 30 to 300 kB.
_KEEP = 8
_IMPORT = re.compile(
    rf"^\s*(?:from|import) {re.escape(__package__)}(?:\.(\w+))?(?: import (\([^)]*\)|.*))?$", re.M
)


def root() -> Path:
    """The folder of all compiled kernels of this user."""
    return cache.folder() / "kernels"


def file(module: Path, function: str, signature: str) -> Path:
    """Where the kernel of this signature in the source file `module` is stored."""
    digest = hashlib.sha256(f"{_machine()}\0{function}\0{signature}".encode())
    for source in sorted(_closure(module)):
        digest.update(f"\0{source.name}\0".encode() + _text(source).encode())
    return root() / f"{module.stem}.{function}-{digest.hexdigest()[:16]}.kernel"


def write(path: Path, data: bytes) -> None:
    """Store it, and remove the oldest files of the same kernel."""
    cache.write(path, data)
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
