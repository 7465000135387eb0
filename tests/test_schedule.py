"""The learning-rate schedule against nanoGPT's formula, and its edges."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import ArgumentError
from forge.optim.schedule import CosineSchedule


def nanogpt(it, learning_rate, warmup_iters, lr_decay_iters, min_lr):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


@given(st.integers(0, 50), st.integers(1, 200), st.floats(0, 1), st.integers(0, 400))
def test_is_nanogpts(warmup, span, ratio, step):
    schedule = CosineSchedule(4e-3, warmup, warmup + span, ratio)
    expected = nanogpt(step, 4e-3, warmup, warmup + span, 4e-3 * ratio)
    assert math.isclose(schedule(step), expected, rel_tol=1e-12, abs_tol=1e-18)


def test_points_worked_out_by_hand():
    schedule = CosineSchedule(peak=1.0, warmup_steps=3, decay_steps=13, floor_ratio=0.2)
    assert [schedule(k) for k in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(8) == pytest.approx(0.6)
    assert schedule(13) == schedule(10**9) == 0.2


def test_no_steps_at_all():
    assert CosineSchedule(1.0, 0, 0, 0.1)(0) == 0.1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((-1.0, 1, 2, 0.1), "peak"),
        ((math.nan, 1, 2, 0.1), "peak"),
        ((1.0, -1, 2, 0.1), "warmup_steps"),
        ((1.0, 3, 2, 0.1), "decay_steps"),
        ((1.0, 1, 2, 1.5), "floor_ratio"),
    ],
)
def test_refuses(arguments, name):
    with pytest.raises(ArgumentError, match=f"expected {name} "):
        CosineSchedule(*arguments)
