"""One row of the table, run on one device in one dtype, in every way a tape may run it.

The oracle is the reference backend in float64, on copies of the same rounded inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from forge.autograd.check import check_grads
from forge.autograd.tape import Tape
from forge.dtypes import EPSILON, to_numpy
from forge.ops.define import op
from forge.tensor import Device, Tensor, full, tensor
from forge.verify.case import Array, Case

REFERENCE = Device("reference")

# A tensor whose elements are smaller than this counts as one of such elements: the error of an
# exact zero has no relative size. The smallest real gradients of a GPT-2 124M row are 4e-6.
FLOOR = 1e-7

# In float64 central differences with h = 1e-5 agree with a right rule to about 1e-10, and an op
# with its composite to about 1e-13; a wrong rule differs by 1e-3.
DIFFERENCE_TOLERANCE = 1e-7
COMPOSITE_TOLERANCE = 1e-12

Arguments = dict[str, Any]


class Trial:
    """One row on one device in one dtype: after `run`, the largest errors and all `failures`."""

    def __init__(self, case: Case, device: Device, dtype: str) -> None:
        self.case = case
        self.device = device
        self.dtype = dtype
        self.forward_error = self.gradient_error = 0.0
        self.failures: list[str] = []

    def run(self) -> None:
        """Hold the op to its definition: outputs, side effects, gradients."""
        case = self.case
        drawn = case.arguments()
        given = tensors(drawn, self.dtype, self.device, case.masters)
        # The oracle gets the device's rounded numbers, widened.
        rounded = {
            name: x.astype(to_numpy(given[name].dtype)).astype(np.float64) if _floating(x) else x
            for name, x in drawn.items()
        }
        exact = tensors(rounded, "float64", REFERENCE)
        wanted = outputs(case, copies(exact))
        used = copies(given)
        got = outputs(case, used)
        self.forward_error = self._compare("", got, wanted, case.bound(self.dtype))
        self._check_inputs(used, given)
        seeds: list[Array] = []
        grads: dict[str, Array] = {}
        if case.wrt:
            rng = np.random.default_rng(0)
            seeds = [
                np.asarray(rng.standard_normal(x.shape)).astype(to_numpy(x.dtype))
                for x in got.values()
            ]
            grads = gradients(case, exact, seeds)
            self._check_gradients(given, seeds, got, grads)
        if (self.device, self.dtype) == (REFERENCE, "float64"):
            if case.wrt and case.differences:
                _differences(case, exact, seeds)
            if case.composite is not None:
                self._check_composite(exact, seeds, wanted, grads)

    def _check_inputs(self, used: Arguments, given: Arguments) -> None:
        """Only what the op mutates may have changed, and there the version must say so."""
        for name, x in used.items():
            if isinstance(x, Tensor):
                if name not in self.case.mutates and not _same_bits(x.numpy(), given[name].numpy()):
                    self.failures.append(f"the op changed its input {name}")
                if (name in self.case.mutates) != (x.storage.version > 0):
                    self.failures.append(
                        f"the version of {name} is {x.storage.version} after one call"
                    )

    def _check_gradients(
        self,
        given: Arguments,
        seeds: list[Array],
        results: Mapping[str, Tensor],
        wanted: dict[str, Array],
    ) -> None:
        """The rule from the declared saves, with outputs made again, and into buffers."""
        case, bound = self.case, self.case.bound(self.dtype, gradient=True)
        got = gradients(case, given, seeds)
        self.gradient_error = self._compare("d", got, wanted, bound)
        if not case.thorough:
            return
        ways = [("in a recompute block", Tape(), True)]
        for names in _droppable(case.op):
            how = f"with its {' and '.join(names)} dropped"
            ways.append((how, Tape(recompute=[f"{case.op}.{name}" for name in names]), False))
        for how, tape, block in ways:
            remade: list[Array] = []
            again = gradients(case, given, seeds, tape=tape, block=block, remade=remade)
            for name, a, b in (
                *((f"d{name}", again[name], got[name]) for name in got),
                *((n, a, x.numpy()) for (n, x), a in zip(results.items(), remade, strict=True)),
            ):
                if not _same_bits(a, b):
                    self.failures.append(f"{name} has other bits {how}")
        # Something of the gradient's own size to add to.
        before = {name: np.flip(x) for name, x in got.items()}
        wide = "float32" if self.dtype == "bfloat16" else self.dtype
        into = {name: tensor(x, wide, self.device) for name, x in before.items()}
        gradients(case, given, seeds, into=into)
        total = {name: _wide(before[name]) + wanted[name] for name in wanted}
        self._compare("the buffer of d", into, total, bound + EPSILON[wide])

    def _check_composite(
        self,
        exact: Arguments,
        seeds: list[Array],
        wanted: Mapping[str, Tensor],
        grads: dict[str, Array],
    ) -> None:
        """The op's other definition, for the same arguments."""
        function = self.case.composite
        other = outputs(self.case, copies(exact), function)
        self._compare("the composite's ", other, wanted, COMPOSITE_TOLERANCE)
        if grads:
            again = gradients(self.case, exact, seeds, function=function)
            self._compare("the composite's d", again, grads, COMPOSITE_TOLERANCE)

    def _compare(
        self, what: str, got: Mapping[str, Any], wanted: Mapping[str, Any], bound: float
    ) -> float:
        """The largest relative error in norm; what is above the bound is a failure."""
        largest = 0.0
        if got.keys() != wanted.keys():
            self.failures.append(f"{what}[{', '.join(got)}] came, not {', '.join(wanted)}")
            return math.inf
        for name, expected in wanted.items():
            a, b = _wide(got[name]), _wide(expected)
            if a.shape != b.shape:
                self.failures.append(f"{what}{name} has shape {a.shape}, not {b.shape}")
                return math.inf
            error = _error(a, b)
            largest = float(np.maximum(largest, error))  # NaN stays.
            if not error <= bound:
                self.failures.append(f"{what}{name} is wrong by {error:.2g}, above {bound:.2g}")
        return largest


