"""Fused ops spelled out in smaller public ops: a second definition of each, also for gradients.

Each takes its op's arguments, Tensors or Vars, and runs on any device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forge import ops
from forge.ops.token import BLOCK
from forge.tensor import Tensor, tensor


def gelu(x: Any, *, form: str) -> Any:
    """x/2 (1 + tanh(k (x + c x^3))), the tanh form."""
    inner = ops.scale(x + ops.scale(x * x * x, 0.044715), math.sqrt(2.0 / math.pi))
    return ops.scale(x * (ops.tanh(inner) + 1.0), 0.5)


def linear(x: Any, w: Any, bias: Any = None, *, gelu: str | None = None) -> Any:
    """A product, a sum and gelu."""
    rows = ops.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    y = ops.reshape(ops.matmul(rows, w), (*x.shape[:-1], w.shape[1]))
    y = y if bias is None else y + bias
    return y if gelu is None else ops.gelu(y, form=gelu)


def mlp(x: Any, w: Any, bias: Any, w_out: Any, bias_out: Any = None, *, gelu: str = "tanh") -> Any:
    """Two linear layers."""
    return ops.linear(ops.linear(x, w, bias, gelu=gelu), w_out, bias_out)


def dequantize(q: Any, scale: Any, dtype: str | None = None) -> Any:
    """A product of the numbers with their row's scale."""
    whole = ops.cast(q, scale.dtype) * ops.reshape(scale, (*scale.shape, 1))
    return whole if dtype is None else ops.cast(whole, dtype)


def quantized_linear(
    x: Any, w: Any, scale: Any, bias: Any = None, *, gelu: str | None = None
) -> Any:
    """linear of the weights as they were meant."""
    return ops.linear(x, ops.transpose(ops.dequantize(w, scale)), bias, gelu=gelu)


def quantized_embedding(ids: Any, wte: Any, scale: Any, wpe: Any = None, pos: Any = 0) -> Any:
    """embedding of the rows as they were meant."""
    return ops.embedding(ids, ops.dequantize(wte, scale), wpe, pos)


def layernorm(x: Any, gamma: Any, beta: Any, eps: float = 1e-5) -> Any:
    """Mean and variance by `mean`; 1 / sqrt(v) as e^(-log(v) / 2)."""
    centred = x - ops.mean(x, -1, keepdims=True)
    variance = ops.mean(centred * centred, -1, keepdims=True) + eps
    return centred * ops.exp(ops.scale(ops.log(variance), -0.5)) * gamma + beta


def add_layernorm(
    x: Any, branch: Any, bias: Any, gamma: Any, beta: Any, eps: float = 1e-5
) -> tuple[Any, Any]:
    """Two sums and a layernorm."""
    total = x + branch if bias is None else x + branch + bias
    return total, ops.layernorm(total, gamma, beta, eps)


def softmax(x: Any, *, causal: bool = False, pos: int = 0) -> Any:
    """Exponentials over their sum; the masked ones become e^-inf."""
    rows, columns = x.shape[-2:]
    hidden = np.arange(columns) > pos + np.arange(rows)[:, None]
    if causal:
        x = x + tensor(np.where(hidden, -np.inf, 0.0), x.dtype, x.device)
    e = ops.exp(x - ops.max(x, -1, keepdims=True))
    return e / ops.sum(e, -1, keepdims=True)


def split_heads(qkv: Any, n_head: int) -> tuple[Any, ...]:
    """[B, T, 3, H, D] with the heads before the positions, cut in three."""
    *batch, length, packed = qkv.shape
    width = packed // (3 * n_head)
    x = ops.reshape(qkv, (math.prod(batch), length, 3, n_head, width))
    x = ops.transpose(x, (2, 0, 3, 1, 4))
    return tuple(ops.reshape(x[i], (math.prod(batch) * n_head, length, width)) for i in range(3))


