"""What a function gave to a host device, as a list of calls: its counterpart of a GPU's graph.

While they are recorded nothing is computed, and the Tensors made have no `array`, as on a GPU: what
would read a value then, and so bake it in, can't. A replay calls the kernels in order. What they
are called with holds no buffer back, so the pool reuses them just as it does in a step that is run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from forge.backends import capture, registry
from forge.pool import Hidden, Memory
from forge.tensor import Borrowed, Device, Storage, Tensor


def settings() -> Hashable:
    """What of the process's settings is baked into recorded calls: nothing, kernels look."""
    return ()


class Graph:
    """The calls that a block of code made of kernels on a host device, to be made again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        # Storages from outside with the version they had when first met; later with its rise.
        self._versions: dict[Storage, int] = {}

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Within this block work is recorded and not done."""
        device, memory = self._device, self._device.memory
        device.memory = _RecordedMemory(device, memory, self._record)
        try:
            with registry.recorded(device, self._record):
                yield
        except (AttributeError, TypeError) as error:
            if "NoneType" in str(error):
                error.add_note(
                    "While a step is captured Tensors have no array: an op's own NumPy goes into a "
                    "function with @forge.extend.on_host"
                )
            raise
        finally:
            device.memory = memory
            rises = {storage: storage.version - then for storage, then in self._versions.items()}
            for storage, rise in rises.items():
                storage.version -= rise  # Nothing has changed yet.
            self._versions = {storage: rise for storage, rise in rises.items() if rise}

    def replay(self) -> None:
        """Do the recorded work again."""
        # A tape that saved what is about to change must not find it unchanged.
        for storage, rise in self._versions.items():
            storage.version += rise
        for function, args, keywords in self._calls:
            function(*args, **keywords)

    def _record(
        self, function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        kept = {name: self._kept(value) for name, value in keywords.items()}
        self._calls.append((function, tuple(map(self._kept, args)), kept))

    def _kept(self, value: Any) -> Any:
        """An argument as replays pass it: one that is the function's own holds no buffer."""
        if value.__class__ is Tensor:
            if value.array is not None:
                self._versions.setdefault(value.storage, value.storage.version)
                return value
            array = value.storage.buffer.shown(value)
            place = Borrowed(None, array, value.device)
            return Tensor(value.shape, value.dtype, place, array, value.offset)
        if value.__class__ is tuple or value.__class__ is list:
            return value.__class__(map(self._kept, value))
        return value


class _RecordedMemory:
    """A host's memory while work on it is recorded; for other threads, what it was."""

    def __init__(self, device: Device, memory: Memory, record: Callable[..., None]) -> None:
        self._device = device
        self._memory = memory
        self._record = record

    @property
    def stream(self) -> int | None:
        capture.eager("array of another library")
        return self._memory.stream

    def allocate(self, size: int) -> Any:
        buffer = self._memory.allocate(size)
        return Hidden(buffer) if capture.here() else buffer

    def release(self, buffer: Any) -> None:
        """Nothing: the array goes with the last that refers to it."""

    def fill(self, x: Tensor, value: float) -> None:
        self._do("fill", x, value)

    def write(self, x: Tensor, array: np.ndarray) -> None:
        capture.eager("copy from the host")
        self._memory.write(x, array)

    def read(self, x: Tensor) -> np.ndarray:
        capture.eager("copy to the host")
        return self._memory.read(x)

    def copy(self, source: Tensor, x: Tensor) -> None:
        self._do("copy", source, x)

    def hand_over(self, stream: int | None) -> None:
        capture.eager("hand-over to another library")
        self._memory.hand_over(stream)

    def settle(self) -> None:
        """Nothing: what is recorded is not waited for."""

    def _do(self, name: str, *args: Any) -> None:
        if capture.here():
            self._record(partial(_move, self._device, name), args, {})
        else:
            getattr(self._memory, name)(*args)


def _move(device: Device, name: str, *args: Any) -> None:
    """A fill or copy by the memory that the device has by then, which may be watched."""
    getattr(device.memory, name)(*args)
