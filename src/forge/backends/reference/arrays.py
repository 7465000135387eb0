"""How the reference reads and writes arrays: bfloat16 is widened to float32 and rounded once."""

from __future__ import annotations

import numpy as np

from forge.tensor import Tensor

Array = np.ndarray


def read(x: Tensor) -> Array:
    """The array of x, bfloat16 as float32 (exact)."""
    array: Array = x.array
    return array.astype(np.float32) if x.dtype == "bfloat16" else array


def write(out: Tensor, value: Array | float) -> None:
    """Round `value` to out's dtype and store it."""
    out.array[...] = value


def add(out: Tensor, value: Array) -> None:
    """Add `value` to out, rounding the sum once."""
    out.array[...] = read(out) + value
