"""Which kernel serves an op on a device for a dtype, and what stands in where there is none.

`kernels(x).gelu(x, out=out, form=form)` runs the kernel of x's device for x's dtype. A backend
lists what it implements in the table `KERNELS` of its package; for the rest the reference stands
in, which `report()` shows and `strict()` forbids.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar, cast

from forge import dtypes
from forge.backends import capture
from forge.backends.kernel import Kernel
from forge.backends.reference import KERNELS as REFERENCE
from forge.errors import FallbackError
from forge.pool import Memory, Pool, rounded
from forge.tensor import Device, Tensor, tensor

# Backend package by kind of device.
BACKENDS = {
    "cpu": "forge.backends.cpu",
    "cuda": "forge.backends.cuda",
    "reference": "forge.backends.reference",
}


def _cuda_memory() -> Memory:
    memory: Memory = importlib.import_module("forge.backends.cuda.memory").CudaMemory()
    return memory


# From a kernel's name and the kernel to what is called in its place.
Around = Callable[[str, Callable[..., Any]], Callable[..., Any]]
# What keeps a function and its arguments, to call it later.
Record = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], None]
Function = TypeVar("Function", bound=Callable[..., None])
# Kernels that return what they find, where the others fill Tensors.
_FINDERS = frozenset({"extent", "finite"})

# Imported when the device is asked for, so that a machine without a GPU never loads its packages.
Device.memories["cuda"] = _cuda_memory


class Kernels:
    """The kernels of one device and dtype; each is looked up when it is first asked for."""

    def __init__(self, device: Device, dtype: str) -> None:
        self._device = device
        self._dtype = dtype

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _choose(name, self._device, self._dtype)
        if _around is not None:
            function = _around(name, function)
        setattr(self, name, function)
        return function


class _Recorded(Kernels):
    """Kernels that are recorded where their thread captures, and run in others."""

    def __init__(self, device: Device, dtype: str, where: Device, record: Record) -> None:
        super().__init__(device, dtype)
        self._where = where
        self._record = record

    def __getattr__(self, name: str) -> Callable[..., Any]:
        device, dtype = self._device, self._dtype

        def run(*args: Any, **keywords: Any) -> Any:
            if not capture.here():
                return getattr(Kernels(device, dtype), name)(*args, **keywords)
            if device is not self._where:
                capture.eager(f"work for {device.name}")
            if name in _FINDERS:
                capture.eager("look at values")
            self._record(partial(_run, device, dtype, name), args, keywords)
            return None

        setattr(self, name, run)
        return run


def _run(device: Device, dtype: str, name: str, *args: Any, **keywords: Any) -> None:
    """Run the kernel that serves by then, which may be watched or forbidden."""
    bound = _bound.get((device, dtype))
    getattr(_bind(device, dtype) if bound is None else bound, name)(*args, **keywords)


_bound: dict[tuple[Device, str], Kernels] = {}
# Held where a recording begins or ends, and where kernels are bound for one or for none.
_binding = threading.RLock()
_strict = False
_around: Around | None = None
_recording: tuple[Device, Record] | None = None


class Row(NamedTuple):
    """Which implementation serves a kernel on a device for a dtype."""

    kernel: str
    device: str
    dtype: str
    implementation: str


def kernels(x: Tensor) -> Kernels:
    """The kernels for x's device and dtype, by name."""
    bound = _bound.get((x.device, x.dtype))
    return _bind(x.device, x.dtype) if bound is None else bound


def _bind(device: Device, dtype: str) -> Kernels:
    with _binding:
        recording = _recording
        bound = (
            Kernels(device, dtype) if recording is None else _Recorded(device, dtype, *recording)
        )
        _bound[device, dtype] = bound
        return bound


