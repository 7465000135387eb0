"""A step that a device is told once and then repeats.

A training step is a few hundred kernels. On a GPU each costs the host a few microseconds to launch,
and a decoded token's take less time than that; on a CPU the tape, the ops' checks and Python around
the kernels take a tenth of a small model's step. `Captured` runs a function as it is, and then
records its kernels: as a graph on a GPU, as a list of calls on the host. From then on one call does
them all.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import numbers
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from forge.backends import capture
from forge.errors import ArgumentError, DtypeError, no_single_name
from forge.pool import Memory, Pool
from forge.tensor import Device, Tensor, empty_like

# The module that records for a kind of device, by `Graph(device)`, and says by `settings()` what
# else than a function's arguments a recording depends on.
_GRAPHS = {
    "cpu": "forge.backends.calls",
    "cuda": "forge.backends.cuda.device",
    "reference": "forge.backends.calls",
}


@functools.cache
def _graphs(kind: str) -> Any:
    return importlib.import_module(_GRAPHS[kind])


class Captured:
    """`function`, captured at its second call and replayed from then on.

    The first call runs as it is: kernels are compiled and algorithms chosen then. `varying` names
    the parameters whose Tensors differ from call to call: they are copied to where the recorded
    kernels read; they may be in tuples, lists, dicts and dataclasses. Everything else, Tensors that
    change in place included, must be the same objects each time, and numbers the same numbers;
    where shapes or numbers differ, another recording is made. What these objects hold is recorded
    too: another number in an attribute is not seen. The function must not read from the device
    (`item`, `numpy`, hooks on a tape) or write to it, which raises `DeviceError`, and it returns
    Tensors, alone or in tuples, or None, else `ArgumentError`; a replay gives copies of them.
    Python in it, `print` say, runs no more. A recording keeps its own memory, apart from the
    device's pool, and serves one thread at a time. On a plan this is the function itself, and so it
    is while another one is being captured, which may call it.
    """

    def __init__(
        self, function: Callable[..., Any], device: Device | str, varying: Collection[str]
    ) -> None:
        self._function = function
        self._device = Device(device) if isinstance(device, str) else device
        self._signature = inspect.signature(function)
        no_single_name("captured", varying, ArgumentError)
        self._varying = frozenset(varying)
        unknown = self._varying - self._signature.parameters.keys()
        if unknown:
            raise ArgumentError(
                f"[captured] expected varying parameters out of "
                f"{', '.join(self._signature.parameters) or 'none'}, got {', '.join(unknown)}"
            )
        self._seen: set[Any] = set()
        self._recordings: dict[Any, _Recording] = {}

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the function, or replay what it did."""
        if self._device.plan or capture.busy():
            return self._function(*args, **keywords)
        arguments = self._signature.bind(*args, **keywords).arguments
        inputs: list[Tensor] = []
        described = (
            (name, _describe(value, inputs) if name in self._varying else _identity(value))
            for name, value in arguments.items()
        )
        key = (_graphs(self._device.kind).settings(), *described)
        recording = self._recordings.get(key)
        if recording is None:
            if key not in self._seen:
                self._seen.add(key)
                return self._function(*args, **keywords)
            fixed = {n: v for n, v in arguments.items() if n not in self._varying}
            varying = {n: v for n, v in arguments.items() if n in self._varying}
            recording = _Recording(self._function, self._device, fixed, varying, inputs)
            self._recordings[key] = recording
        return recording.replay(inputs)


