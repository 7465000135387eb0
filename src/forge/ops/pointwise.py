"""Pointwise ops.

`add sub mul div` broadcast as NumPy's and sum their gradients back; nothing else broadcasts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forge import dtypes
from forge.backends.registry import kernels
from forge.errors import DtypeError, ShapeError
from forge.ops import check
from forge.ops.define import Record, op
from forge.tensor import Shape, Tensor, empty, empty_like, tensor, zeros

GELU_K = math.sqrt(2.0 / math.pi)
GELU_C = 0.044715


def _broadcast(name: str, a: Tensor, b: Tensor) -> Shape:
    if a.shape == b.shape:
        return a.shape
    try:
        return np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise ShapeError(
            f"[{name}] expected shapes that broadcast, got {check.describe({'a': a, 'b': b})}; "
            "trailing dimensions must be equal or 1"
        ) from None


def _binary(name: str, a: Tensor, b: Tensor) -> Tensor:
    check.floating(name, a=a, b=b)
    out = empty(_broadcast(name, a, b), a.dtype, a.device)
    getattr(kernels(a), name)(a, b, out=out)
    return out


def _unary(name: str, x: Tensor) -> Tensor:
    check.floating(name, x=x)
    out = empty_like(x)
    getattr(kernels(x), name)(x, out=out)
    return out


def _same_shape(name: str, **args: Tensor) -> None:
    if len({x.shape for x in args.values()}) > 1:
        raise ShapeError(f"[{name}] expected equal shapes, got {check.describe(args)}")


@op()
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, broadcast: floating, one dtype. Differentiable twice.

    Raises ShapeError, DtypeError, DeviceError. One rounding.
    """
    return _binary("add", a, b)


@add.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"a": dy, "b": dy}


@op()
def sub(a: Tensor, b: Tensor) -> Tensor:
    """a - b, broadcast: floating, one dtype. Differentiable twice.

    Raises ShapeError, DtypeError, DeviceError. One rounding.
    """
    return _binary("sub", a, b)


@sub.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"a": dy, "b": neg(dy) if node.wants("b") else None}


@op(saves=("a", "b"))
def mul(a: Tensor, b: Tensor) -> Tensor:
    """a b, elementwise and broadcast: floating, one dtype. Differentiable twice.

    Raises ShapeError, DtypeError, DeviceError. One rounding.
    """
    return _binary("mul", a, b)


@mul.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {
        "a": mul(dy, node.b) if node.wants("a") else None,
        "b": mul(dy, node.a) if node.wants("b") else None,
    }


@op(saves=("a", "b"))
def div(a: Tensor, b: Tensor) -> Tensor:
    """a / b, elementwise and broadcast: floating, one dtype; IEEE at zero. Differentiable twice.

    Raises ShapeError, DtypeError, DeviceError. One rounding.
    """
    return _binary("div", a, b)


@div.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    da = div(dy, node.b)
    return {"a": da, "b": neg(mul(da, div(node.a, node.b))) if node.wants("b") else None}


@op(saves=("mask",))
def maximum(a: Tensor, b: Tensor, *, record: Record | None = None) -> Tensor:
    """The larger of a and b, of one shape and floating dtype. Differentiable twice.

    Where they are equal each gets half the gradient. Raises ShapeError, DtypeError. Exact.
    """
    check.floating("maximum", a=a, b=b)
    _same_shape("maximum", a=a, b=b)
    out = empty_like(a)
    mask = empty_like(a) if record is not None else None
    kernels(a).maximum(a, b, out=out, mask=mask)
    if record is not None and mask is not None:
        record.keep(mask=mask)
    return out


@maximum.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    da = mul(dy, node.mask)
    return {"a": da, "b": sub(dy, da)}


