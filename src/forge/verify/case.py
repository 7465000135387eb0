"""What a row of the table of ops says, and how its inputs are drawn."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forge import ops
from forge.autograd.tape import Tape
from forge.dtypes import EPSILON
from forge.tensor import Shape

Array = np.ndarray
Rng = np.random.Generator

ALL = ("float64", "float32", "bfloat16")


@dataclass(frozen=True)
class Draw:
    """An array to be drawn: its shape and how. Float64 arrays later get the dtype of the run."""

    shape: Shape
    draw: Callable[[Rng, Shape], Array]
    floating: bool = True


def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Draw:
    """Normal numbers; a bare shape in a row means these, standard."""
    return Draw(shape, lambda rng, s: mean + std * rng.standard_normal(s))


def positive(*shape: int) -> Draw:
    """Numbers in [0.5, 2)."""
    return Draw(shape, lambda rng, s: rng.uniform(0.5, 2.0, s))


def nonzero(*shape: int) -> Draw:
    """Numbers of either sign and magnitude in [0.5, 2): divisors."""
    return Draw(shape, lambda rng, s: rng.uniform(0.5, 2.0, s) * rng.choice((-1.0, 1.0), s))


def steps(*shape: int) -> Draw:
    """The integers of 0 … n - 1, each at most twice, shuffled: ties, and no near ties."""
    return Draw(shape, lambda rng, s: rng.permutation(math.prod(s)).reshape(s) // 2 * 1.0)


def ids(limit: int, *shape: int) -> Draw:
    """int64 numbers below `limit`, with repetitions."""
    return Draw(shape, lambda rng, s: rng.integers(0, limit, s), floating=False)


def int8(*shape: int) -> Draw:
    """int8 numbers from -127 to 127."""
    return Draw(shape, lambda rng, s: rng.integers(-127, 128, s, np.int8), floating=False)


def scales(*shape: int) -> Draw:
    """Scales that make such numbers weights of up to 2."""
    return Draw(shape, lambda rng, s: rng.uniform(0.5, 2.0, s) / 127)


def flags(*shape: int) -> Draw:
    """Bools."""
    return Draw(shape, lambda rng, s: rng.random(s) < 0.5, floating=False)


def given(value: Any, dtype: Any = np.int64) -> Draw:
    """These numbers."""
    array = np.asarray(value, dtype)
    return Draw(array.shape, lambda rng, s: array, floating=array.dtype == np.float64)


@dataclass(frozen=True)
class Case:
    """One row: an op, its inputs, and how exact it is.

    `inputs` and `attributes` are the op's arguments by name: a shape (normal numbers), a `Draw`, or
    the argument itself. The floating inputs are differentiable, but for those in `constant`, where
    the op is and mutates nothing; those in `masters` stay float32 in a bfloat16 run. `derive` makes
    more inputs from the drawn ones, such as the mean of x: functions of them, when x is moved.
    `mutates` names what the op changes in place.

    The relative error in norm is bounded by `tolerance` roundings to the dtype and a sum of `terms`
    in float32 or wider; that of a gradient by `slope` roundings (4 `tolerance` unless given) and
    four such sums. No roundings means the same numbers. `composite` is the same function out of
    other public ops. `differences` is how often the row can be differentiated by them: not where
    they see rounding, once where the slope jumps. Not `thorough` means accuracy alone.
    """

    op: str
    inputs: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1.0
    slope: float | None = None
    terms: int = 0
    constant: tuple[str, ...] = ()
    masters: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ALL
    derive: Callable[[dict[str, Array]], dict[str, Array]] | None = None
    composite: Callable[..., Any] | None = None
    differences: int = 2
    thorough: bool = True

    @property
    def function(self) -> Any:
        """The public op."""
        return getattr(ops, self.op)

    @property
    def variadic(self) -> str | None:
        """What the op calls its `*xs`, which are the inputs xs0, xs1, …; None where it has none."""
        parameters = inspect.signature(self.function).parameters.values()
        return next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)

    @property
    def name(self) -> str:
        """Shapes and attributes, such as `x[7,33] form=tanh`."""
        parts = []
        for key, value in {**self.inputs, **self.attributes}.items():
            shape = value.shape if isinstance(value, Draw) else value
            drawn = isinstance(value, Draw) or (key in self.inputs and isinstance(value, tuple))
            parts.append(f"{key}[{','.join(map(str, shape))}]" if drawn else f"{key}={value}")
        return " ".join(parts).replace("'", "")

    @property
    def wrt(self) -> tuple[str, ...]:
        """Names of the inputs whose gradients are checked."""
        primitive = Tape.primitives.get(self.op)
        if self.mutates or (primitive is not None and primitive.differentiable == "no"):
            return ()
        return tuple(
            name
            for name, value in self.inputs.items()
            if (value.floating if isinstance(value, Draw) else isinstance(value, tuple))
            and name not in self.constant
        )

    def arguments(self) -> dict[str, Any]:
        """All arguments by name, arrays drawn: the same at every call."""
        rng = np.random.default_rng(zlib.crc32(f"{self.op} {self.name}".encode()))
        drawn = {
            key: normal(*value) if isinstance(value, tuple) else value
            for key, value in self.inputs.items()
        }
        arguments = {
            key: np.asarray(value.draw(rng, value.shape)) if isinstance(value, Draw) else value
            for key, value in {**drawn, **self.attributes}.items()
        }
        return {**arguments, **(self.derive(arguments) if self.derive is not None else {})}

    def bound(self, dtype: str, *, gradient: bool = False) -> float:
        """The largest relative error in norm that passes."""
        roundings, sums = self.tolerance, 1.0
        if gradient:
            roundings, sums = 4.0 * roundings if self.slope is None else self.slope, 4.0
        if not roundings:
            return 0.0
        accumulator = min(EPSILON[dtype], EPSILON["float32"])
        return roundings * EPSILON[dtype] + sums * math.sqrt(self.terms) * accumulator
