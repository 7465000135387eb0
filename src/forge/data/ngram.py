"""N-gram tables of bytes: what a model must beat to have learned more than short sequences.

They are counted on the training bytes and scored on the held-out ones, in bits per byte. Contexts
are packed into integers, so that counting is sorting: a second for a megabyte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float64]

# A context of 7 bytes and the byte after it fill a uint64.
LONGEST = 8


def bigram_bits(train: Bytes, held_out: Bytes) -> float:
    """Bits per held-out byte of a table of byte pairs.

    `alpha` is added to every count; of a grid, the one that is best for the held-out bytes.
    """
    pairs = train[:-1].astype(np.int64) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256)
    totals = counts.sum(axis=1)
    first, second = held_out[:-1], held_out[1:]
    seen, total = counts[first, second], totals[first]
    return min(
        float(-np.log2((seen + alpha) / (total + 256 * alpha)).mean())
        for alpha in np.geomspace(1e-4, 1, 25)
    )


def witten_bell_bits(train: Bytes, held_out: Bytes, longest: int = LONGEST) -> list[float]:
    """Bits per held-out byte of n-gram tables of 1, 2, … `longest` bytes (at most `LONGEST`).

    Witten and Bell (1991), interpolated: with N(h) the occurrences of context h, T(h) the number of
    different bytes after it, and h' the context without its first byte,
    p(c | h) = (N(hc) + T(h) p(c | h')) / (N(h) + T(h)); below the empty context all bytes are
    equal. The first byte is context only; near it contexts are as long as there is text.
    """
    probability = np.full(len(held_out) - 1, 1 / 256)
    bits = []
    for n in range(1, longest + 1):
        grams, ours = _packed(train, n), _packed(held_out, n)
        kinds, counts = np.unique(grams, return_counts=True)
        contexts, first = np.unique(kinds >> np.uint64(8), return_index=True)
        occurrences = np.add.reduceat(counts, first)
        followers = np.diff(first, append=len(kinds))
        # The first held-out bytes have too short a context: they keep what shorter ones gave.
        scored = ours[1:] if n == 1 else ours
        gram = _look_up(kinds, counts, scored)
        total = _look_up(contexts, occurrences, scored >> np.uint64(8))
        types = _look_up(contexts, followers, scored >> np.uint64(8))
        shorter = probability[len(probability) - len(scored) :]
        known = total > 0
        mixed = (gram[known] + types[known] * shorter[known]) / (total[known] + types[known])
        shorter[known] = mixed
        bits.append(float(-np.log2(probability).mean()))
    return bits


def _packed(text: Bytes, n: int) -> npt.NDArray[np.uint64]:
    """Every run of n bytes as one integer, the last byte lowest."""
    count = max(0, len(text) - n + 1)
    packed = np.zeros(count, np.uint64)
    for i in range(n):
        packed = (packed << np.uint64(8)) | text[i : i + count].astype(np.uint64)
    return packed


def _look_up(
    keys: npt.NDArray[np.uint64], values: npt.NDArray[np.int64], wanted: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """The value of each wanted key, 0 where it is not among the sorted keys."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
