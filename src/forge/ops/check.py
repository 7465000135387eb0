"""The checks that ops make of their arguments, one message form for all."""

from __future__ import annotations

from typing import Any

import numpy as np

from forge.autograd.node import Var
from forge.backends.registry import on_host
from forge.dtypes import FLOATING, accumulator
from forge.errors import ArgumentError, DeviceError, DtypeError, GradientError, ShapeError
from forge.tensor import Device, Shape, Tensor


def describe(tensors: dict[str, Any]) -> str:
    """Shapes, dtypes and devices of named arguments, for a message."""
    return ", ".join(
        f"{name}: {list(x.shape)} {x.dtype} on {x.device.name}"
        if isinstance(x, Tensor)
        else f"{name}: {type(x).__name__}"
        for name, x in tensors.items()
        if x is not None or not any(isinstance(y, Tensor) for y in tensors.values())
    )


def value(x: Any) -> Any:
    """The Tensor of a Var, anything else itself: what a composite op checks."""
    return x.value if isinstance(x, Var) else x


def tensors(op: str, **args: Any) -> Device:
    """Raise unless all are Tensors on one device, which is returned; None is passed over."""
    device: Device | None = None
    for x in args.values():
        if x is None:
            continue
        if x.__class__ is not Tensor:
            break
        if device is None:
            device = x.device
        elif x.device is not device:
            raise DeviceError(
                f"[{op}] expected one device, got {describe(args)}; copy with forge.tensor(x, "
                "device=…)"
            )
    else:
        if device is not None:
            return device
    raise DtypeError(f"[{op}] expected Tensors, got {describe(args)}; make one with forge.tensor")


def floating(op: str, **args: Any) -> Device:
    """Raise unless all are floating Tensors of one dtype on one device; None is passed over."""
    first: Any = None
    for x in args.values():
        if x is None:
            continue
        first = x if first is None else first
        if x.__class__ is not Tensor or x.device is not first.device or x.dtype != first.dtype:
            break
    else:
        if first is not None and first.dtype in FLOATING:
            device: Device = first.device
            return device
    tensors(op, **args)
    hint = "convert with ops.cast"
    if any(x is not None and x.dtype == "int8" for x in args.values()):
        hint = "weights in int8 go to ops.quantized_linear, or through ops.dequantize"
    raise DtypeError(f"[{op}] expected floating Tensors of one dtype, got {describe(args)}; {hint}")


def weights(op: str, x: Any, **args: Any) -> None:
    """Raise unless x and all are floating, of x's dtype or of that of its sums; None is passed."""
    floating(op, x=x)
    for weight in args.values():
        if weight is None:
            continue
        if weight.__class__ is not Tensor or weight.device is not x.device:
            tensors(op, x=x, **args)
        if weight.dtype not in (x.dtype, accumulator(x.dtype)):
            raise DtypeError(
                f"[{op}] expected weights of x's dtype, or float32 for a bfloat16 x, got "
                f"{describe({'x': x, **args})}; convert with ops.cast"
            )


def buffer(op: str, name: str, x: Tensor, into: Any, expected: Shape | None = None) -> None:
    """Raise unless `into` can be added to: of this shape, on x's device, of x's or its sums' dtype.

    Wider buffers still are the tape's to add to: no kernel needs to know them.
    """
    if into.__class__ is not Tensor or into.device is not x.device:
        tensors(op, x=x, **{name: into})
    if into.dtype not in (x.dtype, accumulator(x.dtype)):
        raise DtypeError(
            f"[{op}] expected {name} of x's dtype, or float32 for a bfloat16 x, got "
            f"{describe({'x': x, name: into})}; convert with ops.cast"
        )
    if expected is not None:
        shape(op, name, into.shape, expected)


def integers(op: str, **args: Any) -> Device:
    """Raise unless all are int64 Tensors on one device; None is passed over."""
    device = tensors(op, **args)
    for x in args.values():
        if x is not None and x.dtype != "int64":
            raise DtypeError(f"[{op}] expected int64 Tensors, got {describe(args)}")
    return device


def int8(op: str, **args: Any) -> None:
    """Raise unless all are int8 Tensors on one device."""
    tensors(op, **args)
    for x in args.values():
        if x.dtype != "int8":
            raise DtypeError(
                f"[{op}] expected int8 Tensors, got {describe(args)}; ops.quantize makes such of "
                "floating ones"
            )


def shape(op: str, name: str, got: Shape, expected: Shape, **args: Any) -> None:
    """Raise `ShapeError` unless `got`, of the argument `name`, is `expected`."""
    if got != expected:
        raise ShapeError(
            f"[{op}] expected {name} of shape {list(expected)}, got {list(got)}"
            + (f"; {describe(args)}" if args else "")
        )


