"""Attention: fused and causal for training, cached for decoding, and its pieces.

B batch, T sequence, H heads, D head width, C = H D, N positions that a cache holds. Each head is
computed by one thread, in one order, with scratch of its own: results don't depend on how many
threads there are.
"""

import math
from typing import Any

import numpy as np
from numba import prange

from forge import philox
from forge.backends.cpu import heads as over_heads
from forge.backends.cpu import threads
from forge.backends.cpu.bfloat16 import bits, f32_of, narrow, wide
from forge.backends.cpu.embedding import positions
from forge.backends.cpu.head import dot, panels, scratch_rows, softmax_row, stride
from forge.backends.cpu.jit import forms, routine
from forge.backends.cpu.layout import append, merge, split
from forge.backends.cpu.tiles import LANES
from forge.tensor import Shape, Tensor, empty

f32 = np.float32

_attend = {"float32": over_heads.attention, "bfloat16": over_heads.low_attention}
_attend_backward = {
    "float32": over_heads.attention_backward,
    "bfloat16": over_heads.low_attention_backward,
}

# ---- Softmax and the copies around it ----


@routine
def _softmax_of_row(x: Any, out: Any, seen: Any) -> None:
    """The softmax of the first `seen` elements of x, and zeros after it."""
    row = np.empty(seen, f32)
    for j in range(seen):
        row[j] = wide(x[j])
    softmax_row(row)
    for j in range(seen):
        out[j] = narrow(out, row[j])
    for j in range(seen, out.size):
        out[j] = narrow(out, f32(0.0))


@forms("void(T[:,:,::1], T[:,:,::1], boolean, int64)")
def _softmax(x: Any, out: Any, causal: Any, pos: Any) -> None:
    batch, rows, columns = x.shape
    for n in prange(batch * rows):
        b = n // rows
        i = n % rows
        seen = min(columns, pos + i + 1) if causal else columns
        _softmax_of_row(x[b, i], out[b, i], seen)


@routine
def _softmax_row_backward(y: Any, dy: Any, out: Any) -> None:
    total = dot(y, dy)
    for j in range(y.size):
        out[j] = narrow(out, wide(y[j]) * (wide(dy[j]) - total))


@forms("void(T[:,::1], T[:,::1], T[:,::1])")
def _softmax_backward(y: Any, dy: Any, out: Any) -> None:
    for n in prange(y.shape[0]):
        _softmax_row_backward(y[n], dy[n], out[n])


def softmax(x: Tensor, *, out: Tensor, causal: bool, pos: int) -> None:
    """out = softmax over the last dimension; causal: row i sees the columns up to pos + i."""
    rows = x.shape[-2] if x.ndim > 1 else 1
    shape = (math.prod(x.shape[:-2]), rows, x.shape[-1])
    _softmax[x.dtype](bits(x).reshape(shape), bits(out).reshape(shape), causal, pos)


def softmax_backward(y: Tensor, dy: Tensor, *, out: Tensor) -> None:
    """out = y (dy - sum(y dy)): zero wherever y is, so the mask needs no bookkeeping."""
    shape = (math.prod(y.shape[:-1]), y.shape[-1])
    _softmax_backward[y.dtype](*(bits(each).reshape(shape) for each in (y, dy, out)))