@op(saves=("factor",))
def scale(x: Tensor, factor: float | Tensor, *, into: Tensor | None = None) -> Tensor:
    """factor x, for a number or a Tensor of one element, which gets no gradient.

    With `into`, of x's shape, the result is added there. Differentiable twice in x.
    Raises DtypeError, ShapeError. One rounding.
    """
    check.floating("scale", x=x)
    if isinstance(factor, Tensor):
        check.floating("scale", factor=factor)
        check.that(factor.size == 1, "scale", "a factor of one element", list(factor.shape))
    if into is not None:
        check.buffer("scale", "into", x, into, x.shape)
    out = empty_like(x) if into is None else into
    kernels(x).scale(x, factor, out=out, accumulate=into is not None)
    if into is not None:
        into.storage.version += 1
    return out


@scale.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    if node.wants("factor"):
        raise check.no_gradient("scale", "factor", "use mul")
    return {"x": scale(dy, node.factor)}


@op()
def neg(x: Tensor) -> Tensor:
    """-x, floating. Differentiable twice. Raises DtypeError. Exact."""
    return _unary("neg", x)


@neg.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": neg(dy)}


@op(saves=("out",))
def exp(x: Tensor) -> Tensor:
    """e^x, floating. Differentiable twice. Raises DtypeError. Within 4 ulp."""
    return _unary("exp", x)


@exp.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": mul(dy, node.out)}


@op(saves=("x",))
def log(x: Tensor) -> Tensor:
    """Natural logarithm, floating; -inf at 0 and NaN below. Differentiable twice.

    Raises DtypeError. Within 4 ulp.
    """
    return _unary("log", x)


@log.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": div(dy, node.x)}


@op(saves=("out",))
def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent, floating. Differentiable twice. Raises DtypeError. Within 8 ulp of 1."""
    return _unary("tanh", x)


@tanh.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": sub(dy, mul(dy, mul(node.out, node.out)))}


@op(saves=("condition",))
def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where the bool `condition` holds, else b; one shape. Differentiable twice in a and b.

    Raises ShapeError, DtypeError, DeviceError. Exact.
    """
    check.tensors("where", condition=condition, a=a, b=b)
    check.floating("where", a=a, b=b)
    _same_shape("where", condition=condition, a=a, b=b)
    if condition.dtype != "bool":
        raise DtypeError(f"[where] expected a bool condition, got {condition.dtype}")
    out = empty_like(a)
    kernels(a).where(condition, a, b, out=out)
    return out


@where.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    # Not 0 dy: that is NaN where dy is not finite, though the value was not taken there.
    zero = zeros(dy.shape, dy.dtype, dy.device)
    return {
        "a": where(node.condition, dy, zero) if node.wants("a") else None,
        "b": where(node.condition, zero, dy) if node.wants("b") else None,
    }


@op()
def cast(x: Tensor, dtype: str) -> Tensor:
    """x in another dtype, to the nearest, ties to even. Differentiable twice between floating ones.

    From int8, but not to it. Raises DtypeError. One rounding.
    """
    check.tensors("cast", x=x)
    if dtype == "int8":
        raise DtypeError(
            f"[cast] expected another dtype than int8, got it for {check.describe({'x': x})}; "
            "ops.quantize rounds to it, with a scale for each row"
        )
    out = empty(x.shape, dtypes.check("cast", dtype), x.device)
    kernels(x).cast(x, out=out)
    return out


@cast.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": cast(dy, node.spec("x").dtype)}


@op(saves=("x",))
def gelu(x: Tensor, *, form: str = "tanh") -> Tensor:
    """Gaussian error linear unit, x Phi(x). Differentiable twice.

    `form` is "tanh", GPT-2's x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), or "erf", exact
    (Hendrycks and Gimpel, 2016). Any shape, floating. Raises DtypeError, ArgumentError.
    Absolute error in float32 below 1e-6 max(1, |x|).
    """
    check.floating("gelu", x=x)
    check.gelu_form("gelu", form)
    out = empty_like(x)
    kernels(x).gelu(x, out=out, form=form)
    return out


@gelu.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": gelu_backward(node.x, dy, form=node.form)}


