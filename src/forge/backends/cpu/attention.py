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
from forge.backends.cpu import threads
from forge.backends.cpu.embedding import positions
from forge.backends.cpu.head import (
    SCRATCH_ROWS,
    attend,
    attend_backward,
    dot,
    pack,
    panels,
    softmax_row,
    stride,
)
from forge.backends.cpu.jit import kernel, routine
from forge.backends.cpu.layout import append, copy, merge, split
from forge.backends.cpu.tiles import LANES
from forge.tensor import Shape, Tensor, empty

f32 = np.float32

# ---- Softmax and the copies around it ----


@kernel("void(float32[:,:,::1], float32[:,:,::1], boolean, int64)")
def _softmax(x: Any, out: Any, causal: Any, pos: Any) -> None:
    batch, rows, columns = x.shape
    for n in prange(batch * rows):
        b = n // rows
        i = n % rows
        seen = min(columns, pos + i + 1) if causal else columns
        copy(out[b, i, :seen], x[b, i, :seen])
        softmax_row(out[b, i, :seen])
        for j in range(seen, columns):
            out[b, i, j] = f32(0.0)


@routine
def _softmax_row_backward(y: Any, dy: Any, out: Any) -> None:
    total = dot(y, dy)
    for j in range(y.size):
        out[j] = y[j] * (dy[j] - total)


@kernel("void(float32[:,::1], float32[:,::1], float32[:,::1])")
def _softmax_backward(y: Any, dy: Any, out: Any) -> None:
    for n in prange(y.shape[0]):
        _softmax_row_backward(y[n], dy[n], out[n])


def softmax(x: Tensor, *, out: Tensor, causal: bool, pos: int) -> None:
    """out = softmax over the last dimension; causal: row i sees the columns up to pos + i."""
    rows = x.shape[-2] if x.ndim > 1 else 1
    shape = (math.prod(x.shape[:-2]), rows, x.shape[-1])
    _softmax(x.array.reshape(shape), out.array.reshape(shape), causal, pos)


def softmax_backward(y: Tensor, dy: Tensor, *, out: Tensor) -> None:
    """out = y (dy - sum(y dy)): zero wherever y is, so the mask needs no bookkeeping."""
    shape = (math.prod(y.shape[:-1]), y.shape[-1])
    _softmax_backward(y.array.reshape(shape), dy.array.reshape(shape), out.array.reshape(shape))


