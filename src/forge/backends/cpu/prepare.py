"""Compiling what a command needs before it begins, in as many processes as it may use cores."""

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from forge.backends.cpu import jit, store, threads
from forge.errors import DeviceError

# More processes would each import Numba to compile a kernel or two.
_MOST_WORKERS = 8
_EVAL = (
    "embedding:_embedding",
    "norm:_layernorm",
    "norm:_add_layernorm",
    "attention:_attention",
    "linear:_tiles",
    "loss:_losses",
    "loss:_weighted_sum",
)
# What each kind of work calls. Another kernel is compiled alone, at its first call.
NEEDED: dict[str, tuple[str, ...]] = {
    "eval": _EVAL,
    "train": (
        *_EVAL,
        "loss:_losses_and_gradients",
        "norm:_backward",
        "attention:_attention_backward",
        "pointwise:_gelu_backward",
        "pointwise:_same_shape",
        "pointwise:_scale",
        "reduce:_sum_rows",
        "embedding:_scatter_add_rows",
        "embedding:_position_backward",
        "update:_global_norm",
        "update:_adamw",
    ),
    "dropout": ("pointwise:_dropout",),
    "generate": (
        "embedding:_embedding",
        "norm:_layernorm",
        "norm:_add_layernorm",
        "attention:_attention",
        "attention:_cached_one",
        "layout:append",
        "linear:_tiles",
        "few_rows:few_rows",
    ),
}


def prepare(*kinds: str) -> None:
    """Compile what these kinds of work call, keys of `NEEDED` or "all", unless it is stored.

    Raises `DeviceError` when a compiler process fails; what was compiled is kept.
    """
    if "all" in kinds:
        fill(every())
        return
    names = dict.fromkeys(name for kind in kinds for name in NEEDED[kind])
    fill([_find(f"{__package__}.{name}") for name in names])


def every() -> list[jit.Kernel]:
    """All kernels of this backend."""
    found = []
    for source in sorted(Path(__file__).parent.glob("*.py")):
        module = importlib.import_module(f"{__package__}.{source.stem}")
        found += [value for value in vars(module).values() if isinstance(value, jit.Kernel)]
    return list({kernel.name: kernel for kernel in found}.values())


def fill(wanted: Sequence[jit.Kernel]) -> None:
    """Compile those of `wanted` that are not stored yet, at the same time."""
    if all(kernel.file.exists() for kernel in wanted):
        return
    try:
        store.check()
    except OSError as error:
        jit.say_unwritable(error)
        return
    with _lock(store.root() / "lock"):
        missing = [kernel for kernel in wanted if not kernel.file.exists()]
        if not missing:
            return
        missing.sort(key=lambda kernel: -kernel.cost)
        workers = min(threads.available_cores(), len(missing), _MOST_WORKERS)
        seconds = sum(kernel.cost for kernel in missing) / workers
        kernels = "a CPU kernel" if len(missing) == 1 else f"{len(missing)} CPU kernels"
        jit.say(f"compiling {kernels} for this machine, once (about {seconds + 1:.0f} s)…")
        _run_workers([kernel.name for kernel in missing], workers)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time in; the system frees the lock of one that dies."""
    try:
        import fcntl
    except ImportError:
        yield  # Windows: two processes then compile the same, and the files stay whole
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            jit.say("another process is compiling the CPU kernels; waiting for it…")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_workers(names: list[str], count: int) -> None:
    # Subprocesses, not multiprocessing: that would import the user's main module again.
    code = "import sys; from forge.backends.cpu.prepare import work; work(*sys.argv[1:])"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONSAFEPATH": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="forge-") as claims:
        command = [sys.executable, "-c", code, claims, *names]
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


def work(claims: str, *names: str) -> None:
    """Compile those of `names` that no other worker has claimed: the body of a worker process."""
    gc.disable()  # a twentieth of the time; the process ends before its garbage matters
    for name in names:
        try:
            os.close(os.open(Path(claims) / name.replace(":", "."), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        _find(name).compile()


def _find(name: str) -> jit.Kernel:
    module, function = name.split(":")
    kernel: jit.Kernel = getattr(importlib.import_module(module), function)
    return kernel
