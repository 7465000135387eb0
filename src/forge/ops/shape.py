"""Shape ops: elements moved, none changed."""

from __future__ import annotations

import math
from typing import Any

from forge.backends.registry import kernels
from forge.errors import DtypeError, ShapeError
from forge.ops import check
from forge.ops.define import op
from forge.tensor import Shape, Tensor, empty, zeros


@op(view=True)
def reshape(x: Tensor, shape: Shape) -> Tensor:
    """x's elements in another shape, sharing its storage; one size may be -1.

    Any dtype. Differentiable twice. Raises ShapeError. Exact.
    """
    check.tensors("reshape", x=x)
    shape, size = tuple(shape), x.size
    if shape.count(-1) == 1:
        rest = -math.prod(shape)
        if rest > 0 and size % rest == 0:
            shape = tuple(size // rest if n == -1 else n for n in shape)
    if min(shape, default=0) < 0 or math.prod(shape) != size:
        raise ShapeError(
            f"[reshape] expected a shape of {size} elements, got {list(shape)} for {list(x.shape)}"
        )
    return x.view(shape)


@reshape.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": reshape(dy, node.spec("x").shape)}


def as_shape(x: Any, shape: Shape) -> Any:
    """`reshape` in a rule, where the size is known to fit: only a Var needs the op."""
    return x.view(shape) if x.__class__ is Tensor else reshape(x, shape)


@op()
def transpose(x: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
    """x with its dimensions in the order `axes`, reversed by default; a copy. Any dtype.

    Differentiable twice. Raises ShapeError. Exact.
    """
    check.tensors("transpose", x=x)
    axes = tuple(range(x.ndim))[::-1] if axes is None else axes
    order = tuple(check.axis("transpose", axis, x.ndim) for axis in axes)
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(f"[transpose] expected each axis of {list(x.shape)} once, got {axes}")
    out = empty(tuple(x.shape[axis] for axis in order), x.dtype, x.device)
    kernels(x).transpose(x, out=out, axes=order)
    return out


@transpose.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    rank = len(node.spec("x").shape)
    order = range(rank)[::-1] if node.axes is None else [axis % rank for axis in node.axes]
    inverse = sorted(range(rank), key=list(order).__getitem__)
    return {"x": transpose(dy, tuple(inverse))}


@op()
def slice(x: Tensor, start: Shape, shape: Shape, step: Shape | None = None) -> Tensor:
    """`shape` elements of x, every `step`-th from `start` on, per dimension; a copy. Any dtype.

    Differentiable twice. Raises ShapeError. Exact.
    """
    check.tensors("slice", x=x)
    step = (1,) * x.ndim if step is None else step
    _check_window("slice", x.shape, start, shape, step)
    out = empty(tuple(shape), x.dtype, x.device)
    kernels(x).slice(x, out=out, start=tuple(start), step=tuple(step))
    return out


@slice.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": unslice(dy, node.start, node.spec("x").shape, node.step)}


@op()
def unslice(dy: Tensor, start: Shape, shape: Shape, step: Shape | None = None) -> Tensor:
    """Zeros of `shape` with dy where `slice` reads: slice's transpose. Any dtype.

    Differentiable twice. Raises ShapeError. Exact.
    """
    check.tensors("unslice", dy=dy)
    step = (1,) * dy.ndim if step is None else step
    _check_window("unslice", shape, start, dy.shape, step)
    out = zeros(tuple(shape), dy.dtype, dy.device)
    kernels(dy).unslice(dy, out=out, start=tuple(start), step=tuple(step))
    return out


@unslice.rule
def _(node: Any, dout: Any) -> dict[str, Any]:
    return {"dy": slice(dout, node.start, node.spec("dy").shape, node.step)}


def _check_window(name: str, whole: Shape, start: Shape, shape: Shape, step: Shape) -> None:
    ranks = {len(whole), len(start), len(shape), len(step)}
    fits = len(ranks) == 1 and all(
        stride >= 1
        and min(first, count) >= 0
        and (count == 0 or first + (count - 1) * stride < size)
        for size, first, count, stride in zip(whole, start, shape, step, strict=True)
    )
    if not fits:
        raise ShapeError(
            f"[{name}] expected a window inside {list(whole)}, got start {list(start)}, "
            f"shape {list(shape)}, step {list(step)}"
        )


@op()
def concat(*xs: Tensor, axis: int = 0) -> Tensor:
    """The xs one after the other along `axis`; their other sizes are equal. One dtype.

    Differentiable twice. Raises ShapeError, DtypeError, DeviceError, and ArgumentError for none.
    Exact.
    """
    check.that(bool(xs), "concat", "at least one Tensor", "none")
    named = {f"xs{i}": x for i, x in enumerate(xs)}
    device = check.tensors("concat", **named)
    first = xs[0]
    axis = check.axis("concat", axis, first.ndim)
    if len({x.dtype for x in xs}) > 1:
        raise DtypeError(f"[concat] expected one dtype, got {check.describe(named)}")
    if len({(*x.shape[:axis], *x.shape[axis + 1 :], x.ndim) for x in xs}) > 1:
        raise ShapeError(
            f"[concat] expected equal sizes but for axis {axis}, got {check.describe(named)}"
        )
    total = sum(x.shape[axis] for x in xs)
    out = empty((*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype, device)
    kernels(first).concat(xs, out=out, axis=axis)
    return out


@concat.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    axis = node.axis % len(dy.shape)
    grads = {}
    first = 0
    for name in [f"xs{i}" for i in range(len(node.names()))]:
        shape = node.spec(name).shape
        start = tuple(first if i == axis else 0 for i in range(len(shape)))
        grads[name] = slice(dy, start, shape) if node.wants(name) else None
        first += shape[axis]
    return grads


@op()
def broadcast_to(x: Tensor, shape: Shape) -> Tensor:
    """x repeated to `shape`, over dimensions it lacks or has once; a copy. Floating.

    Differentiable twice. Raises ShapeError, DtypeError. Exact.
    """
    check.floating("broadcast_to", x=x)
    shape = tuple(shape)
    padded = (1,) * (len(shape) - x.ndim) + x.shape
    if len(padded) != len(shape) or any(
        m not in (1, n) for n, m in zip(shape, padded, strict=True)
    ):
        raise ShapeError(
            f"[broadcast_to] expected a shape that {list(x.shape)} broadcasts to, got {list(shape)}"
        )
    out = empty(shape, x.dtype, x.device)
    kernels(x).broadcast_to(x, out=out)
    return out


@broadcast_to.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    # The tape sums it back to x's shape.
    return {"x": dy}
