"""Shape kernels: elements moved, none changed. By NumPy; a training step of GPT-2 uses none."""

from __future__ import annotations

from builtins import slice as index
from collections.abc import Sequence

import numpy as np

from forge.tensor import Tensor


def transpose(x: Tensor, *, out: Tensor, axes: tuple[int, ...]) -> None:
    """out = x with its dimensions in the order `axes`."""
    np.copyto(out.array, np.transpose(x.array, axes))


def slice(x: Tensor, *, out: Tensor, start: tuple[int, ...], step: tuple[int, ...]) -> None:
    """out = every step-th element of x from `start` on, per dimension."""
    np.copyto(out.array, x.array[_window(out.shape, start, step)])


def unslice(dy: Tensor, *, out: Tensor, start: tuple[int, ...], step: tuple[int, ...]) -> None:
    """Write dy where `slice` read; out is zero already."""
    out.array[_window(dy.shape, start, step)] = dy.array


def concat(xs: Sequence[Tensor], *, out: Tensor, axis: int) -> None:
    """out = the xs one after the other along `axis`."""
    np.concatenate([x.array for x in xs], axis=axis, out=out.array)


def broadcast_to(x: Tensor, *, out: Tensor) -> None:
    """out = x repeated over the dimensions it lacks or has once."""
    np.copyto(out.array, x.array)


def take(x: Tensor, ids: Tensor, *, out: Tensor) -> None:
    """out[i] = x[ids[i]]."""
    np.take(x.array, ids.array, axis=0, out=out.array)


def _window(
    shape: tuple[int, ...], start: tuple[int, ...], step: tuple[int, ...]
) -> tuple[index, ...]:
    return tuple(
        index(first, first + count * stride, stride)
        for first, count, stride in zip(start, shape, step, strict=True)
    )
