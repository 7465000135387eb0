"""Dropout's random words inside kernels: Philox4x32-10, bit for bit that of `forge.philox`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_factors(element, sample, site, key, limit, factor):
    """`factor` where dropout keeps an element of a sample, else 0.

    `element` is int64 of any shape, `key` points to int64 (seed, step), of which the low 32 bits
    count; an element is kept where its word is at least `limit`.
    """
    seed = tl.load(key) & 0xFFFFFFFF
    step = tl.load(key + 1) & 0xFFFFFFFF
    block = (element >> 2).to(tl.uint32)
    none = block * 0
    w0, w1, w2, w3 = tl.philox(
        seed | (step << 32), block, none + sample.to(tl.uint32), none + site, none
    )
    which = element & 3
    word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    return tl.where(word.to(tl.int64) >= limit, factor, 0.0)