def on_host(function: Function) -> Function:
    """Decorator of a function that works on Tensors' arrays on the host, and returns nothing.

    It is for an op's own NumPy: where a step is captured, replays call it like a kernel. Tensors
    are arguments, alone or in lists and tuples.
    """

    @wraps(function)
    def run(*args: Any, **keywords: Any) -> None:
        if _recording is not None and capture.here():
            _recording[1](function, args, keywords)
        else:
            function(*args, **keywords)

    return cast(Function, run)


@contextmanager
def recorded(device: Device, record: Record) -> Iterator[None]:
    """Within this block kernels of a device on the host are recorded instead of run."""
    global _recording
    with _binding:
        _recording = device, record
        _bound.clear()
    try:
        yield
    finally:
        with _binding:
            _recording = None
            _bound.clear()


@contextmanager
def strict() -> Iterator[None]:
    """Within this block a reference kernel that would stand in raises `FallbackError`."""
    global _strict
    before = _strict
    _strict = True
    _bound.clear()
    try:
        yield
    finally:
        _strict = before
        _bound.clear()


@contextmanager
def watched(around: Around) -> Iterator[None]:
    """Within this block `around(name, kernel)` is called in a kernel's place: to time it, say."""
    global _around
    before = _around
    _around = around
    _bound.clear()
    try:
        yield
    finally:
        _around = before
        _bound.clear()


def forbid_fallbacks() -> None:
    """`strict()` for the rest of the process."""
    global _strict
    _strict = True
    _bound.clear()


def implementation(kernel: str, kind: str, dtype: str) -> str:
    """The backend that serves a kernel: `kind` itself, or "reference"."""
    table = importlib.import_module(BACKENDS[kind]).KERNELS
    served = table.get(kernel)
    return kind if served is not None and dtype in served.dtypes else "reference"


def report() -> list[Row]:
    """A row for every kernel, device and floating dtype."""
    return [
        Row(kernel, kind, dtype, implementation(kernel, kind, dtype))
        for kernel in REFERENCE
        for kind in BACKENDS
        for dtype in sorted(dtypes.FLOATING)
    ]


def _choose(name: str, device: Device, dtype: str) -> Callable[..., Any]:
    kind = device.kind
    backend = implementation(name, kind, dtype)
    if backend != kind and _strict:
        return _forbidden(name, kind, dtype)
    kernel: Kernel = importlib.import_module(BACKENDS[backend]).KERNELS[name]
    if device.plan:
        return _planned(kernel, device.pool)
    function = kernel.load()
    return _through_host(function) if kind == "cuda" and backend == "reference" else function


def _through_host(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A reference kernel run on copies in the host's memory, which are then copied back."""

    def run(*args: Any, **keywords: Any) -> Any:
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def down(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(down(each) for each in x)
            if not isinstance(x, Tensor):
                return x
            if id(x) not in copies:
                copies[id(x)] = (x, tensor(x, device="reference"))
            return copies[id(x)][1]

        result = kernel(*map(down, args), **{name: down(x) for name, x in keywords.items()})
        for x, copy in copies.values():
            x.device.memory.write(x, copy.array)
        return result

    return run


def _planned(kernel: Kernel, pool: Pool) -> Callable[..., Any]:
    """What a plan runs in a kernel's place: it counts the workspace, and finds all finite."""
    workspace = kernel.load_workspace() if kernel.workspace else None

    def count(*args: Any, **keywords: Any) -> bool:
        if workspace is not None:
            sizes = [rounded(nbytes) for nbytes in workspace(*args, **keywords)]
            buffers = [pool.take(size) for size in sizes]
            for size, buffer in zip(sizes, buffers, strict=True):
                pool.give(size, buffer)
        return True

    return count


def _forbidden(name: str, kind: str, dtype: str) -> Callable[..., Any]:
    def refuse(*args: Any, **keywords: Any) -> None:
        raise FallbackError(
            f"[{name}] expected a {kind} kernel for {dtype}, got only the reference; "
            "`forge kernels` lists what there is, and without strict the reference serves"
        )

    return refuse
