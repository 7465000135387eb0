"""Layer normalisation, alone and fused with the residual addition."""

from __future__ import annotations

import math
from typing import Any

from forge.backends.registry import kernels
from forge.dtypes import accumulator
from forge.errors import ShapeError
from forge.ops import check
from forge.ops.define import Record, op
from forge.ops.pointwise import add, cast, mul, neg, sub
from forge.ops.reduce import mean as average
from forge.ops.shape import broadcast_to, reshape
from forge.tensor import Tensor, empty, empty_like, full, zeros, zeros_like


def _check(name: str, x: Tensor, **parameters: Tensor | None) -> tuple[int, int]:
    """Rows and width of x [..., C], where each parameter is [C]."""
    check.weights(name, x, **parameters)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ShapeError(f"[{name}] expected x [..., C] with C > 0, got shape {list(x.shape)}")
    width = x.shape[-1]
    for key, value in parameters.items():
        if value is not None:
            check.shape(name, key, value.shape, (width,))
    return math.prod(x.shape[:-1]), width


def _check_statistics(name: str, x: Tensor, rows: int, mean: Tensor, rstd: Tensor) -> None:
    check.weights(name, x, mean=mean, rstd=rstd)
    check.shape(name, "mean", mean.shape, (rows,))
    check.shape(name, "rstd", rstd.shape, (rows,))


def _statistics(record: Record | None, x: Tensor, rows: int) -> tuple[Tensor | None, Tensor | None]:
    if record is None:
        return None, None
    dtype = accumulator(x.dtype)
    mean, rstd = empty((rows,), dtype, x.device), empty((rows,), dtype, x.device)
    record.keep(mean=mean, rstd=rstd)
    return mean, rstd


@op(saves=("x", "gamma", "mean", "rstd"))
def layernorm(
    x: Tensor, gamma: Tensor, beta: Tensor, eps: float = 1e-5, *, record: Record | None = None
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) gamma + beta over the last dimension: x [..., C].

    Ba, Kiros, Hinton (2016); the variance is the biased one. Floating. Differentiable twice.
    Raises ShapeError, DtypeError, DeviceError. Relative error in norm in float32 below 1e-6.
    """
    rows, width = _check("layernorm", x, gamma=gamma, beta=beta)
    out = empty_like(x)
    mean, rstd = _statistics(record, x, rows)
    flat = (rows, width)
    kernels(x).layernorm(
        x.view(flat), gamma, beta, out=out.view(flat), mean=mean, rstd=rstd, eps=eps
    )
    return out


@layernorm.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    dx, dgamma, dbeta = layernorm_backward(
        node.x,
        node.gamma,
        dy,
        node.mean,
        node.rstd,
        into_gamma=node.into("gamma"),
        into_beta=node.into("beta"),
    )
    return {"x": dx, "gamma": dgamma, "beta": dbeta}


@op(
    saves=("x", "gamma", "dy", "mean", "rstd"),
    outputs=("dx", "dgamma", "dbeta"),
    differentiable="once",
)
def layernorm_backward(
    x: Tensor,
    gamma: Tensor,
    dy: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    into_gamma: Tensor | None = None,
    into_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients (dx, dgamma, dbeta) of layernorm, from its saved mean and rstd, [rows] each.

    With `into_gamma` and `into_beta` those gradients are added there. Differentiable once, where
    mean and rstd count as functions of x. Raises ShapeError, DtypeError. Accuracy as layernorm's.
    """
    rows, width = _check("layernorm_backward", x, gamma=gamma)
    check.floating("layernorm_backward", x=x, dy=dy)
    check.shape("layernorm_backward", "dy", dy.shape, x.shape)
    _check_statistics("layernorm_backward", x, rows, mean, rstd)
    for name, into in (("into_gamma", into_gamma), ("into_beta", into_beta)):
        if into is not None:
            check.buffer("layernorm_backward", name, gamma, into, (width,))
    dx = empty_like(x)
    dgamma = zeros_like(gamma) if into_gamma is None else into_gamma
    dbeta = zeros_like(gamma) if into_beta is None else into_beta
    flat = (rows, width)
    kernels(x).layernorm_backward(
        x.view(flat),
        gamma,
        dy.view(flat),
        mean,
        rstd,
        dx=dx.view(flat),
        dgamma=dgamma,
        dbeta=dbeta,
    )
    for buffer in (into_gamma, into_beta):
        if buffer is not None:
            buffer.storage.version += 1
    return dx, dgamma, dbeta


