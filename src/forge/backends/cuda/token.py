"""A whole GPT-2 for one new position of every sample, in one launch: see token.cu.

For bfloat16, widths that are multiples of 32 and heads of a power of two from 8 to 256.
"""

from __future__ import annotations

from functools import cache

import triton

from forge.backends.cuda import device, pointwise
from forge.backends.cuda.nvrtc import kernel
from forge.backends.cuda.shape import blocks
from forge.errors import DeviceError
from forge.tensor import Device, Tensor, empty, full

# Places of gamma and beta among a block's weights.
NORMS = (0, 1, 6, 7)
# Threads of a block and columns of a strip, as in token.cu. More threads only where those of 256
# could not have a sum each: on cards of few multiprocessors.
THREADS = (256, 512, 1024)
STRIP = 32
# A span has so many rows for each of 256 threads, but at most so many keys: with GPT-2's 12 heads
# of 64 and 1024 positions there are 96 spans, and the parts of no more than eight to put together.
ROWS, SPAN = 4, 128
# Parts of a product's rows, at most, that each reader adds up.
SPLIT = 4
# Shared memory of a thread block, in bytes, by compute capability; all others have the least.
SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
LEAST_SHARED = 99 << 10
# Vectors of weights that a thread copies ahead for a product, at most.
AHEAD = 16


def decode_token(
    ids: Tensor,
    pos: Tensor,
    wte: Tensor,
    wpe: Tensor,
    gamma: Tensor,
    beta: Tensor,
    weights: tuple[tuple[Tensor, ...], ...],
    *,
    k_caches: tuple[Tensor, ...],
    v_caches: tuple[Tensor, ...],
    out: Tensor,
    eps: float,
) -> None:
    """out [B, V] = logits for ids [B] at pos [B], where keys and values go into the caches."""
    B, V = out.shape
    if out.size == 0:
        return
    _, H, N, D = k_caches[0].shape
    tables = wte, wpe, _float32(gamma), _float32(beta)
    weights = tuple(
        tuple(_float32(x) if i in NORMS else x for i, x in enumerate(each)) for each in weights
    )
    # Rounded up, so that there are few kernels to compile for caches of all lengths.
    heads = H, D, triton.next_power_of_2(N)
    samples = B
    while not (sizes := _sizes(samples, *heads, len(weights), V)):
        # A card with few multiprocessors, or a wide model: fewer samples at a time.
        samples -= 1
        if samples == 0:
            raise DeviceError(
                f"[decode_token_] expected a GPU for blocks of width {H * D}, got one of "
                f"{device.processors()} multiprocessors; use the ops that it is made of"
            )
    for first in range(0, B, samples):
        count = min(samples, B - first)
        sizes = _sizes(count, *heads, len(weights), V)
        caches = [
            [x.view((count, H, N, D), first * H * N * D) for x in pair]
            for pair in zip(k_caches, v_caches, strict=True)
        ]
        pointers = tuple(
            x for each, pair in zip(weights, caches, strict=True) for x in (*each, *pair)
        )
        run = kernel("token.cu", "token", sizes, shared=sizes["SHARED"], together=True)
        turns, mail = _mail(sizes["BLOCKS"], sizes["MAILBOX"] * len(weights))
        run(
            sizes["BLOCKS"],
            sizes["THREADS"],
            ids.view((count,), first),
            pos.view((count,), first),
            *tables,
            out.view((count, V), first * V),
            turns,
            mail,
            N,
            eps,
            pointers,
        )


@cache
def _sizes(samples: int, H: int, D: int, N: int, layers: int, V: int) -> dict[str, int]:
    """The macros of token.cu for up to N positions; none if it cannot take so many samples."""
    C, count = H * D, device.processors()
    # No part of the rows may be empty.
    split = max(1, min(SPLIT, count // (C // STRIP)))
    while (split - 1) * blocks(C, 8 * split) * 8 >= C:
        split -= 1
    strips = blocks(4 * C // STRIP, count)
    sums = strips * samples * STRIP
    limit = SHARED.get(device.arch(), LEAST_SHARED)
    for threads in THREADS if samples == 1 else THREADS[:1]:
        warps, step = threads // 32, threads // (D // 8)
        span = step * max(1, min(ROWS, SPAN // step))
        floats = 2 * samples * C + warps * (sums + 2 * samples + D + 2) + samples
        shared = 112 * layers + 4 * span * D + blocks(floats, 4) * 16
        rows = threads // (STRIP // 8)
        wanted = max(strips * blocks(C, rows), blocks(blocks(4 * C, split), rows))
        ahead = min(wanted, AHEAD, (limit - shared) // (32 * threads))
        if sums <= threads and ahead > 0:
            break
    else:
        return {}
    parts = samples * H * blocks(N, span)
    words = samples * C * (3 + 4) // 2 + 2 * split * samples * C + parts * (D + 8)
    return {
        "B": samples,
        "C": C,
        "H": H,
        "L": layers,
        "S": blocks(N, span),
        "V": V,
        "SPAN": span,
        "SPLIT": split,
        "AHEAD": ahead,
        "BLOCKS": count,
        "THREADS": threads,
        "SHARED": shared + 32 * threads * ahead,
        "MAILBOX": 4 * words,
    }


@cache
def _mail(count: int, size: int) -> tuple[Tensor, Tensor]:
    """The turn of each thread block, and two sets of mailboxes of `size` bytes, all empty."""
    device.eager("new mailbox")
    words = blocks(count, 64) * 32
    both = full((words + 2 * size // 8,), -1, "int64", Device("cuda"))
    return both.view((words,)), both.view((2 * size // 8,), words)


def _float32(x: Tensor) -> Tensor:
    if x.dtype == "float32":
        return x
    out = empty(x.shape, "float32", x.device)
    pointwise.cast(x, out=out)
    return out
