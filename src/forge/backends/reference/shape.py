"""Shape kernels: elements moved, none changed."""

from __future__ import annotations

from builtins import slice as index
from collections.abc import Sequence
from typing import Any

import numpy as np

from forge.backends.reference.arrays import Array
from forge.tensor import Tensor


def transpose(x: Tensor, *, out: Tensor, axes: tuple[int, ...]) -> None:
    """out = x with its dimensions in the order `axes`."""
    out.array[...] = np.transpose(x.array, axes)


def slice(x: Tensor, *, out: Tensor, start: tuple[int, ...], step: tuple[int, ...]) -> None:
    """out = every step-th element of x from `start` on, per dimension."""
    out.array[...] = _window(x.array, out.shape, start, step)


def unslice(dy: Tensor, *, out: Tensor, start: tuple[int, ...], step: tuple[int, ...]) -> None:
    """Write dy where `slice` read; out is zero already."""
    _window(out.array, dy.shape, start, step)[...] = dy.array


def concat(xs: Sequence[Tensor], *, out: Tensor, axis: int) -> None:
    """out = the xs one after the other along `axis`."""
    np.concatenate([x.array for x in xs], axis=axis, out=out.array)


def broadcast_to(x: Tensor, *, out: Tensor) -> None:
    """out = x repeated over the dimensions it lacks or has once."""
    out.array[...] = x.array


def take(x: Tensor, ids: Tensor, *, out: Tensor) -> None:
    """out[i] = x[ids[i]]."""
    out.array[...] = x.array[ids.array]


def _window(
    array: Array, shape: tuple[int, ...], start: tuple[int, ...], step: tuple[int, ...]
) -> Array:
    where: tuple[Any, ...] = tuple(
        index(first, first + count * stride, stride)
        for first, count, stride in zip(start, shape, step, strict=True)
    )
    return array[(*where, ...)]  # With the ellipsis a rank of 0 gives an array, too.
