"""Rows by their ids: embedding, taking, and the additions that their gradients are made of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forge.backends.registry import kernels
from forge.errors import ShapeError
from forge.ops import check
from forge.ops.define import op
from forge.ops.shape import reshape
from forge.tensor import Tensor, empty, tensor, zeros


@op(saves=("ids", "pos", "order"), differentiable="once")
def embedding(
    ids: Tensor,
    wte: Tensor,
    wpe: Tensor | None = None,
    pos: int | Tensor = 0,
    order: Tensor | None = None,
    *,
    rows: int | None = None,
) -> Tensor:
    """wte[ids] + wpe[pos + t]: ids int64 [T] or [B, T] -> [T, C] or [B, T, C].

    wte [V, C] of which the first `rows` are tokens (all by default), wpe [N, C] or None; `pos` is
    an int or int64 [B]. `order` is the stable order that sorts the ids, for the gradient, which
    adds rows in it; without it the rule sorts. Differentiable once in wte and wpe. Raises
    ShapeError, DtypeError, ArgumentError for an id or a position out of range, or another order.
    One rounding.
    """
    check.integers("embedding", ids=ids, order=order)
    check.floating("embedding", wte=wte, wpe=wpe)
    check.tensors("embedding", ids=ids, wte=wte)
    check.rank("embedding", "ids", ids, 1, 2)
    check.rank("embedding", "wte", wte, 2)
    vocabulary = wte.shape[0] if rows is None else rows
    check.that(vocabulary <= wte.shape[0], "embedding", f"rows <= {wte.shape[0]}", rows)
    check.ids("embedding", "ids", ids, vocabulary, hint=check.VOCABULARY)
    _check_order("embedding", ids, order)
    batched = ids.view((1, *ids.shape)) if ids.ndim == 1 else ids
    width = wte.shape[1]
    if wpe is not None:
        check.rank("embedding", "wpe", wpe, 2)
        if wpe.shape[1] != width:
            raise ShapeError(
                f"[embedding] expected wpe [N, {width}], got {check.describe({'wpe': wpe})}"
            )
        check.position("embedding", wte, pos, batched.shape[0], batched.shape[1], wpe.shape[0])
    out = empty((*batched.shape, width), wte.dtype, wte.device)
    kernels(wte).embedding(batched, wte, wpe, out=out, pos=pos)
    return out.view((*ids.shape, width))


@embedding.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    ids, pos = node.ids, node.pos
    grads: dict[str, Any] = {}
    if node.wants("wte"):
        spec = node.spec("wte")
        into = node.into("wte")
        buffer = zeros(spec.shape, spec.dtype, spec.device) if into is None else into
        # The ids, their order and the buffer were checked when they were recorded.
        grads["wte"] = _add_rows(buffer, ids, dy.view((ids.size, dy.shape[-1])), node.order)
    if node.wants("wpe"):
        spec = node.spec("wpe")
        into = node.into("wpe")
        buffer = zeros(spec.shape, spec.dtype, spec.device) if into is None else into
        batched = dy if len(dy.shape) == 3 else reshape(dy, (1, *dy.shape))
        grads["wpe"] = add_positions_(buffer, batched, pos)
    return grads


@op(differentiable="no")
def scatter_add_rows_(out: Tensor, ids: Tensor, x: Tensor, order: Tensor | None = None) -> Tensor:
    """out[ids[n]] += x[n] for every n, in increasing n: out [V, C], ids int64 [N], x [N, C].

    `order` is the stable order that sorts the ids; without it the op sorts. out's dtype is x's or
    that of its sums. In place; returns out. Not differentiable: see scatter_rows. Raises
    ShapeError, DtypeError, ArgumentError for an id out of range or another order. One rounding an
    addition.
    """
    check.integers("scatter_add_rows_", ids=ids, order=order)
    check.floating("scatter_add_rows_", x=x)
    check.tensors("scatter_add_rows_", ids=ids, x=x)
    check.buffer("scatter_add_rows_", "out", x, out)
    check.rank("scatter_add_rows_", "out", out, 2)
    check.shape("scatter_add_rows_", "x", x.shape, (ids.size, out.shape[1]))
    check.ids("scatter_add_rows_", "ids", ids, out.shape[0])
    _check_order("scatter_add_rows_", ids, order)
    return _add_rows(out, ids, x, order)


def _add_rows(out: Tensor, ids: Tensor, x: Tensor, order: Tensor | None) -> Tensor:
    flat = ids.view((ids.size,))
    kernels(x).scatter_add_rows(flat, x, _order(flat, order), out=out)
    out.storage.version += 1
    return out


def _check_order(name: str, ids: Tensor, order: Tensor | None) -> None:
    if order is not None:
        check.shape(name, "order", (order.size,), (ids.size,))
        check.ids(name, "order", order, ids.size)
        check.sorts(name, order, ids)


def _order(ids: Tensor, order: Tensor | None) -> Tensor:
    if order is not None:
        return order.view(ids.shape)
    if ids.device.plan:
        return empty(ids.shape, "int64", ids.device)
    return tensor(np.argsort(ids.numpy(), kind="stable"), "int64", ids.device)


@op(differentiable="no")
def add_positions_(out: Tensor, x: Tensor, pos: int | Tensor = 0) -> Tensor:
    """out[pos[b] + t] += x[b, t], in the order of b: out [N, C], x [B, T, C], pos int or int64 [B].

    out's dtype is x's or that of its sums. In place; returns out. Not differentiable. Raises
    ShapeError, DtypeError, ArgumentError for a position out of range. One rounding an addition.
    """
    check.floating("add_positions_", x=x)
    check.buffer("add_positions_", "out", x, out)
    check.rank("add_positions_", "out", out, 2)
    check.rank("add_positions_", "x", x, 3)
    check.shape("add_positions_", "x", x.shape, (*x.shape[:2], out.shape[1]))
    check.position("add_positions_", x, pos, x.shape[0], x.shape[1], out.shape[0])
    kernels(x).position_backward(x, out=out, pos=pos)
    out.storage.version += 1
    return out


@op(saves=("ids",))
def scatter_rows(x: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Zeros [rows, C] with x[n] added at row ids[n], in increasing n: take's transpose.

    x [N, C] floating, ids int64 of N elements. Differentiable twice. Raises and accuracy as
    scatter_add_rows_.
    """
    check.integers("scatter_rows", ids=ids)
    check.floating("scatter_rows", x=x)
    check.tensors("scatter_rows", x=x, ids=ids)
    check.rank("scatter_rows", "x", x, 2)
    check.shape("scatter_rows", "x", x.shape, (ids.size, x.shape[1]))
    check.ids("scatter_rows", "ids", ids, rows)
    out = zeros((rows, x.shape[-1]), x.dtype, x.device)
    scatter_add_rows_(out, ids, x)
    return out


@scatter_rows.rule
def _(node: Any, dout: Any) -> dict[str, Any]:
    return {"x": reshape(take(dout, node.ids), node.spec("x").shape)}


@op(saves=("ids",))
def take(x: Tensor, ids: Tensor) -> Tensor:
    """Rows of x: x [N, …], ids int64 of any shape -> ids.shape + x.shape[1:]. Any dtype.

    Differentiable twice. Raises ShapeError, DtypeError, ArgumentError for an id outside [0, N).
    Exact.
    """
    check.tensors("take", x=x, ids=ids)
    check.integers("take", ids=ids)
    check.that(x.ndim > 0, "take", "x with at least one dimension", "a scalar")
    check.ids("take", "ids", ids, x.shape[0])
    out = empty(ids.shape + x.shape[1:], x.dtype, x.device)
    kernels(x).take(x, ids, out=out)
    return out


@take.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    shape = node.spec("x").shape
    count = math.prod(node.ids.shape)
    rows = scatter_rows(reshape(dy, (count, math.prod(shape[1:]))), node.ids, shape[0])
    return {"x": reshape(rows, shape)}
