"""Fused attention on the CPU: at the sizes where its tiles, blocks and vectors end."""

import numpy as np
import pytest

from forge.backends.cpu import attention, threads
from forge.backends.cpu.head import QUERIES, SHORT
from forge.errors import ArgumentError
from forge.tensor import Tensor, tensor, zeros_like

f32 = np.float32
LENGTHS = (1, 15, 16, 17, QUERIES, SHORT, SHORT + 1, 130)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[0]).standard_normal(shape).astype(f32)


def both_ways(
    qkv: Tensor, dout: Tensor, n_head: int, p: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The result, its lse and the gradient of qkv."""
    B, T, _ = qkv.shape
    out, dqkv, lse = zeros_like(dout), zeros_like(qkv), tensor(np.zeros((B * n_head, T), f32))
    key = tensor(np.array([3, 5], np.int64)) if p else None
    settings = {"n_head": n_head, "p": p, "site": 2, "first_sample": 0}
    attention.attention(qkv, key, out=out, lse=lse, **settings)
    attention.attention_backward(qkv, out, dout, lse, key, dqkv=dqkv, **settings)
    return out.numpy(), lse.numpy(), dqkv.numpy()


def defined(qkv: np.ndarray, dout: np.ndarray, n_head: int) -> tuple[np.ndarray, ...]:
    """The same in float64, by the definition."""
    B, T, C = dout.shape
    D = C // n_head
    q, k, v, dy = (
        part.astype(np.float64).reshape(B, T, n_head, D).transpose(0, 2, 1, 3)
        for part in (*np.split(qkv, 3, axis=2), dout)
    )
    scores = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(D), -np.inf)
    lse = np.log(np.exp(scores).sum(axis=3, keepdims=True))
    weights = np.exp(scores - lse)
    y = weights @ v
    dscores = weights * (dy @ v.swapaxes(2, 3) - (y * dy).sum(axis=3, keepdims=True)) / np.sqrt(D)
    gradients = (dscores @ k, dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dy)

    def packed(x: np.ndarray) -> np.ndarray:
        return x.transpose(0, 2, 1, 3).reshape(B, T, C)

    dqkv = np.concatenate([packed(gradient) for gradient in gradients], axis=2)
    return packed(y), lse.reshape(B * n_head, T), dqkv


@pytest.mark.parametrize("D", [1, 7, 8, 24, 32, 33])
@pytest.mark.parametrize("T", LENGTHS)
def test_attention_is_what_its_definition_gives_in_float64(T, D):
    qkv, dout = normal(2, T, 9 * D), normal(2, T, 3 * D)
    found = both_ways(tensor(qkv), tensor(dout), 3)
    for name, x, y in zip(("out", "lse", "dqkv"), found, defined(qkv, dout, 3), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-6 * np.abs(y).max(), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tokens_bits_do_not_depend_on_how_many_follow_it(dtype):
    most = max(LENGTHS)
    qkv, dout = normal(1, most, 3 * 48), normal(1, most, 48)
    out, lse, dqkv = both_ways(tensor(qkv, dtype), tensor(dout, dtype), 2)
    for T in LENGTHS:
        part = both_ways(tensor(qkv[:, :T], dtype), tensor(dout[:, :T], dtype), 2)
        np.testing.assert_array_equal(part[0], out[:, :T])
        np.testing.assert_array_equal(part[1], lse[:, :T])
        # Keys and values get a part of their gradient from the tokens that follow.
        np.testing.assert_array_equal(part[2][..., :48], dqkv[:, :T, :48])


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_thread_count_never_shows_in_attentions_bits(dtype, p):
    before = threads.get_threads()
    qkv, dout = tensor(normal(3, 70, 120), dtype), tensor(normal(3, 70, 40), dtype)
    results = []
    try:
        for count in (1, 2, 3, 5):
            threads.set_threads(count)
            results.append([x.tobytes() for x in both_ways(qkv, dout, 5, p)])
    except ArgumentError as error:
        pytest.skip(str(error))
    finally:
        threads.set_threads(before)
    assert all(result == results[0] for result in results)


def test_an_infinite_score_makes_its_row_nan_and_no_row_before():
    qkv, dout = normal(1, 40, 24), normal(1, 40, 8)
    # Only the last query's scores: its key is seen by itself alone.
    qkv[0, 39, :8] = np.inf
    out, lse, _ = both_ways(tensor(qkv), tensor(dout), 1)
    assert np.isnan(out[0, 39]).all()
    assert np.isnan(lse[0, 39])
    assert np.isfinite(out[0, :39]).all()
    assert np.isfinite(lse[0, :39]).all()
