"""Dtype names and what follows from them.

Dtypes are strings everywhere in Forge; this is the one place that maps them to NumPy. bfloat16 is
`ml_dtypes.bfloat16`: storage and casts, with arithmetic left to kernels that widen it. int8 stores
quantized weights, each row of which has a scale beside it (`ops.quantize`).
"""

import ml_dtypes
import numpy as np

from forge.errors import DtypeError

NUMPY: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
    "int8": np.dtype(np.int8),
    "bool": np.dtype(np.bool_),
}
NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in NUMPY.items()}
FLOATING = frozenset({"float32", "float64", "bfloat16"})
ITEMSIZE: dict[str, int] = {name: dtype.itemsize for name, dtype in NUMPY.items()}

# Spacing of 1.0: what tolerances are stated in.
EPSILON: dict[str, float] = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-7}


def accumulator(dtype: str) -> str:
    """The dtype that sums over values of `dtype` are kept in: statistics, losses, gradients."""
    return "float32" if dtype == "bfloat16" else dtype


def from_numpy(dtype: np.dtype) -> str:
    """Name of a NumPy dtype; raises `DtypeError` for one that Forge does not store."""
    name = NAMES.get(dtype)
    if name is None:
        raise DtypeError(
            f"[dtype] expected one of {', '.join(NUMPY)}, got NumPy's {dtype}; "
            "convert it with .astype first"
        )
    return name


def check(op: str, dtype: str) -> str:
    """Return `dtype` if it names one, else raise `DtypeError`."""
    if dtype not in NUMPY:
        raise DtypeError(
            f"[{op}] expected a dtype of {', '.join(NUMPY)}, got {dtype!r}; "
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
