"""Kernels compiled by Numba: the two decorators, the disk cache, and its filling on first use.

A kernel has one explicit signature and is loaded at its first call, so importing Forge compiles
nothing. Compiled kernels live in `$XDG_CACHE_HOME/forge/kernels/<key>`, where the key hashes every
source of this package, the versions of Python, Numba and llvmlite, and the processor: Numba's own
check only sees the kernel's own file, not its callees or constants elsewhere.
"""

import contextlib
import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import llvmlite.binding
import numba

from forge.backends.cpu import threads
from forge.errors import DeviceError

Function = TypeVar("Function", bound=Callable[..., Any])

# Not nnan, ninf: a NaN must reach the loss. Not arcp, afn: LLVM then replaces a vector's division
# by an estimate, which turns 1/inf into NaN and gives a loop's tail other bits than its body.
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_FASTMATH = {"contract", "reassoc", "nsz"}
# Only `prange` makes a loop parallel. Array expressions stay as they are: to make parallel loops of
# them too takes a quarter longer to compile.
_PARALLEL = {
    "comprehension": False,
    "reduction": False,
    "inplace_binop": False,
    "setitem": False,
    "numpy": False,
    "stencil": False,
    "fusion": False,
    "prange": True,
}
# Cache folders of other versions that are kept, the newest ones; each is about 2 MB.
_KEEP = 12
_COMPLETE = "complete"
# More processes would each import Numba to compile a kernel or two.
_MOST_WORKERS = 8
# Held while a kernel is loaded: Numba's cache folder is a global of Numba's.
_loading = threading.RLock()


class Kernel:
    """A compiled function with one signature: made by `kernel`, called like a function."""

    __slots__ = ("cost", "function", "parallel", "run", "setup", "signature")

    def __init__(
        self,
        function: Callable[..., Any],
        signature: str,
        parallel: bool,
        cost: float,
        setup: Callable[[], None] | None,
    ) -> None:
        self.function = function
        self.setup = setup
        self.signature = signature
        self.parallel = parallel
        self.cost = cost
        self.run: Callable[..., Any] = self._first

    @property
    def name(self) -> str:
        """Where it is defined, as module:function."""
        return f"{self.function.__module__}:{self.function.__name__}"

    def __call__(self, *args: Any) -> Any:
        """Run it on arrays and numbers of exactly the signature's types."""
        if threads.applied.count != threads.count:
            threads.apply()
        return self.run(*args)

    def _first(self, *args: Any) -> Any:
        with _loading:
            if self.run == self._first:
                self.load(ready())
        return self.run(*args)

    def load(self, folder: Path | None) -> None:
        """Compile, or load from `folder`; None compiles in memory."""
        threads.start()
        if self.setup is not None:
            self.setup()
        with _numba_settings(folder):
            dispatcher = numba.njit(
                parallel=_PARALLEL if self.parallel else False,
                fastmath=_FASTMATH,
                cache=folder is not None,
                no_cfunc_wrapper=True,
                **_OPTIONS,
            )(self.function)
            try:
                dispatcher.compile(self.signature)
            except OSError as error:
                if not dispatcher.nopython_signatures:
                    raise
                # Compiled, but the disk is full or the folder was just pruned.
                _say(f"could not save the kernel {self.name} ({error}); it stays in memory")
        dispatcher.disable_compile()
        self.run = dispatcher