@layernorm_backward.rule
def _(node: Any, u: Any, dgamma: Any, dbeta: Any) -> dict[str, Any]:
    # With xhat = (x - mean) r, g = dy gamma and m() the mean of a row, the op computes
    # dx = r (g - m(g) - xhat m(g xhat)), dgamma = sum dy xhat, dbeta = sum dy. Differentiated here
    # is <u, dx> + <dgamma', dgamma> + <dbeta', dbeta>, with the cotangents u, dgamma', dbeta'.
    if node.wants("mean") or node.wants("rstd"):
        raise check.no_gradient("layernorm_backward", "mean and rstd", "they are functions of x")
    x, dy = node.x, node.dy
    gamma, column = _as(node.gamma, x.dtype), (*x.shape[:-1], 1)
    mean, r = (reshape(_as(each, x.dtype), column) for each in (node.mean, node.rstd))
    xhat = mul(sub(x, mean), r)
    dx = ddy = dgamma_in = dxhat = None
    if u is not None:
        g = mul(dy, gamma)
        a, b, c = (average(t, -1, keepdims=True) for t in (u, mul(g, xhat), mul(u, xhat)))
        # d<u, dx> / dg, to dy and to gamma.
        dg = mul(r, sub(sub(u, a), mul(xhat, c)))
        ddy, dgamma_in = mul(dg, gamma), mul(dg, dy)
        dxhat = neg(mul(r, add(mul(u, b), mul(g, c))))
        # r also scales dx outright; dr / dx = -r^2 xhat / C.
        inner = sub(average(mul(u, g), -1, keepdims=True), mul(b, c))
        inner = sub(inner, mul(a, average(g, -1, keepdims=True)))
        dx = neg(mul(mul(mul(r, r), xhat), inner))
    dgamma, dbeta = (None if each is None else _as(each, x.dtype) for each in (dgamma, dbeta))
    if dgamma is not None:
        ddy = mul(dgamma, xhat) if ddy is None else add(ddy, mul(dgamma, xhat))
        term = mul(dgamma, dy)
        dxhat = term if dxhat is None else add(dxhat, term)
    if dbeta is not None:
        spread = broadcast_to(dbeta, dy.shape)
        ddy = spread if ddy is None else add(ddy, spread)
    if dxhat is not None:
        ones = full(gamma.shape, 1.0, gamma.dtype, gamma.device)
        through, _, _ = layernorm_backward(x, ones, dxhat, node.mean, node.rstd)
        dx = through if dx is None else add(dx, through)
    if dgamma_in is not None:
        dgamma_in = _as(dgamma_in, node.spec("gamma").dtype)
    return {"x": dx, "gamma": dgamma_in, "dy": ddy}


def _as(x: Any, dtype: str) -> Any:
    """x in a dtype: itself where it has it."""
    return x if x.dtype == dtype else cast(x, dtype)


@op(saves=("sum", "gamma", "mean", "rstd"), outputs=("sum", "y"), differentiable="once")
def add_layernorm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    eps: float = 1e-5,
    *,
    record: Record | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum, layernorm(sum)) of sum = x + branch + bias: x, branch [..., C]; bias [C] or None.

    The residual addition of a transformer with the norm that follows it, in one pass over the data.
    Floating. Differentiable once. Raises ShapeError, DtypeError. Accuracy as layernorm's.
    """
    rows, width = _check("add_layernorm", x, bias=bias, gamma=gamma, beta=beta)
    check.floating("add_layernorm", x=x, branch=branch)
    check.shape("add_layernorm", "branch", branch.shape, x.shape)
    sum, y = empty_like(x), empty_like(x)
    mean, rstd = _statistics(record, x, rows)
    flat = (rows, width)
    kernels(x).add_layernorm(
        x.view(flat),
        branch.view(flat),
        bias,
        gamma,
        beta,
        sum=sum.view(flat),
        y=y.view(flat),
        mean=mean,
        rstd=rstd,
        eps=eps,
    )
    return sum, y


@add_layernorm.rule
def _(node: Any, dsum: Any, dy: Any) -> dict[str, Any]:
    dx, dgamma, dbeta, dbias = add_layernorm_backward(
        dsum,
        dy,
        node.sum,
        node.gamma,
        node.mean,
        node.rstd,
        into_gamma=node.into("gamma"),
        into_beta=node.into("beta"),
        into_bias=node.into("bias"),
        wants_bias=node.wants("bias"),
    )
    return {"x": dx, "branch": dx, "bias": dbias, "gamma": dgamma, "beta": dbeta}


@add_layernorm.remake("y", needs=("sum", "gamma", "beta"))
def _(node: Any) -> Tensor:
    # The same kernel arithmetic as the first time: y depends on sum, gamma, beta and eps alone.
    result: Tensor = layernorm(node.sum, node.gamma, node.beta, node.eps)
    return result


@op(outputs=("dx", "dgamma", "dbeta", "dbias"), differentiable="no")
def add_layernorm_backward(
    dsum: Tensor | None,
    dy: Tensor | None,
    sum: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    into_gamma: Tensor | None = None,
    into_beta: Tensor | None = None,
    into_bias: Tensor | None = None,
    wants_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients (dx, dgamma, dbeta, dbias) of add_layernorm; dx is x's and the branch's.

    dsum or dy may be None; the `into` Tensors are added to. Not differentiable.
    Raises ShapeError, DtypeError. Accuracy as layernorm's.
    """
    rows, width = _check("add_layernorm_backward", sum, gamma=gamma)
    check.floating("add_layernorm_backward", sum=sum, dsum=dsum, dy=dy)
    for name, value in (("dsum", dsum), ("dy", dy)):
        if value is not None:
            check.shape("add_layernorm_backward", name, value.shape, sum.shape)
    _check_statistics("add_layernorm_backward", sum, rows, mean, rstd)
    for name, like, into in (
        ("into_gamma", gamma, into_gamma),
        ("into_beta", gamma, into_beta),
        ("into_bias", sum, into_bias),
    ):
        if into is not None:
            check.buffer("add_layernorm_backward", name, like, into, (width,))
    dx = empty_like(sum)
    dgamma = zeros_like(gamma) if into_gamma is None else into_gamma
    dbeta = zeros_like(gamma) if into_beta is None else into_beta
    dbias = None
    if wants_bias:
        dbias = zeros((width,), sum.dtype, sum.device) if into_bias is None else into_bias
    flat = (rows, width)
    kernels(sum).add_layernorm_backward(
        None if dsum is None else dsum.view(flat),
        None if dy is None else dy.view(flat),
        sum.view(flat),
        gamma,
        mean,
        rstd,
        dx=dx.view(flat),
        dgamma=dgamma,
        dbeta=dbeta,
        dbias=dbias,
    )
    for buffer in (into_gamma, into_beta, into_bias):
        if buffer is not None:
            buffer.storage.version += 1
    return dx, dgamma, dbeta, dbias
