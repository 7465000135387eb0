"""Reductions, in two stages where that is faster.

A fixed number of programs each reduce a part; then the parts are added in their order. Sums are of
float32.
"""

from __future__ import annotations

import builtins
import math

import triton
import triton.language as tl

from forge.backends.cuda.shape import block_indices, blocks, contiguous, merge, place
from forge.backends.cuda.triton_jit import launch
from forge.tensor import Tensor, empty, full

# Programs of a first stage, two for each multiprocessor of the largest cards: enough to draw the
# full bandwidth, and the same on every card, for the same bits.
PROGRAMS = 264
# `sum_rows` has twice as many, and adds tiles of this many rows and columns, several of them on
# their way at a time: 4.0 TB/s on an H200, where tiles four times as tall, one at a time, draw 3.6.
ROW_PROGRAMS = 2 * PROGRAMS
ROWS, COLUMNS, STAGES = 8, 512, 4
# Elements in a tile of `sum_to` and `max`, and how many results it makes at most.
TILE, RESULTS = 2048, 64
# Columns of a part of a row whose largest is looked for.
PLACES = 2048


@triton.jit
def _sum_rows(
    x,
    partial,
    N,
    C,
    per_program,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    part = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    start = part * per_program
    for first in tl.range(0, per_program, ROWS, num_stages=STAGES):
        rows = start + first + tl.arange(0, ROWS)
        inside = (rows < N)[:, None] & (columns < C)[None, :]
        places = rows.to(tl.int64)[:, None] * C + columns[None, :]
        total += tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(partial + part * C + columns, tl.sum(total, 0), mask=columns < C)


@triton.jit
def _fold(
    partial,
    a,
    b,
    c,
    parts,
    C,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the columns of partial [parts, SUMS, C] to a, b and c, as far as they are given."""
    which = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in range(0, parts, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < parts)[:, None] & (columns < C)[None, :]
        places = (rows * SUMS + which)[:, None] * C + columns[None, :]
        total += tl.load(partial + places, mask=inside, other=0.0)
    sums = tl.sum(total, 0)
    if which == 0:
        add_to(a, columns, sums, columns < C)
    elif which == 1:
        add_to(b, columns, sums, columns < C)
    else:
        add_to(c, columns, sums, columns < C)


@triton.jit
def add_to(out, places, value, inside):
    """out[places] += value, if there is an out."""
    if out is not None:
        before = tl.load(out + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + places, before + value, mask=inside)


@triton.jit
def _sum_to(
    x,
    out,
    kept,
    kept_shape,
    kept_strides,
    count,
    shape,
    strides,
    per_program,
    RESULTS: tl.constexpr,
    TERMS: tl.constexpr,
):
    """out[part, i] = the part's share of the sum for result i."""
    part = tl.program_id(1).to(count.dtype)
    i = tl.program_id(0) * RESULTS + tl.arange(0, RESULTS)
    start = place(i, kept_shape, kept_strides)
    total = tl.full([RESULTS, TERMS], 0.0, tl.float32)
    for first in range(part * per_program, (part + 1) * per_program, TERMS):
        j = first + tl.arange(0, TERMS)
        inside = (i < kept)[:, None] & (j < count)[None, :]
        places = start[:, None] + place(j, shape, strides)[None, :]
        total += tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + part.to(tl.int64) * kept + i, tl.sum(total, 1), mask=i < kept)


@triton.jit
def _max(
    x,
    out,
    mask,
    kept,
    kept_shape,
    kept_strides,
    count,
    shape,
    strides,
    RESULTS: tl.constexpr,
    TERMS: tl.constexpr,
):
    i = tl.program_id(0) * RESULTS + tl.arange(0, RESULTS)
    start = place(i, kept_shape, kept_strides)
    top = tl.full([RESULTS, TERMS], -float("inf"), tl.float32)
    for first in range(0, count, TERMS):
        j = first + tl.arange(0, TERMS)
        inside = (i < kept)[:, None] & (j < count)[None, :]
        places = start[:, None] + place(j, shape, strides)[None, :]
        value = tl.load(x + places, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    lost = tl.sum((top != top).to(tl.int32), 1) > 0
    largest = tl.where(lost, float("nan"), tl.max(top, 1))
    tl.store(out + i, largest, mask=i < kept)
    if mask is not None:
        ties = tl.full([RESULTS, TERMS], 0.0, tl.float32)
        for first in range(0, count, TERMS):
            j = first + tl.arange(0, TERMS)
            inside = (i < kept)[:, None] & (j < count)[None, :]
            places = start[:, None] + place(j, shape, strides)[None, :]
            value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
            ties += tl.where(inside & (value == largest[:, None]), 1.0, 0.0)
        share = 1.0 / tl.sum(ties, 1)
        for first in range(0, count, TERMS):
            j = first + tl.arange(0, TERMS)
            inside = (i < kept)[:, None] & (j < count)[None, :]
            places = start[:, None] + place(j, shape, strides)[None, :]
            value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
            tie = tl.where(value == largest[:, None], 1.0, 0.0)
            tl.store(mask + places, tie * share[:, None], mask=inside)


@triton.jit
def _finite(x, count, flag, BLOCK: tl.constexpr):
    """flag = 0 if an element is not finite; every program that finds one writes the same."""
    i = block_indices(count, BLOCK)
    value = tl.load(x + i, mask=i < count, other=0.0).to(tl.float32)
    # x - x is 0 of finite numbers, NaN of the others.
    if tl.sum((value - value != 0.0).to(tl.int32), 0) > 0:
        tl.store(flag, 0)


@triton.jit
def _extent(x, count, out, BLOCK: tl.constexpr):
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < count, other=float("nan")).to(tl.float32)
        finite = value - value == 0.0
        low = tl.minimum(low, tl.where(finite, value, float("inf")))
        high = tl.maximum(high, tl.where(finite, value, -float("inf")))
    tl.store(out, tl.min(low, 0))
    tl.store(out + 1, tl.max(high, 0))


@triton.jit
def _largest(x, known, top, place, C, BLOCK: tl.constexpr):
    """Of a part of a row, its largest and where that is: column c stands for `known`[c]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * C + c, mask=c < C, other=-float("inf")).to(tl.float32)
    highest = tl.max(value, 0)
    first = tl.min(tl.where((value == highest) & (c < C), c, C - 1), 0)
    at = row * tl.num_programs(1) + part
    if top is not None:
        tl.store(top + at, highest)
    if known is None:
        tl.store(place + at, first.to(tl.int64))
    else:
        tl.store(place + at, tl.load(known + row * C + first))


def sum_rows(x: Tensor, *, out: Tensor) -> None:
    """out[c] += sum over n of x[n, c]."""
    N, C = x.shape
    across = blocks(C, COLUMNS)
    parts = builtins.max(1, min(ROW_PROGRAMS // builtins.max(1, across), blocks(N, ROWS)))
    partial = empty((parts, 1, C), "float32", x.device)
    per_program = blocks(blocks(N, parts), ROWS) * ROWS
    launch(
        _sum_rows,
        (parts, across),
        x,
        partial,
        N,
        C,
        per_program,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        STAGES=STAGES,
        num_warps=4,
    )
    fold(partial, out)


def fold(partial: Tensor, *outs: Tensor | None) -> None:
    """outs[k][c] += sum of partial [parts, k, C] over the parts, in their order."""
    parts, sums, C = partial.shape
    a, b, c = (*outs, None, None)[:3]
    rows, columns = 64, 32
    launch(
        _fold,
        (blocks(C, columns), sums),
        partial,
        a,
        b,
        c,
        parts,
        C,
        SUMS=sums,
        ROWS=rows,
        COLUMNS=columns,
    )


def sum_to(x: Tensor, *, out: Tensor) -> None:
    """out = x summed over the dimensions that out has once."""
    axes = tuple(i for i, (n, m) in enumerate(zip(x.shape, out.shape, strict=True)) if n != m)
    kept, summed = _split(x, axes)
    results, terms = _tile(out.size)
    count = math.prod(x.shape[axis] for axis in axes)
    wanted = PROGRAMS // builtins.max(1, blocks(out.size, results))
    parts = builtins.max(1, min(wanted, blocks(count, 8 * terms)))
    partial = out if parts == 1 else empty((parts, *out.shape), "float32", x.device)
    launch(
        _sum_to,
        (blocks(out.size, results), parts),
        x,
        partial,
        out.size,
        *kept,
        count,
        *summed,
        blocks(blocks(count, parts), terms) * terms,
        RESULTS=results,
        TERMS=terms,
    )
    if parts > 1:
        sum_to(partial, out=out.view((1, *out.shape)))


def max(x: Tensor, *, out: Tensor, mask: Tensor | None = None, axis: tuple[int, ...]) -> None:
    """out = the largest over `axis`, kept as dimensions of 1; mask = d out / dx, ties sharing."""
    kept, reduced = _split(x, axis)
    results, terms = _tile(out.size)
    launch(
        _max,
        (blocks(out.size, results),),
        x,
        out,
        mask,
        out.size,
        *kept,
        math.prod(x.shape[a] for a in axis),
        *reduced,
        RESULTS=results,
        TERMS=terms,
    )


def argmax(x: Tensor, *, out: Tensor) -> None:
    """out [N] = the first place of the largest in each row of x [N, C]."""
    N, C = x.shape
    parts = blocks(C, PLACES)
    tops, places = (empty((N, parts), dtype, x.device) for dtype in ("float32", "int64"))
    launch(_largest, (N, parts), x, None, tops, places, C, BLOCK=PLACES)
    launch(_largest, (N, 1), tops, places, None, out, parts, BLOCK=triton.next_power_of_2(parts))


def finite(x: Tensor) -> bool:
    """Whether every element is finite."""
    flag = full((), 1, "int64", x.device)
    clear_unless_finite(x, flag)
    return bool(flag.item())


def clear_unless_finite(x: Tensor, flag: Tensor) -> None:
    """flag = 0 if an element of x is not finite."""
    block = 2048
    launch(_finite, (blocks(x.size, block),), x, x.size, flag, BLOCK=block)


def extent(x: Tensor) -> tuple[float, float]:
    """Smallest and largest of the finite elements; NaN where there are none."""
    out = empty((2,), "float32", x.device)
    launch(_extent, (1,), x, x.size, out, BLOCK=8192, num_warps=16)
    low, high = out.numpy()
    return (float(low), float(high)) if low <= high else (math.nan, math.nan)


def _split(x: Tensor, axes: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """(shape, strides) of the dimensions of x that stay, and of those that are reduced."""
    strides = contiguous(x.shape)
    dimensions = range(x.ndim)
    return tuple(
        merge(tuple(x.shape[i] for i in chosen), tuple(strides[i] for i in chosen))
        for chosen in ([i for i in dimensions if i not in axes], axes)
    )


def _tile(results: int) -> tuple[int, int]:
    """How many results a program makes, and how many terms it adds to each at a time."""
    rows = min(RESULTS, triton.next_power_of_2(builtins.max(1, results)))
    return rows, TILE // rows
