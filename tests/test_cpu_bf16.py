"""bfloat16 on the CPU: its conversions, its packed products, and training in it."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from forge import ConfigError, Device, tensor
from forge.backends.cpu import jit, linear, low_product, micro, threads
from forge.backends.cpu.bfloat16 import narrow, wide
from forge.config import Config
from forge.data.loader import Loader
from forge.models import GPT2, GPT2Config
from forge.optim.adamw import AdamW
from forge.run import choices
from forge.training import evaluate, step_state, to_device, train_step

CPU = Device("cpu")
f32, bf16, u16 = np.float32, ml_dtypes.bfloat16, np.uint16


@pytest.fixture
def rng():
    return np.random.default_rng(11)


# ---- Conversions ----


def test_rounding_is_that_of_ml_dtypes():
    @jit.kernel("void(float32[::1], uint16[::1])", parallel=False)
    def apply(x, out):
        for i in range(x.size):
            out[i] = narrow(out, x[i])

    # Every upper half, with lower halves about the ties: NaN, infinities and denormals among them.
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    words = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | low).reshape(-1)
    x, out = words.view(f32), np.empty(words.size, u16)
    apply.load(stored=False)
    apply(x, out)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, x.astype(bf16).view(u16))


def test_widening_is_exact():
    @jit.kernel("void(uint16[::1], float32[::1])", parallel=False)
    def apply(x, out):
        for i in range(x.size):
            out[i] = wide(x[i])

    x, out = np.arange(1 << 16, dtype=np.uint32).astype(u16), np.empty(1 << 16, f32)
    apply.load(stored=False)
    apply(x, out)
    np.testing.assert_array_equal(out.view(np.uint32), x.astype(np.uint32) << 16)


# ---- Products ----


def bits(x: np.ndarray) -> np.ndarray:
    return x.astype(bf16).view(u16)


def value(x: np.ndarray) -> np.ndarray:
    return (x.view(bf16) if x.dtype == u16 else x).astype(np.float64)


def draw(rng, G, M, N, K, trans_a, trans_b):
    a = bits(rng.standard_normal((G, K, M) if trans_a else (G, M, K)))
    b = bits(rng.standard_normal((G, N, K) if trans_b else (G, K, N)))
    x = value(a).swapaxes(1, 2) if trans_a else value(a)
    y = value(b).swapaxes(1, 2) if trans_b else value(b)
    return a, b, x @ y


@pytest.mark.parametrize("out_dtype", [u16, f32])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize(
    ("G", "M", "N", "K"),
    [(1, 1, 1, 1), (1, 97, 70, 33), (1, 200, 129, 515), (1, 13, 800, 1030), (3, 31, 65, 64)],
)
def test_products_against_float64(rng, G, M, N, K, trans_a, trans_b, out_dtype):
    a, b, exact = draw(rng, G, M, N, K, trans_a, trans_b)
    bias = bits(rng.standard_normal(N))
    before = rng.standard_normal((G, M, N)).astype(f32)
    out = bits(before) if out_dtype == u16 else before.copy()
    wanted = value(out) - 0.5 * exact + value(bias)
    how = {"trans_a": trans_a, "trans_b": trans_b}
    linear.product(a, b, bias, out=out, alpha=-0.5, accumulate=True, **how)
    tolerance = 2.0**-8 if out_dtype == u16 else 4e-7 * K**0.5
    size = np.linalg.norm(wanted) / wanted.size**0.5
    np.testing.assert_allclose(value(out), wanted, rtol=tolerance, atol=tolerance * size)
    linear.product(a, b, out=out, **how)
    size = np.linalg.norm(exact) / exact.size**0.5
    np.testing.assert_allclose(value(out), exact, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_gelu_is_that_of_the_rounded_product(rng, form):
    x, w, bias = (rng.standard_normal(s).astype(bf16) for s in ((30, 40), (40, 70), (70,)))
    out, pre, plain = (tensor(np.zeros((30, 70)), "bfloat16") for _ in range(3))
    given = tensor(x), tensor(w), tensor(bias)
    linear.linear(*given, out=out, pre=pre, gelu=form)
    linear.linear(*given, out=plain, pre=None, gelu=None)
    np.testing.assert_array_equal(pre.array.view(u16), plain.array.view(u16))
    again = tensor(np.zeros((30, 70)), "bfloat16")
    linear.linear(*given, out=again, pre=None, gelu=form)
    np.testing.assert_array_equal(again.array.view(u16), out.array.view(u16))
    from forge import ops

    np.testing.assert_array_equal(ops.gelu(pre, form=form).array.view(u16), out.array.view(u16))


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
def test_pieces_of_a_large_product_change_no_bit(rng, monkeypatch, thread_counts, trans_a, trans_b):
    """B packed in pieces of its columns and of K, as where it is larger than a cache."""
    a, b, _ = draw(rng, 2, 150, 300, 1541, trans_a, trans_b)
    how = {"trans_a": trans_a, "trans_b": trans_b}
    linear.product(a, b, out=(whole := np.zeros((2, 150, 300), u16)), **how)
    monkeypatch.setattr(low_product, "_PACKED", 2 * 512 * 128)
    low_product.plan.cache_clear()
    try:
        for count in thread_counts:
            threads.set_threads(count)
            assert low_product.plan(2, 150, 300, 1541, count).reach < 1541
            linear.product(a, b, out=(cut := np.zeros_like(whole)), **how)
            np.testing.assert_array_equal(cut, whole)
    finally:
        low_product.plan.cache_clear()


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(("N", "K"), [(768, 300), (128, 128), (33, 37)])
def test_a_rows_bits_depend_on_nothing_beside_it(rng, N, K, trans_b):
    a, b, _ = draw(rng, 1, 400, N, K, False, trans_b)
    bias = bits(rng.standard_normal(N))

    def rows(start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, N), u16)
        linear.product(a[0, start:stop], b[0], bias, out=out, trans_b=trans_b)
        return out

    whole = rows(0, 400)
    for start, stop in ((0, 9), (7, 16), (5, 105), (100, 399)):
        np.testing.assert_array_equal(rows(start, stop), whole[start:stop])
    few = rows(0, 8)
    for start, stop in ((0, 1), (3, 4), (2, 8)):
        np.testing.assert_array_equal(rows(start, stop), few[start:stop])


def test_what_is_not_finite_stays_where_it_is(rng):
    """Padding must not meet it: 0 times infinity is NaN."""
    a, b, _ = draw(rng, 1, 20, 40, 33, False, False)
    a[0, 3, 32] = bits(np.array(np.inf))
    linear.product(a[0], b[0], out=(out := np.empty((20, 40), u16)))
    finite = np.isfinite(value(out))
    assert not finite[3].any()
    assert finite[np.arange(20) != 3].all()


FEATURES = (
    "+64bit,+adx,+aes,+avx,+avx2,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd,+avx512bf16,+fma,"
    "+bmi,+bmi2,+f16c,+popcnt,+sse4.2,+sse4.1,+lzcnt,+movbe"
)
ASSEMBLY = """
import re, numba
from forge.backends.cpu import low_product
kind = "void(uint16[:,::1], uint32[:,::1], float32[::1], uint32[::1], int64, int64, int64, int64,"
block = numba.njit(low_product._block.py_func)
block.compile(kind + " boolean)")
text = next(iter(block.inspect_asm().values()))
loop = max(re.split(r"\\n[.]LBB", text), key=lambda part: part.count("dpbf16ps"))
loop = loop[: loop.rindex("dpbf16ps")]
loop = loop[loop.index("dpbf16ps") :]
print("dpbf16ps" in loop, "vdpbf16ps" in text, "\\ttdpbf16ps" in text, loop.count("%rsp"))
"""


@pytest.mark.parametrize(
    ("processor", "more", "found"),
    [
        ("znver4", "", "True True False 0"),
        ("sapphirerapids", "", "True True False 0"),
        ("sapphirerapids", ",+amx-tile,+amx-bf16", "True False True 0"),
    ],
)
def test_the_inner_loop_multiplies_pairs_and_spills_nothing(processor, more, found):
    """Compiled for other processors, which cannot be run here."""
    named = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": FEATURES + more}
    done = subprocess.run(
        [sys.executable, "-c", ASSEMBLY],
        env={**os.environ, **named},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == found, done.stderr


def test_every_size_follows_what_is_compiled_for():
    """Not the processor at hand: a stored kernel's name tells the one, and not the other."""
    code = "from forge.backends.cpu import micro, pairs, tiles; print(tiles.ROWS, micro.FAST)"
    for features, found in (("+avx2,+fma", "6 False"), (FEATURES, "12 True")):
        named = {"NUMBA_CPU_NAME": "znver4", "NUMBA_CPU_FEATURES": features}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **named},
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == found, done.stderr


