"""A whole GPT-2 for one new position of every sample."""

from __future__ import annotations

import numpy as np

from forge.backends.reference.arrays import Array, read, write
from forge.backends.reference.pointwise import gelu_array
from forge.tensor import Tensor


def decode_token(
    ids: Tensor,
    pos: Tensor,
    wte: Tensor,
    wpe: Tensor,
    gamma: Tensor,
    beta: Tensor,
    weights: tuple[tuple[Tensor, ...], ...],
    *,
    k_caches: tuple[Tensor, ...],
    v_caches: tuple[Tensor, ...],
    out: Tensor,
    eps: float,
) -> None:
    """out [B, V] = logits for ids [B] at pos [B], where keys and values go into the caches."""
    table = read(wte)
    h = table[ids.array] + read(wpe)[pos.array]
    for each, k_cache, v_cache in zip(weights, k_caches, v_caches, strict=True):
        gamma_1, beta_1, w_attn, b_attn, w_proj, b_proj, *mlp = map(read, each)
        packed = _layernorm(h, gamma_1, beta_1, eps) @ w_attn + b_attn
        h = h + _attention(packed, k_cache, v_cache, pos) @ w_proj + b_proj
        gamma_2, beta_2, w_fc, b_fc, w_out, b_out = mlp
        wide = gelu_array(_layernorm(h, gamma_2, beta_2, eps) @ w_fc + b_fc, "tanh")
        h = h + wide @ w_out + b_out
    write(out, _layernorm(h, read(gamma), read(beta), eps) @ table[: out.shape[1]].T)


def _attention(packed: Array, k_cache: Tensor, v_cache: Tensor, pos: Tensor) -> Array:
    """The attention's output [B, C] for packed [B, 3C]."""
    B, H, _, D = k_cache.shape
    heads = packed.reshape(B, 3, H, D)
    mixed = np.empty_like(heads[:, 0])
    for b, position in enumerate(pos.array):
        k_cache.array[b, :, position] = heads[b, 1]
        v_cache.array[b, :, position] = heads[b, 2]
        seen = slice(0, position + 1)
        keys, values = read(k_cache)[b, :, seen], read(v_cache)[b, :, seen]
        scores = (keys @ heads[b, 0, :, :, None])[:, :, 0] / np.sqrt(np.asarray(D, packed.dtype))
        share = np.exp(scores - scores.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        mixed[b] = (share[:, None, :] @ values)[:, 0]
    return mixed.reshape(B, H * D)


def _layernorm(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = 1.0 / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps)
    result: Array = centred * scale * gamma + beta
    return result
