"""N-gram tables against the formula, one byte at a time."""

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from forge.data.ngram import bigram_bits, witten_bell_bits

TRAIN = b"the cat sat on the mat; the dog sat on the log. " * 3 + b"zebra"
HELD_OUT = b"the cat on the log sat; a quick dog."


def plain_witten_bell(train, held_out, longest):
    """p(c | h) by recursion over dictionaries."""
    after = defaultdict(Counter)
    for n in range(longest):
        for i in range(n, len(train)):
            after[train[i - n : i]][train[i]] += 1

    def probability(history, c):
        shorter = 1 / 256 if not history else probability(history[1:], c)
        if history not in after:
            return shorter
        counts = after[history]
        total, types = sum(counts.values()), len(counts)
        return (counts[c] + types * shorter) / (total + types)

    scores = []
    for i in range(1, len(held_out)):
        history = held_out[max(0, i - longest + 1) : i]
        scores.append(-math.log2(probability(history, held_out[i])))
    return sum(scores) / len(scores)


def array(text):
    return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_witten_bell_is_its_formula(n):
    bits = witten_bell_bits(array(TRAIN), array(HELD_OUT), n)
    assert len(bits) == n
    assert bits[-1] == pytest.approx(plain_witten_bell(TRAIN, HELD_OUT, n), rel=1e-12)


def test_longer_tables_do_not_change_shorter_ones():
    long, short = (witten_bell_bits(array(TRAIN), array(HELD_OUT), n) for n in (8, 3))
    assert long[:3] == short


def test_high_bytes_do_not_overflow_the_packing():
    text = bytes(range(248, 256)) * 40
    assert witten_bell_bits(array(text), array(text))[-1] < 0.05


def test_texts_shorter_than_the_longest_context():
    bits = witten_bell_bits(array(b"abcab"), array(b"abc"), 8)
    assert bits[7] == pytest.approx(plain_witten_bell(b"abcab", b"abc", 8))


def test_bigram_is_the_best_of_a_grid_of_smoothings():
    def bits(alpha):
        pairs, totals = Counter(itertools.pairwise(TRAIN)), Counter(TRAIN[:-1])
        scores = [
            -math.log2((pairs[a, b] + alpha) / (totals[a] + 256 * alpha))
            for a, b in itertools.pairwise(HELD_OUT)
        ]
        return sum(scores) / len(scores)

    ours = bigram_bits(array(TRAIN), array(HELD_OUT))
    grid = [bits(alpha) for alpha in np.geomspace(1e-4, 1, 400)]
    assert min(grid) == pytest.approx(ours, abs=0.01)