# AMX's sizes, packing and blocks, around a tile that any processor computes.
STAND_IN = """
import itertools
import ml_dtypes
import numpy as np
from forge.backends.cpu import amx, pairs, threads, tiles
pairs.ROWS, pairs.WIDTH, pairs.STEP = amx.ROWS, amx.WIDTH, amx.STEP
for name in ("prepare", "begin", "pair_tile", "end"):
    setattr(amx, name, getattr(pairs, name))
tiles.supports = lambda feature: feature == "amx-bf16"
from forge.backends.cpu import linear, micro
assert micro.BY_ROW
threads.set_threads(1)
rng = np.random.default_rng(0)
for M, N, K in ((9, 1, 1), (97, 70, 33), (200, 129, 515), (450, 800, 1030), (64, 64, 1024)):
    for ta, tb in itertools.product((False, True), repeat=2):
        a, b = (
            rng.standard_normal(shape[::-1] if flip else shape).astype(ml_dtypes.bfloat16)
            for shape, flip in (((M, K), ta), ((K, N), tb))
        )
        out = np.zeros((M, N), np.float32)
        bits = a.view(np.uint16), b.view(np.uint16)
        linear.product(*bits, out=out, trans_a=ta, trans_b=tb)
        x, y = a.astype(np.float64), b.astype(np.float64)
        exact = (x.T if ta else x) @ (y.T if tb else y)
        error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
        assert error < 1e-6, (M, N, K, ta, tb, error)
print("ok")
"""


