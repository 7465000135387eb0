"""Products."""

from __future__ import annotations

import numpy as np

from forge.backends.reference.arrays import Array, add, read, write
from forge.backends.reference.pointwise import gelu_array, gelu_slope
from forge.tensor import Tensor


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
    x, y = read(a), read(b)
    if b_rows is not None:
        y = y[..., :b_rows, :]
    product = _transposed(x, trans_a) @ _transposed(y, trans_b)
    product = product * np.asarray(alpha, product.dtype)
    if bias is not None:
        product = product + read(bias)
    if accumulate:
        product = read(out) + product
    write(out, product)


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None, *, out: Tensor, pre: Tensor | None, gelu: str | None
) -> None:
    """pre = x w + bias; out = gelu(pre), or pre itself where gelu is None."""
    finish(read(x) @ read(w), bias, out, pre, gelu)


def finish(
    product: Array, bias: Tensor | None, out: Tensor, pre: Tensor | None, gelu: str | None
) -> None:
    """pre = product + bias; out = gelu(pre), or pre itself where gelu is None."""
    if bias is not None:
        product = product + read(bias)
    write(out, product)
    if pre is not None:
        write(pre, product)
    if gelu is not None:
        # Of the rounded product: `out` made again from a saved `pre` has the same bits.
        write(out, gelu_array(read(out), gelu))


def matmul_gelu_backward(
    dy: Tensor, w: Tensor, pre: Tensor, *, out: Tensor, sums: Tensor | None, form: str
) -> None:
    """out = (dy w^T) gelu'(pre); sums[c] += sum over n of out[n, c]."""
    result = (read(dy) @ read(w).T) * gelu_slope(read(pre), form)
    write(out, result)
    if sums is not None:
        add(sums, result.sum(axis=0))


def _transposed(array: Array, trans: bool) -> Array:
    return np.swapaxes(array, -1, -2) if trans else array
