"""Token and position embedding: ids [B, T], rows of width C.

No two threads add to the same element: the rows of an id are one thread's, in the order given, and
position gradients are split by columns.
"""

from typing import Any

import numpy as np
from numba import prange

from forge.backends.cpu.bfloat16 import bits, narrow, wide
from forge.backends.cpu.jit import forms, routine
from forge.tensor import Tensor

# Places of the sorted order, and columns of position gradients, that one thread takes at a time.
PLACES = 64
COLUMNS = 128


@forms("void(int64[:,::1], T[:,::1], T[:,::1], int64[::1], T[:,:,::1])")
def _embedding(ids: Any, wte: Any, wpe: Any, pos: Any, out: Any) -> None:
    """A missing wpe has no rows."""
    B, T = ids.shape
    for n in prange(B * T):
        b = n // T
        t = n % T
        row = out[b, t]
        token = wte[ids[b, t]]
        if wpe.shape[0] > 0:
            position = wpe[pos[b] + t]
            for c in range(row.size):
                row[c] = narrow(row, wide(token[c]) + wide(position[c]))
        else:
            for c in range(row.size):
                row[c] = token[c]


@routine
def _continues(ids: Any, order: Any, i: Any) -> Any:
    """Whether place i of the order holds the same id as the place before."""
    return i > 0 and ids[order[i]] == ids[order[i - 1]]


@routine
def _add_runs(start: Any, stop: Any, ids: Any, x: Any, order: Any, out: Any) -> None:
    """Adds the rows of the runs of equal ids that begin at places start … stop - 1 of the order."""
    i = start
    while i < stop and _continues(ids, order, i):
        i += 1
    if i == stop:
        return
    while i < stop or (i < order.size and _continues(ids, order, i)):
        source = x[order[i]]
        target = out[ids[order[i]]]
        for c in range(source.size):
            target[c] = narrow(target, wide(target[c]) + wide(source[c]))
        i += 1


@forms("void(int64[::1], T[:,::1], int64[::1], U[:,::1])", cost=0.5)
def _scatter_add_rows(ids: Any, x: Any, order: Any, out: Any) -> None:
    N = order.size
    for block in prange((N + PLACES - 1) // PLACES):
        _add_runs(block * PLACES, min(block * PLACES + PLACES, N), ids, x, order, out)


@forms("void(T[:,:,::1], int64[::1], U[:,::1])")
def _position_backward(dy: Any, pos: Any, out: Any) -> None:
    B, T, C = dy.shape
    for block in prange((C + COLUMNS - 1) // COLUMNS):
        low = block * COLUMNS
        high = min(low + COLUMNS, C)
        for b in range(B):
            for t in range(T):
                source = dy[b, t, low:high]
                target = out[pos[b] + t, low:high]
                for c in range(source.size):
                    target[c] = narrow(target, wide(target[c]) + wide(source[c]))


def embedding(
    ids: Tensor, wte: Tensor, wpe: Tensor | None, *, out: Tensor, pos: int | Tensor
) -> None:
    """out[b, t] = wte[ids[b, t]] + wpe[pos[b] + t]."""
    table = bits(wte)[:0] if wpe is None else bits(wpe)
    first = positions(pos, ids.shape[0])
    _embedding[wte.dtype](ids.array, bits(wte), table, first, bits(out))


def scatter_add_rows(ids: Tensor, x: Tensor, order: Tensor, *, out: Tensor) -> None:
    """out[ids[n]] += x[n], for every row in increasing n; `order` sorts the ids, stably."""
    _scatter_add_rows[x.dtype, out.dtype](ids.array, bits(x), order.array, bits(out))


def position_backward(dy: Tensor, *, out: Tensor, pos: int | Tensor) -> None:
    """out[pos[b] + t] += dy[b, t], in the order of b."""
    _position_backward[dy.dtype, out.dtype](bits(dy), positions(pos, dy.shape[0]), bits(out))


def positions(pos: int | Tensor, batch: int) -> np.ndarray:
    """The first position of each sample."""
    return np.full(batch, pos, np.int64) if isinstance(pos, int) else pos.array
