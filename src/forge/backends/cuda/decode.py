"""Attention of new queries on cached keys and values.

Shapes: B samples, T new positions, H heads of width D, C = H D, caches [B, H, N, D]. One query of a
sample, as in decoding, is a matter of drawing its keys and values from memory: a program has a head
of a sample, and adds up as many softmaxes as it takes keys at a time, which it puts together at the
end, so that no step waits for another. Where the cache is long, programs share its keys, and a
second kernel puts their parts together. How keys are split depends on N alone, so a sample's bits
do not depend on its neighbours or its position. Several queries go through the keys in tiles.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from forge.backends.cuda.embedding import position, split
from forge.backends.cuda.flash import load_rows, multiply, rounding, store_rows, tiles
from forge.backends.cuda.shape import blocks
from forge.backends.cuda.triton_jit import launch
from forge.tensor import Tensor, empty

LOG2_E = tl.constexpr(math.log2(math.e))

# Keys of a program that has one query, and how many it takes at a time: with two rounds of loads
# under way, 3.3 TB/s on an H200 at a batch of 64.
SPAN = 1024
KEYS = 32
STAGES = 3
COLUMNS = 256


@triton.jit
def _one(
    q,
    k_cache,
    v_cache,
    pos,
    start,
    out,
    sums,
    H,
    N,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of one query and a span of keys; without `sums` that is all keys, and out is [B H, D].

    With `sums` [B H, spans, 2], which gets the maximum and the sum, out is [B H, spans, D] and not
    divided by the sum.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    across = columns < D
    query = tl.load(q + row * D + columns, mask=across, other=0.0).to(tl.float32) * (scale * LOG2_E)
    stop = tl.minimum(position(pos, start, row // H) + 1, (part + 1) * SPAN).to(tl.int32)
    top = tl.full([KEYS], -1e30, tl.float32)
    total = tl.full([KEYS], 0.0, tl.float32)
    result = tl.full([KEYS, WIDTH], 0.0, tl.float32)
    for first in tl.range(part * SPAN, stop, KEYS, num_stages=STAGES):
        j = first + tl.arange(0, KEYS)
        k = load_rows(k_cache + row * N * D, j, stop, D, D, WIDTH).to(tl.float32)
        v = load_rows(v_cache + row * N * D, j, stop, D, D, WIDTH).to(tl.float32)
        scores = tl.where(j < stop, tl.sum(k * query[None, :], 1), -1e30)
        higher = tl.maximum(top, scores)
        p = tl.where(j < stop, tl.exp2(scores - higher), 0.0)
        fade = tl.exp2(top - higher)
        total = total * fade + p
        result = result * fade[:, None] + p[:, None] * v
        top = higher
    highest = tl.max(top, 0)
    fade = tl.exp2(top - highest)
    total = tl.sum(total * fade, 0)
    result = tl.sum(result * fade[:, None], 0)
    if sums is None:
        tl.store(out + row * D + columns, result / total, mask=across)
    else:
        at = row * tl.num_programs(1) + part
        tl.store(sums + 2 * at, highest)
        tl.store(sums + 2 * at + 1, total)
        tl.store(out + at * D + columns, result, mask=across)


@triton.jit
def _join(parts, sums, out, spans, D: tl.constexpr, WIDTH: tl.constexpr, SPANS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    at = row * spans + span
    top = tl.load(sums + 2 * at, mask=span < spans, other=-1e30)
    fade = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(sums + 2 * at + 1, mask=span < spans, other=0.0) * fade, 0)
    values = load_rows(parts + row * spans * D, span, spans, D, D, WIDTH)
    columns = tl.arange(0, WIDTH)
    result = tl.sum(values * fade[:, None], 0) / total
    tl.store(out + row * D + columns, result, mask=columns < D)


@triton.jit
def _several(
    q,
    k_cache,
    v_cache,
    pos,
    start,
    out,
    T,
    H,
    N,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Of a block of queries."""
    row = tl.program_id(1).to(tl.int64)
    b, h = row // H, row % H
    C = H * D
    first_position = position(pos, start, b)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    queries = load_rows(q + b * T * C + h * D, t, T, C, D, WIDTH)
    # One past the last key that any of the queries sees.
    stop = (first_position + tl.minimum(T, (tl.program_id(0) + 1) * BLOCK)).to(tl.int32)
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    result = tl.full([BLOCK, WIDTH], 0.0, tl.float32)
    for first in range(0, stop, BLOCK):
        j = first + tl.arange(0, BLOCK)
        k = load_rows(k_cache + row * N * D, j, stop, D, D, WIDTH)
        v = load_rows(v_cache + row * N * D, j, stop, D, D, WIDTH)
        visible = (j[None, :] <= first_position + t[:, None]) & (j < stop)[None, :]
        scores = multiply(queries, tl.trans(k), ROUNDING) * (scale * LOG2_E)
        scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        result = result * fade[:, None] + multiply(p.to(v.dtype), v, ROUNDING)
        top = higher
    store_rows(out + b * T * C + h * D, t, T, C, result / total[:, None], D, WIDTH)