def rank(op: str, name: str, x: Tensor, *allowed: int) -> None:
    """Raise `ShapeError` unless x has one of the allowed numbers of dimensions."""
    if len(x.shape) not in allowed:
        raise ShapeError(
            f"[{op}] expected {name} of rank {' or '.join(map(str, allowed))}, "
            f"got shape {list(x.shape)}"
        )


def that(condition: bool, op: str, expected: str, got: object, hint: str = "") -> None:
    """Raise `ArgumentError` unless the condition holds."""
    if not condition:
        raise ArgumentError(f"[{op}] expected {expected}, got {got}" + (hint and f"; {hint}"))


def axis(op: str, value: int, ndim: int) -> int:
    """The axis counted from the front; raises `ShapeError` where there is none such."""
    if not -ndim <= value < ndim:
        raise ShapeError(f"[{op}] expected an axis of a rank-{ndim} Tensor, got {value}")
    return value % ndim


def gelu_form(op: str, form: str | None) -> None:
    """Raise `ArgumentError` unless `form` names a form of gelu."""
    if form not in ("tanh", "erf"):
        raise ArgumentError(f'[{op}] expected a gelu form "tanh" or "erf", got {form!r}')


def dropout(op: str, device: Device, key: Any, p: float) -> None:
    """Raise unless p is a probability below 1 and `key` an int64 [2] Tensor on the device."""
    that(0.0 <= p < 1.0, op, "a probability 0 <= p < 1", p)
    if p > 0.0:
        where = integers(op, key=key)
        shape(op, "key", key.shape, (2,))
        if where is not device:
            raise DeviceError(f"[{op}] expected the key on {device.name}, got {where.name}")


def ids(
    op: str, name: str, x: Tensor, limit: int, ignore_index: int | None = None, hint: str = ""
) -> None:
    """Raise `ArgumentError` unless all ids on a host lie in [0, limit), or are ignored."""
    if _seen_by_host(x):
        _ids(op, name, x, limit, ignore_index, hint)


@on_host
def _ids(op: str, name: str, x: Tensor, limit: int, ignore_index: int | None, hint: str) -> None:
    if x.size == 0:
        return
    # In one pass: a negative id is a huge unsigned one.
    if int(x.array.view(np.uint64).max()) < limit:
        return
    counted = x.array if ignore_index is None else x.array[x.array != ignore_index]
    if not counted.size:
        return
    low, high = int(counted.min()), int(counted.max())
    that(low >= 0 and high < limit, op, f"{name} in [0, {limit})", f"{low} to {high}", hint)


def finite(op: str, x: Tensor, hint: str) -> None:
    """Raise `ArgumentError` unless all of x, on a host, is finite."""
    if _seen_by_host(x):
        _finite(op, x, hint)


@on_host
def _finite(op: str, x: Tensor, hint: str) -> None:
    that(bool(np.isfinite(x.array).all()), op, "finite numbers", "infinity or NaN", hint)


def _seen_by_host(x: Tensor) -> bool:
    return x.device.kind in ("cpu", "reference") and not x.device.plan


def sorts(op: str, order: Tensor, ids: Tensor) -> None:
    """Raise `ArgumentError` unless `order`, on a host, is the stable order that sorts the ids.

    Kernels give each run of equal ids to one thread: two runs of one id would be a race.
    """
    if _seen_by_host(order):
        _sorts(op, order, ids)


@on_host
def _sorts(op: str, order: Tensor, ids: Tensor) -> None:
    places = order.array.reshape(-1)
    row = ids.array.reshape(-1)[places]
    ascending = (row[1:] > row[:-1]) | ((row[1:] == row[:-1]) & (places[1:] > places[:-1]))
    that(bool(ascending.all()), op, "the stable order that sorts the ids", "another")


# The hint where the ids are tokens.
VOCABULARY = "the tokenizer and the model's vocabulary differ"


def no_gradient(op: str, name: str, hint: str) -> GradientError:
    """The error for a gradient that an op does not give."""
    return GradientError(f"[{op}] expected a Tensor for {name}, got a Var; {hint}")


def position(op: str, x: Tensor, pos: Any, batch: int, length: int, room: int) -> None:
    """Raise unless `pos` is an int or an int64 [B] whose positions pos … pos + length - 1 exist."""
    if isinstance(pos, int):
        _within(op, pos, pos, length, room)
        return
    integers(op, pos=pos)
    tensors(op, x=x, pos=pos)
    shape(op, "pos", pos.shape, (batch,))
    if batch and _seen_by_host(pos):
        _positions(op, pos, length, room)


@on_host
def _positions(op: str, pos: Tensor, length: int, room: int) -> None:
    _within(op, int(pos.array.min()), int(pos.array.max()), length, room)


def _within(op: str, first: int, last: int, length: int, room: int) -> None:
    that(
        first >= 0 and last + length <= room,
        op,
        f"positions in [0, {room})",
        f"{first} to {last + length - 1}",
        f"there is room for {room}, such as the model's block_size",
    )
