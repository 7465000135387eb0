"""Products of bfloat16: packed, by the microkernel of `pairs`, with float32 sums.

C [M, N] = op(A) [M, K] op(B) [K, N], for each of G matrices. B is packed once, by all threads, into
panels of WIDTH columns; A is read where it lies, or packed where its pairs lie apart. Then blocks
of rows and columns are computed, in steps of DEPTH of K, into float32 scratch, from which an
epilogue adds bias and gelu and rounds. Each sum is one chain in the order of K, so neither the
blocks, nor the rows beside it, nor the threads show in an element's bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from forge.backends.cpu import threads
from forge.backends.cpu.bfloat16 import narrow, wide
from forge.backends.cpu.few_rows import gelu_row
from forge.backends.cpu.jit import forms, routine
from forge.backends.cpu.micro import (
    BY_ROW,
    DEPTH,
    ROW,
    ROWS,
    STEP,
    WIDTH,
    begin,
    end,
    pair_tile,
    prepare,
)
from forge.backends.cpu.packing import pack_columns, pack_rows, padded_pairs
from forge.backends.cpu.tiles import LANES, address
from forge.tensor import Device, Shape, empty

f32 = np.float32
u32 = np.uint32
Array = np.ndarray

# Rows of a block, and columns: its float32 sums take 576 KiB, its part of A 192. A lower block
# would read packed B more often, which the last-level cache of a large Xeon is slow at.
_HEIGHT = 192
_COLUMNS = 768
# Bytes of B that are packed at a time, which a processor's last-level cache holds.
_PACKED = 16 << 20
# Pairs of K and columns of B that a thread packs at a time: whole rows of memory, for panels side
# by side.
_STRIP = 256
_ACROSS = 512 // WIDTH
# Floats between two rows of a block's sums: a power of two apart they would share cache sets.
_GAP = LANES


class Plan(NamedTuple):
    """How a product is cut.

    B is packed `span` columns and `reach` of K at a time; blocks are cut into `rows` by `columns`
    of them for each span. Scratch: packed B, the sums of a block, and a block's part of A.
    """

    rows: int
    columns: int
    span: int
    reach: int
    scratch: tuple[Shape, Shape, Shape]

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of the scratch."""
        return tuple(4 * int(np.prod(shape)) for shape in self.scratch)


