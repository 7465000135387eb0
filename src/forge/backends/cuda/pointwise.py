"""Pointwise kernels: one element out of the elements in its place, computed in float32."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from forge.backends.cuda.philox import keep_factors
from forge.backends.cuda.reduce import fold
from forge.backends.cuda.shape import block_indices, blocks, expanded, merge, place
from forge.backends.cuda.triton_jit import launch
from forge.philox import threshold
from forge.tensor import Shape, Tensor, empty

BLOCK = 1024
# Tiles of a program that also sums columns, and programs: four for each multiprocessor of the
# largest cards, and the same on every card, for the same bits.
SUM_ROWS, SUM_COLUMNS = 8, 512
SUM_PROGRAMS = 528

LOG2_E = tl.constexpr(math.log2(math.e))
# What float32 loses of it.
LOG2_E_REST = tl.constexpr(math.log2(math.e) - 1.4426950216293335)
LN_2 = tl.constexpr(math.log(2.0))
# GPT-2's approximation, Hendrycks and Gimpel (2016): gelu(x) = x/2 (1 + tanh(k (x + c x^3))),
# which is x sigmoid(2 k (x + c x^3)).
GELU_2K = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
GELU_C = tl.constexpr(0.044715)
SQRT_HALF = tl.constexpr(math.sqrt(0.5))
NORMAL_DENSITY = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))


@triton.jit
def exact_exp(x):
    """e^x. The GPU's 2^y is good to 2^-22, but y = x log2(e) rounded costs |x| times that."""
    y = x * LOG2_E
    lost = tl.fma(x, LOG2_E, -y) + x * LOG2_E_REST
    power = tl.exp2(y)
    return tl.where(tl.abs(x) < 88.0, power + power * (lost * LN_2), power)


