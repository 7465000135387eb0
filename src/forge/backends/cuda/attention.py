"""Attention and its parts.

Shapes: B samples, T positions, H heads of width D, C = H D. The fused kernels are cuDNN's, for
bfloat16 without dropout where it has them for the card, and else those of `flash`; those for a
cache of keys and values are in `decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forge.backends.cuda import decode, flash
from forge.backends.cuda.shape import gather, scatter
from forge.backends.cuda.triton_jit import launch
from forge.tensor import Shape, Tensor

# Columns that a program looks at together.
BLOCK = 4096


@triton.jit
def _softmax(x, out, T, N, pos, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each row, of which `visible` columns count."""
    row = tl.program_id(0).to(tl.int64)
    visible = N
    if CAUSAL:
        visible = tl.minimum(N, pos + tl.program_id(0) % T + 1)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, visible, BLOCK):
        c = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * N + c, mask=c < visible, other=-float("inf"))
        top = tl.maximum(top, value.to(tl.float32))
    highest = tl.max(top, 0)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, visible, BLOCK):
        c = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * N + c, mask=c < visible, other=-float("inf"))
        total += tl.exp(value.to(tl.float32) - highest)
    scale = 1.0 / tl.sum(total, 0)
    for first in range(0, N, BLOCK):
        c = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * N + c, mask=c < visible, other=-float("inf"))
        y = tl.where(c < visible, tl.exp(value.to(tl.float32) - highest) * scale, 0.0)
        tl.store(out + row * N + c, y, mask=c < N)


@triton.jit
def _softmax_backward(y, dy, out, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, N, BLOCK):
        c = first + tl.arange(0, BLOCK)
        p = tl.load(y + row * N + c, mask=c < N, other=0.0).to(tl.float32)
        d = tl.load(dy + row * N + c, mask=c < N, other=0.0).to(tl.float32)
        total += p * d
    inner = tl.sum(total, 0)
    for first in range(0, N, BLOCK):
        c = first + tl.arange(0, BLOCK)
        p = tl.load(y + row * N + c, mask=c < N, other=0.0).to(tl.float32)
        d = tl.load(dy + row * N + c, mask=c < N, other=0.0).to(tl.float32)
        tl.store(out + row * N + c, p * (d - inner), mask=c < N)


def attention(
    qkv: Tensor,
    key: Tensor | None,
    *,
    out: Tensor,
    lse: Tensor | None,
    n_head: int,
    p: float,
    site: int,
    first_sample: int,
) -> None:
    """Causal attention of packed qkv [B, T, 3C]; lse [B, H, T] are the log-sum-exps of scores."""
    if _by_cudnn(qkv, n_head, p):
        from forge.backends.cuda import cudnn_sdpa

        cudnn_sdpa.attention(qkv, out=out, lse=lse, n_head=n_head)
        return
    flash.attention(
        qkv, key, out=out, lse=lse, n_head=n_head, p=p, site=site, first_sample=first_sample
    )


def attention_backward(
    qkv: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    key: Tensor | None,
    *,
    dqkv: Tensor,
    n_head: int,
    p: float,
    site: int,
    first_sample: int,
) -> None:
    """The gradient of qkv, all of it written; the same bits every time."""
    if _by_cudnn(qkv, n_head, p):
        from forge.backends.cuda import cudnn_sdpa

        cudnn_sdpa.attention_backward(qkv, out, dout, lse, dqkv=dqkv, n_head=n_head)
        return
    flash.attention_backward(
        qkv,
        out,
        dout,
        lse,
        key,
        dqkv=dqkv,
        n_head=n_head,
        p=p,
        site=site,
        first_sample=first_sample,
    )


def _by_cudnn(qkv: Tensor, n_head: int, p: float) -> bool:
    """Triton's interpreter, which tests run the other kernels in, has Tensors on the host."""
    if qkv.device.kind != "cuda" or qkv.dtype != "bfloat16" or p > 0.0:
        return False
    from forge.backends.cuda import cudnn_sdpa

    return cudnn_sdpa.serves(qkv, n_head)


def cached_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: int | Tensor, *, out: Tensor, n_head: int
) -> None:
    """Query t of sample b sees the cached positions 0 .. pos[b] + t; q [B, T, C]."""
    decode.cached_attention(q, k_cache, v_cache, pos, out=out, n_head=n_head)


def kv_append(
    qkv: Tensor, pos: int | Tensor, *, k_cache: Tensor, v_cache: Tensor, q: Tensor, n_head: int
) -> None:
    """Write keys and values of qkv [B, T, 3C] into the caches from `pos` on; q = the queries."""
    decode.kv_append(qkv, pos, k_cache=k_cache, v_cache=v_cache, q=q, n_head=n_head)


def softmax(x: Tensor, *, out: Tensor, causal: bool, pos: int) -> None:
    """out = softmax over the last dimension; causal: row i sees the columns up to pos + i."""
    N = x.shape[-1]
    T = x.shape[-2] if causal else 1
    rows = x.size // N if N else 0
    launch(_softmax, (rows,), x, out, T, N, pos, CAUSAL=causal, BLOCK=_block(N))


def softmax_backward(y: Tensor, dy: Tensor, *, out: Tensor) -> None:
    """out = y (dy - sum(y dy)): zero wherever y is, so the mask needs no bookkeeping."""
    N = y.shape[-1]
    rows = y.size // N if N else 0
    launch(_softmax_backward, (rows,), y, dy, out, N, BLOCK=_block(N))


def _block(columns: int) -> int:
    power: int = triton.next_power_of_2(max(columns, 1))
    return min(BLOCK, power)


def split_heads(qkv: Tensor, *, q: Tensor, k: Tensor, v: Tensor, n_head: int) -> None:
    """[B, T, 3C] -> three [B H, T, D]."""
    shape, strides = _heads(qkv.shape, 3, n_head)
    for i, out in enumerate((q, k, v)):
        first = i * (qkv.shape[2] // 3)
        gather(qkv, out=out, first=first, shape=shape, strides=strides)


def unsplit_heads(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *, out: Tensor, n_head: int
) -> None:
    """Three [B H, T, D] -> [B, T, 3C]; a missing one counts as zeros."""
    shape, strides = _heads(out.shape, 3, n_head)
    for i, part in enumerate((dq, dk, dv)):
        first = i * (out.shape[2] // 3)
        scatter(part, out=out, first=first, shape=shape, strides=strides)


def merge_heads(x: Tensor, *, out: Tensor, n_head: int) -> None:
    """[B H, T, D] -> [B, T, C]."""
    shape, strides = _heads(out.shape, 1, n_head)
    scatter(x, out=out, first=0, shape=shape, strides=strides)


def unmerge_heads(dy: Tensor, *, out: Tensor, n_head: int) -> None:
    """[B, T, C] -> [B H, T, D]."""
    shape, strides = _heads(dy.shape, 1, n_head)
    gather(dy, out=out, first=0, shape=shape, strides=strides)


def _heads(packed: Shape, parts: int, n_head: int) -> tuple[Shape, Shape]:
    """Shape [B, H, T, D] and strides of one of the `parts` packed side by side in [B, T, …]."""
    B, T, width = packed
    D = width // (parts * n_head)
    return (B, n_head, T, D), (T * width, D, width, 1)
