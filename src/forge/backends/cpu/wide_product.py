"""Products of float32: OpenBLAS's single-threaded sgemm, called on tiles from a loop of threads.

C [M, N] = op(A) [M, K] op(B) [K, N], for each of G matrices.

Which bits a row of C gets must not depend on how many rows come with it (a prompt alone or in a
batch, a batch whole or in parts), nor on the thread count. OpenBLAS works on groups of rows and
treats the rest of the last group otherwise, so a product has whole groups of `GROUP` rows: the
last is padded, in scratch. For products of up to a million multiply-adds OpenBLAS may choose other
kernels, so each has more than that or, where N and K are small, all have the same number of rows,
`_SMALL`. So row i has the same bits in every product that holds it at the same place modulo 24
(modulo `_SMALL` for small N and K). This was measured on OpenBLAS's cores Haswell and SkylakeX
(`_PROVEN`), where the height of a tile may therefore follow the thread count. How columns are cut
does show in the bits: N alone decides.

With `trans_a` (weight gradients) the rows are a model's features, whose number never varies, and
the last group is not padded.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from forge.backends.cpu import threads
from forge.backends.cpu.blas import core, link, sgemm
from forge.backends.cpu.few_rows import ARRAYS, gelu_row, put
from forge.backends.cpu.jit import kernel, routine
from forge.tensor import Device, empty

f32 = np.float32
Array = np.ndarray

# The row groups of sgemm: 12 on Haswell, 24 on SkylakeX.
GROUP = 24
_PROVEN = ("Haswell", "Zen", "SkylakeX")
# Where sgemm's choice of kernels may depend on the size.
_SMALL_PRODUCT = 1_000_000
_SMALL = 96
# Largest tile, rows and columns.
_ROWS, _COLUMNS = 1056, 768
# sgemm first rearranges a tile's parts of A and B, which costs about as much as this many rows (on
# SkylakeX 48 rows run at 106 GFLOP/s, 96 at 129, 192 at 143, 384 at 153, 1056 at 162).
_OVERHEAD = 20
# Columns are cut at multiples of this, a cache line.
_LINE = 16


def wide_product(
    a: Array,
    b: Array,
    bias: Array,
    out: Array,
    pre: Array,
    *,
    trans_a: bool,
    trans_b: bool,
    alpha: Any,
    accumulate: bool,
    gelu: bool,
) -> None:
    """pre (+)= alpha op(a) op(b) + bias, out = gelu(pre): float32 arrays of rank 3, K > 0.

    A bias or pre of size 0 is none; without pre, out takes its place.
    """
    G, M, N = out.shape
    K = a.shape[1] if trans_a else a.shape[2]
    workers = threads.get_threads()
    grid = _grid(G, M, N, K, trans_a, workers if core() in _PROVEN else 2)
    shape = workers, grid.padded * (K + grid.width)
    # From the pool: this much fresh memory would cost a page fault for every 4 KiB.
    pooled = empty(shape, "float32", Device("cpu")) if grid.padded else None
    scratch = np.empty(shape, f32) if pooled is None else pooled.array
    _tiles(
        a,
        b,
        bias,
        out,
        pre,
        scratch,
        trans_a,
        trans_b,
        alpha,
        accumulate,
        gelu,
        grid.groups,
        grid.rows,
        grid.columns,
        grid.padded,
    )


def wide_workspace(G: int, M: int, N: int, K: int, trans_a: bool) -> tuple[int, ...]:
    """Bytes of the scratch."""
    workers = threads.get_threads()
    grid = _grid(G, M, N, K, trans_a, workers if core() in _PROVEN else 2)
    nbytes = 4 * workers * grid.padded * (K + grid.width)
    return (nbytes,) if nbytes else ()


class _Grid(NamedTuple):
    """How C is cut: groups of rows, tiles down and across; its last rows, padded; tiles' width."""

    groups: int
    rows: int
    columns: int
    padded: int
    width: int


