"""Attention and its parts.

Shapes: B samples, T positions, H heads of width D, C = H D, N cached positions.
"""

from __future__ import annotations

from typing import Any

from forge.backends.registry import kernels
from forge.dtypes import accumulator
from forge.errors import ShapeError
from forge.ops import check
from forge.ops.define import Record, op
from forge.ops.pointwise import mul, sub
from forge.ops.reduce import sum as total
from forge.ops.shape import reshape
from forge.tensor import Tensor, empty, empty_like


@op(saves=("out",))
def softmax(x: Tensor, causal: bool = False, pos: int = 0) -> Tensor:
    """Softmax over the last dimension; causal: row i sees only the columns j <= pos + i.

    x [..., T, N] if causal, else [..., N]; masked outputs are exact zeros. Floating. Differentiable
    twice. Raises ShapeError, DtypeError, ArgumentError. Relative error in float32 below 1e-6.
    """
    check.floating("softmax", x=x)
    check.that(pos >= 0, "softmax", "pos >= 0", pos)
    if x.ndim < (2 if causal else 1):
        raise ShapeError(f"[softmax] expected x [..., T, N], got shape {list(x.shape)}")
    out = empty_like(x)
    kernels(x).softmax(x, out=out, causal=causal, pos=pos)
    return out


@softmax.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    return {"x": softmax_backward(node.out, dy)}


@op(saves=("y", "dy"))
def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """y (dy - sum(y dy)) over the last dimension: the gradient of softmax, whose output is y.

    Zero wherever y is, so no mask is needed. Floating. Differentiable twice.
    Raises ShapeError, DtypeError. Accuracy as softmax's.
    """
    check.floating("softmax_backward", y=y, dy=dy)
    check.shape("softmax_backward", "dy", dy.shape, y.shape)
    out = empty_like(y)
    kernels(y).softmax_backward(y, dy, out=out)
    return out


@softmax_backward.rule
def _(node: Any, dout: Any) -> dict[str, Any]:
    y, dy = node.y, node.dy
    d_y = None
    if node.wants("y"):
        inner = total(mul(y, dy), -1, keepdims=True)
        outer = total(mul(y, dout), -1, keepdims=True)
        d_y = sub(mul(dout, sub(dy, inner)), mul(dy, outer))
    return {"y": d_y, "dy": softmax_backward(y, dout) if node.wants("dy") else None}


def _check_heads(name: str, size: int, n_head: int, *, what: str = "width", parts: int = 1) -> None:
    if n_head < 1 or size % (parts * n_head):
        heads = f"{parts} × {n_head}" if parts > 1 else str(n_head)
        raise ShapeError(f"[{name}] expected a {what} that {heads} heads divide, got {size}")


def _batched(name: str, x: Tensor) -> Tensor:
    """x [B, T, C], where rank 2 means B = 1."""
    check.floating(name, x=x)
    check.rank(name, "x", x, 2, 3)
    return x.view((1, *x.shape)) if x.ndim == 2 else x


