"""Gradients as a function, and the check of gradients against differences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from forge.autograd.node import Var
from forge.autograd.tape import Tape
from forge.dtypes import EPSILON, FLOATING
from forge.errors import DtypeError, GradientError, ShapeError
from forge.tensor import Tensor, tensor


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in FLOATING


def value_and_grad(fn: Callable[..., Any]) -> Callable[..., tuple[Tensor, tuple[Any, ...]]]:
    """A function that returns fn's scalar value and its gradients.

    The gradients are those of the positional arguments that are floating Tensors, in their order;
    None where the value does not depend on one. Other arguments, and all keywords, pass through.
    Raises `ShapeError` where fn returns no scalar, `DtypeError` where there is no such argument.
    """

    def wrapped(*args: Any, **keywords: Any) -> tuple[Tensor, tuple[Any, ...]]:
        tape = Tape()
        args = tuple(tape.leaf(x) if _floating(x) else x for x in args)
        leaves = [x for x in args if isinstance(x, Var)]
        if not leaves:
            raise DtypeError(
                f"[value_and_grad] expected a floating Tensor by position, got {args!r}, and by "
                f"name {', '.join(keywords) or 'nothing'}; what is passed by name is a constant"
            )
        out = fn(*args, **keywords)
        value = out.value if isinstance(out, Var) else out
        if not isinstance(value, Tensor) or value.size != 1:
            raise ShapeError(
                f"[value_and_grad] expected a scalar Tensor, got {value!r}; "
                "take its sum, or call Tape.backward with a seed"
            )
        if value is out:
            return value, (None,) * len(leaves)
        grads = tape.backward(out)
        return value, tuple(grads[leaf] for leaf in leaves)

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
    `step` is h, `tolerance` is relative. Raises `GradientError` with the argument and both numbers,
    and `DtypeError` where there is nothing to check.
    """
    # Differences in float32 drown in rounding.
    points = [tensor(x, "float64") if _floating(x) else x for x in tensors]
    if not any(map(_floating, points)):
        raise DtypeError(
            f"[check_grads] expected a floating Tensor among the arguments, got {tensors!r}; "
            "make one with forge.tensor"
        )
    rng = np.random.default_rng(seed)
    out = fn(*points).numpy()
    u = rng.standard_normal(out.shape)
    # Of the difference of two sums of u·fn, sixteenfold for what fn itself rounds.
    rounding = 16 * EPSILON["float64"] * float(np.abs(u * out).sum()) / step

    def gradient(i: int, *xs: Any) -> Any:
        """Of argument i for the seed u; where the xs are Vars, recorded on their tape."""
        tape = next((x.tape for x in xs if isinstance(x, Var)), None)
        recorded = tape is not None
        tape = tape or Tape()
        leaves = xs if recorded else [tape.leaf(x) if _floating(x) else x for x in xs]
        root = fn(*leaves)
        dout = tensor(u, "float64", root.device)
        return tape.backward(root, dout, create_graph=recorded)[leaves[i]]

    for i, x in enumerate(points):
        if not _floating(x):
            continue
        v = rng.standard_normal(x.shape)
        moved = [tensor(x.numpy() + h * v, device=x.device) for h in (step, -step)]
        ahead, behind = (
            float((u * fn(*points[:i], end, *points[i + 1 :]).numpy()).sum()) for end in moved
        )
        difference = (ahead - behind) / (2 * step)
        dx = gradient(i, *points)
        g = np.zeros(x.shape) if dx is None else dx.numpy()
        product = float((g * v).sum())
        # v·g is of the size of |g|, except by chance.
        bound = tolerance * max(abs(difference), float(np.linalg.norm(g))) + rounding
        if not abs(difference - product) <= bound:
            raise GradientError(
                f"[check_grads] expected {difference:.9g} along a random direction of argument {i} "
                f"of {getattr(fn, '__name__', 'a gradient')}, got {product:.9g} from its gradient"
            )
        if order > 1 and dx is not None:
            again = partial(gradient, i)
            check_grads(again, *points, order=order - 1, step=step, tolerance=tolerance, seed=seed)