@functools.lru_cache(maxsize=4096)
def _grid(G: int, M: int, N: int, K: int, trans_a: bool, workers: int) -> _Grid:
    if trans_a and max(M, 128) < N:
        columns = 2 * -(-N // (2 * _COLUMNS))
    elif trans_a or N <= 512:
        columns = -(-N // _COLUMNS)
    else:
        columns = max(2, -(-N // _COLUMNS))
    lines = -(-N // _LINE)
    width = -(-lines // columns) * _LINE
    narrowest = min(lines // columns * _LINE, N - (columns - 1) * lines // columns * _LINE)
    # The groups that lift a tile over the limit of small products.
    least = _SMALL_PRODUCT // (GROUP * narrowest * K) + 1
    groups = -(-M // GROUP)
    if least * GROUP <= _SMALL:
        groups = max(groups, least)
        # Unpadded, the last group of the last tile may have a single row.
        rows = _best_rows(groups, least + trans_a, G * columns, workers)
    else:
        least = _SMALL // GROUP
        groups = -(-groups // least) * least
        rows = groups // least
    last = groups - (rows - 1) * groups // rows
    # Apart from the rest of their tile, if that too is no small product: to copy all of a tile of
    # logits takes 100 MiB, to call sgemm once more as long as some rows.
    apart = least if last >= 2 * least else last
    padded = apart * GROUP if groups * GROUP > M and not trans_a else 0
    return _Grid(groups, rows, columns, padded, width)


def _best_rows(groups: int, least: int, others: int, workers: int) -> int:
    """The number of row tiles, of at least `least` groups each, that ends soonest.

    `others` is the number of tiles for each row tile.
    """
    fewest = -(-groups * GROUP // _ROWS)
    most = max(fewest, min(groups // least, fewest + 2 * workers))

    def cost(rows: int) -> int:
        height = -(-groups // rows) * GROUP
        return -(-rows * others // workers) * (height + _OVERHEAD)

    return min(range(fewest, most + 1), key=cost)


@kernel(
    f"void({ARRAYS.replace('T', 'float32')}, float32[:, ::1],"
    " boolean, boolean, float32, boolean, boolean, int64, int64, int64, int64)",
    cost=1.2,
    setup=link,
)
def _tiles(
    a: Any,
    b: Any,
    bias: Any,
    out: Any,
    pre: Any,
    scratch: Any,
    trans_a: Any,
    trans_b: Any,
    alpha: Any,
    accumulate: Any,
    gelu: Any,
    groups: Any,
    rows: Any,
    columns: Any,
    padded: Any,
) -> None:
    """A tile is matrix g, rows i0 … i1, columns j0 … j1 of C; its rows from `split` are padded."""
    G, M, N = out.shape
    lines = (N + _LINE - 1) // _LINE
    target = pre if pre.size else out
    tiles = G * columns * rows
    workers = scratch.shape[0]
    # A worker, not a thread, owns scratch: the pool may have more threads than Forge was given,
    # where other code has set Numba's number. Row tiles of the same columns follow each other:
    # their part of B stays in the cache, and the padded ones are spread over the workers.
    for worker in prange(workers):
        own = scratch[worker]
        for t in range(worker * tiles // workers, (worker + 1) * tiles // workers):
            r = t % rows
            c = t // rows % columns
            g = t // rows // columns
            i0 = r * groups // rows * GROUP
            i1 = (r + 1) * groups // rows * GROUP
            j0 = c * lines // columns * _LINE
            j1 = min(N, (c + 1) * lines // columns * _LINE)
            split = i1 - padded if i1 > M and not trans_a else min(M, i1)
            C = target[g]
            if i0 < split:
                _whole(a[g], b[g], bias, C, i0, split, j0, j1, trans_a, trans_b, alpha, accumulate)
            if split < min(M, i1):
                _padded(a[g], b[g], bias, C, own, split, i1, j0, j1, trans_b, alpha, accumulate)
            if gelu:
                for i in range(i0, min(M, i1)):
                    gelu_row(target[g, i, j0:j1], out[g, i, j0:j1], pre.size > 0)


@routine
def _whole(
    a: Any,
    b: Any,
    bias: Any,
    c: Any,
    i0: Any,
    i1: Any,
    j0: Any,
    j1: Any,
    trans_a: Any,
    trans_b: Any,
    alpha: Any,
    accumulate: Any,
) -> None:
    """One tile of c, in place. sgemm adds it to the bias, which so costs no pass of its own."""
    if bias.size:
        for i in range(i0, i1):
            put(bias[j0:j1], c[i, j0:j1], f32(1.0), accumulate)
    lda, ldb, ldc = a.shape[1], b.shape[1], c.shape[1]
    sgemm(
        trans_a,
        trans_b,
        i1 - i0,
        j1 - j0,
        a.shape[0] if trans_a else a.shape[1],
        alpha,
        a.ctypes.data + 4 * (i0 if trans_a else i0 * lda),
        lda,
        b.ctypes.data + 4 * (j0 * ldb if trans_b else j0),
        ldb,
        f32(1.0) if accumulate or bias.size else f32(0.0),
        c.ctypes.data + 4 * (i0 * ldc + j0),
        ldc,
    )


@routine
def _padded(
    a: Any,
    b: Any,
    bias: Any,
    c: Any,
    scratch: Any,
    i0: Any,
    i1: Any,
    j0: Any,
    j1: Any,
    trans_b: Any,
    alpha: Any,
    accumulate: Any,
) -> None:
    """The rows of a tile up to c's last, which the missing ones repeat: computed in `scratch`."""
    M, N = c.shape[0], j1 - j0
    K, ldb = a.shape[1], b.shape[1]
    left = scratch[: (i1 - i0) * K]
    result = scratch[left.size : left.size + (i1 - i0) * N]
    for n in range(i1 - i0):
        i = min(M - 1, i0 + n)
        put(a[i], left[n * K : (n + 1) * K], f32(1.0), False)
        row = result[n * N : (n + 1) * N]
        if accumulate:
            put(c[i, j0:j1], row, f32(1.0), False)
        if bias.size:
            put(bias[j0:j1], row, f32(1.0), accumulate)
    sgemm(
        False,
        trans_b,
        i1 - i0,
        N,
        K,
        alpha,
        left.ctypes.data,
        K,
        b.ctypes.data + 4 * (j0 * ldb if trans_b else j0),
        ldb,
        f32(1.0) if accumulate or bias.size else f32(0.0),
        result.ctypes.data,
        N,
    )
    for i in range(i0, M):
        put(result[(i - i0) * N : (i - i0 + 1) * N], c[i, j0:j1], f32(1.0), False)
