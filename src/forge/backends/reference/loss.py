"""Cross-entropy over the classes of each row, in nats: logits [N, V], targets [N]."""

from __future__ import annotations

import numpy as np

from forge.backends.reference.arrays import Array, read, write
from forge.tensor import Tensor


def target_weight(targets: Tensor, *, out: Tensor, ignore_index: int) -> None:
    """out = 1 / the number of targets that count, 0 where none does."""
    count = int((targets.array != ignore_index).sum())
    write(out, 1.0 / count if count else 0.0)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    lse: Tensor | None,
    ignore_index: int,
) -> None:
    """out = weight sum over the targets that count of (lse - logits[target])."""
    losses, denominators = _losses(read(logits), targets.array, ignore_index)
    write(out, weight.item() * losses.sum())
    if lse is not None:
        write(lse, denominators)


def cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    weight: Tensor,
    dloss: Tensor,
    *,
    dlogits: Tensor,
    ignore_index: int,
) -> None:
    """dlogits = dloss weight (softmax - one-hot), 0 for ignored rows."""
    gradient = _gradient(read(logits), targets.array, read(lse), ignore_index)
    write(dlogits, gradient * np.asarray(dloss.item() * weight.item(), gradient.dtype))


def linear_cross_entropy(
    x: Tensor,
    wte: Tensor,
    targets: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    dx: Tensor | None,
    dwte: Tensor | None,
    rows: int,
    ignore_index: int,
) -> None:
    """Cross-entropy of the logits x wte^T over wte's first `rows`, and its gradients."""
    head = read(wte)[:rows]
    logits = read(x) @ head.T
    losses, lse = _losses(logits, targets.array, ignore_index)
    write(out, weight.item() * losses.sum())
    dlogits = _gradient(logits, targets.array, lse, ignore_index)
    dlogits = dlogits * np.asarray(weight.item(), logits.dtype)
    if dx is not None:
        write(dx, dlogits @ head)
    if dwte is not None:
        dwte.array[rows:] = 0
        dwte.array[:rows] = dlogits.T @ read(x)


def _losses(logits: Array, targets: Array, ignore_index: int) -> tuple[Array, Array]:
    top = logits.max(axis=-1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(logits - top).sum(axis=-1))
    counted = targets != ignore_index
    chosen = logits[np.arange(len(targets)), np.where(counted, targets, 0)]
    return np.where(counted, lse - chosen, 0), lse


def _gradient(logits: Array, targets: Array, lse: Array, ignore_index: int) -> Array:
    gradient = np.exp(logits - lse[:, None])
    counted = targets != ignore_index
    gradient[np.arange(len(targets)), np.where(counted, targets, 0)] -= 1
    return np.where(counted[:, None], gradient, 0)
