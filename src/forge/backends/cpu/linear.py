"""Products: OpenBLAS's single-threaded sgemm, called on tiles from the threads of one Numba loop.

C [M, N] = op(A) [M, K] op(B) [K, N], for each of G matrices.

Which bits a row of C gets must not depend on how many rows come with it (a prompt alone or in a
batch, a batch whole or in parts). OpenBLAS works on groups of rows and treats the rest of the last
group otherwise, so the rows of a tile are always a multiple of `_GROUP`: the last tile is padded
with zeros. For products of up to a million multiply-adds it may choose other kernels, so tiles have
either more than that or, where N and K are small, all the same number of rows, `_SMALL`. So row i
has the same bits in every product that has more than `_FEW` rows and holds it at the same place
modulo 24 (modulo `_SMALL` for small N and K), measured on OpenBLAS's cores Haswell and SkylakeX.

Up to `_FEW` rows (decoding) OpenBLAS would first rearrange all of B. There a loop of our own reads
B once, and a row has the same bits at any place, though not those it has among more rows.

With `trans_a` (weight gradients) the rows are a model's features, whose number never varies.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from forge.backends.cpu.blas import link, sgemm
from forge.backends.cpu.jit import kernel, routine
from forge.backends.cpu.mathlib import gelu_erf, gelu_tanh
from forge.tensor import Tensor

f32 = np.float32
Array = np.ndarray

# The row groups of sgemm: 12 on Haswell, 24 on SkylakeX.
_GROUP = 24
# Where sgemm's choice of kernels may depend on the size.
_SMALL_PRODUCT = 1_000_000
_SMALL = 96
# Largest tile. sgemm rearranges a tile's part of A and of B first: smaller tiles cost more of that
# (on SkylakeX 96 x 384 runs at 124 GFLOP/s, 384 x 768 at 153, the whole at 162), larger ones leave
# threads idle.
_ROWS, _COLUMNS = 384, 768
# Columns are cut at multiples of this, a cache line.
_LINE = 16
# Rows that are better off without sgemm, and the part of K that one thread sums for them.
_FEW = 8
_DEPTH = 64
_GELU = {None: 0, "tanh": 1, "erf": 2}
_NONE = np.zeros((0, 0, 0), f32)
_NO_BIAS = np.zeros(0, f32)


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor,
    trans_a: bool,
    trans_b: bool,
    alpha: float,
    b_rows: int | None,
    accumulate: bool,
) -> None:
    """out (+)= alpha op(a) op(b) + bias; `b_rows` uses only b's first rows, as stored."""
    # The shapes of a and out tell how much of b is used.
    product(
        a.array,
        b.array,
        None if bias is None else bias.array,
        out=out.array,
        trans_a=trans_a,
        trans_b=trans_b,
        alpha=alpha,
        accumulate=accumulate,
    )


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None, *, out: Tensor, pre: Tensor | None, gelu: str | None
) -> None:
    """pre = x w + bias; out = gelu(pre), or pre itself where gelu is None."""
    product(
        x.array,
        w.array,
        None if bias is None else bias.array,
        out=out.array,
        pre=None if pre is None else pre.array,
        gelu=gelu,
    )


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
    gelu: str | None = None,
) -> None:
    """pre (+)= alpha op(a) op(b) + bias, out = gelu(pre), on arrays of rank 2 or batched rank 3.

    Without `gelu` out is pre. b may have more rows, as stored, than a and out use.
    """
    if gelu is None and pre is not None:
        product(a, b, bias, out=out, trans_a=trans_a, trans_b=trans_b, alpha=alpha)
        np.copyto(pre, out)
        return
    M, N = out.shape[-2:]
    K = a.shape[-2] if trans_a else a.shape[-1]
    if out.size == 0:
        return
    if K == 0:  # sgemm refuses a leading dimension of 0
        trans_a, trans_b, K = False, False, 1
        a = np.zeros((*out.shape[:-2], M, 1), f32)
        b = np.zeros((*out.shape[:-2], 1, N), f32)
    arguments = (
        _batch(a),
        _batch(b),
        _NO_BIAS if bias is None else bias,
        _batch(out),
        _NONE if pre is None else _batch(pre),
    )
    flags = (f32(alpha), accumulate, _GELU[gelu])
    if M <= _FEW and out.ndim == 2 and not trans_a:
        _few_rows(*arguments, trans_b, *flags)
    else:
        _tiles(*arguments, trans_a, trans_b, *flags, *_grid(M, N, K, trans_a))


def _batch(x: Array) -> Array:
    return x if x.ndim == 3 else x.reshape(1, *x.shape)