@op(outputs=("q", "k", "v"))
def split_heads(qkv: Tensor, n_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """The packed projection [B, T, 3C] as q, k, v, each [B H, T, D]; rank 2 means B = 1.

    Floating. Differentiable twice; a gradient that is missing counts as zeros. Raises ShapeError.
    Exact.
    """
    x = _batched("split_heads", qkv)
    batch, length, width = x.shape
    _check_heads("split_heads", width, n_head, parts=3)
    shape = (batch * n_head, length, width // (3 * n_head))
    q, k, v = (empty(shape, x.dtype, x.device) for _ in range(3))
    kernels(x).split_heads(x, q=q, k=k, v=v, n_head=n_head)
    return q, k, v


@split_heads.rule
def _(node: Any, dq: Any, dk: Any, dv: Any) -> dict[str, Any]:
    dqkv = unsplit_heads(dq, dk, dv, node.n_head)
    return {"qkv": reshape(dqkv, node.spec("qkv").shape)}


@op()
def unsplit_heads(dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, n_head: int) -> Tensor:
    """split_heads' transpose: three [B H, T, D] to [B, T, 3C]; None counts as zeros.

    Floating. Differentiable twice. Raises ShapeError, DtypeError, ArgumentError. Exact.
    """
    given = {"dq": dq, "dk": dk, "dv": dv}
    first = next((x for x in given.values() if x is not None), None)
    if first is None:
        raise ShapeError("[unsplit_heads] expected at least one of dq, dk, dv, got none")
    check.floating("unsplit_heads", **given)
    check.rank("unsplit_heads", "dq, dk, dv", first, 3)
    for name, x in given.items():
        if x is not None:
            check.shape("unsplit_heads", name, x.shape, first.shape)
    rows, length, width = first.shape
    _check_heads("unsplit_heads", rows, n_head, what="number of rows")
    out = empty((rows // n_head, length, 3 * n_head * width), first.dtype, first.device)
    kernels(first).unsplit_heads(dq, dk, dv, out=out, n_head=n_head)
    return out


@unsplit_heads.rule
def _(node: Any, dout: Any) -> dict[str, Any]:
    return dict(zip(("dq", "dk", "dv"), split_heads(dout, node.n_head), strict=True))


@op()
def merge_heads(x: Tensor, n_head: int | None = None) -> Tensor:
    """[B H, T, D] to [B, T, C]; without `n_head` all rows are heads of one sample: to [T, C].

    Floating. Differentiable twice. Raises ShapeError, DtypeError. Exact.
    """
    check.floating("merge_heads", x=x)
    check.rank("merge_heads", "x", x, 3)
    rows, length, width = x.shape
    heads = rows if n_head is None else n_head
    _check_heads("merge_heads", rows, heads, what="number of rows")
    out = empty((rows // heads, length, heads * width), x.dtype, x.device)
    kernels(x).merge_heads(x, out=out, n_head=heads)
    return out.view(out.shape[1:]) if n_head is None else out


@merge_heads.rule
def _(node: Any, dy: Any) -> dict[str, Any]:
    heads = node.spec("x").shape[0] if node.n_head is None else node.n_head
    return {"x": unmerge_heads(dy, heads)}


@op()
def unmerge_heads(dy: Tensor, n_head: int) -> Tensor:
    """merge_heads' transpose: [B, T, C] to [B H, T, D]; rank 2 means B = 1.

    Floating. Differentiable twice. Raises ShapeError, DtypeError. Exact.
    """
    x = _batched("unmerge_heads", dy)
    batch, length, width = x.shape
    _check_heads("unmerge_heads", width, n_head)
    out = empty((batch * n_head, length, width // n_head), x.dtype, x.device)
    kernels(x).unmerge_heads(x, out=out, n_head=n_head)
    return out


@unmerge_heads.rule
def _(node: Any, dout: Any) -> dict[str, Any]:
    return {"dy": reshape(merge_heads(dout, node.n_head), node.spec("dy").shape)}


@op(saves=("qkv", "out", "lse", "key"), differentiable="once")
def attention(
    qkv: Tensor,
    n_head: int,
    p: float = 0.0,
    key: Tensor | None = None,
    *,
    site: int = 0,
    first_sample: int = 0,
    record: Record | None = None,
) -> Tensor:
    """Causal self-attention of the packed projection: qkv [B, T, 3C] -> [B, T, C]; rank 2 is B = 1.

    Per head dropout(softmax(q k^T / sqrt(D))) v, where a query sees the positions up to its own
    (Vaswani et al., 2017; computed in tiles, Dao et al., 2022). Dropout as `ops.dropout`, with
    element (h T + i) T + j of sample first_sample + b. The same as split_heads, matmul, softmax,
    dropout, matmul, merge_heads, without the [B H, T, T] in memory. Floating. Differentiable once.
    Raises ShapeError, DtypeError, ArgumentError. Relative error in norm in float32 below 1e-6.
    """
    x = _batched("attention", qkv)
    batch, length, packed = x.shape
    _check_heads("attention", packed, n_head, parts=3)
    check.dropout("attention", x.device, key, p)
    out = empty((batch, length, packed // 3), x.dtype, x.device)
    lse = None
    if record is not None:
        lse = empty((batch, n_head, length), accumulator(x.dtype), x.device)
        record.keep(lse=lse)
    kernels(x).attention(
        x, key, out=out, lse=lse, n_head=n_head, p=p, site=site, first_sample=first_sample
    )
    return out.view((*qkv.shape[:-1], packed // 3))


@attention.rule
def _(node: Any, dout: Any) -> dict[str, Any]:
    dqkv = attention_backward(
        node.qkv,
        node.out,
        dout,
        node.lse,
        node.n_head,
        node.p,
        node.key if node.p > 0.0 else None,
        site=node.site,
        first_sample=node.first_sample,
    )
    return {"qkv": dqkv}


@op(differentiable="no")
def attention_backward(
    qkv: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    n_head: int,
    p: float = 0.0,
    key: Tensor | None = None,
    *,
    site: int = 0,
    first_sample: int = 0,
) -> Tensor:
    """The gradient of attention's qkv, from its output and the log-sum-exps lse [B, H, T].

    Not differentiable. Raises ShapeError, DtypeError, ArgumentError. Accuracy as attention's.
    """
    x = _batched("attention_backward", qkv)
    check.floating("attention_backward", qkv=qkv, out=out, dout=dout)
    check.weights("attention_backward", qkv, lse=lse)
    check.dropout("attention_backward", x.device, key, p)
    batch, length, packed = x.shape
    _check_heads("attention_backward", packed, n_head, parts=3)
    shape = (batch, length, packed // 3)
    for name, given in (("out", out), ("dout", dout)):
        check.shape("attention_backward", name, given.shape, (*qkv.shape[:-1], shape[-1]))
    check.shape("attention_backward", "lse", lse.shape, (batch, n_head, length))
    dqkv = empty_like(qkv)
    kernels(x).attention_backward(
        x,
        out.view(shape),
        dout.view(shape),
        lse,
        key,
        dqkv=dqkv.view(x.shape),
        n_head=n_head,
        p=p,
        site=site,
        first_sample=first_sample,
    )
    return dqkv


@op(differentiable="no")
def cached_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: int | Tensor) -> Tensor:
    """Attention of new queries on cached keys and values: q [B, T, C], caches [B, H, N, D].

    Query t of sample b sees the cached positions 0 … pos[b] + t; `pos` is an int or int64 [B].
    A sample's result does not depend on the others. Floating. Not differentiable.
    Raises ShapeError, DtypeError, ArgumentError. Accuracy as attention's.
    """
    check.floating("cached_attention", q=q, k_cache=k_cache, v_cache=v_cache)
    check.rank("cached_attention", "q", q, 3)
    batch, length, width = q.shape
    heads, room = _check_caches("cached_attention", k_cache, v_cache, batch, width)
    check.position("cached_attention", q, pos, batch, length, room)
    out = empty_like(q)
    kernels(q).cached_attention(q, k_cache, v_cache, pos, out=out, n_head=heads)
    return out


@op(differentiable="no")
def kv_append_(k_cache: Tensor, v_cache: Tensor, qkv: Tensor, pos: int | Tensor) -> Tensor:
    """Write keys and values of qkv [B, T, 3C] into the caches [B, H, N, D]; returns q [B, T, C].

    They go to the positions from `pos` on, an int or int64 [B]. In place. Not differentiable.
    Raises ShapeError, DtypeError, ArgumentError where the cache is full. Exact.
    """
    check.floating("kv_append_", k_cache=k_cache, v_cache=v_cache, qkv=qkv)
    check.rank("kv_append_", "qkv", qkv, 3)
    batch, length, packed = qkv.shape
    heads, room = _check_caches("kv_append_", k_cache, v_cache, batch, packed // 3)
    _check_heads("kv_append_", packed, heads, parts=3)
    check.position("kv_append_", qkv, pos, batch, length, room)
    q = empty((batch, length, packed // 3), qkv.dtype, qkv.device)
    kernels(qkv).kv_append(qkv, pos, k_cache=k_cache, v_cache=v_cache, q=q, n_head=heads)
    k_cache.storage.version += 1
    v_cache.storage.version += 1
    return q


def _check_caches(
    name: str, k_cache: Tensor, v_cache: Tensor, batch: int, width: int
) -> tuple[int, int]:
    check.rank(name, "k_cache", k_cache, 4)
    check.shape(name, "v_cache", v_cache.shape, k_cache.shape)
    rows, heads, room, head_width = k_cache.shape
    if rows != batch or heads * head_width != width:
        raise ShapeError(
            f"[{name}] expected caches [B, H, N, D] for B={batch} and H D={width}, "
            f"got {list(k_cache.shape)}"
        )
    return heads, room