def split_heads(qkv: Tensor, *, q: Tensor, k: Tensor, v: Tensor, n_head: int) -> None:
    """[B, T, 3C] -> three [B H, T, D]."""
    for i, part in enumerate((q, k, v)):
        if part.size:
            split(qkv.array, part.array, i * qkv.shape[2] // 3)


def unsplit_heads(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *, out: Tensor, n_head: int
) -> None:
    """Three [B H, T, D] -> [B, T, 3C]; a missing one counts as zeros."""
    C = out.shape[2] // 3
    for i, part in enumerate((dq, dk, dv)):
        if part is None:
            out.array[:, :, i * C : i * C + C] = 0
        elif part.size:
            merge(part.array, out.array, i * C)


def merge_heads(x: Tensor, *, out: Tensor, n_head: int) -> None:
    """[B H, T, D] -> [B, T, C]."""
    if x.size:
        merge(x.array, out.array, 0)


def unmerge_heads(dy: Tensor, *, out: Tensor, n_head: int) -> None:
    """[B, T, C] -> [B H, T, D]."""
    if dy.size:
        split(dy.array, out.array, 0)


# ---- Fused, for training ----


@kernel(
    "void(float32[:,::1], float32[:,::1], float32[:,::1], int64[::1], int64[::1], float32[:,::1],"
    " float32[:,::1], float32[:,:,:,::1], float32[:,:,::1], int64[::1], float32)",
    cost=1.5,
)
def _attention(
    q: Any,
    k: Any,
    v: Any,
    where: Any,
    pos: Any,
    out: Any,
    lse: Any,
    keys: Any,
    s: Any,
    dropout: Any,
    factor: Any,
) -> None:
    """The head (b, h) of k begins in row b where[0] + h where[1] and column where[3] + h where[2].

    That of v has where[4] instead of where[3]; queries have theirs in out's rows and columns.
    """
    heads, T = lse.shape
    D = keys.shape[2]
    n_head = heads // pos.size
    workers = s.shape[0]
    for worker in prange(workers):
        for head in range(worker, heads, workers):
            b = head // n_head
            h = head % n_head
            row = b * where[0] + h * where[1]
            column = h * where[2]
            pack(k, (row, where[3] + column), pos[b] + T, keys[worker])
            attend(
                q,
                keys[worker],
                v,
                (row, where[4] + column),
                out,
                (b * T, h * D),
                lse[head],
                s[worker],
                pos[b],
                (b, h * T * T),
                (dropout[0], dropout[1], dropout[2], dropout[3], dropout[4]),
                factor,
            )


@kernel(
    "void(float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1],"
    " float32[:,:,:,:,::1], float32[:,:,:,::1], int64[::1], float32)",
    cost=1.4,
)
def _attention_backward(
    qkv: Any,
    out: Any,
    dout: Any,
    lse: Any,
    dqkv: Any,
    packed: Any,
    s: Any,
    dropout: Any,
    factor: Any,
) -> None:
    heads = lse.shape[0]
    n_head = out.shape[1] // packed.shape[3]
    workers = s.shape[0]
    for worker in prange(workers):
        for head in range(worker, heads, workers):
            attend_backward(
                qkv,
                out,
                dout,
                lse[head],
                dqkv,
                packed[worker],
                s[worker],
                head // n_head,
                head % n_head,
                (dropout[0], dropout[1], dropout[2], dropout[3], dropout[4]),
                factor,
            )


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
        lse = empty((heads, T), qkv.dtype, qkv.device)
    D = C // n_head
    keys, s = (empty(shape, qkv.dtype, qkv.device) for shape in _scratch(heads, T, D))
    packed = qkv.array.reshape(B * T, 3 * C)
    _attention(
        packed,
        packed,
        packed,
        np.array([T, 0, D, C, 2 * C]),
        np.zeros(B, np.int64),
        out.array.reshape(B * T, C),
        lse.array.reshape(heads, T),
        keys.array,
        s.array,
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
    shapes = _scratch(heads, T, C // n_head, 2)
    packed, s = (empty(shape, qkv.dtype, qkv.device) for shape in shapes)
    _attention_backward(
        qkv.array.reshape(B * T, 3 * C),
        out.array.reshape(B * T, C),
        dout.array.reshape(B * T, C),
        lse.array.reshape(heads, T),
        dqkv.array.reshape(B * T, 3 * C),
        packed.array,
        s.array,
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
    return _nbytes(*unasked, *_scratch(heads, T, C // n_head))


def attention_backward_workspace(
    qkv: Tensor, out: Tensor, *rest: Any, n_head: int, **_: Any
) -> tuple[int, ...]:
    """Bytes of the scratch."""
    B, T, C = out.shape
    return _nbytes(*_scratch(B * n_head, T, C // n_head, 2)) if out.size else ()


def _scratch(heads: int, keys: int, D: int, *sets: int) -> tuple[Shape, Shape]:
    """Shapes of the packed keys and of the probabilities: a set, or `sets`, for each thread."""
    workers = min(heads, threads.get_threads())
    return (
        (workers, *sets, panels(keys), D, LANES),
        (workers, *sets, SCRATCH_ROWS, stride(keys)),
    )


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
    for j in range(out.size):
        out[j] = scale * dot(x, rows[j])


@routine
def _weighted_sum(weights: Any, rows: Any, out: Any) -> None:
    for d in range(out.size):
        out[d] = f32(0.0)
    for j in range(weights.size):
        row = rows[j]
        for d in range(out.size):
            out[d] += weights[j] * row[d]


@kernel(
    "void(float32[:,::1], float32[:,:,::1], float32[:,:,::1], int64[::1], float32[:,::1],"
    " float32[:,::1])",
    cost=0.6,
)
def _cached_one(q: Any, k_cache: Any, v_cache: Any, pos: Any, out: Any, s: Any) -> None:
    """One query of each sample, q and out [B, C], caches [B H, N, D]: the caches are read once."""
    heads, _, D = k_cache.shape
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
            _weighted_sum(weights, v_cache[head], out[b, column : column + D])


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
        s = empty((min(heads, threads.get_threads()), N), q.dtype, q.device)
        caches = [cache.array.reshape(heads, N, D) for cache in (k_cache, v_cache)]
        _cached_one(q.array.reshape(B, C), *caches, first, out.array.reshape(B, C), s.array)
        return
    keys, s = (empty(shape, q.dtype, q.device) for shape in _scratch(heads, N, D))
    lse = empty((heads, T), q.dtype, q.device)
    _attention(
        q.array.reshape(B * T, C),
        k_cache.array.reshape(heads * N, D),
        v_cache.array.reshape(heads * N, D),
        np.array([n_head * N, N, 0, 0, 0]),
        first,
        out.array.reshape(B * T, C),
        lse.array,
        keys.array,
        s.array,
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
        return _nbytes((min(heads, threads.get_threads()), N))
    return _nbytes(*_scratch(heads, N, C // n_head), (heads, T))


def kv_append(
    qkv: Tensor, pos: int | Tensor, *, k_cache: Tensor, v_cache: Tensor, q: Tensor, n_head: int
) -> None:
    """Write qkv's keys and values into the caches from `pos` on; q [B, T, C] gets the queries."""
    append(qkv.array, positions(pos, q.shape[0]), k_cache.array, v_cache.array, q.array)
