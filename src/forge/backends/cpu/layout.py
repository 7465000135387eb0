"""Copies between packed heads, separate heads and caches.

B batch, T sequence, H heads, D head width, C = H D, N positions of a cache.
"""

from typing import Any

from numba import prange

from forge.backends.cpu.jit import forms, routine


@routine
def copy(out: Any, x: Any) -> None:
    """out = x, rows of equal length."""
    for i in range(out.size):
        out[i] = x[i]


@forms("void(T[:,:,::1], T[:,:,::1], int64)")
def split(packed: Any, heads: Any, column: Any) -> None:
    """heads [B H, T, D] = the columns of packed [B, T, …] from `column` on."""
    T, D = heads.shape[1:]
    n_head = heads.shape[0] // packed.shape[0]
    for head in prange(heads.shape[0]):
        start = column + head % n_head * D
        for t in range(T):
            copy(heads[head, t], packed[head // n_head, t, start : start + D])


@forms("void(T[:,:,::1], T[:,:,::1], int64)")
def merge(heads: Any, packed: Any, column: Any) -> None:
    """The columns of packed [B, T, …] from `column` on = heads [B H, T, D]."""
    T, D = heads.shape[1:]
    n_head = heads.shape[0] // packed.shape[0]
    for head in prange(heads.shape[0]):
        start = column + head % n_head * D
        for t in range(T):
            copy(packed[head // n_head, t, start : start + D], heads[head, t])


@forms("void(T[:,:,::1], int64[::1], T[:,:,:,::1], T[:,:,:,::1], T[:,:,::1])")
def append(qkv: Any, pos: Any, k_cache: Any, v_cache: Any, q: Any) -> None:
    """qkv [B, T, 3C] into q [B, T, C] and, from position pos[b] on, the caches [B, H, N, D]."""
    B, T, C = q.shape
    H = k_cache.shape[1]
    D = k_cache.shape[3]
    for n in prange(B * T):
        b = n // T
        t = n % T
        copy(q[b, t], qkv[b, t, :C])
        for h in range(H):
            k = C + h * D
            copy(k_cache[b, h, pos[b] + t], qkv[b, t, k : k + D])
            copy(v_cache[b, h, pos[b] + t], qkv[b, t, k + C : k + C + D])
