"""Causal attention by cuDNN: bfloat16, without dropout, deterministic, on packed q, k, v in place.

Shapes: B samples, T positions, H heads of width D; qkv [B, T, 3, H, D], out [B, T, H, D].
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import cudnn

from forge.backends.cuda import cudnn_graph
from forge.backends.cuda.pointwise import cast
from forge.tensor import Device, Tensor, empty

# What cuDNN's graphs call their tensors.
Q, K, V, OUT, LSE, DOUT, DQ, DK, DV = range(1, 10)
# Head widths of the backward kernels: multiples of 8 up to this.
WIDEST = 128


class Sizes(NamedTuple):
    """What a plan is built for."""

    B: int
    T: int
    H: int
    D: int

    @property
    def heads(self) -> dict[str, list[int]]:
        """Dimensions and strides of q, k or v inside qkv."""
        C3 = 3 * self.H * self.D
        return {"dim": [*self._dim], "stride": [self.T * C3, self.D, C3, 1]}

    @property
    def merged(self) -> dict[str, list[int]]:
        """Dimensions and strides of the output."""
        C = self.H * self.D
        return {"dim": [*self._dim], "stride": [self.T * C, self.D, C, 1]}

    @property
    def _dim(self) -> tuple[int, int, int, int]:
        return self.B, self.H, self.T, self.D


def serves(qkv: Tensor, n_head: int) -> bool:
    """Whether cuDNN has kernels for this attention, forward and backward, on this card."""
    if qkv.size == 0:
        return False
    sizes = _sizes(qkv, n_head)
    if sizes.D % 8 or sizes.D > WIDEST:
        return False
    return _forward(sizes, lse=True) is not None and _backward(sizes) is not None


def attention(qkv: Tensor, *, out: Tensor, lse: Tensor | None, n_head: int) -> None:
    """out and, if wanted, the log-sum-exps [B, H, T] of the scaled scores."""
    sizes = _sizes(qkv, n_head)
    addresses = {**_heads(qkv, (Q, K, V)), OUT: out.pointer}
    if lse is not None:
        addresses[LSE] = lse.pointer
    _execute(_forward(sizes, lse=lse is not None), addresses)


def attention_backward(
    qkv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, dqkv: Tensor, n_head: int
) -> None:
    """The gradient of qkv, all of it written; the same bits every time."""
    if lse.dtype != "float32":
        rounded, lse = lse, empty(lse.shape, "float32", lse.device)
        cast(rounded, out=lse)
    addresses = {
        **_heads(qkv, (Q, K, V)),
        **_heads(dqkv, (DQ, DK, DV)),
        OUT: out.pointer,
        DOUT: dout.pointer,
        LSE: lse.pointer,
    }
    _execute(_backward(_sizes(qkv, n_head)), addresses)


def _sizes(qkv: Tensor, n_head: int) -> Sizes:
    B, T, C3 = qkv.shape
    return Sizes(B, T, n_head, C3 // (3 * n_head))


def _heads(packed: Tensor, names: tuple[int, int, int]) -> dict[int, int]:
    """Addresses of the three parts of a packed Tensor."""
    width = packed.shape[-1] // 3 * 2
    return {name: packed.pointer + i * width for i, name in enumerate(names)}


def _execute(plan: Any, addresses: dict[int, int]) -> None:
    size = plan.get_workspace_size()
    workspace = empty((size,), "bool", Device("cuda"))
    plan.execute(addresses, workspace.pointer, handle=cudnn_graph.handle())


@cache
def _forward(sizes: Sizes, *, lse: bool) -> Any:
    graph = cudnn_graph.graph()
    q, k, v = (
        graph.tensor(name=name, uid=uid, **sizes.heads)
        for name, uid in (("q", Q), ("k", K), ("v", V))
    )
    out, stats = graph.sdpa(q=q, k=k, v=v, generate_stats=lse, name="attention", **_causal(sizes))
    merged = sizes.merged
    out.set_uid(OUT).set_output(True).set_dim(merged["dim"]).set_stride(merged["stride"])
    if lse:
        stats.set_uid(LSE).set_output(True).set_data_type(cudnn.data_type.FLOAT)
    return _built(graph)


@cache
def _backward(sizes: Sizes) -> Any:
    graph = cudnn_graph.graph()
    B, T, H, _ = sizes
    q, k, v = (
        graph.tensor(name=name, uid=uid, **sizes.heads)
        for name, uid in (("q", Q), ("k", K), ("v", V))
    )
    out, dout = (
        graph.tensor(name=name, uid=uid, **sizes.merged)
        for name, uid in (("out", OUT), ("dout", DOUT))
    )
    stats = graph.tensor(
        name="lse",
        uid=LSE,
        dim=[B, H, T, 1],
        stride=[H * T, T, 1, 1],
        data_type=cudnn.data_type.FLOAT,
    )
    gradients = graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=out,
        dO=dout,
        stats=stats,
        use_deterministic_algorithm=True,
        name="attention_backward",
        **_causal(sizes),
    )
    heads = sizes.heads
    for gradient, uid in zip(gradients, (DQ, DK, DV), strict=True):
        gradient.set_uid(uid).set_output(True).set_dim(heads["dim"]).set_stride(heads["stride"])
    return _built(graph)


def _causal(sizes: Sizes) -> dict[str, Any]:
    return {
        "attn_scale": sizes.D**-0.5,
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        "diagonal_band_right_bound": 0,
    }


def _built(graph: Any) -> Any:
    """The graph with a plan that runs it, or None where cuDNN has none for this card."""
    if not cudnn_graph.planned(graph):
        return None
    try:
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError:
        return None
    return graph
