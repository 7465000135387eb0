"""Products of a few rows, such as one token's: B is read once, as it lies in memory.

C [M, N] = A [M, K] op(B) [K, N]. sgemm would first rearrange all of B, which takes longer than the
product itself. The thread count never shows in the bits, nor does the number of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from forge.backends.cpu.bfloat16 import narrow, wide
from forge.backends.cpu.jit import forms, routine
from forge.backends.cpu.mathlib import gelu_tanh

f32 = np.float32

# Rows of B that a thread takes at a time.
_DEPTH = 64

# a, b, bias, out, pre, all of rank 3 but the bias; bias and pre are of size 0 where there is none.
ARRAYS = "T[:, :, ::1], T[:, :, ::1], T[::1], T[:, :, ::1], T[:, :, ::1]"


@forms(f"void({ARRAYS}, boolean, float32, boolean, boolean)", cost=1.3)
def few_rows(
    a: Any,
    b: Any,
    bias: Any,
    out: Any,
    pre: Any,
    trans_b: Any,
    alpha: Any,
    accumulate: Any,
    gelu: Any,
) -> None:
    """pre (+)= alpha a op(b) + bias, out = gelu(pre); one matrix each."""
    M, K, N = a.shape[1], a.shape[2], out.shape[2]
    target = pre if pre.size else out
    tiles = ((N if trans_b else K) + _DEPTH - 1) // _DEPTH
    x = np.empty((M, K), f32)
    for m in range(M):
        put(a[0, m], x[m], f32(1.0), False)
    sums = np.empty((1 if trans_b else tiles, M, N), f32)
    for t in prange(tiles):
        if trans_b:
            _dots(x, b[0], sums[0], t * _DEPTH)
        else:
            _weighted(x, b[0], sums[t], t * _DEPTH)
    for m in range(M):
        row = sums[0, m]
        if not trans_b:
            for t in range(1, tiles):
                put(sums[t, m], row, f32(1.0), True)
        if bias.size:
            _times_plus(row, alpha, bias)
            put(row, target[0, m], f32(1.0), accumulate)
        else:
            put(row, target[0, m], alpha, accumulate)
        if gelu:
            gelu_row(target[0, m], out[0, m], pre.size > 0)


@routine
def put(values: Any, target: Any, factor: Any, accumulate: Any) -> None:
    """target (+)= factor * values."""
    if accumulate:
        for j in range(target.size):
            target[j] = narrow(target, wide(target[j]) + factor * wide(values[j]))
    else:
        for j in range(target.size):
            target[j] = narrow(target, factor * wide(values[j]))


@routine
def gelu_row(row: Any, out: Any, apart: Any) -> None:
    """out = gelu(row), by GPT-2's form; `apart` tells that out is not the row itself.

    LLVM needs the two cases spelt out: where one array has two names its check for overlap fails,
    and the loop runs element by element.
    """
    if apart:
        for j in range(row.size):
            out[j] = narrow(out, gelu_tanh(wide(row[j])))
    else:
        for j in range(row.size):
            row[j] = narrow(row, gelu_tanh(wide(row[j])))


@routine
def _times_plus(row: Any, factor: Any, bias: Any) -> None:
    for j in range(row.size):
        row[j] = factor * row[j] + wide(bias[j])


@routine
def _dots(a: Any, b: Any, c: Any, first: Any) -> None:
    """`_DEPTH` columns of c = a b^T."""
    for n in range(first, min(c.shape[1], first + _DEPTH)):
        y = b[n]
        for m in range(a.shape[0]):
            x = a[m]
            total = f32(0.0)
            for k in range(x.size):
                total += x[k] * wide(y[k])
            c[m, n] = total


@routine
def _weighted(a: Any, b: Any, sums: Any, first: Any) -> None:
    """sums[m] = the sum over `_DEPTH` values of k of a[m, k] b[k]."""
    M, K = a.shape
    for m in range(M):
        put(b[first], sums[m], a[m, first], False)
    stop = min(K, first + _DEPTH)
    fours = first + 1 + (stop - first - 1) // 4 * 4
    # Four rows of B at a time: as many streams from memory, and a quarter of the traffic on sums.
    for k in range(first + 1, fours, 4):
        b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
        for m in range(M):
            x0, x1, x2, x3 = a[m, k], a[m, k + 1], a[m, k + 2], a[m, k + 3]
            row = sums[m]
            for j in range(row.size):
                low = x0 * wide(b0[j]) + x1 * wide(b1[j])
                row[j] += low + (x2 * wide(b2[j]) + x3 * wide(b3[j]))
    for k in range(fours, stop):
        for m in range(M):
            put(b[k], sums[m], a[m, k], True)
