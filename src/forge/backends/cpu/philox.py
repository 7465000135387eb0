"""Dropout's random words inside kernels: Philox4x32-10, bit for bit that of `forge.philox`."""

from typing import Any

import numpy as np

from forge.backends.cpu.bfloat16 import narrow
from forge.backends.cpu.jit import device, routine

u32 = np.uint32
u64 = np.uint64

_M0, _M1 = u64(0xD2511F53), u64(0xCD9E8D57)
_W0, _W1 = u32(0x9E3779B9), u32(0xBB67AE85)
_SHIFT = u64(32)
# Counters that are scrambled at a time.
_BLOCK = 256


@device
def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """The four words of a counter and a key, all uint32 (Salmon and others, SC 2011)."""
    for _ in range(10):
        p0 = _M0 * u64(c0)
        p1 = _M1 * u64(c2)
        c0 = u32(u32(p1 >> _SHIFT) ^ c1 ^ k0)
        c2 = u32(u32(p0 >> _SHIFT) ^ c3 ^ k1)
        c1 = u32(p1)
        c3 = u32(p0)
        k0 = u32(k0 + _W0)
        k1 = u32(k1 + _W1)
    return c0, c1, c2, c3


@routine
def keep_factors(
    factors: Any,
    first: Any,
    sample: Any,
    site: Any,
    seed: Any,
    step: Any,
    threshold: Any,
    scale: Any,
) -> None:
    """factors[i] = scale where element first + i of a sample is kept, else 0.

    `factors` is float32 [n], or bfloat16's bits, where `scale` is rounded; `seed` and `step` are
    the key's int64 words, of which the low 32 bits count. An element is kept iff its word >=
    threshold (uint32). 0.8 ns an element where `first` is a multiple of 4, else 1.6.
    """
    c1, c2 = u32(sample), u32(site)
    k0, k1 = u32(seed), u32(step)
    skip = first % 4
    # Each word of a counter goes to an array of its own: stores of stride 4 keep LLVM from
    # vectorising the rounds (3.3 against 1.1 ns an element).
    words = np.empty((4, _BLOCK + 1), np.float32)
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    for start in range(0, factors.size, 4 * _BLOCK):
        part = factors[start : start + 4 * _BLOCK]
        block = (first + start) // 4
        for i in range((skip + part.size + 3) // 4):
            v0, v1, v2, v3 = philox4x32(u32(block + i), c1, c2, u32(0), k0, k1)
            w0[i] = scale if v0 >= threshold else np.float32(0.0)
            w1[i] = scale if v1 >= threshold else np.float32(0.0)
            w2[i] = scale if v2 >= threshold else np.float32(0.0)
            w3[i] = scale if v3 >= threshold else np.float32(0.0)
        whole = part.size // 4 if skip == 0 else 0
        # Unsigned indices spare the check for negative ones, and so vectorise.
        for i in range(u64(whole)):
            part[u64(4) * i] = narrow(part, w0[i])
            part[u64(4) * i + u64(1)] = narrow(part, w1[i])
            part[u64(4) * i + u64(2)] = narrow(part, w2[i])
            part[u64(4) * i + u64(3)] = narrow(part, w3[i])
        for i in range(4 * whole, part.size):
            part[i] = narrow(part, words[(i + skip) % 4, (i + skip) // 4])