@triton.jit
def exact_tanh(x):
    """tanh x; for small x, where 1 - 2 / (e^2x + 1) cancels, the polynomial of Cephes' tanhf."""
    s = x * x
    small = -5.70498872745e-3 * s + 2.06390887954e-2
    small = small * s - 5.37397155531e-2
    small = small * s + 1.33314422036e-1
    small = small * s - 3.33332819422e-1
    small = x + x * s * small
    large = 1.0 - 2.0 / (exact_exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def gelu_of(x, FORM: tl.constexpr):
    """x Phi(x)."""
    if FORM == "erf":
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    else:
        y = x * sigmoid(GELU_2K * (x + GELU_C * x * x * x))
    return y


@triton.jit
def gelu_slope(x, FORM: tl.constexpr):
    """The derivative of gelu."""
    if FORM == "erf":
        density = NORMAL_DENSITY * tl.exp(-0.5 * x * x)
        slope = 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * density
    else:
        s = sigmoid(GELU_2K * (x + GELU_C * x * x * x))
        slope = s + x * s * (1.0 - s) * GELU_2K * (1.0 + 3.0 * GELU_C * x * x)
    return slope


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _binary(a, b, out, count, shape, a_strides, b_strides, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = block_indices(count, BLOCK)
    inside = i < count
    x = tl.load(a + place(i, shape, a_strides), mask=inside).to(tl.float32)
    y = tl.load(b + place(i, shape, b_strides), mask=inside).to(tl.float32)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    else:
        z = tl.div_rn(x, y)
    tl.store(out + i, z, mask=inside)


@triton.jit
def _unary(x, out, count, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = block_indices(count, BLOCK)
    inside = i < count
    v = tl.load(x + i, mask=inside, other=1.0).to(tl.float32)
    if OP == "neg":
        y = -v
    elif OP == "exp":
        y = exact_exp(v)
    elif OP == "log":
        y = tl.log(v)
    elif OP == "tanh":
        y = exact_tanh(v)
    else:
        y = gelu_of(v, OP)
    tl.store(out + i, y, mask=inside)


@triton.jit
def _maximum(a, b, out, slope, count, BLOCK: tl.constexpr):
    i = block_indices(count, BLOCK)
    inside = i < count
    x = tl.load(a + i, mask=inside).to(tl.float32)
    y = tl.load(b + i, mask=inside).to(tl.float32)
    tl.store(out + i, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL), mask=inside)
    if slope is not None:
        share = tl.where(x == y, 0.5, tl.where(x > y, 1.0, 0.0))
        tl.store(slope + i, share, mask=inside)


@triton.jit
def _scale(x, factor, number, out, count, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):
    """`factor`, if given, is a scalar on the device; else `number` is the factor."""
    i = block_indices(count, BLOCK)
    inside = i < count
    y = tl.load(x + i, mask=inside).to(tl.float32)
    y *= number if factor is None else tl.load(factor).to(tl.float32)
    if ACCUMULATE:
        y += tl.load(out + i, mask=inside).to(tl.float32)
    tl.store(out + i, y, mask=inside)


@triton.jit
def _where(condition, a, b, out, count, BLOCK: tl.constexpr):
    i = block_indices(count, BLOCK)
    inside = i < count
    holds = tl.load(condition + i, mask=inside, other=0)
    x = tl.load(a + i, mask=inside)
    y = tl.load(b + i, mask=inside)
    tl.store(out + i, tl.where(holds, x, y), mask=inside)


@triton.jit
def _cast(x, out, count, BLOCK: tl.constexpr):
    i = block_indices(count, BLOCK)
    inside = i < count
    value = tl.load(x + i, mask=inside, other=0)
    if out.dtype.element_ty == tl.bfloat16:
        # There is no cast from float64 or integers to it.
        value = value.to(tl.float32)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(x, dy, out, count, FORM: tl.constexpr, BLOCK: tl.constexpr):
    i = block_indices(count, BLOCK)
    inside = i < count
    v = tl.load(x + i, mask=inside).to(tl.float32)
    d = tl.load(dy + i, mask=inside).to(tl.float32)
    tl.store(out + i, d * gelu_slope(v, FORM), mask=inside)


@triton.jit
def _gelu_backward_sums(
    x,
    dy,
    out,
    partial,
    N,
    C,
    per_program,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of some rows and columns, and what they add to the sums of the columns."""
    part = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    start = part * per_program
    for first in range(0, per_program, ROWS):
        rows = start + first + tl.arange(0, ROWS)
        inside = (rows < N)[:, None] & (columns < C)[None, :]
        places = rows.to(tl.int64)[:, None] * C + columns[None, :]
        v = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + places, mask=inside, other=0.0).to(tl.float32)
        slope = d * gelu_slope(v, FORM)
        tl.store(out + places, slope, mask=inside)
        total += slope
    tl.store(partial + part * C + columns, tl.sum(total, 0), mask=columns < C)


@triton.jit
def _dropout(x, key, out, per_sample, first_sample, site, limit, factor, BLOCK: tl.constexpr):
    """A program drops BLOCK elements of one sample."""
    sample = tl.program_id(1)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < per_sample
    i = sample.to(tl.int64) * per_sample + element
    v = tl.load(x + i, mask=inside).to(tl.float32)
    keep = keep_factors(element, first_sample + sample, site, key, limit, factor)
    tl.store(out + i, v * keep, mask=inside)


def add(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a + b, broadcast."""
    _combine(a, b, out, "add")


def sub(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a - b, broadcast."""
    _combine(a, b, out, "sub")


def mul(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a b, broadcast."""
    _combine(a, b, out, "mul")


def div(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a / b, broadcast; IEEE infinities and NaN."""
    _combine(a, b, out, "div")


def _combine(a: Tensor, b: Tensor, out: Tensor, op: str) -> None:
    shape: Shape = ()
    a_strides = b_strides = shape
    if a.shape != b.shape:
        shape, a_strides, b_strides = merge(
            out.shape, expanded(a.shape, out.shape), expanded(b.shape, out.shape)
        )
    launch(
        _binary,
        (blocks(out.size, BLOCK),),
        a,
        b,
        out,
        out.size,
        shape,
        # None says: as they lie, so that loads are of 128 bits.
        None if a.size == out.size else a_strides,
        None if b.size == out.size else b_strides,
        OP=op,
        BLOCK=BLOCK,
    )


def maximum(a: Tensor, b: Tensor, *, out: Tensor, mask: Tensor | None = None) -> None:
    """out = the larger; mask = d out / d a: 1, 0, or 0.5 where they are equal."""
    launch(_maximum, (blocks(out.size, BLOCK),), a, b, out, mask, out.size, BLOCK=BLOCK)


def scale(x: Tensor, factor: float | Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """out = factor x, or out += factor x; factor is a number or a Tensor of one element."""
    given = isinstance(factor, Tensor)
    launch(
        _scale,
        (blocks(out.size, BLOCK),),
        x,
        factor if given else None,
        None if given else float(factor),
        out,
        out.size,
        ACCUMULATE=accumulate,
        BLOCK=BLOCK,
    )


def accumulate(x: Tensor, *, out: Tensor) -> None:
    """out += x, out of the same or a wider dtype."""
    scale(x, 1.0, out=out, accumulate=True)


def neg(x: Tensor, *, out: Tensor) -> None:
    """out = -x."""
    _map(x, out, "neg")


def exp(x: Tensor, *, out: Tensor) -> None:
    """out = e^x."""
    _map(x, out, "exp")


def log(x: Tensor, *, out: Tensor) -> None:
    """out = ln x."""
    _map(x, out, "log")


def tanh(x: Tensor, *, out: Tensor) -> None:
    """out = tanh x."""
    _map(x, out, "tanh")


def gelu(x: Tensor, *, out: Tensor, form: str) -> None:
    """out = x Phi(x): Phi by `erf`, or by GPT-2's `tanh` approximation."""
    _map(x, out, form if form == "erf" else "gelu")


def _map(x: Tensor, out: Tensor, op: str) -> None:
    launch(_unary, (blocks(out.size, BLOCK),), x, out, out.size, OP=op, BLOCK=BLOCK)


def where(condition: Tensor, a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a where the condition holds, else b."""
    launch(_where, (blocks(out.size, BLOCK),), condition, a, b, out, out.size, BLOCK=BLOCK)


def cast(x: Tensor, *, out: Tensor) -> None:
    """out = x in out's dtype, rounded to nearest even."""
    launch(_cast, (blocks(out.size, BLOCK),), x, out, out.size, BLOCK=BLOCK)


def gelu_backward(x: Tensor, dy: Tensor, *, out: Tensor, sums: Tensor | None, form: str) -> None:
    """out = dy gelu'(x), and sums[c] += sum over n of out[n, c]; out may be dy."""
    if sums is None:
        grid = (blocks(out.size, BLOCK),)
        launch(_gelu_backward, grid, x, dy, out, out.size, FORM=form, BLOCK=BLOCK)
        return
    C = sums.size
    N = x.size // max(C, 1)
    across = blocks(C, SUM_COLUMNS)
    parts = max(1, min(SUM_PROGRAMS // max(1, across), blocks(N, SUM_ROWS)))
    partial = empty((parts, 1, C), "float32", x.device)
    launch(
        _gelu_backward_sums,
        (parts, across),
        x,
        dy,
        out,
        partial,
        N,
        C,
        blocks(blocks(N, parts), SUM_ROWS) * SUM_ROWS,
        FORM=form,
        ROWS=SUM_ROWS,
        COLUMNS=SUM_COLUMNS,
        num_warps=8,
    )
    fold(partial, sums)


def dropout(
    x: Tensor, key: Tensor, *, out: Tensor, p: float, site: int, first_sample: int, samples: int
) -> None:
    """out = x / (1 - p) where the element's word is at least round(p 2^32), else 0."""
    per_sample = x.size // max(samples, 1)
    launch(
        _dropout,
        (blocks(per_sample, BLOCK), samples),
        x,
        key,
        out,
        per_sample,
        first_sample,
        site,
        threshold(p),
        1.0 / (1.0 - p),
        BLOCK=BLOCK,
    )