def test_what_is_around_amx_tiles_against_float64(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "ok", done.stderr


# ---- Training ----

MODEL = GPT2(
    GPT2Config(
        vocab_size=61,
        block_size=24,
        n_layer=2,
        n_head=3,
        n_embd=36,
        embd_pdrop=0.1,
        resid_pdrop=0.1,
        attn_pdrop=0.1,
    )
)


def trained(model: GPT2, precision: str, tokens: np.ndarray, steps: int, batch: int = 4):
    params = model.zeros(CPU, precision)
    params.load_(model.init(5))
    grads, optimizer = params.zeros_like(), AdamW(params)
    loader = Loader(tokens, model.config.block_size, batch, 3)
    for step in range(steps):
        got = to_device(loader.batch(first_sample=batch * step, micro_batch=batch // 2), CPU)
        rate = 4e-3 * min(1.0, (step + 1) / 10)
        result = train_step(model, params, grads, optimizer, got, step_state(5, step, rate, CPU))
        assert result.finite.item() == 1
    return params, optimizer


def test_a_training_step_has_the_same_bits_on_any_number_of_threads(thread_counts, rng):
    tokens = rng.integers(0, 61, 3000)
    results = []
    for count in thread_counts:
        threads.set_threads(count)
        params, optimizer = trained(MODEL, "bf16", tokens, 3)
        kept = params.flat, optimizer.m.flat, optimizer.v.flat, params.working
        results.append([x.numpy().tobytes() for x in kept])
    assert all(result == results[0] for result in results)


def test_the_rounded_copy_follows_the_masters(rng):
    params, _ = trained(MODEL, "bf16", rng.integers(0, 61, 3000), 2)
    rounded = params.flat.numpy().astype(bf16)
    np.testing.assert_array_equal(params.working.numpy().view(u16), rounded.view(u16))


def test_a_run_in_bf16_ends_where_one_in_fp32_does():
    """Within 1 % of its validation loss, on a text that can be learned."""
    words = np.random.default_rng(0).integers(0, 29, (12, 5))
    order = np.random.default_rng(1).integers(0, 12, 4000)
    tokens = words[order].reshape(-1)
    model = GPT2(GPT2Config(vocab_size=29, block_size=32, n_layer=2, n_head=2, n_embd=32))
    held = Loader(tokens[-2000:], 32, 8, 0)
    batches = [held.batch(first_sample=8 * i) for i in range(4)]
    losses = {}
    for precision in ("fp32", "bf16"):
        params, _ = trained(model, precision, tokens[:-2000], 60, batch=8)
        losses[precision] = evaluate(model, params.compute, batches)
    assert losses["fp32"] < 0.7 * np.log(29)
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)


@pytest.mark.usefixtures("gc_paused")
def test_the_plan_in_bf16_is_what_a_step_takes(rng):
    config = Config(
        precision="bf16",
        vocab_size=256,
        n_layer=2,
        n_head=2,
        n_embd=64,
        block_size=64,
        batch_size=4,
        device="cpu",
    )
    model = GPT2(GPT2Config(vocab_size=256, block_size=64, n_layer=2, n_head=2, n_embd=64))
    CPU.pool.trim()
    before = CPU.pool.in_use
    CPU.pool.reset_peak()
    params, _ = trained(model, "bf16", rng.integers(0, 256, 4000), 2, batch=4)
    took = CPU.pool.peak - before
    snapshot = 3 * params.flat.nbytes
    assert choices.plan_step(config, CPU, 2) - snapshot == pytest.approx(took, rel=0.05)


def test_training_is_refused_where_it_would_be_slow(monkeypatch):
    config = Config(precision="bf16", device="cpu", vocab_size=9, n_layer=1, n_embd=8, n_head=1)
    monkeypatch.setattr(micro, "FAST", False)
    with pytest.raises(ConfigError, match=r"on cpu, got bf16; this processor lacks AVX512-BF16"):
        choices.choose(config, {})
    monkeypatch.setattr(micro, "FAST", True)
    assert choices.choose(config, {}).device == "cpu"
