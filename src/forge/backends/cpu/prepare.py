"""Compiling what a command needs before it begins, in as many processes as it may use cores."""

import contextlib
import errno
import gc
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forge.backends import notice
from forge.backends.cpu import jit, store, threads
from forge.errors import DeviceError

# More processes would each import Numba to compile a kernel or two.
_MOST_WORKERS = 8
_F32, _BF16, _INT8 = "float32", "bfloat16", "int8"
_EVAL = (
    "embedding:_embedding:T",
    "norm:_layernorm:T",
    "norm:_add_layernorm:T",
    "heads:attention",
    "wide_product:_tiles",
    "loss:_losses:T",
    "loss:_weighted_sum",
)
# What each kind of work calls, T and U standing for the dtypes of the work: float32, or bfloat16
# with sums in float32. Another kernel is compiled alone, at its first call.
NEEDED: dict[str, tuple[str, ...]] = {
    "eval": _EVAL,
    "train": (
        *_EVAL,
        "loss:_losses_and_gradients",
        "norm:_backward:T",
        "heads:attention_backward",
        "pointwise:_gelu_backward:T",
        "pointwise:_same_shape:T",
        "pointwise:_same_shape:U",
        "pointwise:_scale:T,T",
        "pointwise:_scale:U,U",
        "reduce:_sum_rows:T,U",
        "embedding:_scatter_add_rows:T,U",
        "embedding:_position_backward:T,U",
        "update:_global_norm:U",
        "update:_adamw:U,T",
    ),
    "dropout": ("pointwise:_dropout:T",),
    "generate": (
        "embedding:_embedding:T",
        "norm:_layernorm:T",
        "norm:_add_layernorm:T",
        "heads:attention",
        "attention:_cached_one:T",
        "layout:append:T",
        "wide_product:_tiles",
        "few_rows:few_rows:T",
    ),
}
# What stands in for a kernel of float32 alone; training's products of bfloat16 also have sums in
# float32, for the weights' gradients.
_LOW = {
    "heads:attention": ("heads:low_attention",),
    "heads:attention_backward": ("heads:low_attention_backward",),
    "wide_product:_tiles": ("low_product:_product:T,T",),
    "loss:_losses_and_gradients": (
        "loss:_low_losses_and_gradients",
        "low_product:_product:T,U",
    ),
}
# What weights in int8 call in its place; T is float32 for them.
_QUANTIZED = {
    "embedding:_embedding:T": ("quantized:_embedding",),
    "few_rows:few_rows:T": ("quantized:_few_rows",),
    "wide_product:_tiles": ("wide_product:_tiles", "quantized:_dequantize"),
}
_INSTEAD: dict[str, dict[str, tuple[str, ...]]] = {_F32: {}, _BF16: _LOW, _INT8: _QUANTIZED}


def names(kind: str, dtype: str) -> list[str]:
    """Names of the kernels that a kind of work calls in a dtype, without the package's."""
    found = []
    instead = _INSTEAD[dtype]
    dtype = _F32 if dtype == _INT8 else dtype
    for each in NEEDED[kind]:
        for name in instead.get(each, (each,)):
            module, function, *form = name.split(":")
            dtypes = [
                {"T": dtype, "U": _F32}[letter] for part in form for letter in part.split(",")
            ]
            found.append(":".join((module, function, *([",".join(dtypes)] if dtypes else []))))
    return list(dict.fromkeys(found))


def prepare(*kinds: str, dtype: str = _F32) -> None:
    """Compile what these kinds of work call in a dtype, or with int8 weights, unless it is stored.

    The kinds are keys of `NEEDED`, or "all": every kernel, whatever its dtype.

    Raises `DeviceError` when a compiler process fails; what was compiled is kept.
    """
    if "all" in kinds:
        fill(every())
        return
    wanted = dict.fromkeys(name for kind in kinds for name in names(kind, dtype))
    fill([_find(f"{__package__}.{name}") for name in wanted])


def every() -> list[jit.Kernel]:
    """All kernels of this backend."""
    found: list[Any] = []
    for source in sorted(Path(__file__).parent.glob("*.py")):
        module = importlib.import_module(f"{__package__}.{source.stem}")
        for value in vars(module).values():
            found += value.values() if isinstance(value, jit.Forms) else [value]
    found = [value for value in found if isinstance(value, jit.Kernel)]
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
        notice.say(f"compiling {kernels} for this machine, once (about {seconds + 1:.0f} s)…")
        _run_workers([kernel.name for kernel in missing], workers)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time in; the system frees the lock of one that dies."""
    try:
        import fcntl
    except ImportError:
        yield  # Windows: two processes may compile the same then, and the files stay whole
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notice.say("another process is compiling the CPU kernels; waiting for it…")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # A file system without locks, such as some of NFS: as on Windows.
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
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
            for worker in workers:  # none is left running, on Ctrl-C either, and writing claims
                worker.kill()
                worker.wait()
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
    module, function, *form = name.split(":")
    found: Any = getattr(importlib.import_module(module), function)
    if form:
        dtypes = form[0].split(",")
        found = found[dtypes[0] if len(dtypes) == 1 else tuple(dtypes)]
    kernel: jit.Kernel = found
    return kernel
