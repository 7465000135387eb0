"""Functions of float32 that LLVM vectorises, for use inside kernels.

Numba calls libm once per element (68 times slower in gelu), and its wheels come without SVML. The
polynomials here are minimax fits made for this file; each docstring states the largest error
measured over all floats against float64, in units in the last place (ulp) or relative to the value.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forge.backends.cpu.jit import device

f32 = np.float32

_FLOAT = ir.FloatType()
# Numba adds a kernel's fast-math flags only to instructions that have none.
FLAGS = ("contract",)


@intrinsic
def maximum(typing: Any, x: Any, y: Any) -> Any:
    """The greater float32, NaN if either is; unlike `max`, reductions by it vectorise anywhere."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_FLOAT, [_FLOAT] * 2)
        function = builder.module.declare_intrinsic("llvm.maximum", [_FLOAT], kind)
        return builder.call(function, args)

    return types.float32(types.float32, types.float32), generate


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """e^x; 0.83 ulp; 0 below -87.7, where it would be denormal, inf above 88.37; NaN stays.

    Written in LLVM's IR with flags of its own: a kernel's `reassoc` would fold the constants of the
    range reduction.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Exp(builder, _FLOAT).emit(args[0])

    return types.float32(types.float32), generate


class Exp:
    """Writes the instructions of e^x = 2^n e^r with integer n and |r| <= log(2) / 2.

    For x of the type `kind`, a float32 or a vector of them.
    """

    def __init__(self, builder: Any, kind: Any) -> None:
        self.builder = builder
        self.kind = kind
        self.lanes = kind.count if isinstance(kind, ir.VectorType) else 1
        self.words = self._like(ir.IntType(32))
        name = "llvm.fma.f32" if self.lanes == 1 else f"llvm.fma.v{self.lanes}f32"
        known = builder.module.globals.get(name)
        signature = ir.FunctionType(kind, [kind] * 3)
        self.fma_function = known or ir.Function(builder.module, signature, name)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a b + c, rounded once."""
        return self.builder.call(self.fma_function, [a, b, c])

    def emit(self, x: Any) -> Any:
        """e^x."""
        builder = self.builder
        # Comparisons are false for NaN, so it passes through.
        low, high = self._number(-88.0), self._number(89.0)
        x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
        # Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
        shifted = self.fma(x, self._number(1.4426950408889634), self._number(12582912.0))
        n = builder.fsub(shifted, self._number(12582912.0), flags=FLAGS)
        # log(2) in two parts, the first with so few bits that n times it is exact.
        r = self.fma(n, self._number(-0.693359375), x)
        r = self.fma(n, self._number(2.12194440e-4), r)
        p = self._number(0.0013814540579915047)
        for coefficient in (
            0.00836874544620514,
            0.04166838899254799,
            0.1666652113199234,
            0.4999999403953552,
            1.0,
            1.0,
        ):
            p = self.fma(p, r, self._number(coefficient))
        # n moves from the lowest bits to the exponent's, which leaves nothing of the 1.5 * 2^23; at
        # n = -127 the power is 0, at 128 infinite. A second factor would serve the few powers that
        # are denormal or above 2^127.5, and takes six of twenty-two instructions.
        n = builder.shl(builder.bitcast(shifted, self.words), self._word(23))
        power = builder.bitcast(builder.add(n, self._word(127 << 23)), self.kind)
        return builder.fmul(p, power, flags=FLAGS)

    def _like(self, element: Any) -> Any:
        return element if self.lanes == 1 else ir.VectorType(element, self.lanes)

    def _number(self, value: float) -> Any:
        return self._constant(self.kind, float(f32(value)))

    def _word(self, value: int) -> Any:
        return self._constant(self.words, value)

    def _constant(self, kind: Any, value: Any) -> Any:
        return ir.Constant(kind, value if self.lanes == 1 else [value] * self.lanes)


@device
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x); 2.2 ulp, and 0 below -88.38."""
    return f32(1.0) / (f32(1.0) + exp(-x))


@device
def tanh(x: Any) -> Any:
    """Hyperbolic tangent; 1.4 ulp."""
    z = x * x
    p = f32(-0.0057170456275343895)
    p = p * z + f32(0.02065058797597885)
    p = p * z + f32(-0.05374349653720856)
    p = p * z + f32(0.13331490755081177)
    p = p * z + f32(-0.3333328366279602)
    near = x + x * z * p
    far = f32(1.0) - f32(2.0) / (f32(1.0) + exp(f32(2.0) * abs(x)))
    far = -far if x < f32(0.0) else far
    return near if abs(x) < f32(0.625) else far


@device
def normal_cdf(x: Any) -> Any:
    """(1 + erf(x / sqrt(2))) / 2, the standard normal distribution function.

    Relative error 4e-7 (1 + x^2), in the lower tail too; absolute error 1.9e-7.
    """
    t = abs(x) * f32(0.7071067811865476)
    # erfc(t) = s exp(-t^2 + P(s)) with s = 1 / (1 + t/2): P is smooth and bounded on (0, 1].
    s = f32(1.0) / (f32(1.0) + f32(0.5) * t)
    p = f32(0.13896816968917847)
    p = p * s + f32(-0.6483120918273926)
    p = p * s + f32(1.080152988433838)
    p = p * s + f32(-0.5943141579627991)
    p = p * s + f32(-0.16452525556087494)
    p = p * s + f32(0.045941077172756195)
    p = p * s + f32(0.01945643126964569)
    p = p * s + f32(0.3897954523563385)
    p = p * s + f32(0.9982675313949585)
    p = p * s + f32(-1.2654300928115845)
    tail = f32(0.5) * s * exp(p - t * t)
    return tail if x < f32(0.0) else f32(1.0) - tail


# sqrt(2/pi) and the cubic's factor of GPT-2's gelu, both times two: tanh(u) = 2 sigmoid(2u) - 1.
_GELU_K = f32(2.0 * 0.7978845608028654)
_GELU_C = f32(0.044715)
_DENSITY = f32(0.3989422804014327)


@device
def gelu_tanh(x: Any) -> Any:
    """x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), GPT-2's form."""
    return x * sigmoid(_GELU_K * (x + _GELU_C * x * x * x))


@device
def gelu_tanh_slope(x: Any) -> Any:
    """Derivative of `gelu_tanh`."""
    square = x * x
    s = sigmoid(_GELU_K * (x + _GELU_C * square * x))
    return s + x * s * (f32(1.0) - s) * _GELU_K * (f32(1.0) + f32(3.0) * _GELU_C * square)


@device
def gelu_erf(x: Any) -> Any:
    """x Phi(x), the exact form."""
    return x * normal_cdf(x)


@device
def gelu_erf_slope(x: Any) -> Any:
    """Derivative of `gelu_erf`."""
    return normal_cdf(x) + x * _DENSITY * exp(f32(-0.5) * x * x)
