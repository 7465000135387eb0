"""Fused causal attention on the packed projection, in tiles (Dao, 2023: FlashAttention-2).

Shapes: B samples, T positions, H heads of width D, C = H D; qkv [B, T, 3C] is read in place. No
[T, T] is stored: the backward kernels make the probabilities again from lse, one with a program for
every block of keys, for dk and dv, one for every block of queries, for dq; each program adds alone
and in order. Any head width, padded to a power of two; dropout of the probabilities.

Scores are kept to base 2, exp2 being what the GPU has in hardware.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from forge.backends.cuda import precision
from forge.backends.cuda.philox import keep_factors
from forge.backends.cuda.shape import blocks
from forge.backends.cuda.triton_jit import launch
from forge.philox import threshold
from forge.tensor import Tensor, empty

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def load_rows(start, rows, stop, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """The block [rows, WIDTH] of a matrix, zero from row `stop` and column D on."""
    columns = tl.arange(0, WIDTH)
    inside = (rows < stop)[:, None] & (columns < D)[None, :]
    places = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(start + places, mask=inside, other=0.0)


@triton.jit
def store_rows(start, rows, stop, stride, value, D: tl.constexpr, WIDTH: tl.constexpr):
    """Store the block [rows, WIDTH] of a matrix, up to row `stop` and column D."""
    columns = tl.arange(0, WIDTH)
    inside = (rows < stop)[:, None] & (columns < D)[None, :]
    places = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(start + places, value, mask=inside)


@triton.jit
def multiply(a, b, ROUNDING: tl.constexpr):
    """The product of two blocks, added in float32; float32 ones are rounded to "tf32" or "ieee"."""
    return tl.dot(a, b, input_precision=ROUNDING)


@triton.jit
def _forward(
    qkv,
    key,
    out,
    lse,
    T,
    H,
    scale,
    site,
    first_sample,
    limit,
    factor,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    # The blocks with the most keys first: short ones fill the gaps at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    C = H * D
    q_start = qkv + b.to(tl.int64) * T * 3 * C + h * D
    i = block * BLOCK + tl.arange(0, BLOCK)
    q = load_rows(q_start, i, T, 3 * C, D, WIDTH)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    result = tl.full([BLOCK, WIDTH], 0.0, tl.float32)
    for first in range(0, (block + 1) * BLOCK, BLOCK):
        j = first + tl.arange(0, BLOCK)
        k = load_rows(q_start + C, j, T, 3 * C, D, WIDTH)
        v = load_rows(q_start + 2 * C, j, T, 3 * C, D, WIDTH)
        visible = (j[None, :] <= i[:, None]) & (j < T)[None, :]
        scores = multiply(q, tl.trans(k), ROUNDING) * (scale * LOG2_E)
        scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        if key is not None:
            element = (h * T + i).to(tl.int64)[:, None] * T + j[None, :]
            p *= keep_factors(element, first_sample + b, site, key, limit, factor)
        result = result * fade[:, None] + multiply(p.to(v.dtype), v, ROUNDING)
        top = higher
    result = result / total[:, None]
    store_rows(out + b.to(tl.int64) * T * C + h * D, i, T, C, result, D, WIDTH)
    if lse is not None:
        log_sum = (top + tl.log2(total)) * LN_2
        tl.store(lse + tl.program_id(1).to(tl.int64) * T + i, log_sum, mask=i < T)


@triton.jit
def _delta(out, dout, delta, T, H, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """delta [B, H, T] = sum of out dout over the head, which is that of P dP over the keys."""
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    C = H * D
    start = b.to(tl.int64) * T * C + h * D
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = load_rows(out + start, i, T, C, D, WIDTH).to(tl.float32)
    do = load_rows(dout + start, i, T, C, D, WIDTH).to(tl.float32)
    tl.store(delta + tl.program_id(1).to(tl.int64) * T + i, tl.sum(o * do, 1), mask=i < T)


@triton.jit
def _backward_keys(
    qkv,
    dout,
    lse,
    delta,
    key,
    dqkv,
    T,
    H,
    scale,
    site,
    first_sample,
    limit,
    factor,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """dk and dv of a block of keys, from all queries that see them."""
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    C = H * D
    start = b.to(tl.int64) * T * 3 * C + h * D
    row = tl.program_id(1).to(tl.int64) * T
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = load_rows(qkv + start + C, j, T, 3 * C, D, WIDTH)
    v = load_rows(qkv + start + 2 * C, j, T, 3 * C, D, WIDTH)
    dk = tl.full([BLOCK, WIDTH], 0.0, tl.float32)
    dv = tl.full([BLOCK, WIDTH], 0.0, tl.float32)
    for first in range(tl.program_id(0) * BLOCK, T, BLOCK):
        i = first + tl.arange(0, BLOCK)
        q = load_rows(qkv + start, i, T, 3 * C, D, WIDTH)
        do = load_rows(dout + b.to(tl.int64) * T * C + h * D, i, T, C, D, WIDTH)
        log_sum = tl.load(lse + row + i, mask=i < T, other=0.0).to(tl.float32) * LOG2_E
        inner = tl.load(delta + row + i, mask=i < T, other=0.0)
        # All transposed, [keys, queries], so that the sums over queries are products as they are.
        visible = (j[:, None] <= i[None, :]) & (i < T)[None, :]
        scores = multiply(k, tl.trans(q), ROUNDING) * (scale * LOG2_E)
        p = tl.where(visible, tl.exp2(scores - log_sum[None, :]), 0.0)
        dp = multiply(v, tl.trans(do), ROUNDING)
        kept = p
        if key is not None:
            element = (h * T + i).to(tl.int64)[None, :] * T + j[:, None]
            keep = keep_factors(element, first_sample + b, site, key, limit, factor)
            kept = p * keep
            dp *= keep
        dv += multiply(kept.to(do.dtype), do, ROUNDING)
        dk += multiply((p * (dp - inner[None, :])).to(q.dtype), q, ROUNDING)
    store_rows(dqkv + start + C, j, T, 3 * C, dk * scale, D, WIDTH)
    store_rows(dqkv + start + 2 * C, j, T, 3 * C, dv, D, WIDTH)


@triton.jit
def _backward_queries(
    qkv,
    dout,
    lse,
    delta,
    key,
    dqkv,
    T,
    H,
    scale,
    site,
    first_sample,
    limit,
    factor,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """dq of a block of queries, from all keys that they see."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    C = H * D
    start = b.to(tl.int64) * T * 3 * C + h * D
    row = tl.program_id(1).to(tl.int64) * T
    i = block * BLOCK + tl.arange(0, BLOCK)
    q = load_rows(qkv + start, i, T, 3 * C, D, WIDTH)
    do = load_rows(dout + b.to(tl.int64) * T * C + h * D, i, T, C, D, WIDTH)
    log_sum = tl.load(lse + row + i, mask=i < T, other=0.0).to(tl.float32) * LOG2_E
    inner = tl.load(delta + row + i, mask=i < T, other=0.0)
    dq = tl.full([BLOCK, WIDTH], 0.0, tl.float32)
    for first in range(0, (block + 1) * BLOCK, BLOCK):
        j = first + tl.arange(0, BLOCK)
        k = load_rows(qkv + start + C, j, T, 3 * C, D, WIDTH)
        v = load_rows(qkv + start + 2 * C, j, T, 3 * C, D, WIDTH)
        visible = (j[None, :] <= i[:, None]) & (j < T)[None, :]
        scores = multiply(q, tl.trans(k), ROUNDING) * (scale * LOG2_E)
        p = tl.where(visible, tl.exp2(scores - log_sum[:, None]), 0.0)
        dp = multiply(do, tl.trans(v), ROUNDING)
        if key is not None:
            element = (h * T + i).to(tl.int64)[:, None] * T + j[None, :]
            dp *= keep_factors(element, first_sample + b, site, key, limit, factor)
        dq += multiply((p * (dp - inner[:, None])).to(k.dtype), k, ROUNDING)
    store_rows(dqkv + start, i, T, 3 * C, dq * scale, D, WIDTH)


