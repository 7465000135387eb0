"""Pointwise kernels. Those of a training step are compiled; NumPy's own loops serve the others.

Compiled loops run over tiles of a fixed size, so the thread count never shows in the bits.
"""

from typing import Any

import numpy as np
from numba import prange

from forge.backends.cpu.bfloat16 import bits, narrow, wide
from forge.backends.cpu.jit import forms, routine
from forge.backends.cpu.mathlib import gelu_erf, gelu_erf_slope, gelu_tanh, gelu_tanh_slope
from forge.backends.cpu.philox import keep_factors
from forge.backends.cpu.reduce import sum_rows
from forge.philox import threshold
from forge.tensor import Tensor

f32 = np.float32

# Elements of a tile: 64 KiB, so that three operands stay in a core's L2 cache.
_TILE = 16384
_ADD, _SUB, _MUL, _DIV = range(4)


def add(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a + b, broadcast."""
    if not _binary(_ADD, a, b, out):
        np.add(a.array, b.array, out=out.array)


def sub(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a - b, broadcast."""
    if not _binary(_SUB, a, b, out):
        np.subtract(a.array, b.array, out=out.array)


def mul(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a b, broadcast."""
    with np.errstate(over="ignore", invalid="ignore"):
        if not _binary(_MUL, a, b, out):
            np.multiply(a.array, b.array, out=out.array)


def div(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a / b, broadcast; IEEE infinities and NaN."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if not _binary(_DIV, a, b, out):
            np.divide(a.array, b.array, out=out.array)


def _binary(code: int, a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Compute it here where the shapes are equal or b is a row [C] under a [..., C]."""
    if a.shape == b.shape:
        run = _same_shape[a.dtype]
        run(code, bits(a).reshape(-1), bits(b).reshape(-1), bits(out).reshape(-1))
    elif out.size and b.shape == a.shape[-1:]:
        C = b.shape[0]
        _row[a.dtype](code, bits(a).reshape(-1, C), bits(b), bits(out).reshape(-1, C))
    else:
        return False
    return True


@routine
def _operate(code: Any, a: Any, b: Any, out: Any) -> None:
    if code == _ADD:
        for i in range(out.size):
            out[i] = narrow(out, wide(a[i]) + wide(b[i]))
    elif code == _SUB:
        for i in range(out.size):
            out[i] = narrow(out, wide(a[i]) - wide(b[i]))
    elif code == _MUL:
        for i in range(out.size):
            out[i] = narrow(out, wide(a[i]) * wide(b[i]))
    else:
        for i in range(out.size):
            out[i] = narrow(out, wide(a[i]) / wide(b[i]))


@forms("void(int64, T[::1], T[::1], T[::1])")
def _same_shape(code: Any, a: Any, b: Any, out: Any) -> None:
    for t in prange((out.size + _TILE - 1) // _TILE):
        lo = t * _TILE
        hi = lo + _TILE
        _operate(code, a[lo:hi], b[lo:hi], out[lo:hi])


@forms("void(int64, T[:, ::1], T[::1], T[:, ::1])")
def _row(code: Any, a: Any, b: Any, out: Any) -> None:
    N, C = out.shape
    rows = max(1, _TILE // C)
    for t in prange((N + rows - 1) // rows):
        for n in range(t * rows, min(N, (t + 1) * rows)):
            _operate(code, a[n], b, out[n])


def maximum(a: Tensor, b: Tensor, *, out: Tensor, mask: Tensor | None = None) -> None:
    """out = the larger; mask = d out / d a: 1, 0, or 0.5 where they are equal. By NumPy."""
    np.maximum(a.array, b.array, out=out.array)
    if mask is not None:
        mask.array[...] = a.array > b.array
        mask.array[a.array == b.array] = 0.5


def scale(x: Tensor, factor: float | Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """out = factor x, or out += factor x; factor is a number or a Tensor of one element."""
    number = factor.item() if isinstance(factor, Tensor) else factor
    run = _scale[x.dtype, out.dtype]
    run(bits(x).reshape(-1), f32(number), bits(out).reshape(-1), accumulate)


def accumulate(x: Tensor, *, out: Tensor) -> None:
    """out += x."""
    _scale[x.dtype, out.dtype](bits(x).reshape(-1), f32(1.0), bits(out).reshape(-1), True)


@forms("void(T[::1], float32, U[::1], boolean)")
def _scale(x: Any, factor: Any, out: Any, accumulate: Any) -> None:
    for t in prange((out.size + _TILE - 1) // _TILE):
        lo = t * _TILE
        a = x[lo : lo + _TILE]
        o = out[lo : lo + _TILE]
        if accumulate:
            for i in range(o.size):
                o[i] = narrow(o, wide(o[i]) + factor * wide(a[i]))
        else:
            for i in range(o.size):
                o[i] = narrow(o, factor * wide(a[i]))


def neg(x: Tensor, *, out: Tensor) -> None:
    """out = -x. By NumPy."""
    np.negative(x.array, out=out.array)


def exp(x: Tensor, *, out: Tensor) -> None:
    """out = e^x. By NumPy."""
    with np.errstate(over="ignore"):
        np.exp(x.array, out=out.array)


def log(x: Tensor, *, out: Tensor) -> None:
    """out = ln x. By NumPy."""
    with np.errstate(divide="ignore", invalid="ignore"):
        np.log(x.array, out=out.array)


def tanh(x: Tensor, *, out: Tensor) -> None:
    """out = tanh x. By NumPy."""
    np.tanh(x.array, out=out.array)


def where(condition: Tensor, a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a where the condition holds, else b. By NumPy."""
    np.copyto(out.array, b.array)
    np.copyto(out.array, a.array, where=condition.array)


def cast(x: Tensor, *, out: Tensor) -> None:
    """out = x in out's dtype, rounded to nearest even. By NumPy."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out.array, x.array, casting="unsafe")


def gelu(x: Tensor, *, out: Tensor, form: str) -> None:
    """out = x Phi(x): Phi by `erf`, or by GPT-2's `tanh` approximation."""
    gelu_array[x.dtype](bits(x).reshape(-1), bits(out).reshape(-1), form == "erf")


@forms("void(T[::1], T[::1], boolean)", cost=0.5)
def gelu_array(x: Any, out: Any, erf: Any) -> None:
    """out = gelu(x) on flat arrays, by erf or GPT-2's form."""
    for t in prange((out.size + _TILE - 1) // _TILE):
        lo = t * _TILE
        a = x[lo : lo + _TILE]
        o = out[lo : lo + _TILE]
        if erf:
            for i in range(o.size):
                o[i] = narrow(o, gelu_erf(wide(a[i])))
        else:
            for i in range(o.size):
                o[i] = narrow(o, gelu_tanh(wide(a[i])))


def gelu_backward(x: Tensor, dy: Tensor, *, out: Tensor, sums: Tensor | None, form: str) -> None:
    """out = dy gelu'(x), and sums[c] += sum over n of out[n, c]; out may be dy."""
    in_place = np.may_share_memory(dy.array, out.array)
    run = _gelu_backward[x.dtype]
    flat = bits(x).reshape(-1), bits(dy).reshape(-1), bits(out).reshape(-1)
    run(*flat, form == "erf", in_place)
    if sums is not None:
        sum_rows(out.view((x.size // max(sums.size, 1), sums.size)), out=sums)


@forms("void(T[::1], T[::1], T[::1], boolean, boolean)", cost=0.5)
def _gelu_backward(x: Any, dy: Any, out: Any, erf: Any, in_place: Any) -> None:
    for t in prange((out.size + _TILE - 1) // _TILE):
        lo = t * _TILE
        a = x[lo : lo + _TILE]
        d = dy[lo : lo + _TILE]
        o = out[lo : lo + _TILE]
        # The product is formed in place: with dy and out as two names of one array LLVM's check
        # for overlap fails, and the loop runs element by element, ten times slower.
        if not in_place:
            for i in range(o.size):
                o[i] = d[i]
        if erf:
            for i in range(o.size):
                o[i] = narrow(o, wide(o[i]) * gelu_erf_slope(wide(a[i])))
        else:
            for i in range(o.size):
                o[i] = narrow(o, wide(o[i]) * gelu_tanh_slope(wide(a[i])))


def dropout(
    x: Tensor, key: Tensor, *, out: Tensor, p: float, site: int, first_sample: int, samples: int
) -> None:
    """out = x / (1 - p) where the element's word is at least round(p 2^32), else 0."""
    if x.size == 0:
        return
    if threshold(p) > 0xFFFFFFFF:
        out.array.fill(0.0)
        return
    seed, step = (int(word) for word in key.array)
    _dropout[x.dtype](
        bits(x).reshape(samples, -1),
        bits(out).reshape(samples, -1),
        first_sample,
        site,
        seed,
        step,
        np.uint32(threshold(p)),
        f32(1.0 / (1.0 - p)),
    )


@forms("void(T[:, ::1], T[:, ::1], int64, int64, int64, int64, uint32, float32)", cost=0.5)
def _dropout(
    x: Any,
    out: Any,
    first_sample: Any,
    site: Any,
    seed: Any,
    step: Any,
    threshold: Any,
    scale: Any,
) -> None:
    samples, elements = x.shape
    tiles = (elements + _TILE - 1) // _TILE
    for t in prange(samples * tiles):
        sample = t // tiles
        lo = t % tiles * _TILE
        a = x[sample, lo : lo + _TILE]
        o = out[sample, lo : lo + _TILE]
        keep_factors(o, lo, first_sample + sample, site, seed, step, threshold, scale)
        for i in range(o.size):
            # A dropped element is 0 even where x is not finite. bfloat16 would round the factor.
            o[i] = narrow(o, wide(a[i]) * scale if wide(o[i]) != f32(0.0) else f32(0.0))
