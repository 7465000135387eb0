"""One attention head, inside a kernel: the products over the causal triangle and its softmax.

T queries, D head width. Matrices are views into larger ones, given as an array and the (row,
column) `at` which they begin. Probabilities are held for some rows at once, `s [rows + 1, keys]`;
row r of them sees the keys 0 … first + r, and no product touches more than a tile beyond those.
"""

import math
from typing import Any

import numpy as np

from forge.backends.cpu.bfloat16 import wide
from forge.backends.cpu.jit import device, routine
from forge.backends.cpu.lanes import (
    SIDE,
    clear,
    greatest,
    prefetch,
    score_gradient,
    softmax,
    transpose_block,
)
from forge.backends.cpu.mathlib import exp, maximum
from forge.backends.cpu.philox import keep_factors
from forge.backends.cpu.tiles import LANES, ROWS, address, tile

f32 = np.float32
u32 = np.uint32

# Rows of probabilities held at once: 192 KiB at 1024 keys, within a core's second-level cache. A
# multiple of ROWS, so that a tile of keys lies on one side of the first query.
QUERIES = 48
# Up to so many keys, all rows are held: 48 KiB.
SHORT = 96
# Dropout factors are made this many at a time, which is what LLVM vectorises Philox by at most.
FACTORS = 32


def panels(keys: int) -> int:
    """How many panels of LANES transposed keys `pack` fills."""
    return (keys + LANES - 1) // LANES


