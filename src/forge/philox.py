"""Philox4x32-10: random numbers as a pure function of a counter and a key.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Ten rounds of
two 32x32 -> 64 bit products scramble four 32-bit counter words. Every random choice in Forge is a
function of (seed, step, position), so it can be made again anywhere, in any order.
"""

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds over `counter`, uint32 of shape [..., 4]; returns uint32 of the same shape.

    `key` is two integers, of which the low 32 bits count.
    """
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c2 = (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def words(count: int, key: tuple[int, int], *, stream: int = 0, site: int = 0) -> np.ndarray:
    """The first `count` uint32 words of a stream, from the counters (i // 4, stream, site, 0)."""
    blocks = (count + 3) // 4
    counter = np.zeros((blocks, 4), np.uint32)
    counter[:, 0] = np.arange(blocks, dtype=np.uint32)
    counter[:, 1] = np.uint32(stream)
    counter[:, 2] = np.uint32(site)
    return philox4x32(counter, key).reshape(-1)[:count]


def uniform(count: int, key: tuple[int, int], *, stream: int = 0, site: int = 0) -> np.ndarray:
    """`count` float64 numbers in [0, 1), multiples of 2**-32."""
    return words(count, key, stream=stream, site=site) * 2.0**-32


def normal(count: int, key: tuple[int, int], *, stream: int = 0, site: int = 0) -> np.ndarray:
    """`count` float64 standard normal numbers (Box and Muller, 1958)."""
    pairs = (count + 1) // 2
    u = uniform(2 * pairs, key, stream=stream, site=site).reshape(pairs, 2)
    # 1 - u lies in (0, 1], so the logarithm is finite.
    radius = np.sqrt(-2.0 * np.log(1.0 - u[:, 0]))
    angle = 2.0 * np.pi * u[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1)[:count]


def threshold(p: float) -> int:
    """Words below this are dropped by dropout of probability p."""
    return round(p * 2**32)
