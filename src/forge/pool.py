"""Host memory that is reused instead of returned to the system.

A training step asks for the same few hundred buffers every time. Fresh pages cost a page fault per
4 KiB (at 124M parameters more than the kernels that fill them), so a freed buffer waits in a list
for the next request of its size. The pool also counts: `peak` is the memory a step needs, and on a
plan device, which has no memory at all, the same count tells it beforehand.
"""

import numpy as np

# A cache line, and the width of an AVX-512 register: vector loads never straddle two lines.
ALIGNMENT = 64
# Requests are rounded up to this so that nearly equal sizes share a list.
GRANULE = 256


def rounded(nbytes: int) -> int:
    """Bytes that a request of `nbytes` takes from the pool."""
    return max(GRANULE, (nbytes + GRANULE - 1) // GRANULE * GRANULE)


class Pool:
    """Buffers of one device by size: bytes `in_use`, their `peak`, and bytes `held` in free lists.

    With `backed=False` it hands out None and only counts.
    """

    __slots__ = ("_free", "backed", "held", "in_use", "peak")

    def __init__(self, *, backed: bool = True) -> None:
        self.backed = backed
        self.in_use = 0
        self.peak = 0
        self.held = 0
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, size: int) -> np.ndarray | None:
        """A buffer of `size` bytes (a multiple of `GRANULE`), its content undefined."""
        self.in_use += size
        if self.in_use > self.peak:
            self.peak = self.in_use
        if not self.backed:
            return None
        free = self._free.get(size)
        if free:
            self.held -= size
            return free.pop()
        raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + size]

    def give(self, size: int, buffer: np.ndarray | None) -> None:
        """Take a buffer back; None (a plan's, or one that another library holds) only counts."""
        self.in_use -= size
        if buffer is not None:
            self.held += size
            self._free.setdefault(size, []).append(buffer)

    def reset_peak(self) -> None:
        """Measure `peak` from now on."""
        self.peak = self.in_use

    def trim(self) -> None:
        """Return every unused buffer to the system."""
        self._free.clear()
        self.held = 0