def scratch_rows(keys: int) -> int:
    """Rows of probabilities that are held at once, and one for a row's dropout factors."""
    return (QUERIES if keys > SHORT else (keys + ROWS - 1) // ROWS * ROWS) + 1


def stride(keys: int) -> int:
    """Floats from one row of probabilities to the next.

    More than the keys need by what FACTORS rounds up, and so that at a power of two keys a column
    doesn't fall into one cache set.
    """
    return panels(keys) * LANES + FACTORS


@routine
def pack(x: Any, at: Any, count: Any, packed: Any) -> None:
    """packed[j // LANES, d, j % LANES] = x[at + (j, d)]: transposed, and 0 past the last row."""
    D = packed.shape[1]
    rows = count // SIDE * SIDE
    columns = D // SIDE * SIDE
    for j in range(0, rows, SIDE):
        panel = packed[j // LANES]
        for d in range(0, columns, SIDE):
            transpose_block(x, at[0] + j, at[1] + d, address(panel, d, j % LANES))
    for j in range(_whole(count)):
        panel = packed[j // LANES]
        for d in range(columns if j < rows else 0, D):
            panel[d, j % LANES] = wide(x[at[0] + j, at[1] + d]) if j < count else f32(0.0)


@routine
def _by_row(x: Any, at: Any, packed: Any, s: Any, first: Any, rows: Any, scale: Any) -> None:
    """s[r, j] = scale * sum over d of x[at + (r, d)] packed[j, d], for all keys j that r sees."""
    D = packed.shape[1]
    for r in range(0, rows, ROWS):
        a = address(x, at[0] + r, at[1])
        for j in range(0, first + min(r + ROWS, rows), LANES):
            b = address(packed[j // LANES], 0, 0)
            c = address(s, r, j)
            left = rows - r
            tile(a, x.shape[1], 1, b, LANES, c, s.shape[1], left, LANES, D, scale, False)


@routine
def _over_keys(s: Any, x: Any, at: Any, out: Any, to: Any, first: Any, rows: Any, D: Any) -> None:
    """out[to + (r, d)] = sum over the keys j that r sees of s[r, j] x[at + (j, d)]."""
    one = f32(1.0)
    for d in range(0, D, LANES):
        b = address(x, at[0], at[1] + d)
        for r in range(0, rows, ROWS):
            a = address(s, r, 0)
            c = address(out, to[0] + r, to[1] + d)
            left = rows - r
            seen = first + min(r + ROWS, rows)
            tile(a, s.shape[1], 1, b, x.shape[1], c, out.shape[1], left, D - d, seen, one, False)


@routine
def _over_rows(s: Any, x: Any, at: Any, out: Any, to: Any, first: Any, rows: Any, D: Any) -> None:
    """out[to + (j, d)] += sum over the rows r that see j of s[r, j] x[at + (r, d)].

    The keys from `first` on are seen for the first time: they are written, not added to.
    """
    one = f32(1.0)
    for j in range(0, first + rows, ROWS):
        unseen = max(0, j - first)
        a = address(s, unseen, j)
        left = first + rows - j
        deep = rows - unseen
        for d in range(0, D, LANES):
            b = address(x, at[0] + unseen, at[1] + d)
            c = address(out, to[0] + j, to[1] + d)
            tile(
                a, 1, s.shape[1], b, x.shape[1], c, out.shape[1], left, D - d, deep, one, j < first
            )


@routine
def softmax_row(row: Any) -> Any:
    """Softmax in place; returns the logarithm of the sum of exponentials."""
    top = f32(-np.inf)
    for j in range(row.size):
        top = maximum(top, row[j])
    total = f32(0.0)
    for j in range(row.size):
        e = exp(row[j] - top)
        row[j] = e
        total += e
    inverse = f32(1.0) / total
    for j in range(row.size):
        row[j] *= inverse
    return top + np.log(total)


@routine
def dot(x: Any, y: Any) -> Any:
    """Sum of products."""
    total = f32(0.0)
    for d in range(x.size):
        total += wide(x[d]) * wide(y[d])
    return total


@routine
def _times(row: Any, factors: Any) -> None:
    for j in range(row.size):
        row[j] *= factors[j]


@routine
def _keep(buffer: Any, count: Any, sample: Any, element: Any, dropout: Any, scale: Any) -> Any:
    """The dropout factors of `count` elements from `element` on; returns where they begin.

    Philox makes them by fours.
    """
    seed, step, site, first_sample, threshold = dropout
    lead = element % 4
    whole = (lead + count + FACTORS - 1) // FACTORS * FACTORS
    keep_factors(
        buffer[:whole],
        element - lead,
        first_sample + sample,
        site,
        seed,
        step,
        u32(threshold),
        scale,
    )
    return lead


@device
def _group_end(r: Any, rows: Any) -> Any:
    """Where the group of ROWS rows ends that r is of: products read its rows as far as the last."""
    return min(r // ROWS * ROWS + ROWS, rows)


@device
def _whole(seen: Any) -> Any:
    """`seen` keys and those that complete a vector."""
    return (seen + LANES - 1) // LANES * LANES


@device
def _fetch(x: Any, at: Any, r: Any, D: Any) -> None:
    """Ask for row r of the matrix that begins `at` a place of x."""
    for d in range(0, D, LANES):
        prefetch(address(x, at[0] + r, at[1] + d))


@routine
def attend(
    q: Any,
    keys: Any,
    v: Any,
    v_at: Any,
    out: Any,
    at: Any,
    lse: Any,
    s: Any,
    pos: Any,
    element: Any,
    dropout: Any,
    factor: Any,
    sources: Any,
    ahead: Any,
    soon: Any,
) -> None:
    """out = dropout(softmax(q keys^T / sqrt(D))) v, where query t sees the keys 0 … pos + t.

    Queries and results are `at` the same place, `keys` are packed. `element` is (sample, element)
    of the first probability, `dropout` (seed, step, site, first_sample, threshold): a threshold of
    0 keeps everything. The first `soon` queries, keys and values of the next head are `ahead` in
    `sources`: they are fetched meanwhile, since rows are too far apart for the processor to expect
    the next one. Where they are in no cache, that saves 20 to 30 % of the time at T = 64.
    """
    D = keys.shape[1]
    T = lse.size
    scale = f32(1.0 / math.sqrt(D))
    most = s.shape[0] - 1
    for t in range(0, T, most):
        rows = min(most, T - t)
        first = pos + t
        here = (at[0] + t, at[1])
        _by_row(q, here, keys, s, first, rows, scale)
        for r in range(rows):
            lse[t + r] = greatest(address(s, r, 0), first + r + 1)
        # A loop of its own, so that rows overlap in the processor: one is a chain of operations.
        for r in range(rows):
            seen = first + r + 1
            top = lse[t + r]
            lse[t + r] = top + np.log(softmax(address(s, r, 0), seen, top))
            if dropout[4] > 0:
                start = element[1] + (t + r) * T
                lead = _keep(s[most], seen, element[0], start, dropout, factor)
                _times(s[r, :seen], s[most, lead : lead + seen])
            whole = _whole(seen)
            if whole < first + _group_end(r, rows):
                clear(address(s, r, whole))
            if t + r < soon:
                _fetch(sources[0], ahead[0], t + r, D)
                _fetch(sources[1], ahead[1], t + r, D)
                _fetch(sources[2], ahead[2], t + r, D)
        _over_keys(s, v, v_at, out, here, first, rows, D)


@routine
def _deltas(out: Any, dout: Any, at: Any, D: Any, deltas: Any) -> None:
    """sum(P dP) over a row of probabilities is sum(out dout): Dao (2023), FlashAttention-2."""
    for r in range(deltas.size):
        x = out[at[0] + r, at[1] : at[1] + D]
        y = dout[at[0] + r, at[1] : at[1] + D]
        total = f32(0.0)
        for d in range(D):
            total += x[d] * y[d]
        deltas[r] = total


@routine
def attend_backward(
    qkv: Any,
    out: Any,
    dout: Any,
    lse: Any,
    dqkv: Any,
    packed: Any,
    s: Any,
    at: Any,
    element: Any,
    dropout: Any,
    factor: Any,
    sources: Any,
    ahead: Any,
    soon: Any,
) -> None:
    """A head's part of dqkv, `at` a place of it and of out; `element` and more as in `attend`.

    `packed` and `s` hold two scratch matrices each, `sources` are the whole qkv, out and dout.
    """
    T = lse.size
    D = packed.shape[2]
    C = out.shape[1]
    scale = f32(1.0 / math.sqrt(D))
    row, column = at
    k_at = (row, C + column)
    v_at = (row, 2 * C + column)
    pack(qkv, k_at, T, packed[0])
    pack(qkv, v_at, T, packed[1])
    p = s[0]
    dp = s[1]
    most = p.shape[0] - 1
    for first in range(0, T, most):
        rows = min(most, T - first)
        q_at = (row + first, column)
        _by_row(qkv, q_at, packed[0], p, first, rows, scale)
        _by_row(dout, q_at, packed[1], dp, first, rows, f32(1.0))
        deltas = dp[most, :rows]
        _deltas(out, dout, q_at, D, deltas)
        for r in range(rows):
            t = first + r
            seen = t + 1
            lead = 0
            if dropout[4] > 0:
                start = element[1] + t * T
                lead = _keep(p[most], seen, element[0], start, dropout, factor)
                _times(dp[r, :seen], p[most, lead : lead + seen])
            score_gradient(address(p, r, 0), address(dp, r, 0), seen, lse[t], deltas[r], scale)
            if dropout[4] > 0:
                _times(p[r, :seen], p[most, lead : lead + seen])
            whole = _whole(seen)
            if whole < first + _group_end(r, rows):
                clear(address(p, r, whole))
                clear(address(dp, r, whole))
            if t < soon:
                width = sources[1].shape[1]
                _fetch(sources[0], ahead, t, D)
                _fetch(sources[0], (ahead[0], ahead[1] + width), t, D)
                _fetch(sources[0], (ahead[0], ahead[1] + 2 * width), t, D)
                _fetch(sources[1], ahead, t, D)
                _fetch(sources[2], ahead, t, D)
        _over_rows(p, dout, q_at, dqkv, v_at, first, rows, D)
        _over_rows(dp, qkv, q_at, dqkv, k_at, first, rows, D)
        _over_keys(dp, qkv, k_at, dqkv, q_at, first, rows, D)
