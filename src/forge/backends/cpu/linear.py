"""Products: OpenBLAS's single-threaded sgemm, called on tiles from the threads of one Numba loop.

Those of bfloat16 are `low_product`'s; here begins the choice, and what follows is of float32.

C [M, N] = op(A) [M, K] op(B) [K, N], for each of G matrices.

Which bits a row of C gets must not depend on how many rows come with it (a prompt alone or in a
batch, a batch whole or in parts), nor on the thread count. OpenBLAS works on groups of rows and
treats the rest of the last group otherwise, so a tile has whole groups of `_GROUP` rows: the last
is padded with zeros. For products of up to a million multiply-adds OpenBLAS may choose other
kernels, so tiles have more than that or, where N and K are small, all the same number of rows,
`_SMALL`. So row i has the same bits in every product that has more than `_FEW` rows and holds it at
the same place modulo 24 (modulo `_SMALL` for small N and K). This was measured on OpenBLAS's cores
Haswell and SkylakeX (`_PROVEN`), where the height of a tile may therefore follow the thread count.
How columns are cut does show in the bits: N alone decides.

Up to `_FEW` rows (decoding) the loops of `few_rows` serve: a row has the same bits at any place,
though not those it has among more rows.

With `trans_a` (weight gradients) the rows are a model's features, whose number never varies, and
the last group is not padded.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from forge.backends.cpu import threads
from forge.backends.cpu.bfloat16 import bits
from forge.backends.cpu.blas import core, link, sgemm
from forge.backends.cpu.few_rows import ARRAYS, few_rows, gelu_row, put
from forge.backends.cpu.jit import kernel, routine
from forge.backends.cpu.low_product import low_product, plan
from forge.backends.cpu.pointwise import gelu_array
from forge.tensor import Device, Shape, Tensor, empty

f32 = np.float32
Array = np.ndarray

# The row groups of sgemm: 12 on Haswell, 24 on SkylakeX.
_GROUP = 24
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
# Rows that are better off without sgemm.
_FEW = 8
# An absent pre, and of its first row an absent bias.
_NONE = {np.dtype(dtype): np.zeros((1, 1, 0), dtype) for dtype in (np.float32, np.uint16)}
_ONE = f32(1.0)


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
    product(
        bits(x),
        bits(w),
        None if bias is None else bits(bias),
        out=bits(out),
        pre=None if pre is None else bits(pre),
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

    Without `gelu` out is pre. b may have more rows, as stored, than a and out use. Arrays of
    bfloat16 are given as their bits; out and pre may then be float32.
    """
    if gelu != "tanh" and (pre is not None or gelu is not None):
        product(a, b, bias, out=out if pre is None else pre, trans_a=trans_a, trans_b=trans_b)
        _second_pass(out if pre is None else pre, out, gelu)
        return
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
        few_rows[dtype](a, b, bias, out, pre, trans_b, factor, accumulate, gelu is not None)
        return
    if dtype == "bfloat16":
        low_product(
            a,
            b,
            bias,
            out,
            pre,
            trans_a=trans_a,
            trans_b=trans_b,
            alpha=factor,
            accumulate=accumulate,
            gelu=gelu is not None,
        )
        return
    workers = threads.get_threads()
    grid = _grid(out.shape[0], M, N, K, trans_a, workers if core() in _PROVEN else 2)
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
        factor,
        accumulate,
        gelu is not None,
        grid.groups,
        grid.rows,
        grid.columns,
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
    workers = threads.get_threads()
    if dtype == "bfloat16":
        return plan(G, M, N, K, workers).nbytes
    grid = _grid(G, M, N, K, trans_a, workers if core() in _PROVEN else 2)
    nbytes = 4 * workers * grid.padded * (K + grid.width)
    return (nbytes,) if nbytes else ()


def matmul_workspace(
    a: Tensor, *rest: Any, out: Tensor, trans_a: bool, **_: Any
) -> tuple[int, ...]:
    """Bytes of the scratch."""
    K = a.shape[-2] if trans_a else a.shape[-1]
    return product_workspace(a.dtype, out.dtype, out.shape, K, trans_a)


def linear_workspace(x: Tensor, *rest: Any, out: Tensor, **_: Any) -> tuple[int, ...]:
    """Bytes of the scratch."""
    return matmul_workspace(x, out=out, trans_a=False)


def _second_pass(pre: Array, out: Array, gelu: str | None) -> None:
    """out = gelu(pre) where no kernel fuses it: for the erf form, and for none."""
    if gelu is None:
        np.copyto(out, pre)
    else:
        source = pre.copy() if pre is out else pre
        run = gelu_array["float32" if out.dtype == f32 else "bfloat16"]
        run(source.reshape(-1), out.reshape(-1), gelu == "erf")


class _Grid(NamedTuple):
    """How C is cut: groups of rows, tiles down and across; a padded last tile; a tile's width."""

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
    least = _SMALL_PRODUCT // (_GROUP * narrowest * K) + 1
    groups = -(-M // _GROUP)
    if least * _GROUP <= _SMALL:
        groups = max(groups, least)
        # Unpadded, the last group of the last tile may have a single row.
        rows = _best_rows(groups, least + trans_a, G * columns, workers)
    else:
        least = _SMALL // _GROUP
        groups = -(-groups // least) * least
        rows = groups // least
    last = groups - (rows - 1) * groups // rows
    padded = last * _GROUP if groups * _GROUP > M and not trans_a else 0
    return _Grid(groups, rows, columns, padded, width)


def _best_rows(groups: int, least: int, others: int, workers: int) -> int:
    """The number of row tiles, of at least `least` groups each, that ends soonest.

    `others` is the number of tiles for each row tile.
    """
    fewest = -(-groups * _GROUP // _ROWS)
    most = max(fewest, min(groups // least, fewest + 2 * workers))

    def cost(rows: int) -> int:
        height = -(-groups // rows) * _GROUP
        return -(-rows * others // workers) * (height + _OVERHEAD)

    return min(range(fewest, most + 1), key=cost)


@kernel(
    f"void({ARRAYS.replace('T', 'float32')}, float32[:, ::1],"
    " boolean, boolean, float32, boolean, boolean, int64, int64, int64)",
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
) -> None:
    """A tile is matrix g, rows i0 … i1, columns j0 … j1 of C."""
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
            i0 = r * groups // rows * _GROUP
            i1 = (r + 1) * groups // rows * _GROUP
            j0 = c * lines // columns * _LINE
            j1 = min(N, (c + 1) * lines // columns * _LINE)
            if trans_a or i1 <= M:
                i1 = min(M, i1)
                _whole(
                    a[g], b[g], bias, target[g], i0, i1, j0, j1, trans_a, trans_b, alpha, accumulate
                )
            else:
                _padded(
                    a[g], b[g], bias, target[g], own, i0, i1, j0, j1, trans_b, alpha, accumulate
                )
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
    """The tile with c's last row, whose missing rows repeat that one: computed in `scratch`."""
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
