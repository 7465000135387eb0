"""Products of few rows, as in decoding, where all that counts is to draw the matrix from memory.

For bfloat16. On an H200 at 64 rows the products of a GPT-2's MLP take 4.2 and 7.3 us, where
cuBLASLt takes 6.7 and 9.0. Logits of a vocabulary of 50257 take 25 us: their rows are unaligned,
which costs cuBLASLt four times as much, or a copy of the rows of 50304.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from forge.backends.cuda.shape import blocks
from forge.backends.cuda.triton_jit import launch
from forge.tensor import Tensor

# Rows of a program, at most.
ROWS = 64
# Columns of a program, terms of a step, and steps under way: where the matrix is stored by columns,
# where it has many, and where it has few.
BY_COLUMNS = {"COLUMNS": 128, "TERMS": 64, "STAGES": 4}
WIDE = {"COLUMNS": 32, "TERMS": 64, "STAGES": 6}
NARROW = {"COLUMNS": 16, "TERMS": 128, "STAGES": 5}
# From so many columns on there are programs for all multiprocessors.
MANY = 2048
# What the number of terms must be a multiple of.
ALIGNED = 128


@triton.jit
def _product(
    x,
    w,
    bias,
    out,
    M,
    N,
    K,
    TRANSPOSED: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out [M, N] = gelu(x [M, K] w + bias), where w is [K, N], or [N, K] if TRANSPOSED."""
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows, columns = (m < M)[:, None], (n < N)[None, :]
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in tl.range(0, K, TERMS, num_stages=STAGES):
        k = first + tl.arange(0, TERMS)
        a = tl.load(x + m.to(tl.int64)[:, None] * K + k[None, :], mask=rows, other=0.0)
        if TRANSPOSED:
            places = n.to(tl.int64)[None, :] * K + k[:, None]
        else:
            places = k.to(tl.int64)[:, None] * N + n[None, :]
        total = tl.dot(a, tl.load(w + places, mask=columns, other=0.0), total)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GELU:
        slope = 0.7978845608028654 * (1.0 + 0.044715 * total * total)
        total = total / (1.0 + tl.exp2(-2.8853900817779268 * slope * total))
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], total, mask=rows & columns)


def serves(m: int, n: int, k: int, dtype: str, *, transposed: bool) -> bool:
    """Whether this is the way for a product of [m, k] with [k, n], or with [n, k] transposed."""
    if dtype != "bfloat16" or k == 0 or k % ALIGNED:
        return False
    return m <= ROWS or n % 8 != 0 if transposed else m <= ROWS and n % WIDE["COLUMNS"] == 0


def product(
    x: Tensor, w: Tensor, bias: Tensor | None, *, out: Tensor, transposed: bool, gelu: bool = False
) -> None:
    """out = gelu(x w + bias), or of the first rows of a w that is transposed."""
    m, n = out.shape
    sizes: dict[str, Any] = BY_COLUMNS if transposed else WIDE if n >= MANY else NARROW
    rows = min(ROWS, max(16, triton.next_power_of_2(m)))
    launch(
        _product,
        (blocks(n, sizes["COLUMNS"]), blocks(m, rows)),
        x,
        w,
        bias,
        out,
        m,
        n,
        x.shape[1],
        TRANSPOSED=transposed,
        GELU=gelu,
        ROWS=rows,
        **sizes,
    )
