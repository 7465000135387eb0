"""Hooks: what sees every node of a tape, forward and backward.

`Tape(hooks=[Timer()])` calls each hook around every op and every rule. A hook watches; it changes
nothing. `phase` is "forward" or "backward", `index` the node's place on the tape; `inputs` and
`outputs` map names to values: of the op, or of the gradients its rule takes and returns.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TextIO

from forge.errors import NonFiniteError

Values = dict[str, Any]


class Hook:
    """Base of all hooks; override what is needed."""

    def before(self, phase: str, op: str, index: int) -> None:
        """Called before the op or its rule runs."""

    def after(self, phase: str, op: str, index: int, inputs: Values, outputs: Values) -> None:
        """Called when the op or its rule has run."""


class Anomaly(Hook):
    """Raises `NonFiniteError` at the first value or gradient that is not finite."""

    def __init__(self, finite: Callable[[Any], bool], describe: Callable[[Any], str]) -> None:
        self._finite = finite
        self._describe = describe

    def after(self, phase: str, op: str, index: int, inputs: Values, outputs: Values) -> None:
        for name, value in outputs.items():
            if not self._finite(value):
                ranges = "; ".join(f"{key}: {self._describe(x)}" for key, x in inputs.items())
                raise NonFiniteError(
                    f"[{op}] expected finite values {phase}, got {self._describe(value)} "
                    f"in {name} of node {index}; inputs: {ranges}"
                )


class Timer(Hook):
    """Wall-clock seconds and calls by (phase, op)."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self._start = 0.0

    def before(self, phase: str, op: str, index: int) -> None:
        self._start = time.perf_counter()

    def after(self, phase: str, op: str, index: int, inputs: Values, outputs: Values) -> None:
        self.seconds[phase, op] += time.perf_counter() - self._start
        self.calls[phase, op] += 1

    def table(self) -> str:
        """The totals, largest first."""
        total = sum(self.seconds.values()) or 1.0
        return "\n".join(
            f"{phase:8} {op:28} {1e3 * seconds:10.3f} ms {100 * seconds / total:5.1f} % "
            f"{self.calls[phase, op]:6} calls"
            for (phase, op), seconds in sorted(self.seconds.items(), key=lambda row: -row[1])
        )


class Memory(Hook):
    """Bytes that the device's pool has in use after each node: (phase, op, index, bytes)."""

    def __init__(self) -> None:
        self.trace: list[tuple[str, str, int, int]] = []

    def after(self, phase: str, op: str, index: int, inputs: Values, outputs: Values) -> None:
        for value in list(outputs.values())[:1]:
            self.trace.append((phase, op, index, value.device.pool.in_use))


class Print(Hook):
    """A line per node."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stderr if file is None else file

    def after(self, phase: str, op: str, index: int, inputs: Values, outputs: Values) -> None:
        values = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in outputs.items())
        print(f"{phase:8} {index:4} {op:24} {values}", file=self._file)
