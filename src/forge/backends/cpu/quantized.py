"""Weights in int8: what widens them, whole, a row or a register at a time.

A product of a few rows reads the weights as they lie, once, and widens them in registers; its bits
depend neither on the threads nor on the rows beside. More rows, a prompt's, are worth the widening
of the whole matrix, into scratch that the products of training then read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import prange

from forge.backends.cpu.bfloat16 import wide
from forge.backends.cpu.embedding import positions
from forge.backends.cpu.few_rows import dots, gelu_row
from forge.backends.cpu.jit import kernel, routine
from forge.backends.cpu.linear import product, product_workspace, with_gelu
from forge.tensor import Tensor, empty

Array = np.ndarray

# Rows that are better off without widened weights: 8 take half of the time that they take with
# them, 32 take 0.7 of it, and 48 as long.
_FEW = 32
# About the bytes of weights that a thread takes at a time: four streams from memory, the longer the
# better, but at least as many strips as threads.
_STRIP = 4 * 48 * 768
_NO_BIAS, _NO_PRE = np.zeros(0, np.float32), np.zeros((0, 0), np.float32)


@kernel("void(int8[:, ::1], float32[::1], float32[:, ::1])")
def _dequantize(q: Any, scale: Any, out: Any) -> None:
    for n in prange(q.shape[0]):
        _scaled(q[n], scale[n], out[n])


@routine
def _scaled(q: Any, scale: Any, out: Any) -> None:
    for k in range(out.size):
        out[k] = scale * wide(q[k])


@kernel(
    "void(float32[:, ::1], int8[:, ::1], float32[::1], float32[::1], float32[:, ::1],"
    " float32[:, ::1], boolean)",
    cost=0.6,
)
def _few_rows(x: Any, w: Any, scale: Any, bias: Any, out: Any, pre: Any, gelu: Any) -> None:
    """pre = scale (x w^T) + bias, out = gelu(pre); a bias or pre of size 0 is none."""
    N = w.shape[0]
    target = pre if pre.size else out
    # Fours of rows, and strips of these; the last has what is left.
    fours = N // 4
    strips = 4 * max(1, (w.size + 4 * _STRIP - 1) // (4 * _STRIP))
    for strip in prange(strips):
        first = strip * fours // strips * 4
        stop = (strip + 1) * fours // strips * 4 if strip + 1 < strips else N
        dots(x, w, target, first, stop)
        for m in range(x.shape[0]):
            row = target[m, first:stop]
            _times_plus(row, scale[first:stop], bias[first:stop])
            if gelu:
                gelu_row(row, out[m, first:stop], pre.size > 0)


@routine
def _times_plus(row: Any, scale: Any, bias: Any) -> None:
    if bias.size:
        for n in range(row.size):
            row[n] = row[n] * scale[n] + bias[n]
    else:
        for n in range(row.size):
            row[n] *= scale[n]


@kernel(
    "void(int64[:, ::1], int8[:, ::1], float32[::1], float32[:, ::1], int64[::1],"
    " float32[:, :, ::1])"
)
def _embedding(ids: Any, wte: Any, scale: Any, wpe: Any, pos: Any, out: Any) -> None:
    """A missing wpe has no rows."""
    B, T = ids.shape
    for n in prange(B * T):
        b = n // T
        t = n % T
        row = out[b, t]
        _scaled(wte[ids[b, t]], scale[ids[b, t]], row)
        if wpe.shape[0] > 0:
            position = wpe[pos[b] + t]
            for c in range(row.size):
                row[c] += position[c]


def dequantize(q: Tensor, scale: Tensor, *, out: Tensor) -> None:
    """out = scale q."""
    if out.dtype != "float32":
        out.array[...] = scale.array[..., None] * q.array
    elif q.size:
        shape = (scale.size, q.shape[-1])
        _dequantize(q.array.reshape(shape), scale.array.reshape(-1), out.array.reshape(shape))


def quantized_linear(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor,
    pre: Tensor | None,
    gelu: str | None,
) -> None:
    """pre = scale (x w^T) + bias; out = gelu(pre), or pre itself where gelu is None."""
    added = None if bias is None else bias.array
    if x.shape[0] <= _FEW:
        run = partial(_few, x.array, w.array, scale.array, added)
    else:
        widened = empty(w.shape, "float32", w.device)
        dequantize(w, scale, out=widened)
        run = partial(product, x.array, widened.array, added, trans_b=True)
    with_gelu(run, "float32", out.array, None if pre is None else pre.array, gelu)


def _few(
    x: Array,
    w: Array,
    scale: Array,
    bias: Array | None,
    *,
    out: Array,
    pre: Array | None = None,
    gelu: bool = False,
) -> None:
    _few_rows(
        x,
        w,
        scale,
        _NO_BIAS if bias is None else bias,
        out,
        _NO_PRE if pre is None else pre,
        gelu,
    )


def quantized_linear_workspace(
    x: Tensor, w: Tensor, *rest: Any, out: Tensor, **_: Any
) -> tuple[int, ...]:
    """Bytes of the widened weights, and of their product's scratch; none for a few rows."""
    if x.shape[0] <= _FEW:
        return ()
    return 4 * w.size, *product_workspace("float32", "float32", out.shape, x.shape[1])


def quantized_embedding(
    ids: Tensor, wte: Tensor, scale: Tensor, wpe: Tensor | None, *, out: Tensor, pos: int | Tensor
) -> None:
    """out[b, t] = scale[ids[b, t]] wte[ids[b, t]] + wpe[pos[b] + t]."""
    table = out.array.reshape(-1, out.shape[2])[:0] if wpe is None else wpe.array
    first = positions(pos, ids.shape[0])
    _embedding(ids.array, wte.array, scale.array, table, first, out.array)
