"""Shape kernels: elements moved, none changed, of any dtype.

Each copies between a contiguous Tensor and a strided window of another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate as running
from operator import mul

import triton
import triton.language as tl

from forge.backends.cuda.triton_jit import launch
from forge.tensor import Shape, Tensor

BLOCK = 1024


@triton.jit
def block_indices(count, BLOCK: tl.constexpr):
    """The elements of this program, of 64 bits if the `count` of all is: dividing those is slow."""
    return tl.program_id(0).to(count.dtype) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def place(i, shape, strides):
    """Where element i, counted row by row in `shape`, lies under these strides; None: at i."""
    offset = i
    if strides is not None:
        offset = i.to(tl.int64) * 0
        for axis in tl.static_range(len(shape) - 1, -1, -1):
            offset += (i % shape[axis]).to(tl.int64) * strides[axis]
            i = i // shape[axis]
    return offset


@triton.jit
def _gather(x, out, count, first, shape, strides, BLOCK: tl.constexpr):
    i = block_indices(count, BLOCK)
    inside = i < count
    tl.store(out + i, tl.load(x + first + place(i, shape, strides), mask=inside), mask=inside)


@triton.jit
def _scatter(x, out, count, first, shape, strides, BLOCK: tl.constexpr):
    """A missing x counts as zeros."""
    i = block_indices(count, BLOCK)
    inside = i < count
    value = 0 if x is None else tl.load(x + i, mask=inside)
    tl.store(out + first + place(i, shape, strides), value, mask=inside)


@triton.jit
def _take(x, ids, out, count, width, BLOCK: tl.constexpr):
    i = block_indices(count, BLOCK)
    inside = i < count
    row = tl.load(ids + i // width, mask=inside, other=0)
    tl.store(out + i, tl.load(x + row * width + i % width, mask=inside), mask=inside)


def gather(x: Tensor, *, out: Tensor, first: int, shape: Shape, strides: Shape) -> None:
    """out's elements, of `shape` row by row, = those of x from `first` on, with these strides."""
    merged = merge(shape, strides)
    launch(_gather, (blocks(out.size),), x, out, out.size, first, *merged, BLOCK=BLOCK)


def scatter(x: Tensor | None, *, out: Tensor, first: int, shape: Shape, strides: Shape) -> None:
    """Write x (zeros if None) where `gather` would read out."""
    count = math.prod(shape)
    merged = merge(shape, strides)
    launch(_scatter, (blocks(count),), x, out, count, first, *merged, BLOCK=BLOCK)


def blocks(count: int, size: int = BLOCK) -> int:
    """How many blocks of `size` hold `count` elements."""
    return -(-count // size)


def contiguous(shape: Shape) -> Shape:
    """The strides of a contiguous Tensor."""
    return tuple(running(shape[:0:-1], mul, initial=1))[::-1][: len(shape)]


def expanded(shape: Shape, to: Shape) -> Shape:
    """The strides with which a contiguous Tensor of `shape` is read as if broadcast to `to`."""
    padded = (1,) * (len(to) - len(shape)) + shape
    pairs = zip(padded, contiguous(padded), strict=True)
    return tuple(0 if size == 1 else stride for size, stride in pairs)


def merge(shape: Shape, *strides: Shape) -> tuple[Shape, ...]:
    """The same elements in the fewest dimensions: `shape`, then each of the `strides`."""
    kept: list[list[int]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if kept and all(a == b * size for a, b in zip(kept[-1][1:], steps, strict=True)):
            kept[-1] = [kept[-1][0] * size, *steps]
        else:
            kept.append([size, *steps])
    return tuple(zip(*kept, strict=True)) if kept else ((),) * (1 + len(strides))


def transpose(x: Tensor, *, out: Tensor, axes: tuple[int, ...]) -> None:
    """out = x with its dimensions in the order `axes`."""
    strides = contiguous(x.shape)
    gather(x, out=out, first=0, shape=out.shape, strides=tuple(strides[a] for a in axes))


def slice(x: Tensor, *, out: Tensor, start: tuple[int, ...], step: tuple[int, ...]) -> None:
    """out = every step-th element of x from `start` on, per dimension."""
    first, strides = _window(x.shape, start, step)
    gather(x, out=out, first=first, shape=out.shape, strides=strides)


def unslice(dy: Tensor, *, out: Tensor, start: tuple[int, ...], step: tuple[int, ...]) -> None:
    """Write dy where `slice` read; out is zero already."""
    first, strides = _window(out.shape, start, step)
    scatter(dy, out=out, first=first, shape=dy.shape, strides=strides)


def concat(xs: Sequence[Tensor], *, out: Tensor, axis: int) -> None:
    """out = the xs one after the other along `axis`."""
    strides = contiguous(out.shape)
    first = 0
    for x in xs:
        scatter(x, out=out, first=first, shape=x.shape, strides=strides)
        first += x.shape[axis] * strides[axis]


def broadcast_to(x: Tensor, *, out: Tensor) -> None:
    """out = x repeated over the dimensions it lacks or has once."""
    gather(x, out=out, first=0, shape=out.shape, strides=expanded(x.shape, out.shape))


def take(x: Tensor, ids: Tensor, *, out: Tensor) -> None:
    """out[i] = x[ids[i]]."""
    width = math.prod(x.shape[1:])
    launch(_take, (blocks(out.size),), x, ids, out, out.size, width, BLOCK=BLOCK)


def _window(shape: Shape, start: Shape, step: Shape) -> tuple[int, Shape]:
    """The first element of a window of a contiguous Tensor, and the window's strides."""
    strides = contiguous(shape)
    first = sum(a * b for a, b in zip(start, strides, strict=True))
    return first, tuple(a * b for a, b in zip(step, strides, strict=True))
