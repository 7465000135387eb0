"""Attention (Vaswani et al., 2017), causal, on the packed projection.

Shapes: B samples, T positions, H heads of width D, C = H D, N cached positions.
"""

from __future__ import annotations

import numpy as np

from forge.backends.reference.arrays import Array, read, write
from forge.backends.reference.pointwise import keep_mask
from forge.tensor import Tensor


def softmax(x: Tensor, *, out: Tensor, causal: bool, pos: int) -> None:
    """out = softmax over the last dimension; causal: row i sees the columns up to pos + i."""
    write(out, softmax_array(read(x), causal, pos))


def softmax_array(x: Array, causal: bool, pos: int) -> Array:
    """softmax on an array; masked elements are exact zeros."""
    if causal:
        rows, columns = x.shape[-2:]
        visible = np.arange(columns) <= pos + np.arange(rows)[:, None]
        x = np.where(visible, x, -np.inf)
    e = np.exp(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
    result: Array = e / e.sum(axis=-1, keepdims=True)
    return result


def softmax_backward(y: Tensor, dy: Tensor, *, out: Tensor) -> None:
    """out = y (dy - sum(y dy)): zero wherever y is, so the mask needs no bookkeeping."""
    p, d = read(y), read(dy)
    write(out, p * (d - (p * d).sum(axis=-1, keepdims=True)))


def split_heads(qkv: Tensor, *, q: Tensor, k: Tensor, v: Tensor, n_head: int) -> None:
    """[B, T, 3C] -> three [B H, T, D]."""
    parts = _heads(qkv.array, 3 * n_head)
    for part, out in zip(np.split(parts, 3, axis=1), (q, k, v), strict=True):
        out.array[...] = part.reshape(out.shape)


def unsplit_heads(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *, out: Tensor, n_head: int
) -> None:
    """Three [B H, T, D] -> [B, T, 3C]; a missing one counts as zeros."""
    batch, length, width = out.shape
    view = out.array.reshape(batch, length, 3, n_head, width // (3 * n_head))
    for i, part in enumerate((dq, dk, dv)):
        view[:, :, i] = 0 if part is None else _positions_first(part.array, n_head)


def merge_heads(x: Tensor, *, out: Tensor, n_head: int) -> None:
    """[B H, T, D] -> [B, T, C]."""
    out.array[...] = _positions_first(x.array, n_head).reshape(out.shape)


def unmerge_heads(dy: Tensor, *, out: Tensor, n_head: int) -> None:
    """[B, T, C] -> [B H, T, D]."""
    out.array[...] = _heads(dy.array, n_head).reshape(out.shape)


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
    q, k, v = _qkv(qkv, n_head)
    scores = _scores(q, k)
    probabilities = softmax_array(scores, True, 0)
    kept = probabilities * _dropout_factor(probabilities, key, p, site, first_sample)
    write(out, _merged(kept @ v))
    if lse is not None:
        batch, heads, length, _ = q.shape
        visible = np.tril(np.ones((length, length), bool))
        masked = np.where(visible, scores, -np.inf)
        top = masked.max(axis=-1, initial=-np.inf)
        total = np.exp(masked - top[..., None]).sum(axis=-1)
        write(lse, (top + np.log(total)).reshape(batch, heads, length))


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
    q, k, v = _qkv(qkv, n_head)
    length, width = q.shape[-2:]
    visible = np.tril(np.ones((length, length), bool))
    probabilities = np.where(visible, np.exp(_scores(q, k) - read(lse)[..., None]), 0)
    factor = _dropout_factor(probabilities, key, p, site, first_sample)
    do = _heads(read(dout), n_head)
    dv = np.swapaxes(probabilities * factor, -1, -2) @ do
    dprobabilities = (do @ np.swapaxes(v, -1, -2)) * factor
    # sum(P dP) over a row is sum(out dout): Dao (2023), FlashAttention-2.
    delta = (_heads(read(out), n_head) * do).sum(axis=-1, keepdims=True)
    dscores = probabilities * (dprobabilities - delta) / np.asarray(np.sqrt(width), q.dtype)
    dq, dk = dscores @ k, np.swapaxes(dscores, -1, -2) @ q
    write(dqkv, np.concatenate([_merged(dq), _merged(dk), _merged(dv)], axis=-1))


def cached_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: int | Tensor, *, out: Tensor, n_head: int
) -> None:
    """Query t of sample b sees the cached positions 0 .. pos[b] + t; q [B, T, C]."""
    queries, length = _heads(read(q), n_head), q.shape[1]
    for b, first in enumerate(positions(pos, q.shape[0])):
        stop = first + length
        k, v = read(k_cache)[b, :, :stop], read(v_cache)[b, :, :stop]
        weights = softmax_array(_scores(queries[b], k), True, first)
        out.array[b] = _merged((weights @ v)[None])[0]


def kv_append(
    qkv: Tensor, pos: int | Tensor, *, k_cache: Tensor, v_cache: Tensor, q: Tensor, n_head: int
) -> None:
    """Write keys and values of qkv [B, T, 3C] into the caches from `pos` on; q = the queries."""
    queries, keys, values = np.split(qkv.array, 3, axis=-1)
    q.array[...] = queries
    for b, first in enumerate(positions(pos, qkv.shape[0])):
        where = slice(first, first + qkv.shape[1])
        k_cache.array[b, :, where] = _heads(keys[b : b + 1], n_head)[0]
        v_cache.array[b, :, where] = _heads(values[b : b + 1], n_head)[0]


def positions(pos: int | Tensor, batch: int) -> list[int]:
    """The first position of each sample."""
    return [pos] * batch if isinstance(pos, int) else [int(p) for p in pos.array]


def _heads(x: Array, n_head: int) -> Array:
    """[B, T, H D] -> [B, H, T, D]."""
    batch, length, width = x.shape
    return x.reshape(batch, length, n_head, width // n_head).transpose(0, 2, 1, 3)


def _positions_first(x: Array, n_head: int) -> Array:
    """[B H, T, D] -> [B, T, H, D]."""
    rows, length, width = x.shape
    return x.reshape(rows // n_head, n_head, length, width).transpose(0, 2, 1, 3)


def _merged(x: Array) -> Array:
    """[B, H, T, D] -> [B, T, C]."""
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


def _qkv(qkv: Tensor, n_head: int) -> tuple[Array, Array, Array]:
    q, k, v = np.split(read(qkv), 3, axis=-1)
    return _heads(q, n_head), _heads(k, n_head), _heads(v, n_head)


def _scores(q: Array, k: Array) -> Array:
    result: Array = q @ np.swapaxes(k, -1, -2) / np.asarray(np.sqrt(q.shape[-1]), q.dtype)
    return result


def _dropout_factor(
    like: Array, key: Tensor | None, p: float, site: int, first_sample: int
) -> Array | float:
    if p == 0.0 or key is None:
        return 1.0
    keep = keep_mask(
        like.size, key, p=p, site=site, first_sample=first_sample, samples=like.shape[0]
    )
    kept: Array = keep.reshape(like.shape).astype(like.dtype)
    kept /= np.asarray(1.0 - p, like.dtype)
    return kept