@op(saves=("a", "b", "c"), name="verify.join")
def _join(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    seeds: list[Tensor],
    remade: list[Array] | None,
) -> Tensor:
    """The inner product of outputs with their seeds: a root that hands each output its seed."""
    results = [x for x in (a, b, c) if x is not None]
    total = sum((_wide(s) * _wide(x)).sum() for s, x in zip(seeds, results, strict=True))
    return full((), float(total), a.dtype, a.device)


@_join.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    names = node.names()
    if node.remade is not None:
        # Asking for an output that was dropped makes the tape make it again.
        node.remade.extend(getattr(node, name).numpy() for name in names)
    factor = dy.item()
    grads = [tensor(_wide(seed) * factor, seed.dtype, seed.device) for seed in node.seeds]
    return dict(zip(names, grads, strict=True))


def gradients(
    case: Case,
    given: Arguments,
    seeds: list[Array],
    *,
    tape: Tape | None = None,
    block: bool = False,
    function: Callable[..., Any] | None = None,
    remade: list[Array] | None = None,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Array]:
    """Gradients by name for the seeds of the outputs, from a tape that holds all that is left.

    `remade` collects the outputs as a later rule would find them; with `into` the gradients are
    added to those buffers, and none is returned.
    """
    tape = Tape() if tape is None else tape
    own = copies(given)
    leaves = {
        name: tape.leaf(own[name], into=None if into is None else into[name]) for name in case.wrt
    }
    with tape.recompute() if block else nullcontext():
        results = outputs(case, {**own, **leaves}, function)
    here = [tensor(s, x.dtype, x.device) for s, x in zip(seeds, results.values(), strict=True)]
    root = _join(*results.values(), seeds=here, remade=remade)
    del own, results
    for leaf in leaves.values():
        leaf.value = root.value
    # What was freed is overwritten: a rule that still reads it gives NaN.
    _ = [full(x.shape, np.nan, x.dtype, x.device) for x in given.values() if _floating(x)]
    grads = tape.backward(root)
    return {} if into else {name: grads[leaf].numpy() for name, leaf in leaves.items()}


