"""Where a step's time goes: into which kernel, and what is left for everything around them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.backends import registry
from forge.tensor import Device, Shape, Tensor

# A kernel and the shapes of the Tensors that it was called with.
Key = tuple[str, tuple[Shape, ...]]
# What a device's memory does that takes time, beside the kernels.
_MOVES = ("fill", "write", "copy")


@dataclass(frozen=True)
class Row:
    """A kernel at these shapes: how often a step calls it, and the seconds of all its calls."""

    name: str
    shapes: tuple[Shape, ...]
    calls: float
    seconds: float

    def __str__(self) -> str:
        return " ".join([self.name, *(str(list(shape)) for shape in self.shapes)])


@dataclass(frozen=True)
class Profile:
    """The kernels of a step, longest first, and the seconds of a step.

    `outside` is what the step spent outside of kernels and of fills and copies of memory: in an
    eager step the tape, the ops and Python, in a replay the calls and the checks of ids. None on a
    GPU, where the host runs ahead.
    """

    rows: tuple[Row, ...]
    seconds: float
    outside: float | None


def profile(step: Callable[[], Any], device: Device, *, steps: int) -> Profile:
    """Run steps and time each of their kernels; on a GPU eager ones, between events.

    Kernels' seconds are means; those of a step, and outside, are medians over the steps: where the
    machine has other work, it interrupts a few.
    """
    watch = _Watch(device)
    laps = []
    with watch.at_work():
        for _ in range(steps):
            watch.own, first = 0.0, len(watch.marks)
            start = watch.mark()
            step()
            laps.append((start, watch.mark(), watch.own, first, len(watch.marks)))
    times: dict[Key, tuple[float, int]] = {}
    for key, before, after in watch.marks:
        seconds, calls = times.get(key, (0.0, 0))
        times[key] = seconds + watch.between(before, after), calls + 1
    rows = [Row(*key, calls / steps, s / steps) for key, (s, calls) in times.items()]
    rows.sort(key=lambda row: -row.seconds)
    whole, outside = [], []
    for start, end, own, first, last in laps:
        whole.append(watch.between(start, end) - own)
        inside = sum(watch.between(*marks) for _, *marks in watch.marks[first:last])
        outside.append(max(whole[-1] - inside, 0.0))
    rest = None if device.kind == "cuda" else statistics.median(outside)
    return Profile(tuple(rows), statistics.median(whole), rest)


def peak_rss() -> int:
    """The most host memory that this process ever held, in bytes."""
    # Not getrusage first, whose figure begins with that of the process which started this one.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Watch:
    """Marks before and after each kernel, and `own`, the seconds that watching itself took."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._cuda = device.kind == "cuda"
        self.marks: list[tuple[Key, Any, Any]] = []
        self.own = 0.0

    def mark(self) -> Any:
        """Now: on the host's clock, or in the GPU's stream."""
        if not self._cuda:
            return time.perf_counter()
        from forge.backends.cuda.device import Event

        return Event(timing=True).record()

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another."""
        seconds: float = end.since(start) / 1e3 if self._cuda else end - start
        return seconds

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Watch the kernels, and the memory's fills and copies, within this block."""
        memory = self._device.memory
        self._device.memory = _WatchedMemory(memory, self._around)
        try:
            with registry.watched(self._around):
                yield
        finally:
            self._device.memory = memory

    def _around(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            entered = time.perf_counter()
            key = name, tuple(x.shape for x in args if x.__class__ is Tensor)
            before = self.mark()
            result = kernel(*args, **keywords)
            after = self.mark()
            self.marks.append((key, before, after))
            if not self._cuda:
                self.own += before - entered + time.perf_counter() - after
            return result

        return call


class _WatchedMemory:
    """A device's memory, its slower methods watched."""

    def __init__(self, memory: Any, around: registry.Around) -> None:
        self._memory = memory
        for name in _MOVES:
            setattr(self, name, around(f"memory.{name}", getattr(memory, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)
