"""Weights in int8, a scale for each row."""

from __future__ import annotations

import numpy as np

from forge.backends.reference.arrays import read, write
from forge.backends.reference.attention import positions
from forge.backends.reference.linear import finish
from forge.tensor import Tensor


def quantize(x: Tensor, *, q: Tensor, scale: Tensor) -> None:
    """scale = max |x| / 127 of each row, q = x / scale to the nearest, ties to even."""
    rows = read(x)
    write(scale, np.abs(rows).max(-1, initial=0) / 127)
    # A row without a scale is zeros.
    divisor = np.where(scale.array == 0, 1, scale.array)[..., None]
    # A scale so small that it is rounded much could give more.
    write(q, np.clip(np.rint(rows / divisor), -127, 127))


def dequantize(q: Tensor, scale: Tensor, *, out: Tensor) -> None:
    """out = scale q."""
    write(out, read(scale)[..., None] * q.array)


def quantized_linear(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor,
    pre: Tensor | None,
    gelu: str | None,
) -> None:
    """pre = scale (x w^T) + bias; out = gelu(pre), or pre itself where gelu is None."""
    rows = read(x)
    product = rows @ w.array.T.astype(rows.dtype) * read(scale)
    finish(product, bias, out, pre, gelu)


def quantized_embedding(
    ids: Tensor, wte: Tensor, scale: Tensor, wpe: Tensor | None, *, out: Tensor, pos: int | Tensor
) -> None:
    """out[b, t] = scale[ids[b, t]] wte[ids[b, t]] + wpe[pos[b] + t]."""
    value = read(scale)[ids.array][..., None] * wte.array[ids.array]
    if wpe is not None:
        batch, length = ids.shape
        first = np.array(positions(pos, batch), np.int64)
        value = value + read(wpe)[first[:, None] + np.arange(length)]
    write(out, value)