@functools.lru_cache(maxsize=4096)
def _grid(M: int, N: int, K: int, trans_a: bool) -> tuple[int, int, int]:
    """How C is cut: rows in a unit, number of row tiles, number of column tiles.

    A tile has whole units of rows. Even counts, where possible, balance two and four threads.
    """
    if trans_a:
        if M >= N:
            return _LINE, _parts(M, _LINE, 2 * _ROWS), -(-N // _COLUMNS)
        return _LINE, -(-M // _ROWS), _parts(N, _LINE, 2 * _COLUMNS)
    # N alone decides on the columns: how they are cut shows in the bits.
    columns = 1 if N <= 512 else max(2, -(-N // _COLUMNS))
    lines = -(-N // _LINE)
    narrowest = min(lines // columns * _LINE, N - (columns - 1) * lines // columns * _LINE)
    unit = _GROUP * -(-(_SMALL_PRODUCT + 1) // (_GROUP * narrowest * K))
    if unit > _SMALL:
        return _SMALL, -(-M // _SMALL), columns
    rows = _parts(M, unit, 2 * _ROWS) if columns < 4 else -(-M // _ROWS)
    return unit, rows, columns


def _parts(size: int, unit: int, pair: int) -> int:
    """An even number of parts, of at most half of `pair` each, or 1 where there is but one unit."""
    return 1 if size <= unit else 2 * -(-size // pair)


# G matrices; a tile is matrix g, rows i0 … i1, columns j0 … j1 of C. The arrays are all of rank 3,
# `bias` and `pre` of size 0 where there is none.
_ARRAYS = (
    "float32[:, :, ::1], float32[:, :, ::1], float32[::1], float32[:, :, ::1], float32[:, :, ::1]"
)


@kernel(
    f"void({_ARRAYS}, boolean, boolean, float32, boolean, int64, int64, int64, int64)",
    cost=3.0,
    setup=link,
)
def _tiles(
    a: Any,
    b: Any,
    bias: Any,
    out: Any,
    pre: Any,
    trans_a: Any,
    trans_b: Any,
    alpha: Any,
    accumulate: Any,
    gelu: Any,
    unit: Any,
    row_tiles: Any,
    column_tiles: Any,
) -> None:
    G, M, N = out.shape
    units = (M + unit - 1) // unit
    lines = (N + _LINE - 1) // _LINE
    target = pre if pre.size else out
    for t in prange(G * row_tiles * column_tiles):
        c = t % column_tiles
        r = t // column_tiles % row_tiles
        g = t // column_tiles // row_tiles
        i0 = r * units // row_tiles * unit
        padded = (r + 1) * units // row_tiles * unit - i0
        i1 = min(M, i0 + padded)
        j0 = c * lines // column_tiles * _LINE
        j1 = min(N, (c + 1) * lines // column_tiles * _LINE)
        if trans_a or i1 - i0 == padded:
            _whole(a, b, target, g, i0, i1, j0, j1, trans_a, trans_b, alpha, accumulate)
        else:
            _padded(a, b, target, g, i0, i1, j0, j1, padded, trans_b, alpha, accumulate)
        if bias.size or gelu:
            for i in range(i0, i1):
                _finish(target[g, i, j0:j1], bias[j0:j1], out[g, i, j0:j1], gelu, pre.size > 0)


@routine
def _whole(
    a: Any,
    b: Any,
    c: Any,
    g: Any,
    i0: Any,
    i1: Any,
    j0: Any,
    j1: Any,
    trans_a: Any,
    trans_b: Any,
    alpha: Any,
    accumulate: Any,
) -> None:
    """One tile of c, in place."""
    K = a.shape[1] if trans_a else a.shape[2]
    lda, ldb, ldc = a.shape[2], b.shape[2], c.shape[2]
    sgemm(
        trans_a,
        trans_b,
        i1 - i0,
        j1 - j0,
        K,
        alpha,
        a.ctypes.data + 4 * (g * a.shape[1] * lda + (i0 if trans_a else i0 * lda)),
        lda,
        b.ctypes.data + 4 * (g * b.shape[1] * ldb + (j0 * ldb if trans_b else j0)),
        ldb,
        f32(1.0) if accumulate else f32(0.0),
        c.ctypes.data + 4 * ((g * c.shape[1] + i0) * ldc + j0),
        ldc,
    )


@routine
def _padded(
    a: Any,
    b: Any,
    c: Any,
    g: Any,
    i0: Any,
    i1: Any,
    j0: Any,
    j1: Any,
    rows: Any,
    trans_b: Any,
    alpha: Any,
    accumulate: Any,
) -> None:
    """The last rows of c, as a product of `rows` rows of which the last are zero."""
    K = a.shape[2]
    left = np.empty((rows, K), f32)
    for i in range(rows):
        row = left[i]
        if i < i1 - i0:
            values = a[g, i0 + i]
            for k in range(K):
                row[k] = values[k]
        else:
            for k in range(K):
                row[k] = f32(0.0)
    result = np.empty((rows, j1 - j0), f32)
    ldb = b.shape[2]
    sgemm(
        False,
        trans_b,
        rows,
        j1 - j0,
        K,
        alpha,
        left.ctypes.data,
        K,
        b.ctypes.data + 4 * (g * b.shape[1] * ldb + (j0 * ldb if trans_b else j0)),
        ldb,
        f32(0.0),
        result.ctypes.data,
        j1 - j0,
    )
    for i in range(i1 - i0):
        _put(result[i], c[g, i0 + i, j0:j1], f32(1.0), accumulate)


@routine
def _put(values: Any, target: Any, alpha: Any, accumulate: Any) -> None:
    """target (+)= alpha * values."""
    if accumulate:
        for j in range(target.size):
            target[j] += alpha * values[j]
    else:
        for j in range(target.size):
            target[j] = alpha * values[j]


@routine
def _finish(row: Any, bias: Any, out: Any, gelu: Any, apart: Any) -> None:
    """Row += bias, then out = gelu(row); `apart` tells that out is not the row itself.

    LLVM needs the two cases spelt out: where one array has two names its check for overlap fails,
    and the loop runs element by element.
    """
    for j in range(bias.size):
        row[j] += bias[j]
    if gelu == 1:
        if apart:
            for j in range(row.size):
                out[j] = gelu_tanh(row[j])
        else:
            for j in range(row.size):
                row[j] = gelu_tanh(row[j])
    elif gelu == 2:
        if apart:
            for j in range(row.size):
                out[j] = gelu_erf(row[j])
        else:
            for j in range(row.size):
                row[j] = gelu_erf(row[j])


@kernel(f"void({_ARRAYS}, boolean, float32, boolean, int64)", cost=3.0)
def _few_rows(
    a: Any,
    b: Any,
    bias: Any,
    out: Any,
    pre: Any,
    trans_b: Any,
    alpha: Any,
    accumulate: Any,
    gelu: Any,
) -> None:
    M, K = a.shape[1], a.shape[2]
    N = out.shape[2]
    target = pre if pre.size else out
    tiles = ((N if trans_b else K) + _DEPTH - 1) // _DEPTH
    sums = np.empty((1 if trans_b else tiles, M, N), f32)
    for t in prange(tiles):
        if trans_b:
            _dots(a, b, target, t * _DEPTH, alpha, accumulate)
        else:
            _weighted(a, b, sums, t)
    for m in range(M):
        if not trans_b:
            for t in range(1, tiles):
                _put(sums[t, m], sums[0, m], f32(1.0), True)
            _put(sums[0, m], target[0, m], alpha, accumulate)
        if bias.size or gelu:
            _finish(target[0, m], bias, out[0, m], gelu, pre.size > 0)


@routine
def _dots(a: Any, b: Any, target: Any, first: Any, alpha: Any, accumulate: Any) -> None:
    """`_DEPTH` columns of a b^T."""
    for n in range(first, min(target.shape[2], first + _DEPTH)):
        y = b[0, n]
        for m in range(a.shape[1]):
            x = a[0, m]
            total = f32(0.0)
            for k in range(x.size):
                total += x[k] * y[k]
            target[0, m, n] = alpha * total + (target[0, m, n] if accumulate else f32(0.0))


@routine
def _weighted(a: Any, b: Any, sums: Any, tile: Any) -> None:
    """sums[tile, m] = the sum over the tile's `_DEPTH` values of k of a[m, k] b[k]."""
    M = a.shape[1]
    start = tile * _DEPTH
    stop = min(a.shape[2], start + _DEPTH)
    for m in range(M):
        _put(b[0, start], sums[tile, m], a[0, m, start], False)
    fours = start + 1 + (stop - start - 1) // 4 * 4
    for k in range(start + 1, fours, 4):
        b0, b1, b2, b3 = b[0, k], b[0, k + 1], b[0, k + 2], b[0, k + 3]
        for m in range(M):
            x = a[0, m]
            x0, x1, x2, x3 = x[k], x[k + 1], x[k + 2], x[k + 3]
            row = sums[tile, m]
            for j in range(row.size):
                row[j] += (x0 * b0[j] + x1 * b1[j]) + (x2 * b2[j] + x3 * b3[j])
    for k in range(fours, stop):
        for m in range(M):
            _put(b[0, k], sums[tile, m], a[0, m, k], True)
