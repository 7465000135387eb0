"""What ends a training step: the norm of the gradient and AdamW over flat buffers.

Nothing here is read on the host, so a captured step bakes nothing in.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from forge.backends.cuda.reduce import clear_unless_finite
from forge.backends.cuda.shape import blocks
from forge.backends.cuda.triton_jit import launch
from forge.tensor import Tensor, empty

# Programs that sum squares, eight for each multiprocessor of the largest cards.
PROGRAMS = 1024
NORM_BLOCK = 2048
# A tile of the flat buffers has at most this many elements; a program updates BLOCK of them.
TILE = 16384
BLOCK = 1024


@triton.jit
def _square_sums(x, partial, count, rounds, BLOCK: tl.constexpr):
    """In float64, which neither overflows nor loses small terms among 1e8."""
    total = tl.full([BLOCK], 0.0, tl.float64)
    for turn in range(rounds):
        block = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        i = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < count, other=0.0).to(tl.float64)
        total += value * value
    tl.store(partial + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _root_of_sum(partial, out, programs, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(partial + i, mask=i < programs, other=0.0), 0)
    tl.store(out, tl.sqrt(total))


@triton.jit
def _set(out, value):
    tl.store(out, value)


@triton.jit
def _advance(step, norm, finite, factors, log_beta1, log_beta2, max_norm):
    """Count the step, if it counts; factors = what scales the gradient, m and v."""
    count = tl.load(step) + tl.where(tl.load(finite) != 0, 1, 0)
    tl.store(step, count)
    clip = 1.0
    if max_norm is not None:
        clip = tl.minimum(1.0, max_norm / (tl.load(norm).to(tl.float32) + 1e-6))
    # In float64: 1 - beta^count cancels while beta^count is near 1.
    n = count.to(tl.float64)
    tl.store(factors, clip)
    tl.store(factors + 1, 1.0 / (1.0 - tl.exp(n * log_beta1)))
    tl.store(factors + 2, 1.0 / (1.0 - tl.exp(n * log_beta2)))


@triton.jit
def _adamw(
    param,
    grad,
    m,
    v,
    tiles,
    rates,
    lr,
    finite,
    factors,
    working,
    beta1,
    fresh1,
    beta2,
    fresh2,
    eps,
    BLOCK: tl.constexpr,
):
    if tl.load(finite) != 0:
        tile = tiles + 3 * tl.program_id(0)
        start, stop, segment = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        i = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = i < stop
        rate = tl.load(lr) * tl.load(rates + 2 * segment)
        keep = 1.0 - rate * tl.load(rates + 2 * segment + 1)
        g = tl.load(grad + i, mask=inside).to(tl.float32) * tl.load(factors)
        first = beta1 * tl.load(m + i, mask=inside) + fresh1 * g
        second = beta2 * tl.load(v + i, mask=inside) + fresh2 * g * g
        mean, square = first * tl.load(factors + 1), second * tl.load(factors + 2)
        p = tl.load(param + i, mask=inside) * keep - rate * mean / (tl.sqrt(square) + eps)
        tl.store(m + i, first, mask=inside)
        tl.store(v + i, second, mask=inside)
        tl.store(param + i, p, mask=inside)
        if working is not None:
            tl.store(working + i, p, mask=inside)


def global_norm(x: Tensor, *, out: Tensor) -> None:
    """out = the Euclidean norm of x."""
    programs = max(1, min(PROGRAMS, blocks(x.size, NORM_BLOCK)))
    partial = empty((programs,), "float64", x.device)
    rounds = blocks(x.size, programs * NORM_BLOCK)
    launch(_square_sums, (programs,), x, partial, x.size, rounds, BLOCK=NORM_BLOCK)
    launch(_root_of_sum, (1,), partial, out, programs, BLOCK=PROGRAMS)


def all_finite(values: tuple[Tensor, ...], *, out: Tensor) -> None:
    """out = 1 where every value is finite, else 0."""
    launch(_set, (1,), out, 1)
    for value in values:
        clear_unless_finite(value, out)


def adamw(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    tiles: Tensor,
    rates: Tensor,
    *,
    lr: Tensor,
    step: Tensor,
    norm: Tensor,
    finite: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    max_norm: float | None,
    working: Tensor | None,
) -> None:
    """AdamW (Loshchilov, Hutter, 2019) on each tile (start, stop, segment) of flat buffers."""
    factors = empty((3,), "float32", param.device)
    # exp(step log(beta)) is beta^step; of a beta of 0, too.
    logarithms = [math.log(max(beta, 1e-300)) for beta in (beta1, beta2)]
    launch(_advance, (1,), step, norm, finite, factors, *logarithms, max_norm, num_warps=1)
    launch(
        _adamw,
        (tiles.shape[0], blocks(TILE, BLOCK)),
        param,
        grad,
        m,
        v,
        tiles,
        rates,
        lr,
        finite,
        factors,
        working,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps,
        BLOCK=BLOCK,
    )