def split_heads(qkv: Tensor, *, q: Tensor, k: Tensor, v: Tensor, n_head: int) -> None:
    """[B, T, 3C] -> three [B H, T, D]."""
    for i, part in enumerate((q, k, v)):
        if part.size:
            split[qkv.dtype](bits(qkv), bits(part), i * qkv.shape[2] // 3)


def unsplit_heads(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *, out: Tensor, n_head: int
) -> None:
    """Three [B H, T, D] -> [B, T, 3C]; a missing one counts as zeros."""
    C = out.shape[2] // 3
    for i, part in enumerate((dq, dk, dv)):
        if part is None:
            out.array[:, :, i * C : i * C + C] = 0
        elif part.size:
            merge[out.dtype](bits(part), bits(out), i * C)


def merge_heads(x: Tensor, *, out: Tensor, n_head: int) -> None:
    """[B H, T, D] -> [B, T, C]."""
    if x.size:
        merge[x.dtype](bits(x), bits(out), 0)


def unmerge_heads(dy: Tensor, *, out: Tensor, n_head: int) -> None:
    """[B, T, C] -> [B H, T, D]."""
    if dy.size:
        split[dy.dtype](bits(dy), bits(out), 0)


# ---- Fused, for training ----


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
    """out = dropout(softmax(q k^T / sqrt(D))) v, causal; lse = log of the softmax's denominator."""
    B, T, C = out.shape
    if out.size == 0:
        return
    heads = B * n_head
    if lse is None:
        lse = empty((heads, T), "float32", qkv.device)
    D = C // n_head
    scratch = [empty(shape, "float32", qkv.device) for shape in _scratch(qkv.dtype, heads, T, T, D)]
    packed = bits(qkv).reshape(B * T, 3 * C)
    _attend[qkv.dtype](
        packed,
        packed,
        packed,
        np.array([T, 0, D, C, 2 * C]),
        np.zeros(B, np.int64),
        bits(out).reshape(B * T, C),
        lse.array.reshape(heads, T),
        *(x.array for x in scratch),
        *_dropout(key, site, first_sample, p),
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
    """The gradient of the packed projection, from probabilities made again as exp(scores - lse)."""
    B, T, C = out.shape
    if out.size == 0:
        return
    heads = B * n_head
    shapes = _backward_scratch(qkv.dtype, heads, T, C // n_head)
    scratch = [empty(shape, "float32", qkv.device) for shape in shapes]
    _attend_backward[qkv.dtype](
        bits(qkv).reshape(B * T, 3 * C),
        bits(out).reshape(B * T, C),
        bits(dout).reshape(B * T, C),
        f32_of(lse).reshape(heads, T),
        bits(dqkv).reshape(B * T, 3 * C),
        *(x.array for x in scratch),
        *_dropout(key, site, first_sample, p),
    )


def attention_workspace(
    qkv: Tensor, key: Any, *, out: Tensor, lse: Any, n_head: int, **_: Any
) -> tuple[int, ...]:
    """Bytes of the scratch, and of an lse that nobody asked for."""
    B, T, C = out.shape
    if out.size == 0:
        return ()
    heads = B * n_head
    unasked = () if lse is not None else ((heads, T),)
    return _nbytes(*unasked, *_scratch(qkv.dtype, heads, T, T, C // n_head))


def attention_backward_workspace(
    qkv: Tensor, out: Tensor, *rest: Any, n_head: int, **_: Any
) -> tuple[int, ...]:
    """Bytes of the scratch."""
    B, T, C = out.shape
    if out.size == 0:
        return ()
    return _nbytes(*_backward_scratch(qkv.dtype, B * n_head, T, C // n_head))


def _scratch(dtype: str, heads: int, queries: int, keys: int, D: int) -> list[Shape]:
    """Shapes of the packed keys, the probabilities and, in bfloat16, of what is widened."""
    workers = min(heads, threads.get_threads())
    shapes: list[Shape] = [
        (workers, panels(keys), D, LANES),
        (workers, scratch_rows(keys), stride(keys)),
    ]
    return shapes if dtype == "float32" else [*shapes, (workers, queries + keys, D)]


def _backward_scratch(dtype: str, heads: int, T: int, D: int) -> list[Shape]:
    """The same for the gradient."""
    workers = min(heads, threads.get_threads())
    shapes: list[Shape] = [
        (workers, 2, panels(T), D, LANES),
        (workers, 2, scratch_rows(T), stride(T)),
    ]
    return shapes if dtype == "float32" else [*shapes, (workers, 8 * T * D)]


def _nbytes(*shapes: Shape) -> tuple[int, ...]:
    return tuple(4 * math.prod(shape) for shape in shapes)


def _dropout(key: Tensor | None, site: int, first_sample: int, p: float) -> tuple[Any, Any]:
    """For the kernels: (seed, step, site, first_sample, threshold), and what is kept's factor."""
    seed, step = (0, 0) if key is None else key.array
    threshold = min(philox.threshold(p), 2**32 - 1)
    words = np.array([seed, step, site, first_sample, threshold], np.int64)
    return words, f32(1.0 / (1.0 - p))


# ---- Cached, for decoding ----


@routine
def _products(x: Any, rows: Any, scale: Any, out: Any) -> None:
    """out[j] = scale x · rows[j]; four rows at a time, in streams as in `few_rows.dots`."""
    apart = out.size // 4
    for j in range(apart):
        r0, r1, r2, r3 = rows[j], rows[j + apart], rows[j + 2 * apart], rows[j + 3 * apart]
        t0 = t1 = t2 = t3 = f32(0.0)
        for d in range(x.size):
            value = wide(x[d])
            t0 += value * wide(r0[d])
            t1 += value * wide(r1[d])
            t2 += value * wide(r2[d])
            t3 += value * wide(r3[d])
        out[j], out[j + apart] = scale * t0, scale * t1
        out[j + 2 * apart], out[j + 3 * apart] = scale * t2, scale * t3
    for j in range(4 * apart, out.size):
        out[j] = scale * dot(x, rows[j])


@routine
def _weighted_sum(weights: Any, rows: Any, total: Any, out: Any) -> None:
    """out = the sum of weights[j] rows[j], which is added up in `total`."""
    apart = weights.size // 4
    total[:] = f32(0.0)
    for j in range(apart):
        w0, w1 = weights[j], weights[j + apart]
        w2, w3 = weights[j + 2 * apart], weights[j + 3 * apart]
        r0, r1, r2, r3 = rows[j], rows[j + apart], rows[j + 2 * apart], rows[j + 3 * apart]
        for d in range(total.size):
            so_far = total[d] + w0 * wide(r0[d])
            so_far += w1 * wide(r1[d])
            so_far += w2 * wide(r2[d])
            total[d] = so_far + w3 * wide(r3[d])
    for j in range(4 * apart, weights.size):
        row, weight = rows[j], weights[j]
        for d in range(total.size):
            total[d] += weight * wide(row[d])
    for d in range(total.size):
        out[d] = narrow(out, total[d])


@forms("void(T[:,::1], T[:,:,::1], T[:,:,::1], int64[::1], T[:,::1], float32[:,::1])", cost=0.6)
def _cached_one(q: Any, k_cache: Any, v_cache: Any, pos: Any, out: Any, s: Any) -> None:
    """One query of each sample, q and out [B, C], caches [B H, N, D]: the caches are read once.

    A row of s has room for N weights and D sums.
    """
    heads, N, D = k_cache.shape
    n_head = heads // pos.size
    scale = f32(1.0 / math.sqrt(D))
    workers = s.shape[0]
    for worker in prange(workers):
        for head in range(worker, heads, workers):
            b = head // n_head
            column = head % n_head * D
            weights = s[worker, : pos[b] + 1]
            _products(q[b, column : column + D], k_cache[head], scale, weights)
            softmax_row(weights)
            total = s[worker, N:]
            _weighted_sum(weights, v_cache[head], total, out[b, column : column + D])


def cached_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: int | Tensor, *, out: Tensor, n_head: int
) -> None:
    """Query t of sample b sees the cached positions 0 … pos[b] + t; q [B, T, C]."""
    B, T, C = q.shape
    if q.size == 0:
        return
    heads, N, D = B * n_head, k_cache.shape[2], C // n_head
    first = positions(pos, B)
    if T == 1:
        s = empty((min(heads, threads.get_threads()), N + D), "float32", q.device)
        caches = [bits(cache).reshape(heads, N, D) for cache in (k_cache, v_cache)]
        new, result = bits(q).reshape(B, C), bits(out).reshape(B, C)
        _cached_one[q.dtype](new, *caches, first, result, s.array)
        return
    scratch = [empty(shape, "float32", q.device) for shape in _scratch(q.dtype, heads, T, N, D)]
    lse = empty((heads, T), "float32", q.device)
    _attend[q.dtype](
        bits(q).reshape(B * T, C),
        bits(k_cache).reshape(heads * N, D),
        bits(v_cache).reshape(heads * N, D),
        np.array([n_head * N, N, 0, 0, 0]),
        first,
        bits(out).reshape(B * T, C),
        lse.array,
        *(x.array for x in scratch),
        *_dropout(None, 0, 0, 0.0),
    )


def cached_attention_workspace(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Any, *, out: Tensor, n_head: int
) -> tuple[int, ...]:
    """Bytes of the scratch; with several queries a sample also of their lse."""
    B, T, C = q.shape
    heads, N = B * n_head, k_cache.shape[2]
    if q.size == 0:
        return ()
    if T == 1:
        return _nbytes((min(heads, threads.get_threads()), N + C // n_head))
    return _nbytes(*_scratch(q.dtype, heads, T, N, C // n_head), (heads, T))


def kv_append(
    qkv: Tensor, pos: int | Tensor, *, k_cache: Tensor, v_cache: Tensor, q: Tensor, n_head: int
) -> None:
    """Write qkv's keys and values into the caches from `pos` on; q [B, T, C] gets the queries."""
    first = positions(pos, q.shape[0])
    append[qkv.dtype](bits(qkv), first, bits(k_cache), bits(v_cache), bits(q))
