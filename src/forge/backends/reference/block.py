"""A block of a GPT-2 for one new position of every sample."""

from __future__ import annotations

import numpy as np

from forge.backends.reference.arrays import Array, read, write
from forge.backends.reference.pointwise import gelu_array
from forge.tensor import Tensor


def decode_block(
    h: Tensor,
    gamma_1: Tensor,
    beta_1: Tensor,
    w_attn: Tensor,
    b_attn: Tensor,
    w_proj: Tensor,
    b_proj: Tensor,
    gamma_2: Tensor,
    beta_2: Tensor,
    w_fc: Tensor,
    b_fc: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    pos: Tensor,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    eps: float,
) -> None:
    """out [B, C] = the block's output for h [B, C]; keys and values go into the caches at pos."""
    x = read(h)
    B, H, _, D = k_cache.shape
    y = _layernorm(x, gamma_1, beta_1, eps)
    packed = (y @ read(w_attn) + read(b_attn)).reshape(B, 3, H, D)
    mixed = np.empty_like(packed[:, 0])
    for b, position in enumerate(pos.array):
        k_cache.array[b, :, position] = packed[b, 1]
        v_cache.array[b, :, position] = packed[b, 2]
        seen = slice(0, position + 1)
        keys, values = read(k_cache)[b, :, seen], read(v_cache)[b, :, seen]
        scores = (keys @ packed[b, 0, :, :, None])[:, :, 0] / np.sqrt(np.asarray(D, x.dtype))
        share = np.exp(scores - scores.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        mixed[b] = (share[:, None, :] @ values)[:, 0]
    g = x + mixed.reshape(B, H * D) @ read(w_proj) + read(b_proj)
    z = _layernorm(g, gamma_2, beta_2, eps)
    wide = gelu_array(z @ read(w_fc) + read(b_fc), "tanh")
    write(out, g + wide @ read(w_out) + read(b_out))


def _layernorm(x: Array, gamma: Tensor, beta: Tensor, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = 1.0 / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps)
    result: Array = centred * scale * read(gamma) + read(beta)
    return result
