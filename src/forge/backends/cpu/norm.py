"""Layer normalisation over the last dimension, alone and fused with the residual's addition.

N rows, C width. A row stays in the first-level cache between its passes. The sums over rows
(dgamma, dbeta, dbias) are made per tile of TILE rows and added in the order of the tiles.
"""

from typing import Any

import numpy as np
from numba import prange

from forge.backends.cpu.bfloat16 import bits, f32_of, narrow, wide
from forge.backends.cpu.jit import forms, routine
from forge.backends.cpu.reduce import sum_rows
from forge.dtypes import ITEMSIZE
from forge.tensor import Tensor, empty, empty_like, zeros

f32 = np.float32

# Rows summed into one partial result: the partials then take 5 % of x's memory at most.
TILE = 64
# Columns that one thread reduces: four cache lines of each partial.
COLUMNS = 64


@routine
def _normalise(x: Any, gamma: Any, beta: Any, out: Any, eps: Any) -> Any:
    """out = layernorm of the row x; returns its mean and 1 / standard deviation."""
    C = x.size
    total = f32(0.0)
    for c in range(C):
        total += wide(x[c])
    mean = total / f32(C)
    # About the mean: a sum of squares would cancel where the mean is large.
    variance = f32(0.0)
    for c in range(C):
        centred = wide(x[c]) - mean
        variance += centred * centred
    rstd = f32(1.0) / np.sqrt(variance / f32(C) + eps)
    for c in range(C):
        out[c] = narrow(out, (wide(x[c]) - mean) * rstd * gamma[c] + beta[c])
    return mean, rstd


@forms("void(T[:,::1], float32[::1], float32[::1], T[:,::1], float32[::1], float32[::1], float32)")
def _layernorm(x: Any, gamma: Any, beta: Any, out: Any, mean: Any, rstd: Any, eps: Any) -> None:
    for n in prange(x.shape[0]):
        mean[n], rstd[n] = _normalise(x[n], gamma, beta, out[n], eps)


