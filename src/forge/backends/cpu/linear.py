"""Products: which kernel makes which.

Up to `_FEW` rows (decoding) the loops of `few_rows` serve: a row has the same bits at any place,
though not those it has among more rows. Above that `wide_product` serves float32, by OpenBLAS, and
`low_product` bfloat16, by a kernel of our own. A row's bits don't depend on the rows beside it, nor
on the threads; in float32 they depend on its place modulo 24.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from forge.backends.cpu import threads
from forge.backends.cpu.bfloat16 import bits
from forge.backends.cpu.few_rows import few_rows
from forge.backends.cpu.low_product import low_product, plan
from forge.backends.cpu.pointwise import gelu_array, gelu_backward
from forge.backends.cpu.wide_product import wide_product, wide_workspace
from forge.tensor import Shape, Tensor

f32 = np.float32
Array = np.ndarray

# Rows that are better off without sgemm.
_FEW = 8
# An absent pre, and of its first row an absent bias.
_NONE = {np.dtype(dtype): np.zeros((1, 1, 0), dtype) for dtype in (np.float32, np.uint16)}
_ONE = f32(1.0)


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    b_rows: int | None = None,
    accumulate: bool = False,
) -> None:
    """out (+)= alpha op(a) op(b) + bias; `b_rows` uses only b's first rows, as stored."""
    # The shapes of a and out tell how much of b is used.
    product(
        bits(a),
        bits(b),
        None if bias is None else bits(bias),
        out=bits(out),
        trans_a=trans_a,
        trans_b=trans_b,
        alpha=alpha,
        accumulate=accumulate,
    )


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None, *, out: Tensor, pre: Tensor | None, gelu: str | None
) -> None:
    """pre = x w + bias; out = gelu(pre), or pre itself where gelu is None."""
    run = partial(product, bits(x), bits(w), None if bias is None else bits(bias))
    with_gelu(run, x.dtype, bits(out), None if pre is None else bits(pre), gelu)


def matmul_gelu_backward(
    dy: Tensor, w: Tensor, pre: Tensor, *, out: Tensor, sums: Tensor | None, form: str
) -> None:
    """out = (dy w^T) gelu'(pre), and sums[c] += sum over n of out[n, c]."""
    product(bits(dy), bits(w), out=bits(out), trans_b=True)
    gelu_backward(pre, out, out=out, sums=sums, form=form)


def with_gelu(
    run: Callable[..., None], dtype: str, out: Array, pre: Array | None, gelu: str | None
) -> None:
    """pre = a product, out = gelu(pre) or pre itself; `run(out=…, pre=…, gelu=…)` is the product.

    It fuses the tanh form of gelu; the other is a pass of its own.
    """
    if gelu == "tanh":
        run(out=out, pre=pre, gelu=True)
        return
    first = out if pre is None else pre
    run(out=first)
    if gelu is not None:
        # A kernel whose arrays are one does not vectorise.
        source = first.copy() if first is out else first
        gelu_array[dtype](source.reshape(-1), out.reshape(-1), True)
    elif pre is not None:
        np.copyto(out, pre)


def product(
    a: Array,
    b: Array,
    bias: Array | None = None,
    *,
    out: Array,
    pre: Array | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    accumulate: bool = False,
    gelu: bool = False,
) -> None:
    """pre (+)= alpha op(a) op(b) + bias, out = gelu(pre), on arrays of rank 2 or batched rank 3.

    Gelu is the tanh form; without it there is no `pre`, and out is the sum. b may have more rows,
    as stored, than a and out use. Arrays of bfloat16 are given as their bits; out and pre may then
    be float32.
    """
    M, N = out.shape[-2:]
    K = a.shape[-2] if trans_a else a.shape[-1]
    if out.size == 0:
        return
    if K == 0:  # sgemm refuses a leading dimension of 0
        trans_a, trans_b, K = False, False, 1
        a = np.zeros((*out.shape[:-2], M, 1), a.dtype)
        b = np.zeros((*out.shape[:-2], 1, N), a.dtype)
    dtype = "float32" if a.dtype == f32 else "bfloat16"
    few = _few(out.shape, trans_a) and a.dtype == out.dtype
    if out.ndim == 2:
        a, b, out = a[None], b[None], out[None]
        pre = _NONE[out.dtype] if pre is None else pre[None]
    elif pre is None:
        pre = _NONE[out.dtype]
    bias = _NONE[a.dtype][0, 0] if bias is None else bias
    factor = _ONE if alpha == 1.0 else f32(alpha)
    if few:
        few_rows[dtype](a, b, bias, out, pre, trans_b, factor, accumulate, gelu)
        return
    run = wide_product if dtype == "float32" else low_product
    run(
        a,
        b,
        bias,
        out,
        pre,
        trans_a=trans_a,
        trans_b=trans_b,
        alpha=factor,
        accumulate=accumulate,
        gelu=gelu,
    )


def _few(shape: Shape, trans_a: bool) -> bool:
    """Whether `few_rows` makes an out of this shape."""
    return len(shape) == 2 and shape[0] <= _FEW and not trans_a


def product_workspace(
    dtype: str, out_dtype: str, shape: Shape, K: int, trans_a: bool = False
) -> tuple[int, ...]:
    """Bytes of scratch that `product` takes for an out of this shape."""
    if K == 0:
        trans_a, K = False, 1
    if 0 in shape or (_few(shape, trans_a) and dtype == out_dtype):
        return ()
    G, M, N = shape if len(shape) == 3 else (1, *shape)
    if dtype == "bfloat16":
        return plan(G, M, N, K, threads.get_threads()).nbytes
    return wide_workspace(G, M, N, K, trans_a)


def matmul_workspace(
    a: Tensor, *rest: Any, out: Tensor, trans_a: bool = False, **_: Any
) -> tuple[int, ...]:
    """Bytes of the scratch."""
    K = a.shape[-2] if trans_a else a.shape[-1]
    return product_workspace(a.dtype, out.dtype, out.shape, K, trans_a)


def linear_workspace(x: Tensor, *rest: Any, out: Tensor, **_: Any) -> tuple[int, ...]:
    """Bytes of the scratch."""
    return matmul_workspace(x, out=out)


def matmul_gelu_backward_workspace(
    dy: Tensor, *rest: Any, out: Tensor, **_: Any
) -> tuple[int, ...]:
    """Bytes of the scratch."""
    return matmul_workspace(dy, out=out)