def kernel(
    signature: str,
    *,
    parallel: bool = True,
    cost: float = 1.0,
    setup: Callable[[], None] | None = None,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator of a kernel of one Numba `signature`, such as "void(float32[::1], int64)".

    `parallel` lets its `prange` loops run on the thread pool. `cost` is about how many seconds it
    takes to compile: on first use the slowest are started first. `setup` runs before it is loaded,
    such as `blas.link` for one that calls sgemm.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        return Kernel(function, signature, parallel, cost, setup)

    return decorate


def device(function: Function) -> Function:
    """Decorator of a short function that becomes part of the kernels that call it.

    Numba pastes its code into the caller's, which compiles in a tenth of the time that a function
    of its own takes, and it computes under the caller's fast-math flags.
    """
    decorated: Function = numba.njit(inline="always", **_OPTIONS)(function)
    return decorated


def routine(function: Function) -> Function:
    """Decorator of a function that kernels call as it is, compiled once for each of them.

    It keeps the code of a parallel kernel short, which Numba compiles in more than linear time.
    """
    decorated: Function = numba.njit(
        fastmath=_FASTMATH, no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS
    )(function)
    return decorated


# ---- The cache ----


def cache_key(sources: Path) -> str:
    """Hash of the folder `sources`, all Python files in it, the compiler, and the processor."""
    digest = hashlib.sha256()
    features = numba.config.CPU_FEATURES
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    parts = [
        # Numba files kernels by their path, so another installation fills a cache of its own.
        str(sources.resolve()),
        platform.python_implementation(),
        sys.version,
        numba.__version__,
        llvmlite.__version__,
        numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name(),
        features,
    ]
    for source in sorted(sources.glob("*.py")):
        parts += [source.name, source.read_bytes().decode()]
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def cache_root() -> Path:
    """The folder of all kernel caches of this user."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "forge" / "kernels"


_ready: list[Path | None] = []


def ready() -> Path | None:
    """The filled cache folder of these sources, or None where no folder can be written.

    The first call of a process fills it if it is cold. With FORGE_PREPARE=0 it stays as it is, and
    each kernel is compiled at its first call: for work on the kernels themselves.
    """
    if not _ready:
        folder = _writable(cache_root() / cache_key(Path(__file__).parent))
        if folder is not None and os.environ.get("FORGE_PREPARE") != "0":
            prepare(folder=folder)
        _ready[:] = [folder]
    return _ready[0]


def _writable(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        _say(
            f"cannot write the kernel cache {folder} ({error.strerror}): kernels are compiled in "
            "memory, on every start; set XDG_CACHE_HOME to a writable folder"
        )
        return None
    return folder


@contextlib.contextmanager
def _numba_settings(folder: Path | None) -> Iterator[None]:
    """Numba's cache folder and level of optimisation, for the kernel compiled inside alone."""
    config = numba.config
    before = config.CACHE_DIR, config.OPT
    config.CACHE_DIR = str(folder or config.CACHE_DIR)
    # Level 3 takes a third longer to compile, and no kernel here gains by it.
    config.OPT = type(config.OPT)(2)
    try:
        yield
    finally:
        config.CACHE_DIR, config.OPT = before


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time in; the system frees the lock of one that dies."""
    try:
        import fcntl
    except ImportError:
        yield  # Windows: two processes then compile the same, and Numba's files stay whole
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is compiling the CPU kernels; waiting for it…")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prune(own: Path) -> None:
    others = [path for path in own.parent.iterdir() if path.is_dir() and path != own]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[_KEEP:]:
        shutil.rmtree(path, ignore_errors=True)


# ---- Filling the cache ----


def kernels() -> dict[str, Kernel]:
    """Every kernel of this backend by name, those that compile longest first."""
    found = {}
    for source in sorted(Path(__file__).parent.glob("*.py")):
        module = importlib.import_module(f"{__package__}.{source.stem}")
        for value in vars(module).values():
            if isinstance(value, Kernel):
                found[value.name] = value
    return dict(sorted(found.items(), key=lambda item: -item[1].cost))


def prepare(names: Sequence[str] | None = None, *, folder: Path | None = None) -> None:
    """Compile kernels into the cache, in as many processes as this one may use cores.

    `names` are keys of `kernels()`, by default all. Raises `DeviceError` when a compiler process
    fails; what the others compiled is kept.
    """
    folder = folder or _writable(cache_root() / cache_key(Path(__file__).parent))
    if folder is None or (names is None and (folder / _COMPLETE).exists()):
        return
    with _lock(folder / "lock"):
        if names is None and (folder / _COMPLETE).exists():
            return
        wanted = list(kernels()) if names is None else list(names)
        workers = min(threads.available_cores(), len(wanted), _MOST_WORKERS)
        seconds = sum(kernels()[name].cost for name in wanted) / max(workers, 1)
        _say(
            f"compiling {len(wanted)} CPU kernels for this machine, once "
            f"(about {seconds + 2:.0f} s)…"
        )
        _run_workers(wanted, workers, folder)
        if names is None:
            (folder / _COMPLETE).touch()
            _prune(folder)


def _run_workers(names: list[str], count: int, folder: Path) -> None:
    # Subprocesses, not multiprocessing: that would import the user's main module again.
    code = "import sys; from forge.backends.cpu.jit import work; work(*sys.argv[1:])"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONSAFEPATH": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="forge-") as claims:
        command = [sys.executable, "-c", code, str(folder), claims, *names]
        workers = [
            subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            for _ in range(count)
        ]
        try:
            reports = [worker.communicate()[1].decode(errors="replace") for worker in workers]
        finally:
            for worker in workers:  # none is left running, on Ctrl-C either
                worker.kill()
    for worker, report in zip(workers, reports, strict=True):
        if worker.returncode:
            raise DeviceError(
                f"[cpu] expected the kernel compiler to finish, got exit {worker.returncode}: "
                f"{' '.join(report.split()[-60:]) or 'no message'}; "
                "start again, what was compiled is kept (a negative exit is a signal, such as of "
                "too little memory)"
            )


def work(folder: str, claims: str, *names: str) -> None:
    """Compile those of `names` that no other worker has claimed: the body of a worker process."""
    for name in names:
        try:
            os.close(os.open(Path(claims) / name.replace(":", "."), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        module, function = name.split(":")
        chosen: Kernel = getattr(importlib.import_module(module), function)
        chosen.load(Path(folder))


def _say(text: str) -> None:
    sys.stderr.write(f"[forge] {text}\n")
    sys.stderr.flush()
