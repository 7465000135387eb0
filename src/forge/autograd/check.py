"""Gradients as a function, and the check of gradients against differences."""

from collections.abc import Callable
from typing import Any

import numpy as np

from forge.autograd.node import Var
from forge.autograd.tape import Tape
from forge.dtypes import FLOATING
from forge.errors import GradientError, ShapeError
from forge.tensor import Tensor, tensor


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in FLOATING


def value_and_grad(fn: Callable[..., Any]) -> Callable[..., tuple[Tensor, tuple[Any, ...]]]:
    """A function that returns fn's scalar value and its gradients.

    The gradients are those of the positional arguments that are floating Tensors, in their order;
    other arguments pass through. Raises `ShapeError` where fn does not return a scalar.
    """

    def wrapped(*args: Any, **keywords: Any) -> tuple[Tensor, tuple[Any, ...]]:
        tape = Tape()
        args = tuple(tape.leaf(x) if _floating(x) else x for x in args)
        leaves = [x for x in args if isinstance(x, Var)]
        value = fn(*args, **keywords)
        if not isinstance(value, Var):
            return value, tuple(None for _ in leaves)
        if value.value.size != 1:
            raise ShapeError(
                f"[value_and_grad] expected a scalar, got shape {value.shape}; "
                "take its sum, or call Tape.backward with a seed"
            )
        grads = tape.backward(value)
        return value.value, tuple(grads[leaf] for leaf in leaves)

    return wrapped


def check_grads(
    fn: Callable[..., Any],
    *tensors: Tensor,
    order: int = 1,
    step: float = 1e-5,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> None:
    """Check fn's gradients against central differences, in float64.

    fn takes the Tensors and returns one. Each floating argument is moved along a random direction
    v, and u·(fn(x + hv) - fn(x - hv)) / 2h, u random, is compared with v·(fn's gradient for the
    seed u): two evaluations, whatever the size. `order=2` checks the gradients' gradients too.
    `step` is h, `tolerance` is relative. Raises `GradientError` with the argument and both numbers.
    """
    rng = np.random.default_rng(seed)
    points = [
        tensor(x, "float64") if _floating(x) else x  # Differences in float32 drown in rounding.
        for x in tensors
    ]
    wanted = [i for i, x in enumerate(points) if _floating(x)]
    u = rng.standard_normal(fn(*points).shape)
    ws = {i: rng.standard_normal(points[i].shape) for i in wanted}

    def gradients(xs: list[Any], again: bool) -> list[dict[int, np.ndarray]]:
        """The gradients for the seed u; and those of their inner product with ws."""
        tape = Tape()
        leaves = [tape.leaf(x) if i in wanted else x for i, x in enumerate(xs)]
        out = fn(*leaves)
        first = tape.backward(out, tensor(u, "float64", out.device), create_graph=again)
        found: list[dict[int, np.ndarray]] = [{i: _host(first[leaves[i]], xs[i]) for i in wanted}]
        if again:
            total = {i: np.zeros(xs[i].shape) for i in wanted}
            for k in wanted:
                dx = first[leaves[k]]
                if isinstance(dx, Var):
                    sweep = tape.backward(dx, tensor(ws[k], "float64", dx.device), retain=True)
                    total = {i: total[i] + _host(sweep[leaves[i]], xs[i]) for i in wanted}
            found.append(total)
        return found

    def scalar(xs: list[Any], level: int) -> float:
        if level == 0:
            return float((u * fn(*xs).numpy()).sum())
        first = gradients(xs, again=False)[0]
        return float(sum((ws[i] * first[i]).sum() for i in wanted))

    for level, found in enumerate(gradients(points, again=order > 1)):
        for i in wanted:
            v = rng.standard_normal(points[i].shape)
            ends = []
            for sign in (step, -step):
                moved = tensor(points[i].numpy() + sign * v, device=points[i].device)
                ends.append(scalar([*points[:i], moved, *points[i + 1 :]], level))
            difference = (ends[0] - ends[1]) / (2 * step)
            product = float((found[i] * v).sum())
            if not abs(difference - product) <= tolerance * max(abs(difference), abs(product), 1.0):
                raise GradientError(
                    f"[check_grads] expected {difference:.9g} along a random direction of argument "
                    f"{i}, got {product:.9g} from the gradient (order {level + 1})"
                )


def _host(gradient: Any, x: Tensor) -> np.ndarray:
    if gradient is None:
        return np.zeros(x.shape)
    value: Tensor = gradient.value if isinstance(gradient, Var) else gradient
    return value.numpy()