class _Recording:
    """A function's kernels, with the Tensors they read and write."""

    def __init__(
        self,
        function: Callable[..., Any],
        device: Device,
        fixed: dict[str, Any],
        varying: dict[str, Any],
        inputs: list[Tensor],
    ) -> None:
        self._device = device
        # Two threads would mix their inputs in the memory that the kernels read.
        self._lock = threading.Lock()
        # Kept, for their addresses are recorded and their identities are in the key.
        self._fixed = fixed
        self._inputs = [empty_like(x) for x in inputs]
        places = iter(self._inputs)
        arguments = fixed | {name: _rebuild(value, places) for name, value in varying.items()}
        self._graph = _graphs(device.kind).Graph(device)
        with capture.capturing(device):
            # Not before: until then the pool may be that of another thread's recording.
            device.pool.trim()
            with self._graph.capture():
                shared = device.pool
                device.pool = self._pool = _OwnPool(device.memory)
                try:
                    self._outputs = function(**arguments)
                    _check_outputs(self._outputs)
                finally:
                    device.pool = shared

    def __del__(self) -> None:
        if hasattr(self, "_pool") and not sys.is_finalizing():
            self._pool.close()

    def replay(self, inputs: list[Tensor]) -> Any:
        """Run the kernels on these inputs; returns copies of the outputs."""
        with self._lock:
            for x, place in zip(inputs, self._inputs, strict=True):
                self._device.memory.copy(x, place)
            self._graph.replay()
            return self._copied(self._outputs)

    def _copied(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, Tensor):
            out = empty_like(value)
            self._device.memory.copy(value, out)
            return out
        return _of_kind(value, [self._copied(each) for each in value])


class _OwnPool(Pool):
    """Buffers that replays use, which must not serve anything between them, nor other threads."""

    __slots__ = ("_thread",)

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._thread = threading.get_ident()

    def take(self, size: int) -> Any:
        """A buffer; another thread, which would do without a capture, gets a new one."""
        if threading.get_ident() == self._thread:
            return super().take(size)
        with self._lock:
            self.in_use += size
        return self._memory.allocate(size)

    def give(self, size: int, buffer: Any) -> None:
        """Take a buffer back; one that the host saw was another thread's, and goes its way."""
        super().give(size, None if isinstance(buffer, np.ndarray) else buffer)

    def trim(self) -> None:
        """Nothing while there are replays: what is free within a step, they write to."""
        if self._closed:
            super().trim()


def _identity(value: Any) -> Any:
    """What tells an argument that stays from another: numbers and words are what they say."""
    return _number(value) if isinstance(value, numbers.Number | str) else id(value)


def _number(value: Any) -> Any:
    """A number as part of a key, where 0.0 is not -0.0, and 1 not True; anything else itself."""
    return (type(value), repr(value)) if isinstance(value, numbers.Number) else value


def _describe(value: Any, inputs: list[Tensor]) -> Any:
    """What of a value a recording depends on; its Tensors are appended to `inputs`."""
    if isinstance(value, Tensor):
        inputs.append(value)
        return value.shape, value.dtype, value.device
    if isinstance(value, list | tuple):
        return type(value), tuple(_describe(each, inputs) for each in value)
    if isinstance(value, dict):
        return dict, tuple((name, _describe(each, inputs)) for name, each in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return type(value), tuple(_describe(getattr(value, f.name), inputs) for f in fields)
    if isinstance(value, np.ndarray):
        raise DtypeError(
            f"[captured] expected Tensors in what varies, got an array of {value.dtype} "
            f"{list(value.shape)}; copy it with forge.tensor, a batch with training.to_device"
        )
    return _number(value)


def _rebuild(value: Any, places: Any) -> Any:
    """The value with the next of `places` for each of its Tensors."""
    if isinstance(value, Tensor):
        return next(places)
    if isinstance(value, list | tuple):
        return _of_kind(value, [_rebuild(each, places) for each in value])
    if isinstance(value, dict):
        return {name: _rebuild(each, places) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return type(value)(**{f.name: _rebuild(getattr(value, f.name), places) for f in fields})
    return value


def _of_kind(value: Any, parts: list[Any]) -> Any:
    """The parts in a tuple or list like `value`."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _check_outputs(value: Any) -> None:
    """Raise `ArgumentError` for what a replay can't make again, such as a number or a Var."""
    if isinstance(value, list | tuple):
        for each in value:
            _check_outputs(each)
    elif value is not None and not isinstance(value, Tensor):
        raise ArgumentError(
            "[captured] expected the function to return Tensors, alone or in tuples, or None, got "
            f"{type(value).__name__}; of a Var return its value, and read numbers outside"
        )
