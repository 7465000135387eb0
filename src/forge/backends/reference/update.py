"""What ends a training step: the norm of the gradient and AdamW over flat buffers."""

from __future__ import annotations

import numpy as np

from forge.backends.reference.arrays import read, write
from forge.tensor import Tensor


def global_norm(x: Tensor, *, out: Tensor) -> None:
    """out = the Euclidean norm of x."""
    write(out, np.sqrt((read(x).astype(np.float64) ** 2).sum()))


def all_finite(values: tuple[Tensor, ...], *, out: Tensor) -> None:
    """out = 1 where every value is finite, else 0."""
    write(out, float(all(np.isfinite(read(value)).all() for value in values)))


def adamw(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    tiles: Tensor,
    rates: Tensor,
    *,
    lr: Tensor,
    step: Tensor,
    norm: Tensor,
    finite: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    max_norm: float | None,
    working: Tensor | None,
) -> None:
    """AdamW (Loshchilov, Hutter, 2019) on each tile (start, stop, segment) of flat buffers."""
    if finite.item() == 0:
        return
    step.array += 1
    count = step.item()
    clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm.item() + 1e-6))
    correct1, correct2 = 1.0 - beta1**count, 1.0 - beta2**count
    for start, stop, segment in tiles.array:
        where = slice(start, stop)
        scale, decay = (float(rate) for rate in rates.array[segment])
        rate = lr.item() * scale
        g = grad.array[where] * clip
        m.array[where] = beta1 * m.array[where] + (1.0 - beta1) * g
        v.array[where] = beta2 * v.array[where] + (1.0 - beta2) * g * g
        mhat, vhat = m.array[where] / correct1, v.array[where] / correct2
        p = param.array[where] * (1.0 - rate * decay) - rate * mhat / (np.sqrt(vhat) + eps)
        param.array[where] = p
        if working is not None:
            working.array[where] = p
