"""Products: `matmul`, and `linear` with its bias and gelu."""

from __future__ import annotations

import math
from typing import Any

from forge.backends.registry import kernels
from forge.errors import ShapeError
from forge.ops import check
from forge.ops.define import Record, op
from forge.ops.pointwise import gelu as gelu_of
from forge.ops.pointwise import gelu_backward
from forge.ops.reduce import sum_rows
from forge.ops.shape import as_shape
from forge.tensor import Tensor, empty


@op(saves=("a", "b"))
def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    b_rows: int | None = None,
    into: Tensor | None = None,
    record: Record | None = None,
) -> Tensor:
    """alpha op(a) op(b) + bias, where op transposes the last two dimensions if asked.

    a and b are of rank 2, or of rank 3 with the same batch; bias is [N] for a result [..., M, N].
    `b_rows` uses only b's first rows, as stored; `into` adds the result to a Tensor instead; a of
    rank 3 may meet b of rank 2. Recorded, ranks are equal and `b_rows` and `into` are left out.
    Floating; accumulates in float32 or wider. Differentiable twice. Raises ShapeError, DtypeError,
    DeviceError. Relative error in norm about sqrt(K) epsilon.
    """
    check.floating("matmul", a=a, b=b, bias=bias)
    check.rank("matmul", "a", a, 2, 3)
    check.rank("matmul", "b", b, 2, 3)
    if record is not None and (a.ndim != b.ndim or b_rows is not None or into is not None):
        raise ShapeError(
            "[matmul] expected operands of equal rank, without b_rows and into, while recording, "
            f"got {check.describe({'a': a, 'b': b})}, b_rows={b_rows}; ops.linear folds leading "
            "dimensions"
        )
    folded = a.ndim == 3 and b.ndim == 2 and not trans_a
    if folded:
        a, batched = a.view((a.shape[0] * a.shape[1], a.shape[2])), a
    rows_b = b.shape[-2] if b_rows is None else b_rows
    m, k = a.shape[-2:][::-1] if trans_a else a.shape[-2:]
    kb, n = (b.shape[-1], rows_b) if trans_b else (rows_b, b.shape[-1])
    if a.shape[:-2] != b.shape[:-2] or k != kb or not 0 <= rows_b <= b.shape[-2]:
        raise ShapeError(
            f"[matmul] expected op(a) [M, K] and op(b) [K, N] of one batch, got "
            f"{check.describe({'a': a, 'b': b})}, trans_a={trans_a}, trans_b={trans_b}"
            f"{'' if b_rows is None else f', b_rows={b_rows}'}; K is {k} in a and {kb} in b"
        )
    if bias is not None:
        check.shape("matmul", "bias", bias.shape, (n,))
    shape = (*a.shape[:-2], m, n)
    if into is not None:
        check.buffer("matmul", "into", a, into, shape)
    out = empty(shape, a.dtype, a.device) if into is None else into
    kernels(a).matmul(
        a,
        b,
        bias,
        out=out,
        trans_a=trans_a,
        trans_b=trans_b,
        alpha=alpha,
        b_rows=b_rows,
        accumulate=into is not None,
    )
    out.storage.version += into is not None
    return out.view((*batched.shape[:-1], n)) if folded else out


@matmul.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    a, b, alpha, trans_a, trans_b = node.a, node.b, node.alpha, node.trans_a, node.trans_b
    da = db = dbias = None
    if node.wants("a"):
        into = node.into("a")
        if trans_a:
            da = matmul(b, dy, trans_a=trans_b, trans_b=True, alpha=alpha, into=into)
        else:
            da = matmul(dy, b, trans_b=not trans_b, alpha=alpha, into=into)
    if node.wants("b"):
        into = node.into("b")
        if trans_b:
            db = matmul(dy, a, trans_a=True, trans_b=trans_a, alpha=alpha, into=into)
        else:
            db = matmul(a, dy, trans_a=not trans_a, alpha=alpha, into=into)
    if node.wants("bias"):
        dbias = sum_rows(dy, into=node.into("bias"))
    return {"a": da, "b": db, "bias": dbias}


@op(saves=("x", "w", "bias", "pre"))
def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    gelu: str | None = None,
    record: Record | None = None,
) -> Tensor:
    """gelu(x w + bias): x [..., K], w [K, M], bias [M] -> [..., M]; `gelu` "tanh", "erf" or None.

    Weights are [in, out], as in GPT-2's files. Floating; accumulates in float32 or wider.
    Differentiable twice. Raises ShapeError, DtypeError, DeviceError, ArgumentError.
    Relative error in norm about sqrt(K) epsilon.
    """
    check.floating("linear", x=x, w=w, bias=bias)
    check.rank("linear", "w", w, 2)
    k, m = w.shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise ShapeError(
            f"[linear] expected x [..., K] and w [K, M], got {check.describe({'x': x, 'w': w})}"
        )
    if bias is not None:
        check.shape("linear", "bias", bias.shape, (m,))
    if gelu is not None:
        check.gelu_form("linear", gelu)
    out = empty((*x.shape[:-1], m), x.dtype, x.device)
    rows = math.prod(x.shape[:-1])
    pre = None
    if gelu is not None and record is not None:
        pre = empty(out.shape, x.dtype, x.device)
        record.keep(pre=pre)
    kernels(x).linear(
        x.view((rows, k)),
        w,
        bias,
        out=out.view((rows, m)),
        pre=None if pre is None else pre.view((rows, m)),
        gelu=gelu,
    )
    return out


@linear.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    dx = dw = dbias = None
    if node.gelu is not None:
        # An extra is no function of x to a recorded sweep, so there it is made of ops.
        pre = linear(node.x, node.w, node.bias) if node.tracked else node.pre
        dbias = node.into("bias")
        dy = gelu_backward(pre, dy, form=node.gelu, into_bias=dbias)
    shape = node.spec("x").shape
    k, m = node.spec("w").shape
    rows = math.prod(shape[:-1])
    dy = as_shape(dy, (rows, m))
    if node.wants("w"):
        dw = matmul(as_shape(node.x, (rows, k)), dy, trans_a=True, into=node.into("w"))
    if node.wants("bias") and dbias is None:
        dbias = sum_rows(dy, into=node.into("bias"))
    if node.wants("x"):
        dx = as_shape(matmul(dy, node.w, trans_b=True), shape)
    return {"x": dx, "w": dw, "bias": dbias}


def _remade_exactly(out: Tensor) -> bool:
    """Whether gelu of what is kept has the bits of what was returned.

    cuBLASLt applies gelu to the sum in float32, and keeps that sum rounded to bfloat16.
    """
    return (out.device.kind, out.dtype) != ("cuda", "bfloat16")


@linear.remake("out", needs=("pre",), exact=_remade_exactly)
def _(node: Any) -> Tensor:
    result: Tensor = gelu_of(node.pre, form=node.gelu)
    return result
