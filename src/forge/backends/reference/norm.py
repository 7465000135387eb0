"""Layer normalisation (Ba, Kiros, Hinton, 2016), over the last dimension: x [N, C]."""

from __future__ import annotations

import numpy as np

from forge.backends.reference.arrays import Array, add, read, write
from forge.tensor import Tensor


def layernorm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    out: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> None:
    """out = (x - mean) rstd gamma + beta, with rstd = 1 / sqrt(variance + eps)."""
    _normalise(read(x), gamma, beta, out, mean, rstd, eps)


def layernorm_backward(
    x: Tensor,
    gamma: Tensor,
    dy: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    dx: Tensor | None,
    dgamma: Tensor | None,
    dbeta: Tensor | None,
) -> None:
    """dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy gamma; dgamma and dbeta are added to."""
    value = _backward(read(x), gamma, read(dy), mean, rstd, dgamma, dbeta)
    if dx is not None:
        write(dx, value)


def add_layernorm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    *,
    sum: Tensor,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> None:
    """sum = x + branch + bias; y = layernorm(sum)."""
    total = read(x) + read(branch)
    if bias is not None:
        total = total + read(bias)
    write(sum, total)
    # From the stored sum: a rule that normalises it again sees the same numbers.
    _normalise(read(sum), gamma, beta, y, mean, rstd, eps)


def add_layernorm_backward(
    dsum: Tensor | None,
    dy: Tensor | None,
    sum: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    dx: Tensor | None,
    dgamma: Tensor | None,
    dbeta: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """dx = dsum + the gradient through layernorm; dgamma, dbeta and dbias are added to."""
    value = read(sum)
    total = np.zeros_like(value)
    if dy is not None:
        total = _backward(value, gamma, read(dy), mean, rstd, dgamma, dbeta)
    if dsum is not None:
        total = total + read(dsum)
    if dx is not None:
        write(dx, total)
    if dbias is not None:
        add(dbias, total.sum(axis=0))


def _normalise(
    x: Array,
    gamma: Tensor,
    beta: Tensor,
    out: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> None:
    centre = x.mean(axis=-1, keepdims=True)
    scale = 1.0 / np.sqrt(((x - centre) ** 2).mean(axis=-1, keepdims=True) + x.dtype.type(eps))
    write(out, (x - centre) * scale * read(gamma) + read(beta))
    if mean is not None:
        write(mean, centre[:, 0])
    if rstd is not None:
        write(rstd, scale[:, 0])


def _backward(
    x: Array,
    gamma: Tensor,
    dy: Array,
    mean: Tensor,
    rstd: Tensor,
    dgamma: Tensor | None,
    dbeta: Tensor | None,
) -> Array:
    scale = read(rstd)[:, None]
    xhat = (x - read(mean)[:, None]) * scale
    g = dy * read(gamma)
    if dgamma is not None:
        add(dgamma, (dy * xhat).sum(axis=0))
    if dbeta is not None:
        add(dbeta, dy.sum(axis=0))
    inner = (g * xhat).mean(axis=-1, keepdims=True)
    result: Array = scale * (g - g.mean(axis=-1, keepdims=True) - xhat * inner)
    return result