@op(saves=("x", "dy"))
def gelu_backward(
    x: Tensor, dy: Tensor, *, form: str = "tanh", into_bias: Tensor | None = None
) -> Tensor:
    """dy gelu'(x), of one shape and floating dtype. Differentiable twice.

    With `into_bias` [C], for x [..., C], its sum over all but the last dimension is added there,
    in the same pass: the gradient of a bias. Raises ShapeError, DtypeError, ArgumentError.
    Accuracy as gelu's.
    """
    check.floating("gelu_backward", x=x, dy=dy)
    _same_shape("gelu_backward", x=x, dy=dy)
    check.gelu_form("gelu_backward", form)
    if into_bias is not None:
        check.that(x.ndim > 0, "gelu_backward", "x with at least one dimension", "a scalar")
        check.buffer("gelu_backward", "into_bias", x, into_bias, x.shape[-1:])
    out = empty_like(dy)
    kernels(x).gelu_backward(x, dy, out=out, sums=into_bias, form=form)
    if into_bias is not None:
        into_bias.storage.version += 1
    return out


@gelu_backward.rule
def _(node: Any, dout: Any) -> dict[str, Any]:
    dx = None
    if node.wants("x"):
        dx = mul(mul(dout, node.dy), _gelu_curvature(node.x, node.form))
    ddy = gelu_backward(node.x, dout, form=node.form) if node.wants("dy") else None
    return {"x": dx, "dy": ddy}


def _gelu_curvature(x: Any, form: str) -> Any:
    """gelu''(x), out of ops."""
    square = mul(x, x)
    one = tensor(1.0, x.dtype, x.device)
    if form == "erf":
        density = scale(exp(scale(square, -0.5)), 1.0 / math.sqrt(2.0 * math.pi))
        return mul(density, sub(scale(one, 2.0), square))
    u = scale(add(x, scale(mul(square, x), GELU_C)), GELU_K)
    du = scale(add(scale(square, 3.0 * GELU_C), one), GELU_K)
    ddu = scale(x, 6.0 * GELU_C * GELU_K)
    t = tanh(u)
    slope = sub(one, mul(t, t))
    bend = sub(ddu, scale(mul(t, mul(du, du)), 2.0))
    return mul(slope, add(du, scale(mul(x, bend), 0.5)))


def dropout(
    x: Any,
    p: float,
    key: Tensor | int | None,
    *,
    site: int = 0,
    first_sample: int = 0,
    samples: int = 1,
) -> Any:
    """Inverted dropout with a mask that is a function of (key, site, sample, element).

    An element is kept iff its Philox word is at least round(p 2^32), and then divided by 1 - p; for
    p = 0, x itself comes back. x's first dimension holds `samples` samples, from number
    `first_sample` of the step's whole batch on: so the mask does not depend on the micro-batches.
    `key` is an int64 Tensor [2] (seed, step), or an int meaning (int, 0); `site` tells the calls of
    one step apart. Nothing is saved. Differentiable twice. Raises ArgumentError, DtypeError. Two
    roundings: of 1 / (1 - p), and of the product.
    """
    if p == 0.0:
        return x
    if isinstance(key, int):
        key = tensor([key, 0], "int64", x.device)
    return _dropout(x, key, p=p, site=site, first_sample=first_sample, samples=samples)


@op(saves=("key",), name="dropout")
def _dropout(
    x: Tensor, key: Tensor, *, p: float, site: int, first_sample: int, samples: int
) -> Tensor:
    check.floating("dropout", x=x)
    check.dropout("dropout", x.device, key, p)
    check.that(
        samples > 0 and x.size % samples == 0,
        "dropout",
        f"samples that divide the {x.size} elements",
        samples,
    )
    out = empty_like(x)
    kernels(x).dropout(x, key, out=out, p=p, site=site, first_sample=first_sample, samples=samples)
    return out


@_dropout.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {
        "x": _dropout(
            dy,
            node.key,
            p=node.p,
            site=node.site,
            first_sample=node.first_sample,
            samples=node.samples,
        )
    }
