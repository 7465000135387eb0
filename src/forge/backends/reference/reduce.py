"""Reductions."""

from __future__ import annotations

import numpy as np

from forge.backends.reference.arrays import add, read, write
from forge.tensor import Tensor


def sum_rows(x: Tensor, *, out: Tensor) -> None:
    """out[c] += sum over n of x[n, c]."""
    add(out, read(x).sum(axis=0))


def sum_to(x: Tensor, *, out: Tensor) -> None:
    """out = x summed over the dimensions that out has once."""
    axes = tuple(i for i, (n, m) in enumerate(zip(x.shape, out.shape, strict=True)) if n != m)
    write(out, read(x).sum(axis=axes, keepdims=True))


def max(x: Tensor, *, out: Tensor, mask: Tensor | None = None, axis: tuple[int, ...]) -> None:
    """out = the largest over `axis`, kept as dimensions of 1; mask = d out / dx, ties sharing."""
    value = read(x)
    largest = value.max(axis=axis, keepdims=True)
    write(out, largest)
    if mask is not None:
        ties = (value == largest).astype(value.dtype)
        write(mask, ties / ties.sum(axis=axis, keepdims=True))


def argmax(x: Tensor, *, out: Tensor) -> None:
    """out [N] = the first place of the largest in each row of x [N, C]."""
    out.array[...] = read(x).argmax(-1)


def finite(x: Tensor) -> bool:
    """Whether every element is finite."""
    return bool(np.isfinite(read(x)).all())


def extent(x: Tensor) -> tuple[float, float]:
    """Smallest and largest of the finite elements; NaN where there are none."""
    value = read(x)
    value = value[np.isfinite(value)]
    return (float(value.min()), float(value.max())) if value.size else (np.nan, np.nan)
