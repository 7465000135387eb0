"""Pointwise kernels: one element out of the elements in its place."""

from __future__ import annotations

import math

import numpy as np

from forge.backends.reference.arrays import Array, read, write
from forge.backends.reference.arrays import add as _add_to
from forge.philox import threshold, words
from forge.tensor import Tensor

# GPT-2's approximation, Hendrycks and Gimpel (2016): gelu(x) = x/2 (1 + tanh(k (x + c x^3))).
GELU_K = math.sqrt(2.0 / math.pi)
GELU_C = 0.044715

_erf = np.vectorize(math.erf, otypes=[np.float64])


def add(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a + b, broadcast."""
    write(out, read(a) + read(b))


def sub(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a - b, broadcast."""
    write(out, read(a) - read(b))


def mul(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a b, broadcast."""
    write(out, read(a) * read(b))


def div(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a / b, broadcast; IEEE infinities and NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        write(out, read(a) / read(b))


def maximum(a: Tensor, b: Tensor, *, out: Tensor, mask: Tensor | None = None) -> None:
    """out = the larger; mask = d out / d a: 1, 0, or 0.5 where they are equal."""
    x, y = read(a), read(b)
    write(out, np.maximum(x, y))
    if mask is not None:
        write(mask, np.where(x == y, 0.5, (x > y).astype(x.dtype)))


def scale(x: Tensor, factor: float | Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """out = factor x, or out += factor x; factor is a number or a Tensor of one element."""
    number = factor.item() if isinstance(factor, Tensor) else factor
    value = read(x) * np.asarray(number, read(x).dtype)
    if accumulate:
        _add_to(out, value)
    else:
        write(out, value)


def accumulate(x: Tensor, *, out: Tensor) -> None:
    """out += x, out of the same or a wider dtype."""
    _add_to(out, read(x))


def neg(x: Tensor, *, out: Tensor) -> None:
    """out = -x."""
    write(out, -read(x))


def exp(x: Tensor, *, out: Tensor) -> None:
    """out = e^x."""
    with np.errstate(over="ignore"):
        write(out, np.exp(read(x)))


def log(x: Tensor, *, out: Tensor) -> None:
    """out = ln x."""
    with np.errstate(divide="ignore", invalid="ignore"):
        write(out, np.log(read(x)))


def tanh(x: Tensor, *, out: Tensor) -> None:
    """out = tanh x."""
    write(out, np.tanh(read(x)))


def where(condition: Tensor, a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a where the condition holds, else b."""
    write(out, np.where(condition.array, a.array, b.array))


def cast(x: Tensor, *, out: Tensor) -> None:
    """out = x in out's dtype, rounded to nearest even."""
    with np.errstate(over="ignore"):
        write(out, x.array)


def gelu(x: Tensor, *, out: Tensor, form: str) -> None:
    """out = x Phi(x): Phi by `erf`, or by GPT-2's `tanh` approximation."""
    write(out, gelu_array(read(x), form))


def gelu_array(x: Array, form: str) -> Array:
    """gelu on an array."""
    if form == "erf":
        exact: Array = (x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))).astype(x.dtype)
        return exact
    result: Array = 0.5 * x * (1.0 + np.tanh(GELU_K * (x + GELU_C * x**3)))
    return result


def gelu_backward(x: Tensor, dy: Tensor, *, out: Tensor, sums: Tensor | None, form: str) -> None:
    """out = dy gelu'(x); sums[c] += sum over n of out[n, c]."""
    result = read(dy) * gelu_slope(read(x), form)
    write(out, result)
    if sums is not None:
        _add_to(sums, result.sum(axis=tuple(range(x.ndim - 1))))


def gelu_slope(x: Array, form: str) -> Array:
    """gelu' on an array."""
    if form == "erf":
        cdf = 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))
        slope = cdf + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    else:
        t = np.tanh(GELU_K * (x + GELU_C * x**3))
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * GELU_K * (1.0 + 3.0 * GELU_C * x * x)
    result: Array = slope.astype(x.dtype)
    return result


def dropout(
    x: Tensor, key: Tensor, *, out: Tensor, p: float, site: int, first_sample: int, samples: int
) -> None:
    """out = x / (1 - p) where the element's word is at least round(p 2^32), else 0."""
    keep = keep_mask(x.size, key, p=p, site=site, first_sample=first_sample, samples=samples)
    v = read(x)
    write(out, np.where(keep.reshape(x.shape), v * np.asarray(1.0 / (1.0 - p), v.dtype), 0))


def keep_mask(
    size: int, key: Tensor, *, p: float, site: int, first_sample: int, samples: int
) -> Array:
    """Which of `size` elements dropout keeps, bool [size]; samples count within the whole batch."""
    seed, step = (int(word) for word in key.array)
    per_sample = size // max(samples, 1)
    rows = [
        words(per_sample, (seed, step), stream=first_sample + sample, site=site)
        for sample in range(samples)
    ]
    return np.concatenate(rows) >= threshold(p) if rows else np.zeros(0, bool)
