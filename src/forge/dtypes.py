"""Dtype names and what follows from them.

Dtypes are strings everywhere in Forge; this is the one place that maps them to NumPy. bfloat16 is
`ml_dtypes.bfloat16`: storage and casts, with arithmetic left to kernels that widen it. int8 stores
quantized weights, each row of which has a scale beside it (`ops.quantize`).
"""

from functools import cache
from typing import Any

import numpy as np

from forge.errors import DtypeError

ITEMSIZE: dict[str, int] = {
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "int64": 8,
    "int8": 1,
    "bool": 1,
}
NAMES = tuple(ITEMSIZE)
FLOATING = frozenset({"float32", "float64", "bfloat16"})

# Spacing of 1.0: what tolerances are stated in.
EPSILON: dict[str, float] = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-7}


def accumulator(dtype: str) -> str:
    """The dtype that sums over values of `dtype` are kept in: statistics, losses, gradients."""
    return "float32" if dtype == "bfloat16" else dtype


@cache
def to_numpy(dtype: str) -> np.dtype:
    """NumPy's dtype of this name."""
    scalar: Any = dtype
    if dtype == "bfloat16":
        # Its import takes up to a second (ml_dtypes 0.7), and float32 needs nothing of it.
        from ml_dtypes import bfloat16 as scalar
    found: np.dtype = np.dtype(scalar)
    return found


def stored(dtype: np.dtype) -> bool:
    """Whether it is a NumPy dtype of those that Forge stores."""
    return dtype.name in NAMES and dtype == to_numpy(dtype.name)


def from_numpy(dtype: np.dtype) -> str:
    """Name of a NumPy dtype; raises `DtypeError` for one that Forge does not store."""
    if not stored(dtype):
        raise DtypeError(
            f"[dtype] expected one of {', '.join(NAMES)}, got NumPy's {dtype}; "
            "convert it with .astype first"
        )
    return dtype.name


def check(op: str, dtype: str) -> str:
    """Return `dtype` if it names one, else raise `DtypeError`."""
    if dtype not in NAMES:
        raise DtypeError(
            f"[{op}] expected a dtype of {', '.join(NAMES)}, got {dtype!r}; "
            'dtypes are named by strings, such as "float32"'
        )
    return dtype


def fits_int8(op: str, array: np.ndarray) -> None:
    """Raise `DtypeError` unless every element is one of int8's integers, -128 to 127."""
    if array.dtype in (np.int8, np.bool_) or not array.size:
        return
    low, high = array.min(), array.max()
    # A NaN fails the first comparison.
    if not (low >= -128 and high <= 127) or (array != np.rint(array)).any():
        raise DtypeError(
            f"[{op}] expected integers from -128 to 127 for int8, got {array.dtype} numbers from "
            f"{low} to {high}; ops.quantize rounds, with a scale for each row"
        )