@triton.jit
def _append(qkv, pos, start, k_cache, v_cache, q, T, H, N, D: tl.constexpr, COLUMNS: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    b = n // T
    C = H * D
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < C
    row = qkv + n * 3 * C + c
    at = ((b * H + c // D) * N + position(pos, start, b) + n % T) * D + c % D
    tl.store(q + n * C + c, tl.load(row, mask=inside), mask=inside)
    tl.store(k_cache + at, tl.load(row + C, mask=inside), mask=inside)
    tl.store(v_cache + at, tl.load(row + 2 * C, mask=inside), mask=inside)


def cached_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: int | Tensor, *, out: Tensor, n_head: int
) -> None:
    """Query t of sample b sees the cached positions 0 .. pos[b] + t; q [B, T, C]."""
    B, T = q.shape[:2]
    N, D = k_cache.shape[2:]
    caches, scale = (k_cache, v_cache, *split(pos)), 1.0 / math.sqrt(D)
    if T > 1:
        sizes = tiles(q, D)
        grid = blocks(T, sizes["BLOCK"]), B * n_head
        sizes["ROUNDING"] = rounding(q)
        launch(_several, grid, q, *caches, out, T, n_head, N, scale, **sizes)
        return
    widths = {"D": D, "WIDTH": max(16, triton.next_power_of_2(D))}
    spans, parts, sums = blocks(N, SPAN), out, None
    if spans > 1:
        parts = empty((B * n_head, spans, D), "float32", q.device)
        sums = empty((B * n_head, spans, 2), "float32", q.device)
    launch(
        _one,
        (B * n_head, spans),
        q,
        *caches,
        parts,
        sums,
        n_head,
        N,
        scale,
        SPAN=SPAN,
        KEYS=KEYS,
        STAGES=STAGES,
        num_warps=max(1, min(8, KEYS * widths["WIDTH"] // 1024)),
        **widths,
    )
    if sums is not None:
        padded = triton.next_power_of_2(spans)
        launch(_join, (B * n_head,), parts, sums, out, spans, SPANS=padded, **widths)


def kv_append(
    qkv: Tensor, pos: int | Tensor, *, k_cache: Tensor, v_cache: Tensor, q: Tensor, n_head: int
) -> None:
    """Write keys and values of qkv [B, T, 3C] into the caches from `pos` on; q = the queries."""
    B, T, C = q.shape
    launch(
        _append,
        (B * T, blocks(C, COLUMNS)),
        qkv,
        *split(pos),
        k_cache,
        v_cache,
        q,
        T,
        n_head,
        k_cache.shape[2],
        D=C // n_head,
        COLUMNS=COLUMNS,
    )