def attention(
    qkv: Tensor,
    key: Tensor | None,
    *,
    out: Tensor,
    lse: Tensor | None,
    n_head: int,
    p: float,
    site: int,
    first_sample: int,
) -> None:
    """out = dropout(softmax(q k^T / sqrt(D))) v, causal; lse = log of the softmax's denominator."""
    B, T, C = out.shape
    D = C // n_head
    sizes = tiles(qkv, D)
    launch(
        _forward,
        (blocks(T, sizes["BLOCK"]), B * n_head),
        qkv,
        key if p > 0.0 else None,
        out,
        lse,
        T,
        n_head,
        1.0 / math.sqrt(D),
        site,
        first_sample,
        threshold(p),
        1.0 / (1.0 - p),
        **sizes,
        ROUNDING=rounding(qkv),
    )


def attention_backward(
    qkv: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    key: Tensor | None,
    *,
    dqkv: Tensor,
    n_head: int,
    p: float,
    site: int,
    first_sample: int,
) -> None:
    """The gradient of the packed projection, from probabilities made again as exp(scores - lse)."""
    B, T, C = out.shape
    D = C // n_head
    sizes = tiles(qkv, D)
    grid = (blocks(T, sizes["BLOCK"]), B * n_head)
    delta = empty((B, n_head, T), "float32", qkv.device)
    launch(_delta, grid, out, dout, delta, T, n_head, **sizes)
    for kernel in (_backward_keys, _backward_queries):
        launch(
            kernel,
            grid,
            qkv,
            dout,
            lse,
            delta,
            key if p > 0.0 else None,
            dqkv,
            T,
            n_head,
            1.0 / math.sqrt(D),
            site,
            first_sample,
            threshold(p),
            1.0 / (1.0 - p),
            **sizes,
            ROUNDING=rounding(qkv),
        )


def rounding(x: Tensor) -> str:
    """How products of x's blocks round float32 operands; the same for all other dtypes."""
    return "tf32" if precision.tf32(x.dtype) else "ieee"


def tiles(x: Tensor, D: int) -> dict[str, Any]:
    """Queries and keys in a block, and the padded head width.

    float32 is multiplied by the plain cores, in registers, of which larger blocks need too many.
    """
    width = max(16, triton.next_power_of_2(D))
    wide = width > 128
    if x.dtype == "float32":
        block, stages = (16 if wide else 32), 1
    else:
        block, stages = (32 if wide else 64), 2
    return {"D": D, "WIDTH": width, "BLOCK": block, "num_stages": stages}
