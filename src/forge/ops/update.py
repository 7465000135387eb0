"""What ends a training step, in place over flat buffers."""

from __future__ import annotations

from forge.backends.registry import kernels
from forge.errors import DtypeError
from forge.ops import check
from forge.ops.define import op
from forge.tensor import Tensor, empty


@op(differentiable="no")
def global_norm(x: Tensor) -> Tensor:
    """The Euclidean norm of all elements: a float32 scalar (float64 of float64).

    Any shape, floating. Not differentiable. Raises DtypeError. Relative error below 1e-6 for 1e9
    elements.
    """
    check.floating("global_norm", x=x)
    out = empty((), "float64" if x.dtype == "float64" else "float32", x.device)
    kernels(x).global_norm(x.view((x.size,)), out=out)
    return out


@op(differentiable="no")
def all_finite(*values: Tensor) -> Tensor:
    """1 if every one of the scalars is finite, else 0: an int64 scalar on the device.

    Not differentiable. Raises ShapeError, DtypeError, DeviceError, and ArgumentError for none.
    Exact.
    """
    check.that(bool(values), "all_finite", "at least one Tensor", "none")
    device = check.tensors("all_finite", **{f"values{i}": x for i, x in enumerate(values)})
    for i, x in enumerate(values):
        check.shape("all_finite", f"values{i}", x.shape, ())
    out = empty((), "int64", device)
    kernels(values[0]).all_finite(values, out=out)
    return out


@op(differentiable="no")
def adamw_(
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
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    max_norm: float | None = None,
    working: Tensor | None = None,
) -> Tensor:
    """One AdamW update of flat buffers [n], in place; returns param.

    Loshchilov and Hutter (2019): m and v are moving averages of g and g^2, corrected for their
    start; then p *= 1 - rate decay, p -= rate mhat / (sqrt(vhat) + eps), rate = lr times the
    segment's scale. g is grad, scaled down where its `norm` exceeds `max_norm`.
    `tiles` int64 [m, 3] are the rows (start, stop, segment) to update, `rates` float32 [S, 2] the
    (scale, decay) of each segment; lr, step (int64, counted up first) and norm are scalars. Where
    the int64 scalar `finite` is 0 nothing changes, step included. `working` is a bfloat16 copy to
    rewrite. Not differentiable. Raises ShapeError, DtypeError, DeviceError. The change of an
    element has a relative error in float32 below 1e-6.
    """
    check.floating("adamw_", param=param, grad=grad, m=m, v=v)
    check.tensors("adamw_", param=param, lr=lr, norm=norm, rates=rates, working=working)
    check.floating("adamw_", lr=lr)
    check.floating("adamw_", norm=norm)
    for name, x, dtypes in (
        ("rates", rates, {"float32", param.dtype}),
        ("working", working, {"bfloat16"}),
    ):
        if x is not None and x.dtype not in dtypes:
            raise DtypeError(
                f"[adamw_] expected {name} in {' or '.join(sorted(dtypes))}, got {x.dtype}"
            )
    check.integers("adamw_", tiles=tiles, step=step, finite=finite)
    check.tensors("adamw_", param=param, tiles=tiles, step=step, finite=finite)
    check.rank("adamw_", "param", param, 1)
    for name, x in (("grad", grad), ("m", m), ("v", v)):
        check.shape("adamw_", name, x.shape, param.shape)
    for name, x in (("lr", lr), ("step", step), ("norm", norm), ("finite", finite)):
        check.shape("adamw_", name, x.shape, ())
    check.rank("adamw_", "rates", rates, 2)
    check.shape("adamw_", "rates", rates.shape, (rates.shape[0], 2))
    check.rank("adamw_", "tiles", tiles, 2)
    check.shape("adamw_", "tiles", tiles.shape, (tiles.shape[0], 3))
    check.ids("adamw_", "tiles", tiles, param.size + 1)
    if tiles.array is not None and tiles.size:
        segments, last = rates.shape[0], int(tiles.array[:, 2].max())
        check.that(last < segments, "adamw_", f"segments below {segments} in tiles", last)
    if working is not None:
        check.shape("adamw_", "working", working.shape, param.shape)
    kernels(param).adamw(
        param,
        grad,
        m,
        v,
        tiles,
        rates,
        lr=lr,
        step=step,
        norm=norm,
        finite=finite,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        max_norm=max_norm,
        working=working,
    )
    for x in (param, m, v, step, *(() if working is None else (working,))):
        x.storage.version += 1
    return param