@functools.lru_cache(maxsize=4096)
def plan(G: int, M: int, N: int, K: int, workers: int) -> Plan:
    """How to cut the products of G matrices, for a number of threads."""
    reach = min(K, max(DEPTH, _PACKED // (2 * min(N, _COLUMNS)) // DEPTH * DEPTH))
    widest = max(1, _PACKED // (2 * (reach + reach % 2) * WIDTH))
    panels = -(-N // WIDTH)
    span = min(panels, widest)
    columns = -(-span * WIDTH // _COLUMNS)
    groups = -(-M // ROWS)
    rows = -(-groups * ROWS // _HEIGHT)
    # As many blocks for each thread, where there are enough rows; else columns are cut finer.
    while rows < groups and G * rows * columns % workers:
        rows += 1
    if G * rows * columns < workers:
        columns = min(span, -(-workers // (G * rows)))
    height = -(-groups // rows) * ROWS
    width = -(-span // columns) * WIDTH
    # Sums outlive a step of `reach`, or serve one block after the other.
    slots = workers if reach == K else G * rows * columns
    return Plan(
        rows,
        columns,
        span * WIDTH,
        reach,
        (
            (G * span, -(-reach // (2 * STEP)) * STEP * WIDTH),
            (slots, height * (width + _GAP)),
            (workers, height * ROW),
        ),
    )


def low_product(
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
    """pre (+)= alpha op(a) op(b) + bias, out = gelu(pre): bits of rank 3, out's may be float32.

    A bias or pre of size 0 is none; without pre, out takes its place.
    """
    G, M, N = out.shape
    K = a.shape[1] if trans_a else a.shape[2]
    how = plan(G, M, N, K, threads.get_threads())
    scratch = [empty(shape, "float32", Device("cpu")) for shape in how.scratch]
    packed, sums, own = (x.array for x in scratch)
    run = _product["bfloat16", "bfloat16" if out.dtype == np.uint16 else "float32"]
    for j0 in range(0, N, how.span):
        for k0 in range(0, K, how.reach):
            run(
                a,
                b,
                bias,
                out,
                pre,
                packed.view(u32),
                sums,
                own.view(u32),
                j0,
                min(N, j0 + how.span),
                k0,
                min(K, k0 + how.reach),
                trans_a,
                trans_b,
                alpha,
                accumulate,
                gelu,
                how.rows,
                how.columns,
            )


@forms(
    "void(T[:, :, ::1], T[:, :, ::1], T[::1], U[:, :, ::1], U[:, :, ::1], uint32[:, ::1],"
    " float32[:, ::1], uint32[:, ::1], int64, int64, int64, int64, boolean, boolean, float32,"
    " boolean, boolean, int64, int64)",
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    cost=2.0,
    setup=prepare,
)
def _product(
    a: Any,
    b: Any,
    bias: Any,
    out: Any,
    pre: Any,
    packed: Any,
    sums: Any,
    own: Any,
    j0: Any,
    j1: Any,
    k0: Any,
    k1: Any,
    trans_a: Any,
    trans_b: Any,
    alpha: Any,
    accumulate: Any,
    gelu: Any,
    rows: Any,
    columns: Any,
) -> None:
    """The columns j0 … j1 of all, as far as k0 … k1 of K go; the last of these also end it."""
    G, M = out.shape[:2]
    K = a.shape[1] if trans_a else a.shape[2]
    panels = (j1 - j0 + WIDTH - 1) // WIDTH
    strips = ((k1 - k0 + 1) // 2 + _STRIP - 1) // _STRIP
    groups = (M + ROWS - 1) // ROWS
    workers = own.shape[0]
    parts = (panels + _ACROSS - 1) // _ACROSS
    for t in prange(G * parts * strips):
        g = t // strips // parts
        p = t // strips % parts * _ACROSS
        first = k0 + t % strips * 2 * _STRIP
        last = min(k1, first + 2 * _STRIP)
        here = packed[g * panels + p : g * panels + min(panels, p + _ACROSS)]
        pack_columns(
            b[g], j0 + p * WIDTH, j1, first, last, (first - k0) // 2 * WIDTH, trans_b, here
        )
    for worker in prange(workers):
        tiles = G * rows * columns
        for t in range(worker * tiles // workers, (worker + 1) * tiles // workers):
            # Blocks of the same columns follow each other: their part of B may stay near the core.
            g = t // rows // columns
            c = t // rows % columns
            r = t % rows
            i0 = r * groups // rows * ROWS
            i1 = min(M, (r + 1) * groups // rows * ROWS)
            p0 = c * panels // columns
            p1 = (c + 1) * panels // columns
            total = sums[t if k1 - k0 < K else np.int64(worker)]
            here = packed[g * panels + p0 : g * panels + p1]
            _block(a[g], here, total, own[worker], i0, i1, k0, k1, trans_a)
            if k1 == K:
                _finish(
                    total,
                    (p1 - p0) * WIDTH + _GAP,
                    bias,
                    pre[g] if pre.size else out[g],
                    out[g],
                    i0,
                    i1,
                    j0 + p0 * WIDTH,
                    min(j1, j0 + p1 * WIDTH),
                    alpha,
                    accumulate,
                    gelu,
                    pre.size > 0,
                )


@routine
def _block(
    a: Any,
    panels: Any,
    sums: Any,
    own: Any,
    i0: Any,
    i1: Any,
    k0: Any,
    k1: Any,
    trans_a: Any,
) -> None:
    """sums (+)= rows i0 … i1 and k0 … k1 of op(a), times the panels; k0 = 0 begins them."""
    width = panels.shape[0] * WIDTH + _GAP
    # Signed: with an unsigned address Numba's sums would be of float64.
    c = np.int64(sums.ctypes.data)
    begin()
    for k in range(k0, k1, DEPTH):
        stop = min(k1, k + DEPTH)
        depth = padded_pairs(stop - k)
        if BY_ROW:
            pack_rows(a, i0, i1, k, stop, trans_a, own)
            start, a_row, a_step = np.int64(own.ctypes.data), 4 * ROW, 4
        elif trans_a or (stop - k) % 2:
            pack_rows(a, i0, i1, k, stop, trans_a, own)
            start, a_row, a_step = np.int64(own.ctypes.data), 4, 4 * (i1 - i0)
        else:
            start, a_row, a_step = address(a, i0, k), 2 * a.shape[1], 4
        for p in range(panels.shape[0]):
            b = address(panels, p, (k - k0) // 2 * WIDTH)
            for i in range(0, i1 - i0, ROWS):
                pair_tile(
                    start + i * a_row,
                    a_row,
                    a_step,
                    b,
                    c + 4 * (i * width + p * WIDTH),
                    width,
                    i1 - i0 - i,
                    depth,
                    k == 0,
                )
    end()


@routine
def _finish(
    sums: Any,
    width: Any,
    bias: Any,
    target: Any,
    out: Any,
    i0: Any,
    i1: Any,
    j0: Any,
    j1: Any,
    alpha: Any,
    accumulate: Any,
    gelu: Any,
    apart: Any,
) -> None:
    """target (+)= alpha sums + bias, rounded once; out = gelu(target)."""
    for i in range(i0, i1):
        total = sums[(i - i0) * width : (i - i0) * width + j1 - j0]
        row = target[i, j0:j1]
        if bias.size:
            term = bias[j0:j1]
            for j in range(total.size):
                total[j] = alpha * total[j] + wide(term[j])
        elif alpha != f32(1.0):
            for j in range(total.size):
                total[j] *= alpha
        if accumulate:
            for j in range(total.size):
                row[j] = narrow(row, wide(row[j]) + total[j])
        else:
            for j in range(total.size):
                row[j] = narrow(row, total[j])
        if gelu:
            gelu_row(row, out[i, j0:j1], apart)
