"""The GPU's memory: buffers, and copies between them and the host.

Copies from the host go through page-locked slots in turn: each is queued behind the work before it,
and the caller goes on. A slot is written again when what it held has arrived; there are enough of
them for a batch, so that the next one is queued while the GPU is still at the step before.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from forge import dtypes
from forge.backends.cuda import device
from forge.pool import Buffer

# Bytes of a slot, enough for a copy to run at the bus's rate, and their number.
SLOT = 4 << 20
SLOTS = 12


class CudaMemory:
    """The memory of the GPU; raises `DeviceError` where there is no usable one."""

    def __init__(self) -> None:
        device.card()
        self._cuda = device.runtime()
        self._slots: list[_Slot] = []
        self._next = -1

    @property
    def stream(self) -> int:
        """What other libraries are to make their arrays ready on.

        Raises `DeviceError` within a capture, which their work would become a part of.
        """
        device.eager("array of another library")
        return device.stream()

    def allocate(self, size: int) -> Buffer:
        """A new buffer of `size` bytes; raises `OutOfMemoryError` where they are not free."""
        error, address = self._cuda.cudaMalloc(size)
        if int(error) == device.OUT_OF_MEMORY:
            raise device.out_of_memory(f"{size / 2**20:,.0f} MiB of GPU memory")
        return Buffer(device.check("cudaMalloc", (error, address)))

    def release(self, buffer: Buffer) -> None:
        """Free a buffer, once the GPU has done all it was given."""
        device.check("cudaFree", self._cuda.cudaFree(buffer.address))

    def fill(self, x: Any, value: float) -> None:
        """Set every element of x."""
        if x.size == 0:
            return
        from cuda.bindings import driver

        pattern = np.asarray(value).astype(dtypes.to_numpy(x.dtype))
        width, where, stream = pattern.itemsize, x.pointer, device.stream()
        raw = pattern.tobytes()
        if not any(raw):
            width, count = 1, x.nbytes
        else:
            count = x.size
        if width == 8:
            # There is no memset of 8 bytes: the lower and the upper words, one column each.
            for half, word in enumerate(np.frombuffer(raw, np.uint32)):
                result = driver.cuMemsetD2D32Async(where + 4 * half, 8, int(word), 1, count, stream)
                device.check("a memset", result)
            return
        memset = {
            1: driver.cuMemsetD8Async,
            2: driver.cuMemsetD16Async,
            4: driver.cuMemsetD32Async,
        }[width]
        word = int.from_bytes(raw[:width], "little")
        device.check("a memset", memset(where, word, count, stream))

    def write(self, x: Any, array: np.ndarray) -> None:
        """Copy a host array into x, converting to its dtype; returns before the copy is done."""
        device.eager("copy from the host")
        source = np.broadcast_to(np.asarray(array, dtypes.to_numpy(x.dtype)), x.shape)
        raw = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        for start in range(0, x.nbytes, SLOT):
            piece = raw[start : start + SLOT]
            self._slot().send(x.pointer + start, piece)

    def read(self, x: Any) -> np.ndarray:
        """A copy of x on the host, once all work before it is done."""
        device.eager("copy to the host")
        out = np.empty(x.shape, dtypes.to_numpy(x.dtype))
        if x.size:
            cuda = self._cuda
            kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
            to = out.ctypes.data
            result = cuda.cudaMemcpyAsync(to, x.pointer, x.nbytes, kind, device.stream())
            device.check("a copy to the host", result)
        device.synchronize()
        return out

    def copy(self, source: Any, x: Any) -> None:
        """Copy a Tensor on the GPU into x, of its shape and dtype."""
        if source.size:
            cuda = self._cuda
            kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
            here, there, stream = source.pointer, x.pointer, device.stream()
            result = cuda.cudaMemcpyAsync(there, here, source.nbytes, kind, stream)
            device.check("a copy on the GPU", result)

    def hand_over(self, stream: int | None) -> None:
        """Let another library's stream wait for the work so far, as DLPack numbers streams.

        None and 1 are the default stream, 2 that of the thread, which are CUDA's own numbers too;
        -1 asks for nothing. Raises `DeviceError` within a capture, which is not done by then, and
        would make the other stream a part of it.
        """
        device.eager("hand-over to another library")
        if stream != -1:
            device.Event().record().hold(1 if stream is None else stream)

    def settle(self) -> None:
        """Wait for the work so far; within a capture there is none."""
        if not device.capturing():
            device.synchronize()

    def _slot(self) -> _Slot:
        if len(self._slots) < SLOTS:
            self._slots.append(_Slot())
        self._next = (self._next + 1) % SLOTS
        return self._slots[self._next]


class _Slot:
    """Page-locked host memory on its way to the GPU, and the mark that says it has arrived."""

    def __init__(self) -> None:
        cuda = device.runtime()
        self._address = device.check("page-locked memory", cuda.cudaHostAlloc(SLOT, 0))
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * SLOT).from_address(self._address))
        self._sent = device.Event()

    def send(self, to: int, piece: np.ndarray) -> None:
        """Queue a copy of at most a slot's bytes to an address on the GPU."""
        self._sent.wait()
        self._bytes[: piece.size] = piece
        cuda = device.runtime()
        kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        result = cuda.cudaMemcpyAsync(to, self._address, piece.size, kind, device.stream())
        device.check("a copy to the GPU", result)
        self._sent.record()
