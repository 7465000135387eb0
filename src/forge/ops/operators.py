"""What connects the ops to Tensor, Var and Tape: one visible table, and the tape's arithmetic."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from forge.autograd.node import Var
from forge.autograd.tape import Tape
from forge.backends.capture import eager
from forge.backends.registry import kernels
from forge.dtypes import accumulator
from forge.errors import DtypeError, ShapeError
from forge.ops.embedding import take
from forge.ops.linear import matmul
from forge.ops.pointwise import add, cast, div, mul, neg, scale, sub
from forge.ops.reduce import sum_to
from forge.ops.shape import reshape, slice
from forge.tensor import Tensor, tensor

NUMBER = int | float | np.number


def _lift(x: Any, like: Any) -> Any:
    """A number as a scalar Tensor of `like`'s dtype and device."""
    return tensor(x, like.dtype, like.device) if isinstance(x, NUMBER) else x


def _times(x: Any, y: Any) -> Any:
    return scale(x, float(y)) if isinstance(y, NUMBER) else mul(x, y)


def index(x: Any, key: Any) -> Any:
    """x[key]: ints, slices with a positive step, `...`, or one int64 Tensor of rows.

    Raises ShapeError for anything else, and for an int out of range.
    """
    if isinstance(key, Tensor):
        return take(x, key)
    keys = list(key) if isinstance(key, tuple) else [key]
    # By identity: to compare with an array is to ask it for its truth.
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), None)
    if at is not None:
        keys[at : at + 1] = [builtins.slice(None)] * (len(x.shape) - len(keys) + 1)
    keys += [builtins.slice(None)] * (len(x.shape) - len(keys))
    if len(keys) > len(x.shape):
        raise ShapeError(f"[index] expected at most {len(x.shape)} indices, got {len(keys)}")
    start, shape, step, kept = [], [], [], []
    for k, size in zip(keys, x.shape, strict=True):
        if isinstance(k, builtins.slice):
            first, stop, stride = k.indices(size)
            count = len(range(first, stop, stride))
            kept.append(count)
        elif isinstance(k, int | np.integer) and not isinstance(k, bool) and -size <= k < size:
            first, stride, count = int(k) % size, 1, 1
        else:
            raise ShapeError(f"[index] expected ints below {size} or slices, got {k!r}")
        if stride < 1:
            raise ShapeError(f"[index] expected a positive step, got {stride}")
        start.append(first if count else 0)
        shape.append(count)
        step.append(stride)
    if tuple(shape) != x.shape:
        x = slice(x, tuple(start), tuple(shape), tuple(step))
    return reshape(x, tuple(kept)) if len(kept) < len(shape) else x


def _compare(x: Any, y: Any) -> Any:
    value = "x.value" if isinstance(x, Var) else "x"
    raise DtypeError(
        f"[compare] expected numbers, got a {type(x).__name__}; compare {value}.item(), or make a "
        f"mask for ops.where of {value}.numpy()"
    )


OPERATORS = {
    "__add__": lambda x, y: add(x, _lift(y, x)),
    "__radd__": lambda x, y: add(_lift(y, x), x),
    "__sub__": lambda x, y: sub(x, _lift(y, x)),
    "__rsub__": lambda x, y: sub(_lift(y, x), x),
    "__mul__": _times,
    "__rmul__": _times,
    "__truediv__": lambda x, y: div(x, _lift(y, x)),
    "__rtruediv__": lambda x, y: div(_lift(y, x), x),
    "__neg__": lambda x: neg(x),
    "__matmul__": lambda x, y: matmul(x, y),
    "__getitem__": index,
    **dict.fromkeys(("__lt__", "__le__", "__gt__", "__ge__"), _compare),
    # NumPy's numbers and arrays on the left leave the operation to ours, instead of making arrays.
    "__array_ufunc__": None,
    "__iter__": lambda x: (index(x, i) for i in range(x.shape[0])),
}

for _class in (Tensor, Var):
    for _name, _function in OPERATORS.items():
        setattr(_class, _name, _function)


class _Arithmetic:
    """What `Tape.arithmetic` promises, out of ops."""

    add = staticmethod(add)
    sum_to = staticmethod(sum_to)
    eager = staticmethod(eager)

    @staticmethod
    def add_(a: Tensor, b: Tensor) -> None:
        # As `check.buffer`: no kernel adds to what is wider still.
        b = b if a.dtype in (b.dtype, accumulator(b.dtype)) else cast(b, a.dtype)
        kernels(b).accumulate(b, out=a)
        a.storage.version += 1

    @staticmethod
    def finite(x: Any) -> bool:
        value = x.value if isinstance(x, Var) else x
        return bool(kernels(value).finite(value))

    @staticmethod
    def describe(x: Any) -> str:
        value = x.value if isinstance(x, Var) else x
        low, high = kernels(value).extent(value)
        bad = "" if kernels(value).finite(value) else ", not all finite"
        return f"{list(value.shape)} {value.dtype} in [{low:.4g}, {high:.4g}]{bad}"


Tape.arithmetic = _Arithmetic
