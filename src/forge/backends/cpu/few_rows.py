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

# Rows of B that a thread takes at a time: GPT-2's matrices have a multiple of eight times as many.
_DEPTH = 96

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
        first = t * _DEPTH
        stop = min(N if trans_b else K, first + _DEPTH)
        if trans_b:
            dots(x, b[0], sums[0], first, stop)
        else:
            _weighted(x, b[0], sums[t], first, stop)
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
def dots(a: Any, b: Any, c: Any, first: Any, stop: Any) -> None:
    """Columns `first` … `stop` - 1 of c = a b^T.

    Four rows of b at a time, a quarter of them all apart: four streams, each of which goes on where
    it was, are read from memory 1.3 to 2 times as fast as four rows next to each other.
    """
    apart = (stop - first) // 4
    for n in range(first, first + apart):
        b0, b1, b2, b3 = b[n], b[n + apart], b[n + 2 * apart], b[n + 3 * apart]
        for m in range(a.shape[0]):
            x = a[m]
            t0 = t1 = t2 = t3 = f32(0.0)
            for k in range(x.size):
                t0 += x[k] * wide(b0[k])
                t1 += x[k] * wide(b1[k])
                t2 += x[k] * wide(b2[k])
                t3 += x[k] * wide(b3[k])
            c[m, n], c[m, n + apart] = t0, t1
            c[m, n + 2 * apart], c[m, n + 3 * apart] = t2, t3
    for n in range(first + 4 * apart, stop):
        y = b[n]
        for m in range(a.shape[0]):
            x = a[m]
            total = f32(0.0)
            for k in range(x.size):
                total += x[k] * wide(y[k])
            c[m, n] = total


@routine
def _weighted(a: Any, b: Any, sums: Any, first: Any, stop: Any) -> None:
    """sums[m] = the sum over k = `first` … `stop` - 1 of a[m, k] b[k]; streams as in `dots`."""
    apart = (stop - first) // 4
    sums[:] = f32(0.0)
    for k in range(first, first + apart):
        b0, b1, b2, b3 = b[k], b[k + apart], b[k + 2 * apart], b[k + 3 * apart]
        for m in range(a.shape[0]):
            x = a[m]
            x0, x1, x2, x3 = x[k], x[k + apart], x[k + 2 * apart], x[k + 3 * apart]
            row = sums[m]
            for j in range(row.size):
                total = row[j] + x0 * wide(b0[j])
                total += x1 * wide(b1[j])
                total += x2 * wide(b2[j])
                row[j] = total + x3 * wide(b3[j])
    for k in range(first + 4 * apart, stop):
        for m in range(a.shape[0]):
            put(b[k], sums[m], a[m, k], True)
