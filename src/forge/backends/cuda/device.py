"""The GPU itself: whether it can work, its one stream, events and captured graphs.

The only file that calls CUDA's runtime, through NVIDIA's own bindings. Everything runs in order on
one stream, so a buffer freed on the host can be handed out again at once, and a step can be
captured.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from forge.backends import capture
from forge.backends.cuda import precision
from forge.errors import DeviceError, DeviceLostError, OutOfMemoryError, installing
from forge.tensor import Device

# The oldest architecture: the first with bfloat16 and asynchronous copies.
OLDEST = 80
# The driver that runs CUDA 13: older ones lack it, whatever the card.
OLDEST_DRIVER = 13000
# The driver's library.
DRIVER = "libcuda.so.1"
# cudaErrorMemoryAllocation, and CUDA_ERROR_OUT_OF_MEMORY of the driver.
OUT_OF_MEMORY = 2
# Package and what to install it by.
PACKAGES = {
    "cuda.bindings": "cuda-bindings",
    "triton": "triton",
    "nvmath": "nvmath-python",
    "cudnn": "nvidia-cudnn-frontend",
}


@dataclass(frozen=True)
class Card:
    """What kernels and tables need to know of the GPU."""

    name: str
    arch: int
    processors: int
    driver: int


def runtime() -> Any:
    """CUDA's runtime, as Python functions that return (error, result …)."""
    from cuda.bindings import runtime as module

    return module


def check(what: str, result: tuple[Any, ...]) -> Any:
    """The result of a call of the runtime or driver.

    Raises `OutOfMemoryError` where memory was missing, `DeviceLostError` where it failed otherwise.
    """
    error, *values = result
    if int(error) == OUT_OF_MEMORY:
        raise out_of_memory(f"GPU memory for {what}")
    if int(error) != 0:
        raise DeviceLostError(
            f"[cuda] expected {what} to succeed, got {error.name}; the GPU's state is lost after "
            "such an error: start again from the last checkpoint"
        )
    return values[0] if len(values) == 1 else tuple(values)


def out_of_memory(wanted: str) -> OutOfMemoryError:
    """The error for memory that was asked for, with what is free."""
    cuda = runtime()
    cuda.cudaGetLastError()  # CUDA keeps it, and the next call would find it
    error, *sizes = cuda.cudaMemGetInfo()
    got = "none"
    if int(error) == 0:
        free, total = (size / 2**20 for size in sizes)
        got = f"{free:,.0f} MiB free of {total:,.0f}"
    return OutOfMemoryError(
        f"[cuda] expected {wanted}, got {got}; "
        "lower --micro-batch or --block-size, or --n of forge generate"
    )


def eager(what: str) -> None:
    """Raise `DeviceError` if calls are being captured: `what` would have to wait, or go stale."""
    if _capturing:
        raise capture.refusal("cuda", what)


def capturing() -> bool:
    """Whether work is being recorded, and not done."""
    return _capturing


def absent(reason: str, hint: str) -> DeviceError:
    """The error for a GPU that cannot be used."""
    return DeviceError(f"[cuda] expected a usable NVIDIA GPU, got {reason}; {hint}")


def _no_driver() -> DeviceError:
    return absent("no NVIDIA driver", "install one, or use --device cpu")


@cache
def card() -> Card:
    """The GPU; raises `DeviceError` with the reason where there is none that works."""
    # First: where there is no driver, no package helps.
    try:
        ctypes.CDLL(DRIVER)
    except OSError as unloadable:
        raise _no_driver() from unloadable
    for package, distribution in PACKAGES.items():
        try:
            found = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise absent(f"no package {distribution}", installing("cuda"))
    cuda = runtime()
    _, driver = cuda.cudaDriverGetVersion()
    if not driver:
        raise _no_driver()
    if driver < OLDEST_DRIVER:
        raise absent(
            f"a driver for CUDA {driver // 1000}.{driver % 1000 // 10}",
            f"update it to one for CUDA {OLDEST_DRIVER // 1000} (version 580 or newer)",
        )
    error, count = cuda.cudaGetDeviceCount()
    if int(error) != 0 or count == 0:
        raise absent(
            f"{error.name}, {count or 0} devices",
            "see what nvidia-smi and CUDA_VISIBLE_DEVICES say",
        )
    properties = check("cudaGetDeviceProperties", cuda.cudaGetDeviceProperties(0))
    name = properties.name.decode()
    arch = 10 * properties.major + properties.minor
    if arch < OLDEST:
        raise absent(
            f"{name}, compute capability {properties.major}.{properties.minor}",
            f"Forge needs {OLDEST // 10}.{OLDEST % 10} (Ampere) or newer",
        )
    check("cudaSetDevice", cuda.cudaSetDevice(0))
    return Card(name, arch, properties.multiProcessorCount, driver)