def merge_heads(x: Any, n_head: int | None = None) -> Any:
    """[B, H, T, D] with the heads after the positions."""
    rows, length, width = x.shape
    heads = rows if n_head is None else n_head
    y = ops.transpose(ops.reshape(x, (rows // heads, heads, length, width)), (0, 2, 1, 3))
    batch = () if n_head is None else (rows // heads,)
    return ops.reshape(y, (*batch, length, heads * width))


def attention(
    qkv: Any, n_head: int, p: float = 0.0, key: Any = None, *, site: int = 0, first_sample: int = 0
) -> Any:
    """split_heads, matmul, softmax, dropout, matmul, merge_heads."""
    q, k, v = ops.split_heads(qkv, n_head)
    rows, _, width = q.shape
    scores = ops.matmul(q, k, trans_b=True, alpha=1.0 / math.sqrt(width))
    weights = ops.softmax(scores, causal=True)
    samples = max(rows // n_head, 1)
    weights = ops.dropout(weights, p, key, site=site, first_sample=first_sample, samples=samples)
    out = ops.merge_heads(ops.matmul(weights, v), n_head)
    return ops.reshape(out, (*qkv.shape[:-1], n_head * width))


def cached_attention(q: Any, k_cache: Any, v_cache: Any, pos: int | Tensor) -> Any:
    """A causal softmax per sample over the cached positions that it sees."""
    batch, length, _ = q.shape
    _, heads, _, width = k_cache.shape
    rows = []
    for b, first in enumerate(_positions(pos, batch)):
        k, v = (cache[b, :, : first + length] for cache in (k_cache, v_cache))
        scores = ops.matmul(
            ops.unmerge_heads(q[b], heads), k, trans_b=True, alpha=1.0 / math.sqrt(width)
        )
        weights = ops.softmax(scores, causal=True, pos=first)
        rows.append(ops.merge_heads(ops.matmul(weights, v), heads))
    return ops.reshape(ops.concat(*rows), q.shape)


def embedding(
    ids: Any, wte: Any, wpe: Any = None, pos: Any = 0, order: Any = None, *, rows: Any = None
) -> Any:
    """Rows of one table plus rows of the other."""
    tokens = ops.take(wte, ids)
    if wpe is None:
        return tokens
    batch, length = ids.shape if ids.ndim == 2 else (1, ids.shape[0])
    positions = np.array(_positions(pos, batch))[:, None] + np.arange(length)
    return tokens + ops.take(wpe, tensor(positions.reshape(ids.shape), "int64", ids.device))


def cross_entropy(
    logits: Any, targets: Any, weight: Any = None, *, ignore_index: int = -100
) -> Any:
    """-log of the softmax, times a one-hot mask that is zero for ignored rows, and its sum."""
    labels = targets.numpy()
    mask = (labels[..., None] == np.arange(logits.shape[-1])) & (labels != ignore_index)[..., None]
    losses = ops.scale(ops.log(ops.softmax(logits)), -1.0)
    total = ops.sum(losses * tensor(mask, logits.dtype, logits.device))
    return ops.scale(total, 1.0 / max(int(mask.sum()), 1) if weight is None else weight)


def linear_cross_entropy(
    x: Any,
    wte: Any,
    targets: Any,
    weight: Any = None,
    *,
    rows: Any = None,
    ignore_index: int = -100,
) -> Any:
    """cross_entropy of whole logits."""
    head = wte if rows is None else wte[:rows]
    flat = ops.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    labels = ops.reshape(targets, flat.shape[:1])
    logits = ops.matmul(flat, head, trans_b=True)
    return ops.cross_entropy(logits, labels, weight, ignore_index=ignore_index)


def _positions(pos: int | Tensor, batch: int) -> list[int]:
    return [pos] * batch if isinstance(pos, int) else [int(first) for first in pos.numpy()]


def decode_token(
    *blocks: Any,
    ids: Any,
    wte: Any,
    wpe: Any,
    gamma: Any,
    beta: Any,
    pos: Any,
    rows: Any = None,
    eps: float = 1e-5,
) -> Any:
    """The ops that a GPT-2 is made of."""
    column, width = (ids.shape[0], 1), len(BLOCK)
    h = ops.embedding(ops.reshape(ids, column), wte, wpe, pos, rows=rows)
    for i in range(0, len(blocks), width):
        gamma_1, beta_1, w_attn, b_attn, w_proj, b_proj, *mlp, keys, values = blocks[i : i + width]
        qkv = ops.linear(ops.layernorm(h, gamma_1, beta_1, eps), w_attn, b_attn)
        y = ops.cached_attention(ops.kv_append_(keys, values, qkv, pos), keys, values, pos)
        gamma_2, beta_2, w_fc, b_fc, w_out, b_out = mlp
        h, y = ops.add_layernorm(h, ops.linear(y, w_proj), b_proj, gamma_2, beta_2, eps)
        h = h + ops.linear(ops.linear(y, w_fc, b_fc, gelu="tanh"), w_out, b_out)
    y = ops.reshape(ops.layernorm(h, gamma, beta, eps), (ids.shape[0], wte.shape[1]))
    return ops.matmul(y, wte, trans_b=True, b_rows=rows)
