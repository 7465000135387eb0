"""bfloat16 inside kernels: its bits as uint16, widened when read and rounded when written.

A kernel's source is written once for float32 and bfloat16 arrays: `wide` and `narrow` leave
float32 as it is. All arithmetic and all sums are in float32.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forge.tensor import Tensor

_SHORT = ir.IntType(16)
_WORD = ir.IntType(32)
_FLOAT = ir.FloatType()
_UINT16 = np.dtype(np.uint16)


def bits(x: Tensor) -> np.ndarray:
    """x's array as kernels take it: bfloat16 as uint16."""
    array: np.ndarray = x.array
    return array.view(_UINT16) if x.dtype == "bfloat16" else array


def f32_of(x: Tensor) -> np.ndarray:
    """x's array in float32: itself, or a copy. For what has a row's length at most."""
    array: np.ndarray = x.array
    return array if x.dtype == "float32" else array.astype(np.float32)


@intrinsic
def wide(typing: Any, x: Any) -> Any:
    """The float32 value of an element: of bfloat16's bits, of an int8, or of float32 itself."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x == types.float32:
            return args[0]
        if x == types.int8:
            return builder.sitofp(args[0], _FLOAT)
        word = builder.shl(builder.zext(args[0], _WORD), ir.Constant(_WORD, 16))
        return builder.bitcast(word, _FLOAT)

    return types.float32(x), generate


@intrinsic
def narrow(typing: Any, array: Any, x: Any) -> Any:
    """The float32 x as an element of `array`: itself, or bfloat16's bits, rounded to nearest even.

    A NaN keeps its sign alone, as ml_dtypes has it. In integers: LLVM vectorises these, and its own
    conversion on some processors only.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if array.dtype == types.float32:
            return args[1]

        def constant(value: int) -> Any:
            return ir.Constant(_WORD, value)

        word = builder.bitcast(args[1], _WORD)
        odd = builder.and_(builder.lshr(word, constant(16)), constant(1))
        rounded = builder.add(word, builder.add(odd, constant(0x7FFF)))
        sign = builder.and_(word, constant(0x80000000))
        quiet = builder.or_(sign, constant(0x7FC00000))
        # By the bits: a comparison of floats might be folded under fast-math.
        size = builder.and_(word, constant(0x7FFFFFFF))
        is_nan = builder.icmp_unsigned(">", size, constant(0x7F800000))
        chosen = builder.select(is_nan, quiet, rounded)
        return builder.trunc(builder.lshr(chosen, constant(16)), _SHORT)

    return array.dtype(array, types.float32), generate
