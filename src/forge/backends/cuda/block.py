"""A block of a GPT-2 for one new position of every sample, in one launch: see block.cu.

For bfloat16, widths that are multiples of 16 and heads of a power of two from 8 to 256.
"""

from __future__ import annotations

from functools import cache

from forge.backends.cuda import device
from forge.backends.cuda.nvrtc import kernel
from forge.backends.cuda.shape import blocks
from forge.tensor import Device, Tensor, empty, empty_like, zeros

# As in block.cu: threads of a block, its warps, and columns of a strip.
THREADS = 256
WARPS = 8
STRIP = 16
# Keys that a thread block takes at a time, about: with GPT-2's 12 heads and 1024 positions this
# gives one span to each of an H200's 132 multiprocessors.
SPAN = 96
# Shared memory that every card has: those of compute capability 8.6 have the least, 99 KiB.
SHARED = 96 << 10


def decode_block(
    h: Tensor,
    gamma_1: Tensor,
    beta_1: Tensor,
    w_attn: Tensor,
    b_attn: Tensor,
    w_proj: Tensor,
    b_proj: Tensor,
    gamma_2: Tensor,
    beta_2: Tensor,
    w_fc: Tensor,
    b_fc: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    pos: Tensor,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    eps: float,
) -> None:
    """out [B, C] = the block's output for h [B, C]; keys and values go into the caches at pos."""
    B, H, N, D = k_cache.shape
    C = H * D
    at_once = THREADS // (D // 8)
    span = at_once * max(1, SPAN // at_once)
    spans = blocks(N, span)
    count = device.processors()
    sums = blocks(4 * C // STRIP, count) * B * STRIP
    room = max(sums * WARPS, 2 * WARPS * B, 2 * WARPS + WARPS * D, H * spans)
    shared = 4 * (4 * B * C + room)
    if B > 1 and (sums > THREADS or shared > SHARED):
        # A card with few multiprocessors, or a wide model: one sample after the other.
        before = gamma_1, beta_1, w_attn, b_attn, w_proj, b_proj
        after = gamma_2, beta_2, w_fc, b_fc, w_out, b_out
        for b in range(B):
            row, cache_shape, start = (1, C), (1, H, N, D), b * H * N * D
            decode_block(
                h.view(row, b * C),
                *before,
                *after,
                pos.view((1,), b),
                k_cache=k_cache.view(cache_shape, start),
                v_cache=v_cache.view(cache_shape, start),
                out=out.view(row, b * C),
                eps=eps,
            )
        return
    sizes = {"B": B, "C": C, "H": H, "N": N, "SPAN": span, "BLOCKS": count}
    run = kernel("block.cu", "block", sizes, shared=shared)
    run(
        count,
        THREADS,
        h,
        gamma_1,
        beta_1,
        w_attn,
        b_attn,
        w_proj,
        b_proj,
        gamma_2,
        beta_2,
        w_fc,
        b_fc,
        w_out,
        b_out,
        k_cache,
        v_cache,
        pos,
        out,
        empty_like(h),
        empty((B * H * spans * (D + 2),), "float32", h.device),
        empty_like(h),
        empty((B, 4 * C), h.dtype, h.device),
        _arrivals(),
        eps,
    )


@cache
def _arrivals() -> Tensor:
    """The count of arrivals at all meetings of all launches so far."""
    return zeros((1,), "int64", Device("cuda"))