def _droppable(name: str) -> list[tuple[str, ...]]:
    """What of an op's node is dropped together: outputs, extras, and what it can remake, alone."""
    primitive = Tape.primitives.get(name)
    if primitive is None:
        return []
    outputs, extras = primitive.outputs, primitive.made[len(primitive.outputs) :]
    remade = () if primitive.remake is None else (primitive.remake.output,)
    return [*dict.fromkeys(filter(None, (outputs, extras, remade)))]


def _differences(case: Case, exact: Arguments, seeds: list[Array]) -> None:
    """Hold the reference's rule to central differences; its derivative too, where it has one."""

    def function(*xs: Any) -> Any:
        arguments = {**exact, **dict(zip(case.wrt, xs, strict=True))}
        if case.derive is not None:
            values = {name: getattr(x, "value", x) for name, x in arguments.items()}
            arrays = {n: x.numpy() if isinstance(x, Tensor) else x for n, x in values.items()}
            arguments.update(tensors(case.derive(arrays), "float64", REFERENCE))
        results = outputs(case, arguments)
        here = [tensor(s, x.dtype, x.device) for s, x in zip(seeds, results.values(), strict=True)]
        return _join(*results.values(), seeds=here, remade=None)

    primitive = Tape.primitives.get(case.op)
    twice = primitive is None or primitive.differentiable == "twice"
    check_grads(
        function,
        *(exact[name] for name in case.wrt),
        order=min(case.differences, 2 if twice else 1),
        tolerance=DIFFERENCE_TOLERANCE,
    )


def outputs(
    case: Case, arguments: Arguments, function: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """What the op (or `function`) returns, by name, and what it changed in place."""
    rest = dict(arguments)
    variadic = case.variadic
    xs = [rest.pop(name) for name in arguments if variadic and name.startswith(variadic)]
    result = (function or case.function)(*xs, **rest)
    primitive = Tape.primitives.get(case.op)
    names = ("out",) if primitive is None else primitive.outputs
    values = result if isinstance(result, tuple) else (result,)
    returned = {name: x for name, x in zip(names, values, strict=True) if x is not None}
    return {**returned, **{f"{name} (in place)": arguments[name] for name in case.mutates}}


def tensors(
    arguments: Arguments, dtype: str, device: Device, masters: tuple[str, ...] = ()
) -> Arguments:
    """Arguments with arrays as Tensors, all read from strided memory.

    float64 ones become `dtype`, or float32 where that is bfloat16 and they are named in `masters`.
    """
    result = dict(arguments)
    for name, x in arguments.items():
        if isinstance(x, np.ndarray):
            strided = np.repeat(x[..., None], 2, axis=-1)[..., 0]
            own = "float32" if dtype == "bfloat16" and name in masters else dtype
            result[name] = tensor(strided, own if _floating(x) else None, device)
    return result


def copies(arguments: Arguments) -> Arguments:
    """The same arguments, with Tensors of their own."""
    return {name: tensor(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}


def _error(got: Array, wanted: Array) -> float:
    """||got - wanted|| / ||wanted||; NaN where only one is finite."""
    if np.array_equal(got, wanted, equal_nan=True):
        return 0.0
    size = max(_norm(wanted), FLOOR * math.sqrt(wanted.size))
    with np.errstate(invalid="ignore"):
        return _norm(got - wanted) / size


def _norm(x: Array) -> float:
    # Not np.linalg.norm: BLAS wakes its threads for it, which takes longer than the sum.
    return math.sqrt(float((x * x).sum()))


def _floating(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == np.float64


def _same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _wide(x: Any) -> Array:
    array: Array = x.numpy() if isinstance(x, Tensor) else x
    return array.astype(np.float64)
