"""Attention of new queries on cached keys and values.

Shapes: B samples, T new positions, H heads of width D, C = H D, caches [B, H, N, D]. For a few
queries the keys are split over programs, since one alone could not draw the cache fast enough; a
second kernel puts the parts together. How they are split depends on N alone, so a sample's bits do
not depend on its neighbours or its position.
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

# Up to this many queries the keys are split, into spans of this many.
FEW = 16
SPAN = 128
COLUMNS = 256


@triton.jit
def _cached(
    q,
    k_cache,
    v_cache,
    pos,
    start,
    out,
    sums,
    T,
    H,
    N,
    span,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Of a block of queries and a span of keys; without `sums` the span is all keys.

    With `sums` [B H, T, spans, 2], which gets the maximum and the sum, out is [B H, T, spans, D]
    and not divided by the sum.
    """
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    b, h = row // H, row % H
    C = H * D
    first_position = position(pos, start, b)
    t = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    queries = load_rows(q + b * T * C + h * D, t, T, C, D, WIDTH)
    # One past the last key that any of the queries sees.
    stop = first_position + tl.minimum(T, (tl.program_id(0) + 1) * QUERIES)
    stop = tl.minimum(stop, (part + 1) * span).to(tl.int32)
    top = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.full([QUERIES], 0.0, tl.float32)
    result = tl.full([QUERIES, WIDTH], 0.0, tl.float32)
    for first in range(part * span, stop, KEYS):
        j = first + tl.arange(0, KEYS)
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
    if sums is None:
        store_rows(out + b * T * C + h * D, t, T, C, result / total[:, None], D, WIDTH)
    else:
        spans = tl.num_programs(2)
        at = (row * T + t) * spans + part
        tl.store(sums + 2 * at, top, mask=t < T)
        tl.store(sums + 2 * at + 1, total, mask=t < T)
        store_rows(out + (row * T * spans + part) * D, t, T, spans * D, result, D, WIDTH)


@triton.jit
def _join(parts, sums, out, T, H, spans, D: tl.constexpr, WIDTH: tl.constexpr, SPANS: tl.constexpr):
    row, t = tl.program_id(1).to(tl.int64), tl.program_id(0)
    b, h = row // H, row % H
    at = (row * T + t) * spans + tl.arange(0, SPANS)
    inside = tl.arange(0, SPANS) < spans
    top = tl.load(sums + 2 * at, mask=inside, other=-1e30)
    fade = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(sums + 2 * at + 1, mask=inside, other=0.0) * fade, 0)
    start = parts + (row * T + t) * spans * D
    values = load_rows(start, tl.arange(0, SPANS), spans, D, D, WIDTH)
    result = tl.sum(values * fade[:, None], 0) / total
    columns = tl.arange(0, WIDTH)
    tl.store(out + ((b * T + t) * H + h) * D + columns, result, mask=columns < D)


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
    sizes = tiles(q, D)
    keys = sizes.pop("BLOCK")
    few = T <= FEW
    span = min(N, SPAN) if few else N
    spans = blocks(N, span) if span else 1
    parts, sums = out, None
    if spans > 1:
        parts = empty((B * n_head, T, spans, D), "float32", q.device)
        sums = empty((B * n_head, T, spans, 2), "float32", q.device)
    queries = FEW if few else keys
    launch(
        _cached,
        (blocks(T, queries), B * n_head, spans),
        q,
        k_cache,
        v_cache,
        *split(pos),
        parts,
        sums,
        T,
        n_head,
        N,
        span,
        1.0 / math.sqrt(D),
        QUERIES=queries,
        KEYS=keys,
        ROUNDING=rounding(q),
        **sizes,
    )
    if sums is not None:
        launch(
            _join,
            (T, B * n_head),
            parts,
            sums,
            out,
            T,
            n_head,
            spans,
            D=D,
            WIDTH=sizes["WIDTH"],
            SPANS=triton.next_power_of_2(spans),
        )


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
