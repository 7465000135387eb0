"""Hooks: what sees every node of a tape, forward and backward.

A hook is any callable: `Tape(hooks=[Timer()])` calls it with an Event before and after every op and
every rule; what recomputation runs again is part of the rule that asked. A hook watches; it changes
nothing.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from forge.errors import NonFiniteError


class Event(NamedTuple):
    """An op ("forward") or its rule ("backward"), `node` being its place on the tape.

    `inputs` and `outputs` map names to values: of the op, or of the gradients that its rule takes
    and returns ("dx"). `outputs` is None before it runs.
    """

    phase: str
    op: str
    node: int
    inputs: dict[str, Any]
    outputs: dict[str, Any] | None = None


Hook = Callable[[Event], object]


def stop_at_non_finite(finite: Callable[[Any], bool], describe: Callable[[Any], str]) -> Hook:
    """A hook that raises `NonFiniteError` at the first value or gradient that is not finite."""

    def check(event: Event) -> None:
        for name, value in (event.outputs or {}).items():
            if not finite(value):
                ranges = "; ".join(f"{key}: {describe(x)}" for key, x in event.inputs.items())
                raise NonFiniteError(
                    f"[{event.op}] expected finite values {event.phase}, got {describe(value)} "
                    f"in {name} of node {event.node}; inputs: {ranges}"
                )

    return check


class Timer:
    """Wall-clock seconds and calls by (phase, op)."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self._starts: list[float] = []  # A recorded sweep runs ops inside of rules.

    def __call__(self, event: Event) -> None:  # noqa: D102
        if event.outputs is None:
            self._starts.append(time.perf_counter())
        else:
            self.seconds[event.phase, event.op] += time.perf_counter() - self._starts.pop()
            self.calls[event.phase, event.op] += 1

    def table(self) -> str:
        """The totals, largest first."""
        total = sum(self.seconds.values()) or 1.0
        return "\n".join(
            f"{phase:8} {op:28} {1e3 * seconds:10.3f} ms {100 * seconds / total:5.1f} % "
            f"{self.calls[phase, op]:6} calls"
            for (phase, op), seconds in sorted(self.seconds.items(), key=lambda row: -row[1])
        )


class Memory(list[tuple[str, str, int, int]]):
    """Bytes that the device's pool has in use after each node: (phase, op, node, bytes)."""

    def __call__(self, event: Event) -> None:  # noqa: D102
        for value in list((event.outputs or {}).values())[:1]:
            self.append((*event[:3], value.device.pool.in_use))


def show(event: Event) -> None:
    """Print a line per node to stderr."""
    if event.outputs is not None:
        values = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in event.outputs.items())
        sys.stderr.write(f"{event.phase:8} {event.node:4} {event.op:24} {values}\n")
