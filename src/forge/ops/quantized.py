"""Weights in int8, for inference: a row of a matrix is an output channel, and has one scale.

A weight is its int8 number q times its row's scale: symmetric, so zero is exact. The products are
of float x and q, summed in float32 or wider; only then comes the scale. Activations stay floating.
"""

from __future__ import annotations

import math
from typing import Any

from forge import dtypes
from forge.backends.registry import kernels
from forge.errors import ShapeError
from forge.ops import check
from forge.ops.define import Record, op
from forge.ops.linear import matmul
from forge.ops.pointwise import gelu_backward
from forge.ops.reduce import sum_rows
from forge.ops.shape import as_shape
from forge.tensor import Tensor, empty


@op(outputs=("q", "scale"), differentiable="no")
def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """q = x / scale to the nearest, ties to even, where scale = max |x| / 127 of the row.

    x [..., K] -> q int8 [..., K], scale [...] in the dtype of x's sums; a row of zeros has the
    scale 0. Floating. Not differentiable. Raises ShapeError, DtypeError, ArgumentError for what is
    not finite. One rounding of scale, and one of x / scale before that to an integer.
    """
    check.floating("quantize", x=x)
    if x.ndim == 0:
        raise ShapeError("[quantize] expected at least one dimension, got a scalar")
    check.finite("quantize", x, "such a row has no scale")
    q = empty(x.shape, "int8", x.device)
    scale = empty(x.shape[:-1], dtypes.accumulator(x.dtype), x.device)
    kernels(x).quantize(x, q=q, scale=scale)
    return q, scale


@op(differentiable="no")
def dequantize(q: Tensor, scale: Tensor, dtype: str | None = None) -> Tensor:
    """scale q: q int8 [..., K], scale floating [...] -> [..., K] of scale's dtype, or of `dtype`.

    Not differentiable. Raises ShapeError, DtypeError, DeviceError. A rounding, one more to `dtype`.
    """
    check.int8("dequantize", q=q)
    _check_scale("dequantize", q, scale)
    into = scale.dtype if dtype is None else dtypes.check("dequantize", dtype)
    check.that(into in dtypes.FLOATING, "dequantize", "a floating dtype", into)
    out = empty(q.shape, into, q.device)
    kernels(scale).dequantize(q, scale, out=out)
    return out


@op(saves=("w", "scale", "pre"), differentiable="once")
def quantized_linear(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    gelu: str | None = None,
    record: Record | None = None,
) -> Tensor:
    """gelu(scale (x w^T) + bias): x [..., K], w int8 [M, K], scale, bias [M] -> [..., M].

    `gelu` is "tanh", "erf" or None. Weights are [out, in], so that a product of one row reads them
    as they lie. Floating; accumulates in float32 or wider; scale is of x's dtype or of its sums'.
    Differentiable once in x and bias; the weights are frozen. Raises ShapeError, DtypeError,
    DeviceError, ArgumentError, GradientError for a scale that is a Var. Relative error in norm
    about sqrt(K) epsilon.
    """
    name = "quantized_linear"
    check.floating(name, x=x, bias=bias)
    check.int8(name, w=w)
    check.rank(name, "w", w, 2)
    _check_scale(name, w, scale)
    check.weights(name, x, scale=scale)
    m, k = w.shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise ShapeError(
            f"[{name}] expected x [..., K] and w [M, K], got {check.describe({'x': x, 'w': w})}"
        )
    if bias is not None:
        check.shape(name, "bias", bias.shape, (m,))
    if gelu is not None:
        check.gelu_form(name, gelu)
    out = empty((*x.shape[:-1], m), x.dtype, x.device)
    rows = math.prod(x.shape[:-1])
    pre = None
    if gelu is not None and record is not None:
        pre = empty(out.shape, x.dtype, x.device)
        record.keep(pre=pre)
    kernels(x).quantized_linear(
        x.view((rows, k)),
        w,
        scale,
        bias,
        out=out.view((rows, m)),
        pre=None if pre is None else pre.view((rows, m)),
        gelu=gelu,
    )
    return out


@quantized_linear.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    dx = dbias = None
    if node.wants("scale"):
        raise check.no_gradient("quantized_linear", "scale", "weights in int8 are frozen")
    if node.gelu is not None:
        dy = gelu_backward(node.pre, dy, form=node.gelu)
    x = node.spec("x")
    dy = as_shape(dy, (math.prod(x.shape[:-1]), node.spec("w").shape[0]))
    if node.wants("bias"):
        dbias = sum_rows(dy, into=node.into("bias"))
    if node.wants("x"):
        dx = as_shape(matmul(dy, dequantize(node.w, node.scale, x.dtype)), x.shape)
    return {"x": dx, "bias": dbias}


@op(differentiable="no")
def quantized_embedding(
    ids: Tensor, wte: Tensor, scale: Tensor, wpe: Tensor | None = None, pos: int | Tensor = 0
) -> Tensor:
    """scale[ids] wte[ids] + wpe[pos + t]: ids int64 [T] or [B, T] -> [T, C] or [B, T, C].

    wte int8 [V, C], scale [V], wpe [N, C] of scale's dtype or None; `pos` is an int or int64 [B].
    Not differentiable. Raises ShapeError, DtypeError, DeviceError, ArgumentError for an id or a
    position out of range. Two roundings.
    """
    name = "quantized_embedding"
    check.integers(name, ids=ids)
    check.int8(name, wte=wte)
    check.tensors(name, ids=ids, wte=wte)
    check.rank(name, "ids", ids, 1, 2)
    check.rank(name, "wte", wte, 2)
    _check_scale(name, wte, scale)
    check.floating(name, scale=scale, wpe=wpe)
    check.ids(name, "ids", ids, wte.shape[0], hint=check.VOCABULARY)
    batched = ids.view((1, *ids.shape)) if ids.ndim == 1 else ids
    if wpe is not None:
        check.rank(name, "wpe", wpe, 2)
        check.shape(name, "wpe", wpe.shape, (wpe.shape[0], wte.shape[1]))
        check.position(name, wpe, pos, batched.shape[0], batched.shape[1], wpe.shape[0])
    out = empty((*batched.shape, wte.shape[1]), scale.dtype, wte.device)
    kernels(scale).quantized_embedding(batched, wte, scale, wpe, out=out, pos=pos)
    return out.view((*ids.shape, wte.shape[1]))


def _check_scale(name: str, q: Tensor, scale: Tensor) -> None:
    """Raise unless `scale` has a floating number for each of q's rows."""
    check.tensors(name, q=q, scale=scale)
    check.floating(name, scale=scale)
    if q.ndim == 0:
        raise ShapeError(f"[{name}] expected at least one dimension, got a scalar of int8")
    check.shape(name, "scale", scale.shape, q.shape[:-1])
