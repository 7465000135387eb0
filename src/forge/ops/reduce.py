"""Reductions. All are differentiable twice and add in a fixed order."""

from __future__ import annotations

import math
from typing import Any

from forge.backends.registry import kernels
from forge.errors import ShapeError
from forge.ops import check
from forge.ops.define import Record, op
from forge.ops.pointwise import mul, scale
from forge.ops.shape import broadcast_to, reshape
from forge.tensor import Shape, Tensor, empty, zeros

Axis = int | tuple[int, ...] | None


@op()
def sum_rows(x: Tensor, *, into: Tensor | None = None) -> Tensor:
    """The sum over all but the last dimension: [..., C] -> [C], floating.

    With `into` [C], of x's dtype or that of its sums, it is added there. Differentiable twice.
    Raises ShapeError, DtypeError. Relative error in float32 about 1e-6.
    """
    check.floating("sum_rows", x=x)
    check.that(x.ndim > 0, "sum_rows", "x with at least one dimension", "a scalar")
    width = x.shape[-1]
    if into is not None:
        check.buffer("sum_rows", "into", x, into, (width,))
    out = zeros((width,), x.dtype, x.device) if into is None else into
    kernels(x).sum_rows(x.view((math.prod(x.shape[:-1]), width)), out=out)
    out.storage.version += into is not None
    return out


@sum_rows.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": broadcast_to(dy, node.spec("x").shape)}


@op()
def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """x summed over the dimensions that broadcasting from `shape` added or widened. Floating.

    Differentiable twice. Raises ShapeError, DtypeError. Relative error in float32 about 1e-6.
    """
    check.floating("sum_to", x=x)
    shape = tuple(shape)
    padded = (1,) * (x.ndim - len(shape)) + shape
    if len(padded) != x.ndim or any(m not in (1, n) for n, m in zip(x.shape, padded, strict=True)):
        raise ShapeError(
            f"[sum_to] expected a shape that broadcasts to {list(x.shape)}, got {list(shape)}"
        )
    out = empty(shape, x.dtype, x.device)
    kernels(x).sum_to(x, out=out.view(padded))
    return out


@sum_to.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": broadcast_to(_with_ones(dy, node.spec("x").shape), node.spec("x").shape)}


def _with_ones(dy: Any, shape: Shape) -> Any:
    return reshape(dy, (1,) * (len(shape) - len(dy.shape)) + tuple(dy.shape))


def _axes(name: str, axis: Axis, rank: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(rank))
    axes = axis if isinstance(axis, tuple) else (axis,)
    return tuple(sorted({check.axis(name, a, rank) for a in axes}))


def _reduced(shape: Shape, axes: tuple[int, ...], *, keepdims: bool) -> Shape:
    if keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def sum(x: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The sum over `axis` (all by default), which stay as dimensions of 1 with `keepdims`.

    Floating. Differentiable twice. Raises ShapeError, DtypeError. As accurate as sum_to.
    """
    check.floating("sum", x=check.value(x))
    axes = _axes("sum", axis, len(x.shape))
    total = sum_to(x, _reduced(x.shape, axes, keepdims=True))
    return total if keepdims else reshape(total, _reduced(x.shape, axes, keepdims=False))


def mean(x: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The mean over `axis` (all by default), which stay as dimensions of 1 with `keepdims`.

    Floating. Differentiable twice. Raises ShapeError, DtypeError, and ArgumentError for the mean
    of nothing. As accurate as sum_to.
    """
    check.floating("mean", x=check.value(x))
    count = math.prod(x.shape[a] for a in _axes("mean", axis, len(x.shape)))
    check.that(count > 0, "mean", "at least one element", f"shape {list(x.shape)}")
    return scale(sum(x, axis, keepdims=keepdims), 1.0 / count)


@op(saves=("mask",))
def max(
    x: Tensor, axis: Axis = None, *, keepdims: bool = False, record: Record | None = None
) -> Tensor:
    """The largest over `axis` (all by default), which stay as dimensions of 1 with `keepdims`.

    Ties share the gradient equally. Floating. Differentiable twice. Raises ShapeError, DtypeError,
    and ArgumentError for the largest of nothing. Exact.
    """
    check.floating("max", x=x)
    axes = _axes("max", axis, x.ndim)
    check.that(
        math.prod(x.shape[a] for a in axes) > 0, "max", "at least one element", list(x.shape)
    )
    out = empty(_reduced(x.shape, axes, keepdims=True), x.dtype, x.device)
    mask = empty(x.shape, x.dtype, x.device) if record is not None else None
    kernels(x).max(x, out=out, mask=mask, axis=axes)
    if record is not None and mask is not None:
        record.keep(mask=mask)
    return out if keepdims else out.view(_reduced(x.shape, axes, keepdims=False))


@max.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    shape = node.spec("x").shape
    axes = _axes("max", node.axis, len(shape))
    return {"x": mul(reshape(dy, _reduced(shape, axes, keepdims=True)), node.mask)}


@op(differentiable="no")
def argmax(x: Tensor) -> Tensor:
    """Where the largest of the last dimension is, the first of equals: [..., N] -> int64 [...].

    Floating, without NaN. Not differentiable. Raises DtypeError, and ArgumentError for the largest
    of nothing. Exact.
    """
    check.floating("argmax", x=x)
    check.that(x.ndim > 0 and x.shape[-1] > 0, "argmax", "at least one element", list(x.shape))
    out = empty(x.shape[:-1], "int64", x.device)
    kernels(x).argmax(x.view((out.size, x.shape[-1])), out=out.view((out.size,)))
    return out
