"""Reductions. The sum over rows is compiled; NumPy's own loops serve the others.

N rows, C columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from forge.backends.cpu.bfloat16 import bits, narrow, wide
from forge.backends.cpu.jit import forms
from forge.tensor import Tensor

f32 = np.float32

# Rows whose sum is one partial result; partial results are added in the order of the tiles.
_ROWS = 64


def sum_rows(x: Tensor, *, out: Tensor) -> None:
    """out[c] += sum over n of x[n, c]."""
    _sum_rows[x.dtype, out.dtype](bits(x), bits(out))


@forms("void(T[:, ::1], U[::1])", cost=0.4)
def _sum_rows(x: Any, out: Any) -> None:
    N, C = x.shape
    tiles = (N + _ROWS - 1) // _ROWS
    partial = np.empty((tiles, C), f32)
    for t in prange(tiles):
        total = partial[t]
        rows = x[t * _ROWS : (t + 1) * _ROWS]
        for c in range(C):
            total[c] = wide(rows[0, c])
        for n in range(1, rows.shape[0]):
            row = rows[n]
            for c in range(C):
                total[c] += wide(row[c])
    for t in range(1, tiles):
        total = partial[t]
        for c in range(C):
            partial[0, c] += total[c]
    if tiles > 0:
        total = partial[0]
        for c in range(C):
            out[c] = narrow(out, wide(out[c]) + total[c])


def sum_to(x: Tensor, *, out: Tensor) -> None:
    """out = x summed over the dimensions that out has once."""
    axes = tuple(i for i, (n, m) in enumerate(zip(x.shape, out.shape, strict=True)) if n != m)
    kept = out.shape[len(axes) :]
    if axes == tuple(range(len(axes))) and kept == x.shape[len(axes) :]:
        C = int(np.prod(kept, dtype=np.int64))
        out.array.fill(0.0)
        if x.size:
            _sum_rows[x.dtype, out.dtype](bits(x).reshape(-1, C), bits(out).reshape(-1))
        return
    # In float64: NumPy adds floats along an outer dimension one by one.
    out.array[...] = x.array.astype(np.float64).sum(axis=axes, keepdims=True)


def max(x: Tensor, *, out: Tensor, mask: Tensor | None = None, axis: tuple[int, ...]) -> None:
    """out = the largest over `axis`, kept as dimensions of 1; mask = d out / dx, ties sharing."""
    np.max(x.array, axis=axis, keepdims=True, out=out.array)
    if mask is not None:
        ties = x.array == out.array
        with np.errstate(invalid="ignore"):
            mask.array[...] = ties / ties.sum(axis=axis, keepdims=True)


def finite(x: Tensor) -> bool:
    """Whether every element is finite."""
    return bool(np.isfinite(x.array).all())


def extent(x: Tensor) -> tuple[float, float]:
    """Smallest and largest of the finite elements; NaN where there are none."""
    value = x.array[np.isfinite(x.array)]
    return (float(value.min()), float(value.max())) if value.size else (np.nan, np.nan)
