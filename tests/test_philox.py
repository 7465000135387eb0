"""Philox4x32-10 against the vectors its authors publish, and the numbers made of it."""

import math

import numpy as np
import pytest

from forge import philox

# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, output.
VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def hexadecimal(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter, key, expected):
    out = philox.philox4x32(np.array(hexadecimal(counter), np.uint32), tuple(hexadecimal(key)))
    assert out.tolist() == hexadecimal(expected)


def test_counters_in_a_batch_give_what_each_gives_alone():
    counters = np.array([hexadecimal(counter) for counter, _, _ in VECTORS], np.uint32)
    key = (7, 8)
    batch = philox.philox4x32(counters.reshape(3, 1, 4), key).reshape(3, 4)
    assert (batch == [philox.philox4x32(counter, key) for counter in counters]).all()


def test_only_the_low_words_of_the_key_count():
    counter = np.zeros(4, np.uint32)
    low, high = (
        philox.philox4x32(counter, (5, 6)),
        philox.philox4x32(counter, (5 + 2**32, 6 - 2**32)),
    )
    assert (low == high).all()


def test_words_count_elements_by_four_then_stream_then_site():
    words = philox.words(7, (3, 4), stream=5, site=6)
    for element, word in enumerate(words):
        counter = np.array([element // 4, 5, 6, 0], np.uint32)
        assert word == philox.philox4x32(counter, (3, 4))[element % 4]


def test_words_of_a_shorter_call_begin_a_longer_one():
    assert (philox.words(1001, (1, 2))[:10] == philox.words(10, (1, 2))).all()
    assert philox.words(0, (1, 2)).shape == (0,)


def test_every_part_of_the_counter_and_key_matters():
    calls = [((1, 2), 3, 4), ((9, 2), 3, 4), ((1, 9), 3, 4), ((1, 2), 9, 4), ((1, 2), 3, 9)]
    rows = {philox.words(4, key, stream=a, site=b).tobytes() for key, a, b in calls}
    assert len(rows) == len(calls)


def test_uniform_lies_in_the_unit_interval_and_is_flat():
    n = 100_000
    x = philox.uniform(n, (1, 2))
    assert x.min() >= 0.0
    assert x.max() < 1.0
    # Ten bins of n / 10 each: chi-squared with 9 degrees of freedom is below 33.7 in 9,999 of
    # 10,000 cases; the key is fixed, so this one is.
    counts = np.histogram(x, 10, (0, 1))[0]
    assert ((counts - n / 10) ** 2 / (n / 10)).sum() < 33.7


def test_normal_has_the_moments_of_a_normal_distribution():
    n = 100_000
    x = philox.normal(n, (1, 2))
    assert np.isfinite(x).all()
    # Five standard errors of each estimate.
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((x[::2] * x[1::2]).mean()) < 5 / math.sqrt(n / 2)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_normal_gives_as_many_as_asked(count):
    assert (philox.normal(count, (1, 2)) == philox.normal(8, (1, 2))[:count]).all()


@pytest.mark.parametrize(("p", "word"), [(0.0, 0), (0.5, 2**31), (0.1, 429496730)])
def test_threshold_is_the_rounded_share_of_all_words(p, word):
    assert philox.threshold(p) == word