@routine
def _add(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = narrow(out, wide(a[i]) + wide(b[i]) + wide(c[i]))


@forms(
    "void(T[:,::1], T[:,::1], T[::1], float32[::1], float32[::1], T[:,::1], T[:,::1],"
    " float32[::1], float32[::1], float32)"
)
def _add_layernorm(
    x: Any,
    branch: Any,
    bias: Any,
    gamma: Any,
    beta: Any,
    sums: Any,
    y: Any,
    mean: Any,
    rstd: Any,
    eps: Any,
) -> None:
    for n in prange(x.shape[0]):
        _add(x[n], branch[n], bias, sums[n])
        mean[n], rstd[n] = _normalise(sums[n], gamma, beta, y[n], eps)


@routine
def _row_backward(
    dsum: Any, x: Any, gamma: Any, dy: Any, mean: Any, rstd: Any, dx: Any, dgamma: Any, dbeta: Any
) -> None:
    """dx of one row, with dsum unless that is empty; its part of dgamma and dbeta is added."""
    C = x.size
    sum_g = f32(0.0)
    sum_gx = f32(0.0)
    for c in range(C):
        normal = (wide(x[c]) - mean) * rstd
        d = wide(dy[c])
        g = d * gamma[c]
        sum_g += g
        sum_gx += g * normal
        dgamma[c] += d * normal
        dbeta[c] += d
    mean_g = sum_g / f32(C)
    mean_gx = sum_gx / f32(C)
    # dx is rounded once, so what it is made of is computed again rather than kept there.
    if dsum.size > 0:
        for c in range(C):
            normal = (wide(x[c]) - mean) * rstd
            g = wide(dy[c]) * gamma[c]
            dx[c] = narrow(dx, wide(dsum[c]) + (g - mean_g - normal * mean_gx) * rstd)
    else:
        for c in range(C):
            normal = (wide(x[c]) - mean) * rstd
            g = wide(dy[c]) * gamma[c]
            dx[c] = narrow(dx, (g - mean_g - normal * mean_gx) * rstd)


@routine
def _add_to(out: Any, x: Any) -> None:
    for c in range(out.size):
        out[c] += wide(x[c])


@routine
def _tile_backward(
    tile: Any,
    dsum: Any,
    dy: Any,
    x: Any,
    gamma: Any,
    mean: Any,
    rstd: Any,
    dx: Any,
    partial: Any,
    with_bias: Any,
) -> None:
    """The rows of a tile; partial[:, tile] = their dgamma, dbeta and dbias."""
    dgamma = partial[0, tile]
    dbeta = partial[1, tile]
    dbias = partial[2, tile]
    for c in range(gamma.size):
        dgamma[c] = dbeta[c] = dbias[c] = f32(0.0)
    for n in range(tile * TILE, min(tile * TILE + TILE, x.shape[0])):
        residual = dsum[n if dsum.shape[1] > 0 else 0]
        _row_backward(residual, x[n], gamma, dy[n], mean[n], rstd[n], dx[n], dgamma, dbeta)
        if with_bias:
            _add_to(dbias, dx[n])


@routine
def _add_tiles(partial: Any, start: Any, out: Any) -> None:
    """out[start : start + COLUMNS] += the sum of partial [tiles, C], unless out is empty."""
    stop = min(start + COLUMNS, out.size)
    if partial.shape[0] > 0 and stop > start:
        total = partial[0, start:stop]
        for tile in range(1, partial.shape[0]):
            _add_to(total, partial[tile, start:stop])
        _add_to(out[start:stop], total)


@forms(
    "void(T[:,::1], T[:,::1], T[:,::1], float32[::1], float32[::1], float32[::1], T[:,::1],"
    " float32[:,:,::1], float32[::1], float32[::1], float32[::1])",
    cost=1.1,
)
def _backward(
    dsum: Any,
    dy: Any,
    x: Any,
    gamma: Any,
    mean: Any,
    rstd: Any,
    dx: Any,
    partial: Any,
    dgamma: Any,
    dbeta: Any,
    dbias: Any,
) -> None:
    """An absent dgamma, dbeta or dbias has size 0, an absent dsum rows of size 0."""
    C = x.shape[1]
    for tile in prange(partial.shape[1]):
        _tile_backward(tile, dsum, dy, x, gamma, mean, rstd, dx, partial, dbias.size > 0)
    for block in prange((C + COLUMNS - 1) // COLUMNS):
        _add_tiles(partial[0], block * COLUMNS, dgamma)
        _add_tiles(partial[1], block * COLUMNS, dbeta)
        _add_tiles(partial[2], block * COLUMNS, dbias)


def layernorm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    out: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> None:
    """out = (x - mean) rstd gamma + beta, with rstd = 1 / sqrt(variance + eps)."""
    mean, rstd = _statistics(x, mean, rstd)
    weights = f32_of(gamma), f32_of(beta)
    _layernorm[x.dtype](bits(x), *weights, bits(out), mean.array, rstd.array, f32(eps))


def layernorm_workspace(
    x: Tensor, *rest: Any, mean: Tensor | None, rstd: Tensor | None, **_: Any
) -> tuple[int, ...]:
    """Bytes of the statistics that nobody asked for."""
    return (4 * x.shape[0],) * [mean, rstd].count(None)


def layernorm_backward(
    x: Tensor,
    gamma: Tensor,
    dy: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    dx: Tensor | None,
    dgamma: Tensor | None,
    dbeta: Tensor | None,
) -> None:
    """dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy gamma; dgamma and dbeta are added to."""
    add_layernorm_backward(
        None, dy, x, gamma, mean, rstd, dx=dx, dgamma=dgamma, dbeta=dbeta, dbias=None
    )


def layernorm_backward_workspace(
    x: Tensor, gamma: Tensor, dy: Tensor, *rest: Any, dx: Tensor | None, **_: Any
) -> tuple[int, ...]:
    """Bytes of the sums per tile, and of a dx that nobody asked for."""
    return add_layernorm_backward_workspace(None, dy, x, dx=dx)


def add_layernorm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    *,
    sum: Tensor,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> None:
    """sum = x + branch + bias; y = layernorm(sum)."""
    if bias is None:
        bias = zeros(gamma.shape, x.dtype, x.device)
    mean, rstd = _statistics(x, mean, rstd)
    _add_layernorm[x.dtype](
        bits(x),
        bits(branch),
        bits(bias),
        f32_of(gamma),
        f32_of(beta),
        bits(sum),
        bits(y),
        mean.array,
        rstd.array,
        f32(eps),
    )


def add_layernorm_workspace(
    x: Tensor, branch: Tensor, bias: Tensor | None, *rest: Any, **keywords: Any
) -> tuple[int, ...]:
    """Bytes of the statistics that nobody asked for, and of a bias of zeros."""
    return layernorm_workspace(x, **keywords) + (
        () if bias is not None else (ITEMSIZE[x.dtype] * x.shape[1],)
    )


def add_layernorm_backward(
    dsum: Tensor | None,
    dy: Tensor | None,
    sum: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    dx: Tensor | None,
    dgamma: Tensor | None,
    dbeta: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """dx = dsum + the gradient through layernorm; dgamma, dbeta and dbias are added to."""
    N, C = sum.shape
    if dy is None:
        _no_layernorm_backward(dsum, dx, dbias)
        return
    partial = empty((3, (N + TILE - 1) // TILE, C), "float32", sum.device)
    dx = empty_like(sum) if dx is None else dx
    sums = [np.empty(0, f32) if x is None else f32_of(x) for x in (dgamma, dbeta, dbias)]
    _backward[sum.dtype](
        np.empty((1, 0), bits(sum).dtype) if dsum is None else bits(dsum),
        bits(dy),
        bits(sum),
        f32_of(gamma),
        f32_of(mean),
        f32_of(rstd),
        bits(dx),
        partial.array,
        *sums,
    )
    for x, total in zip((dgamma, dbeta, dbias), sums, strict=True):
        if x is not None and x.array is not total:
            x.array[...] = total


def add_layernorm_backward_workspace(
    dsum: Tensor | None, dy: Tensor | None, sum: Tensor, *rest: Any, dx: Tensor | None, **_: Any
) -> tuple[int, ...]:
    """Bytes of the sums per tile, and of a dx that nobody asked for."""
    if dy is None:
        return ()
    N, C = sum.shape
    return (4 * 3 * -(-N // TILE) * C, *(() if dx is not None else (sum.nbytes,)))


def _no_layernorm_backward(dsum: Tensor | None, dx: Tensor | None, dbias: Tensor | None) -> None:
    """The gradient where nothing used y, which no model here does: by NumPy."""
    if dx is not None:
        dx.array[...] = 0 if dsum is None else dsum.array
    if dbias is not None and dsum is not None:
        sum_rows(dsum, out=dbias)


def _statistics(x: Tensor, mean: Tensor | None, rstd: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the kernel puts what nobody asked for."""
    shape = x.shape[:1]
    return (
        empty(shape, "float32", x.device) if mean is None else mean,
        empty(shape, "float32", x.device) if rstd is None else rstd,
    )