@cache
def _stream() -> Any:
    card()
    cuda = runtime()
    return check("a stream", cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))


@cache
def stream() -> int:
    """The handle of the stream that everything runs on."""
    return int(_stream())


def arch() -> int:
    """Compute capability, 90 for 9.0."""
    return card().arch


def processors() -> int:
    """Number of multiprocessors."""
    return card().processors


def synchronize() -> None:
    """Wait until the GPU has done all it was given."""
    check("the GPU's work", runtime().cudaStreamSynchronize(stream()))


def memory_info() -> tuple[int, int]:
    """Bytes of the GPU's memory: (free, all), of all programs that use it."""
    card()
    free, total = check("cudaMemGetInfo", runtime().cudaMemGetInfo())
    return free, total


_capturing = False


class Event:
    """A mark in the stream, to wait for or to measure time between."""

    def __init__(self, *, timing: bool = False) -> None:
        cuda = runtime()
        flags = cuda.cudaEventDefault if timing else cuda.cudaEventDisableTiming
        self._event = check("an event", cuda.cudaEventCreateWithFlags(flags))
        self._destroy = cuda.cudaEventDestroy

    def record(self) -> Event:
        """Put the mark after what the stream was given so far."""
        check("cudaEventRecord", runtime().cudaEventRecord(self._event, stream()))
        return self

    def wait(self) -> None:
        """Wait, on the host, until the stream has passed the mark."""
        check("the GPU's work", runtime().cudaEventSynchronize(self._event))

    def hold(self, stream: int) -> None:
        """Let another stream wait, on the GPU, until this one has passed the mark."""
        cuda = runtime()
        check("cudaStreamWaitEvent", cuda.cudaStreamWaitEvent(stream, self._event, 0))

    def since(self, start: Event) -> float:
        """Milliseconds from another mark to this one, once passed."""
        self.wait()
        elapsed: float = check(
            "cudaEventElapsedTime", runtime().cudaEventElapsedTime(start._event, self._event)
        )
        return elapsed

    def __del__(self) -> None:
        self._destroy(self._event)


def settings() -> Hashable:
    """What of the process's settings is baked into captured work."""
    return precision.tf32()


class Graph:
    """The work that a block of code gave to the stream, to be replayed."""

    def __init__(self, device: Device) -> None:
        self._executable: Any = None
        self._destroy = runtime().cudaGraphExecDestroy

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Within this block work is recorded and not done."""
        global _capturing
        cuda = runtime()
        # Relaxed: memory may be allocated meanwhile, which CUDA otherwise forbids.
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        check("cudaStreamBeginCapture", cuda.cudaStreamBeginCapture(stream(), mode))
        _capturing = True
        graph = None
        try:
            yield
        finally:
            _capturing = False
            error, graph = cuda.cudaStreamEndCapture(stream())
        check("cudaStreamEndCapture", (error, graph))
        self._executable = check("cudaGraphInstantiate", cuda.cudaGraphInstantiate(graph, 0))
        check("cudaGraphDestroy", cuda.cudaGraphDestroy(graph))
        check("cudaGraphUpload", cuda.cudaGraphUpload(self._executable, stream()))

    def replay(self) -> None:
        """Do the recorded work again."""
        check("cudaGraphLaunch", runtime().cudaGraphLaunch(self._executable, stream()))

    def __del__(self) -> None:
        if self._executable is not None:
            self._destroy(self._executable)
