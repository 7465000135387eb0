"""Losses, in nats.

Shapes: N rows (or any leading dimensions), V classes, C width.
"""

from __future__ import annotations

import math
from typing import Any

from forge.backends.registry import kernels
from forge.dtypes import accumulator
from forge.errors import ShapeError
from forge.ops import check
from forge.ops.define import Record, op
from forge.ops.pointwise import cast, scale
from forge.tensor import Shape, Tensor, empty

IGNORE_INDEX = -100


def _check(name: str, rows: Shape, x: Tensor, targets: Tensor, weight: Tensor | None) -> None:
    check.integers(name, targets=targets)
    check.tensors(name, x=x, targets=targets, weight=weight)
    check.shape(name, "targets", targets.shape, rows)
    if weight is not None:
        check.floating(name, weight=weight)
        check.shape(name, "weight", weight.shape, ())


def _weight(x: Tensor, targets: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    if weight is not None:
        return weight
    out = _scalar(x)
    kernels(x).target_weight(targets.view((targets.size,)), out=out, ignore_index=ignore_index)
    return out


def _scalar(x: Tensor) -> Tensor:
    return empty((), accumulator(x.dtype), x.device)


@op(saves=("logits", "targets", "lse", "factor"), differentiable="once")
def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    record: Record | None = None,
) -> Tensor:
    """weight times the sum over the rows of -log softmax(logits)[target]: a scalar.

    logits [..., V] floating; targets int64 [...], where `ignore_index` counts for nothing; `weight`
    a scalar Tensor, by default 1 / the number of targets that count (their mean), 0 where none
    does. Differentiable once in the logits. Raises ShapeError, DtypeError, ArgumentError for a
    target out of range. Relative error in float32 below 1e-6.
    """
    check.floating("cross_entropy", logits=logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ShapeError(f"[cross_entropy] expected logits [..., V], got {list(logits.shape)}")
    _check("cross_entropy", logits.shape[:-1], logits, targets, weight)
    check.ids("cross_entropy", "targets", targets, logits.shape[-1], ignore_index, check.VOCABULARY)
    factor = _weight(logits, targets, weight, ignore_index)
    out = _scalar(logits)
    lse = None
    if record is not None:
        lse = empty((targets.size,), out.dtype, logits.device)
        record.keep(lse=lse, factor=factor)
    kernels(logits).cross_entropy(
        logits.view((targets.size, logits.shape[-1])),
        targets.view((targets.size,)),
        factor,
        out=out,
        lse=lse,
        ignore_index=ignore_index,
    )
    return out


@cross_entropy.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    if node.wants("weight"):
        raise check.no_gradient("cross_entropy", "weight", "multiply the loss instead")
    dlogits = cross_entropy_backward(
        node.logits, node.targets, node.lse, node.factor, dy, ignore_index=node.ignore_index
    )
    return {"logits": dlogits}


@op(differentiable="no")
def cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    weight: Tensor,
    dloss: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """dloss weight (softmax(logits) - one-hot(target)), zero for ignored rows: as the logits.

    lse [N] are the log-sum-exps of the rows, weight and dloss scalars. Not differentiable.
    Raises ShapeError, DtypeError. Accuracy as cross_entropy's.
    """
    check.floating("cross_entropy_backward", logits=logits)
    _check("cross_entropy_backward", logits.shape[:-1], logits, targets, weight)
    check.ids(
        "cross_entropy_backward",
        "targets",
        targets,
        logits.shape[-1],
        ignore_index,
        check.VOCABULARY,
    )
    check.weights("cross_entropy_backward", logits, lse=lse)
    check.tensors("cross_entropy_backward", logits=logits, dloss=dloss)
    check.floating("cross_entropy_backward", dloss=dloss)
    check.shape("cross_entropy_backward", "lse", lse.shape, (targets.size,))
    check.shape("cross_entropy_backward", "dloss", dloss.shape, ())
    dlogits = empty(logits.shape, logits.dtype, logits.device)
    flat = (targets.size, logits.shape[-1])
    kernels(logits).cross_entropy_backward(
        logits.view(flat),
        targets.view((targets.size,)),
        lse,
        weight,
        dloss,
        dlogits=dlogits.view(flat),
        ignore_index=ignore_index,
    )
    return dlogits


@op(saves=("dx", "dwte"), differentiable="once")
def linear_cross_entropy(
    x: Tensor,
    wte: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    *,
    rows: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    record: Record | None = None,
) -> Tensor:
    """cross_entropy of the logits x wte^T, which never exist whole: x [..., C], wte [V, C].

    Only wte's first `rows` are classes (all by default). Rows are taken in chunks; recorded, each
    chunk also gives its part of the wanted gradients of a unit loss, which the rule then scales, so
    that no product is done twice. Differentiable once in x and wte. Raises and accuracy as
    cross_entropy.
    """
    check.floating("linear_cross_entropy", x=x, wte=wte)
    check.rank("linear_cross_entropy", "wte", wte, 2)
    vocabulary = wte.shape[0] if rows is None else rows
    if x.ndim == 0 or x.shape[-1] != wte.shape[1] or not 0 < vocabulary <= wte.shape[0]:
        raise ShapeError(
            f"[linear_cross_entropy] expected x [..., C] and wte [V, C] of at least {vocabulary} "
            f"rows, got {check.describe({'x': x, 'wte': wte})}"
        )
    _check("linear_cross_entropy", x.shape[:-1], x, targets, weight)
    check.ids(
        "linear_cross_entropy", "targets", targets, vocabulary, ignore_index, check.VOCABULARY
    )
    out = _scalar(x)
    dx = dwte = None
    if record is not None and record.wants("x"):
        dx = empty(x.shape, x.dtype, x.device)
        record.keep(dx=dx)
    if record is not None and record.wants("wte"):
        # Chunks add to it, which bfloat16 would round each time.
        dwte = empty(wte.shape, accumulator(wte.dtype), wte.device)
        record.keep(dwte=dwte)
    flat = (math.prod(x.shape[:-1]), x.shape[-1])
    kernels(x).linear_cross_entropy(
        x.view(flat),
        wte,
        targets.view((targets.size,)),
        _weight(x, targets, weight, ignore_index),
        out=out,
        dx=None if dx is None else dx.view(flat),
        dwte=dwte,
        rows=vocabulary,
        ignore_index=ignore_index,
    )
    return out


@linear_cross_entropy.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    if node.wants("weight"):
        raise check.no_gradient("linear_cross_entropy", "weight", "multiply the loss instead")
    dwte = None
    if node.wants("wte"):
        into, dtype = node.into("wte"), node.spec("wte").dtype
        if into is not None and into.dtype != node.dwte.dtype:
            into = None  # A bfloat16 one: the tape adds the rounded gradient.
        dwte = scale(node.dwte, dy, into=into)
        if into is None and dtype != dwte.dtype:
            dwte = cast(dwte, dtype)
    return {"x": scale(node.dx, dy) if node.wants("x") else None, "wte": dwte}
