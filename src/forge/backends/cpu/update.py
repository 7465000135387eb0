"""What ends a training step: the norm of the gradient and AdamW over flat buffers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import prange

from forge.backends.cpu.bfloat16 import bits, narrow, wide
from forge.backends.cpu.jit import forms, routine
from forge.tensor import Tensor

f32 = np.float32
f64 = np.float64

_TILE = 16384


def global_norm(x: Tensor, *, out: Tensor) -> None:
    """out = the Euclidean norm of x."""
    _global_norm[x.dtype](bits(x).reshape(-1), out.array.reshape(-1))


@routine
def _squares(x: Any) -> Any:
    """Sum of squares in float64, which neither overflows nor loses small terms among 1e8."""
    total = f64(0.0)
    for i in range(x.size):
        value = f64(wide(x[i]))
        total += value * value
    return total


@forms("void(T[::1], float32[::1])")
def _global_norm(x: Any, out: Any) -> None:
    tiles = (x.size + _TILE - 1) // _TILE
    partial = np.empty(tiles, f64)
    for t in prange(tiles):
        partial[t] = _squares(x[t * _TILE : (t + 1) * _TILE])
    total = f64(0.0)
    for t in range(tiles):
        total += partial[t]
    out[0] = f32(math.sqrt(total))


def all_finite(values: tuple[Tensor, ...], *, out: Tensor) -> None:
    """out = 1 where every value is finite, else 0."""
    out.array[...] = all(math.isfinite(value.array) for value in values)


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
    if finite.array == 0:
        return
    step.array += 1
    count = int(step.array)
    clip = 1.0 if max_norm is None else min(1.0, max_norm / (float(norm.array) + 1e-6))
    copy = np.empty(0, f32) if working is None else bits(working)
    _adamw["float32", "float32" if working is None else "bfloat16"](
        param.array,
        grad.array,
        m.array,
        v.array,
        tiles.array,
        rates.array,
        f32(lr.array),
        f32(clip),
        f32(beta1),
        f32(1.0 - beta1),
        f32(beta2),
        f32(1.0 - beta2),
        f32(1.0 / (1.0 - beta1**count)),
        f32(1.0 / (1.0 - beta2**count)),
        f32(eps),
        copy,
    )


@forms(
    "void(T[::1], T[::1], T[::1], T[::1], int64[:, ::1], float32[:, ::1], float32, float32,"
    " float32, float32, float32, float32, float32, float32, float32, U[::1])",
    ("float32", "float32"),
    ("float32", "bfloat16"),
)
def _adamw(
    param: Any,
    grad: Any,
    m: Any,
    v: Any,
    tiles: Any,
    rates: Any,
    lr: Any,
    clip: Any,
    beta1: Any,
    fresh1: Any,
    beta2: Any,
    fresh2: Any,
    correct1: Any,
    correct2: Any,
    eps: Any,
    working: Any,
) -> None:
    """`working` is a copy of param to rewrite, or of size 0."""
    for t in prange(tiles.shape[0]):
        start, stop, segment = tiles[t, 0], tiles[t, 1], tiles[t, 2]
        rate = lr * rates[segment, 0]
        keep = f32(1.0) - rate * rates[segment, 1]
        p = param[start:stop]
        g = grad[start:stop]
        first = m[start:stop]
        second = v[start:stop]
        for i in range(p.size):
            gradient = g[i] * clip
            mean = beta1 * first[i] + fresh1 * gradient
            square = beta2 * second[i] + fresh2 * gradient * gradient
            first[i] = mean
            second[i] = square
            p[i] = p[i] * keep - rate * (mean * correct1) / (np.sqrt(square * correct2) + eps)
        # While the tile is in the cache.
        copy = working[start:stop]
        for i in range(copy.size):
            copy[i] = narrow(copy, p[i])
