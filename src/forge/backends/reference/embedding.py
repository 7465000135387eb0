"""Token and position embedding."""

from __future__ import annotations

import numpy as np

from forge.backends.reference.arrays import read, write
from forge.backends.reference.attention import positions
from forge.tensor import Tensor


def embedding(
    ids: Tensor, wte: Tensor, wpe: Tensor | None, *, out: Tensor, pos: int | Tensor
) -> None:
    """out[b, t] = wte[ids[b, t]] + wpe[pos[b] + t]."""
    value = read(wte)[ids.array]
    if wpe is not None:
        batch, length = ids.shape
        first = np.array(positions(pos, batch), np.int64)
        value = value + read(wpe)[first[:, None] + np.arange(length)]
    write(out, value)


def scatter_add_rows(ids: Tensor, x: Tensor, order: Tensor, *, out: Tensor) -> None:
    """out[ids[n]] += x[n], for every row in increasing n; `order` sorts the ids, stably."""
    total, rows = read(out).copy(), read(x)
    for n in order.array:
        total[ids.array[n]] += rows[n]
    write(out, total)


def position_backward(dy: Tensor, *, out: Tensor, pos: int | Tensor) -> None:
    """out[pos[b] + t] += dy[b, t], in the order of b."""
    total, rows = read(out).copy(), read(dy)
    for b, first in enumerate(positions(pos, dy.shape[0])):
        total[first : first + dy.shape[1]] += rows[b]
    write(out, total)
