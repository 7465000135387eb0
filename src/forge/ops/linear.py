"""Products: `matmul`, `linear` with its bias and gelu, and `mlp` of two such layers."""

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
            f"[linear] expected x [..., K] and w [K, M], got {check.describe({'x': x, 'w': w})}; "
            + _disagreement("K", x=x, w=w)
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
    dbias = None
    if node.gelu is not None:
        # An extra is no function of x to a recorded sweep, so there it is made of ops.
        pre = linear(node.x, node.w, node.bias) if node.tracked else node.pre
        dbias = node.into("bias")
        dy = gelu_backward(pre, dy, form=node.gelu, into_bias=dbias)
    return _layer_gradients(node, dy, dbias)


def _disagreement(size: str, **pair: Tensor) -> str:
    """For a message: where a Tensor's width is not its matrix's; a matrix may be as PyTorch's."""
    (name, x), (matrix, w) = pair.items()
    if x.shape[-1:] == w.shape[:1]:
        return ""
    width = x.shape[-1] if x.shape else "missing"
    turned = f", where weights are [in, out]: ops.transpose({matrix}, (1, 0))"
    return f"{size} is {width} in {name} and {w.shape[0]} in {matrix}" + (
        turned if w.shape[1] == width else ""
    )


def _layer_gradients(node: Any, dy: Any, dbias: Any) -> dict[str, Any]:
    """Gradients of x, w and bias, given that of x w + bias, and dbias where its sums were taken."""
    dx = dw = None
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


def _gelu_is_exact(x: Tensor) -> bool:
    """Whether gelu of `pre`, as it is kept for x's device and dtype, is what `linear` returned.

    The GPU's libraries apply gelu to the sum in float32, and keep that sum rounded to bfloat16.
    """
    return (x.device.kind, x.dtype) != ("cuda", "bfloat16")


@linear.remake("out", needs=("pre",), exact=_gelu_is_exact)
def _(node: Any) -> Tensor:
    result: Tensor = gelu_of(node.pre, form=node.gelu)
    return result


@op(saves=("x", "w", "bias", "w_out", "pre", "hidden"))
def mlp(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    w_out: Tensor,
    bias_out: Tensor | None = None,
    *,
    gelu: str = "tanh",
    record: Record | None = None,
) -> Tensor:
    """gelu(x w + bias) w_out + bias_out, a transformer's feed-forward: two `linear`s as one op.

    x [..., K], w [K, M], bias [M] or None, w_out [M, N], bias_out [N] or None -> [..., N]; `gelu`
    "tanh" or "erf". The result has the bits of the two; the gradient takes fewer passes on a GPU,
    and in bfloat16 a rounding less. Floating; accumulates in float32 or wider. Relative error in
    norm about sqrt(K) + sqrt(M) epsilon. Differentiable twice. Raises ShapeError, DtypeError,
    DeviceError, ArgumentError.
    """
    check.floating("mlp", x=x, w=w, bias=bias, w_out=w_out, bias_out=bias_out)
    check.rank("mlp", "w", w, 2)
    check.rank("mlp", "w_out", w_out, 2)
    if x.ndim == 0 or x.shape[-1] != w.shape[0] or w.shape[1] != w_out.shape[0]:
        raise ShapeError(
            f"[mlp] expected x [..., K], w [K, M] and w_out [M, N], got "
            f"{check.describe({'x': x, 'w': w, 'w_out': w_out})}; "
            + (_disagreement("K", x=x, w=w) or _disagreement("M", w=w, w_out=w_out))
        )
    for name, value, width in (("bias", bias, w.shape[1]), ("bias_out", bias_out, w_out.shape[1])):
        if value is not None:
            check.shape("mlp", name, value.shape, (width,))
    check.gelu_form("mlp", gelu)
    inner = record is not None and any(map(record.wants, ("x", "w", "bias")))
    hidden = linear(x, w, bias, gelu=gelu, record=record if inner else None)
    if record is not None and record.wants("w_out"):
        record.keep(hidden=hidden)
    out: Tensor = linear(hidden, w_out, bias_out)
    return out


@mlp.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    dpre = dbias = dw_out = dbias_out = None
    m, n = node.spec("w_out").shape
    rows = math.prod(node.spec("x").shape[:-1])
    dy = as_shape(dy, (rows, n))
    inner = any(map(node.wants, ("x", "w", "bias")))
    pre = None
    if node.tracked and (inner or node.wants("w_out")):
        # As in linear's rule: a recorded sweep takes no extras.
        pre = linear(node.x, node.w, node.bias)
    if node.wants("w_out"):
        hidden = gelu_of(pre, form=node.gelu) if node.tracked else node.hidden
        dw_out = matmul(as_shape(hidden, (rows, m)), dy, trans_a=True, into=node.into("w_out"))
    if node.wants("bias_out"):
        dbias_out = sum_rows(dy, into=node.into("bias_out"))
    if inner and node.tracked:
        dhidden = matmul(dy, node.w_out, trans_b=True)
        dpre = gelu_backward(as_shape(pre, (rows, m)), dhidden, form=node.gelu)
    elif inner:
        dbias = node.into("bias")
        dpre = matmul_gelu_backward(
            dy, node.w_out, node.pre.view((rows, m)), form=node.gelu, into_bias=dbias
        )
    first = _layer_gradients(node, dpre, dbias) if inner else {}
    return {**first, "w_out": dw_out, "bias_out": dbias_out}


# Where `pre` is enough, x, w and bias are asked for in vain; but dw and dx read them anyway.
@mlp.remake("hidden", needs=("x", "w", "bias", "pre"))
def _(node: Any) -> Tensor:
    result: Tensor
    if _gelu_is_exact(node.pre):
        result = gelu_of(node.pre, form=node.gelu)
    else:
        # The kernel's call of the first time, which also stored `pre`: to another place now.
        result = linear(node.x, node.w, node.bias, gelu=node.gelu, record=Record({}, {}))
    return result


@op(differentiable="no")
def matmul_gelu_backward(
    dy: Tensor, w: Tensor, pre: Tensor, *, form: str = "tanh", into_bias: Tensor | None = None
) -> Tensor:
    """(dy w^T) gelu'(pre): dy [R, N], w [M, N], pre [R, M] -> [R, M], a step of `mlp`'s gradient.

    With `into_bias` [M] its sum over the rows is added there. Floating; accumulates in float32 or
    wider. Not differentiable: matmul and gelu_backward are. Raises ShapeError, DtypeError,
    DeviceError, ArgumentError. As accurate as the two, of which a GPU rounds once in bfloat16.
    """
    name = "matmul_gelu_backward"
    check.floating(name, dy=dy, w=w, pre=pre)
    check.rank(name, "dy", dy, 2)
    check.rank(name, "w", w, 2)
    m, n = w.shape
    if dy.shape[1] != n or pre.shape != (dy.shape[0], m):
        raise ShapeError(
            f"[{name}] expected dy [R, N], w [M, N] and pre [R, M], got "
            f"{check.describe({'dy': dy, 'w': w, 'pre': pre})}"
        )
    check.gelu_form(name, form)
    if into_bias is not None:
        check.buffer(name, "into_bias", pre, into_bias, (m,))
    out = empty(pre.shape, pre.dtype, pre.device)
    kernels(pre).matmul_gelu_backward(dy, w, pre, out=out, sums=into_bias, form=form)
    if into_bias is not None:
        into_bias.storage.version += 1
    return out
