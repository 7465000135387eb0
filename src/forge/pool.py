"""Memory that is reused instead of returned to the system.

A training step asks for the same few hundred buffers every time. Fresh host pages cost a page fault
per 4 KiB (at 124M parameters more than the kernels that fill them), and allocating on a GPU waits
for it; so a freed buffer waits in a list for the next request of its size. The pool also counts:
`peak` is the memory a step needs, and on a plan device, which has no memory at all, the same count
tells it beforehand.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any, NamedTuple, Protocol

import numpy as np

from forge import dtypes

# A cache line, and the width of an AVX-512 register: vector loads never straddle two lines.
ALIGNMENT = 64
# Requests are rounded up to this so that nearly equal sizes share a list.
GRANULE = 256


class Buffer(NamedTuple):
    """Bytes that the host cannot see."""

    address: int


class Hidden(NamedTuple):
    """Bytes that the host is not to see yet: they are filled when what is recorded is replayed."""

    bytes: np.ndarray

    def shown(self, x: Any) -> np.ndarray:
        """The host's view of x, a Tensor on them."""
        dtype = dtypes.to_numpy(x.dtype)
        return np.ndarray(x.shape, dtype, self.bytes, x.offset * dtype.itemsize)


class Memory(Protocol):
    """Where a device's buffers come from, and how a Tensor's elements get there and back."""

    @property
    def stream(self) -> int | None:
        """What its work runs on, in order, as other libraries are told; None on the host."""

    def allocate(self, size: int) -> Any:
        """A new buffer of `size` bytes; raises `MemoryError` where they are not free."""

    def release(self, buffer: Any) -> None:
        """Return a buffer to the system."""

    def fill(self, x: Any, value: float) -> None:
        """Set every element of the Tensor x."""

    def write(self, x: Any, array: np.ndarray) -> None:
        """Copy a host array of x's shape into the Tensor x, converting to its dtype."""

    def read(self, x: Any) -> np.ndarray:
        """A copy of the Tensor x on the host."""

    def copy(self, source: Any, x: Any) -> None:
        """Copy a Tensor of this memory into x, of its shape and dtype."""

    def hand_over(self, stream: int | None) -> None:
        """Let another library's stream wait for the work so far, as DLPack numbers streams."""

    def settle(self) -> None:
        """Wait for the work so far."""


class HostMemory:
    """The host's own memory: a Tensor's `array` is a view of its buffer."""

    stream: int | None = None

    def allocate(self, size: int) -> np.ndarray:
        """A new buffer of `size` bytes."""
        raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + size]

    def release(self, buffer: np.ndarray) -> None:
        """Nothing: an array goes with the last that refers to it."""

    def fill(self, x: Any, value: float) -> None:
        """Set every element of x."""
        _array(x).fill(value)

    def write(self, x: Any, array: np.ndarray) -> None:
        """Copy an array into x."""
        _array(x)[...] = array

    def read(self, x: Any) -> np.ndarray:
        """A copy of x."""
        return np.array(_array(x))

    def copy(self, source: Any, x: Any) -> None:
        """Copy a Tensor into x."""
        _array(x)[...] = _array(source)

    def hand_over(self, stream: int | None) -> None:
        """Nothing: work here is done when its call returns."""

    def settle(self) -> None:
        """Nothing, likewise."""


class NoMemory:
    """A plan's memory: buffers are None, and nothing is stored in them."""

    stream: int | None = None

    def allocate(self, size: int) -> None:
        """No buffer."""

    def release(self, buffer: None) -> None:
        """Never called: there is none."""

    def fill(self, x: Any, value: float) -> None:
        """Nothing."""

    def write(self, x: Any, array: np.ndarray) -> None:
        """Nothing."""

    def read(self, x: Any) -> np.ndarray:
        """Never called: a Tensor without memory refuses before."""
        raise AssertionError("a plan has no memory to read")

    def copy(self, source: Any, x: Any) -> None:
        """Nothing."""

    def hand_over(self, stream: int | None) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing."""


class Pool:
    """Buffers of one device by size: bytes `in_use`, their `peak`, and bytes `held` in free lists.

    `memory` provides the buffers. A `bounded` pool never holds more than was ever in use: where the
    sizes keep changing, as with prompts of every length, the old ones are returned. Python threads
    may share it.
    """

    __slots__ = ("_bounded", "_closed", "_free", "_lock", "_memory", "held", "in_use", "peak")

    def __init__(self, memory: Memory, *, bounded: bool = False) -> None:
        self._memory = memory
        self._bounded = bounded
        self._closed = False
        # Reentrant: a collection of garbage, at any time, may give a buffer back.
        self._lock = threading.RLock()
        self.in_use = 0
        self.peak = 0
        self.held = 0
        self._free: defaultdict[int, list[Any]] = defaultdict(list)

    def take(self, size: int) -> Any:
        """A buffer of `size` bytes (a multiple of `GRANULE`), its content undefined."""
        with self._lock:
            self.in_use += size
            if self.in_use > self.peak:
                self.peak = self.in_use
            free = self._free.get(size)
            if free:
                self.held -= size
                return free.pop()
            if self._bounded and self.held > self.peak:
                self.trim()
        try:
            return self._memory.allocate(size)
        except MemoryError:
            # What waits in lists of other sizes may be what is missing.
            self.trim()
            return self._memory.allocate(size)

    def give(self, size: int, buffer: Any) -> None:
        """Take a buffer back; None (a plan's, or one that another library holds) only counts."""
        with self._lock:
            self.in_use -= size
            if buffer is not None:
                self.held += size
                self._free[size].append(buffer)
                if self._closed:
                    self.trim()

    def reset_peak(self) -> None:
        """Measure `peak` from now on."""
        self.peak = self.in_use

    def trim(self) -> None:
        """Return every unused buffer to the system."""
        with self._lock:
            free, self._free, self.held = self._free, defaultdict(list), 0
        for buffers in free.values():
            for buffer in buffers:
                self._memory.release(buffer)

    def close(self) -> None:
        """Return what is unused, and from now on each buffer as soon as it comes back."""
        self._closed = True
        self.trim()


def _array(x: Any) -> np.ndarray:
    """The host's view of x; a Tensor made while it was hidden has none."""
    array: np.ndarray | None = x.array
    return x.storage.buffer.shown(x) if array is None else array


def rounded(nbytes: int) -> int:
    """Bytes that a request of `nbytes` takes from the pool."""
    return ((nbytes or 1) + GRANULE - 1) // GRANULE * GRANULE
