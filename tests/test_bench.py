"""`forge bench`, what it measures with, and what the scripts in benchmarks/ share."""

import gc
import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from forge import Tape, ops
from forge.backends import registry
from forge.backends.cpu import micro
from forge.cli import main
from forge.run import bench, ceiling_loops, ceilings, workload
from forge.run.profile import peak_rss, profile
from forge.tensor import Device, tensor, zeros

CPU = Device("cpu")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """The modules of benchmarks/, which import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (BENCHMARKS / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture
def quick(monkeypatch):
    """Ceilings of a small machine, at once."""
    monkeypatch.setattr(ceilings, "_ELEMENTS", 1 << 12)
    monkeypatch.setattr(ceilings, "_TURNS", 1000)


# ---- Ceilings


def test_the_loop_of_multiply_adds_does_them_all():
    turns, factor = 7, np.float32(0.75)
    values = np.arange(ceiling_loops.CHAINS, dtype=np.float32)
    for _ in range(turns):
        values = values * factor + np.float32(1)
    sums = np.zeros(3, np.float32)
    ceiling_loops.multiply_add(sums, turns, factor)
    np.testing.assert_allclose(sums, values.sum(), rtol=1e-6)


def test_the_loops_read_and_copy_every_element():
    x = np.arange(4096, dtype=np.float32)
    sums, out = np.zeros(4, np.float32), np.zeros_like(x)
    ceiling_loops.read(x, sums)
    ceiling_loops.copy(x, out, 4)
    np.testing.assert_allclose(sums - x[::1024], x.reshape(4, -1).sum(1), rtol=1e-6)
    np.testing.assert_array_equal(out, 1.5 * x)


def test_ceilings_count_what_the_loops_do(quick, monkeypatch):
    # Seconds that two threads computed, and that passed.
    clocks = {time.process_time: 8.0, time.perf_counter: 2.0}
    monkeypatch.setattr(
        ceilings, "_fastest", lambda run, clock=time.perf_counter: (run(), clocks[clock])[1]
    )
    from forge.backends.cpu import threads

    monkeypatch.setattr(threads, "get_threads", lambda: 2)
    found = ceilings.measure(CPU)
    each = 2 * ceiling_loops.CHAINS * ceiling_loops.LANES
    assert found == (each * 1000 * 4 * 2 / (8.0 / 2), 4 * 4096 / 2, 8 * 4096 / 2, "multiply-adds")


# ---- Profiles


def test_a_profile_has_each_kernel_with_its_shapes_and_calls():
    x = tensor(np.ones((3, 5), np.float32))

    def step():
        ops.add(ops.exp(ops.exp(x)), x)

    found = profile(step, CPU, steps=4)
    rows = {str(row): row.calls for row in found.rows}
    assert rows == {"exp [3, 5]": 2, "add [3, 5] [3, 5]": 1}
    inside = sum(row.seconds for row in found.rows)
    assert inside > 0
    assert found.outside > 0
    assert [row.seconds for row in found.rows] == sorted(r.seconds for r in found.rows)[::-1]


def test_a_profile_sees_memory_filled_and_leaves_nothing_behind():
    memory, kernel = CPU.memory, registry.kernels(tensor([1.0])).exp
    model = workload.Training(workload.MODELS["baby"], 1, 8, CPU)
    found = profile(model.repeating(), CPU, steps=1)
    assert any(row.name == "memory.fill" for row in found.rows)

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        profile(broken, CPU, steps=1)
    assert CPU.memory is memory
    assert registry.kernels(tensor([1.0])).exp is kernel


def test_a_profile_on_the_cpu_is_of_replays(monkeypatch):
    model = workload.Training(workload.MODELS["baby"], 1, 8, CPU)
    model.step()
    eager = profile(lambda: model.train_step(*model._arguments()), CPU, steps=1)
    repeat = model.repeating()
    repeat()
    monkeypatch.setattr(Tape, "backward", None)  # no replay needs it
    found = profile(repeat, CPU, steps=2)
    kernels = [(row.name, row.shapes, row.calls) for row in found.rows if "memory" not in row.name]
    expected = [(row.name, row.shapes, row.calls) for row in eager.rows if "memory" not in row.name]
    assert sorted(kernels) == sorted(expected)


def test_peak_memory_sees_what_was_held():
    before = peak_rss()
    held = np.ones(before, np.uint8)  # written to, so it is in memory
    assert before + held.size // 2 < peak_rss() < 1 << 40


# ---- Workloads


def test_training_learns_and_decoding_repeats_its_positions(scripts):
    import sides

    run = workload.Training(workload.MODELS["baby"], 8, 64, CPU)
    losses = [run.step().loss.item() for _ in range(30)]
    # Random bytes: down to ln 256 = 5.545 there is something to learn.
    assert np.mean(losses[-5:]) < losses[0] - 0.05
    run.feed(3, 8)
    assert np.isfinite(run.step().loss.item())
    decoding = workload.Decoding(workload.MODELS["baby"], 2, CPU)
    for _ in range(60):  # more than there are positions
        ids = decoding.step()
    assert ids.shape == (2, 1)
    weights = 4 * (decoding.params.count - 64 * 128)
    assert decoding.weights == weights
    small = workload.Decoding(workload.MODELS["baby"], 2, CPU, "int8")
    assert small.step().shape == (2, 1)
    # Each matrix has its channels' scales beside it; biases and norms stay as they are.
    matrices, channels = 4 * 12 * 128 * 128 + 256 * 128, 4 * 9 * 128 + 256
    assert small.weights == weights - 4 * matrices + matrices + 4 * channels
    side = sides.Side("decode", "cpu", "baby", "int8", 1, 64, 1)
    assert (side.weights, side.channels) == (matrices, channels)


# ---- forge bench


@pytest.fixture
def call(capsys):
    def run(*arguments):
        code = main([*arguments, "--seconds=0.01", "--device=cpu"])
        return code, *capsys.readouterr()

    return run


def test_bench_prints_rates_shares_and_kernels(call, quick):
    code, out, _ = call("bench")
    assert code == 0
    assert re.search(r"^at most +[\d,]+ GFLOP/s of multiply-adds; .* GB/s read", out, re.MULTILINE)
    assert re.search(r"^train +[\d,]+ tokens/s, .* ms a step", out, re.MULTILINE)
    assert re.search(r"\d+% of these operations \(6 N \+ 6 L C T for a token\)", out)
    assert re.search(r"^decode +[\d,]+ tokens/s, .* ms a token", out, re.MULTILINE)
    assert re.search(r"^ *[\d.]+ +[\d.]+% +4  matmul \[768, 512\]", out, re.MULTILINE)
    assert out.count("outside of kernels") == 2
    assert "of this bandwidth" not in out  # the baby's weights fit a cache


def test_bench_prints_one_document(call, quick):
    code, out, _ = call("bench", "train", "--json")
    assert code == 0
    found = json.loads(out)
    assert "decode" not in found
    assert set(found["ceilings"]) == {"flops", "read", "copy", "of"}
    train = found["train"]
    operations = 6 * (834304 - 64 * 128) + 6 * 4 * 128 * 64
    share = operations * train["tokens_per_s"] / found["ceilings"]["flops"]
    assert train["share_of_ceiling"] == pytest.approx(share)
    assert train["tokens_per_s"] == pytest.approx(12 * 64 / train["seconds_per_step"])
    assert 0 < train["share_outside_kernels"] < 1
    kernels = {kernel["name"]: kernel for kernel in train["kernels"]}
    assert {"attention", "attention_backward", "adamw"} <= kernels.keys()
    assert found["peak_rss"] > train["peak_memory"] > 4 * 4 * 834304  # weights, gradients, moments


def test_memory_is_not_less_for_garbage_that_is_freed_meanwhile(monkeypatch):
    class Late(workload.Training):
        def __init__(self, *of):
            gc.collect()
            super().__init__(*of)

    monkeypatch.setattr(bench, "Training", Late)
    cycle = [zeros((32 << 20,), "bool", CPU)]
    cycle.append(cycle)
    del cycle
    assert bench.train("baby", CPU, "fp32", 0.01).memory > 4 * 4 * 834304


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("bench", "sleep"), "train"),
        (("bench", "--seconds=0"), "expected --seconds above 0, at most 3600"),
        (("bench", "--device=reference"), "a device to be fast on"),
        (("bench", "--precision=fp8"), "fp8"),
        (("bench", "--precision=int8"), "fp32 or bf16 to train in, got int8; forge bench decode"),
    ],
)
def test_bench_explains_mistakes(arguments, expected, capsys):
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("fast", [False, True])
def test_bench_in_bf16_says_where_training_has_no_use_of_it(call, quick, monkeypatch, fast):
    monkeypatch.setattr(micro, "FAST", fast)
    code, out, _ = call("bench", "decode", "--precision=bf16")
    assert code == 0
    assert ("forge train takes fp32 alone here" in out) != fast


def test_bench_refuses_a_precision_without_kernels(call, monkeypatch):
    monkeypatch.setattr(registry, "implementation", lambda *of: "reference")
    code, _, error = call("bench", "train")
    assert code == 2
    assert "expected a precision that cpu has kernels for" in error


# ---- benchmarks/


def test_sides_have_the_same_threads_and_no_caps(scripts, monkeypatch):
    import sides

    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("OPENBLAS_L2_SIZE", "1")
    side = sides.Side("train", "cpu", "baby", "fp32", 12, 64, 3)
    env = sides.environment(side)
    assert not {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} & env.keys()
    assert {env[name] for name in sides.THREADS} == {"3"}
    assert sides.Side.of([str(x) for x in side]) == side


def test_sides_measure_the_same_models(scripts):
    import sides

    for name, config in workload.MODELS.items():
        assert sides.MODELS[name] == {k: vars(config)[k] for k in sides.MODELS[name]}
    side = sides.Side("train", "cpu", "124M", "fp32", 1, 4096, 2)
    assert side.sizes["block_size"] == 4096
    assert sides.MODELS["124M"]["block_size"] == 1024


def test_a_side_that_fails_is_skipped_with_its_reason(scripts, capsys):
    import sides

    side = sides.Side("train", "cpu", "baby", "int4", 12, 64, 1)
    assert sides.run("forge_side.py", side) is None
    error = capsys.readouterr().err
    assert "skipped, exit 3: [bench] expected a precision that cpu has kernels for" in error


def test_the_largest_batch_is_predicted_from_small_models(scripts):
    import sides

    side = sides.Side("train", "cuda", "1.5B", "bf16", 0, 1024, 0)
    still, each = 16 * side.parameters, 1 << 20
    width = 12 * 1600**2

    def peak(layers):  # with a batch of 4
        return still - 16 * width * (48 - layers) + 4 * each * (2 + layers)

    assert sides.predicted(side, peak, still + 20 * each * 50, 16) == 20
    assert sides.predicted(side, peak, still + 19 * each * 50, 16) == 16
    tried = []
    assert sides.largest(lambda b: tried.append(b) or b <= 10) == 8
    assert tried == sorted(tried)[::-1]


def test_rows_are_of_forge_over_each_peer_and_the_best_is_named(scripts):
    import train_step
    from table import rows_of

    peers = [train_step.PEERS["cuda"][name] for name in ("nanogpt", "flash", "cudnn", "jax")]

    def ran(rate, gib):
        return [{"rate": rate, "memory": gib * 2**30, "seconds": 1.0}]

    results = {
        "Forge": [*ran(90, 2), *ran(110, 2), *ran(120, 2)],
        peers[0].name: ran(100, 5),
        peers[1].name: ran(50, 4),
        peers[2].name: ran(40, 3),
    }
    side = train_step.Side("train", "cuda", "124M", "bf16", 64, 1024, 0)
    rows = rows_of("work", side, peers, results)
    assert len(rows) == 6  # JAX did not run
    assert rows[0] == {
        "work": "work",
        "precision": "bf16",
        "peer": "PyTorch, nanoGPT compiled",
        "peer_precision": "bf16",
        "peer_value": 100,
        "forge_value": 110,
        "unit": "tokens/s",
        "ratio": 1.1,
    }
    assert all(row["peer"].startswith(("PyTorch", "JAX")) for row in rows)
    assert train_step.best_of(peers, results) == (peers[1], peers[2])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_default_names_peers_that_exist(scripts, device):
    import argparse

    import decode
    import table
    import train_step

    for script in (train_step, decode):
        for (where, _), names in script.DEFAULT.items():
            if where == device:
                known, groups = script.PEERS[device], script.GROUPS[device]
                assert table.chosen(names, known, groups, argparse.ArgumentParser())


def test_the_roofline_repeats_a_steps_calls_on_copies_of_their_operands(scripts, monkeypatch):
    """Without a GPU: the libraries' calls are stand-ins on the host's memory."""
    for package in ("nvmath", "cudnn", "triton", "cuda"):
        pytest.importorskip(package, reason="needs the packages of the extra cuda")
    import ctypes
    from types import SimpleNamespace

    import roofline

    from forge.backends.cuda import device, flash, products
    from forge.tensor import empty

    made = []

    def floats(address, *shape):
        cells = (ctypes.c_float * int(np.prod(shape))).from_address(address)
        return np.ctypeslib.as_array(cells).reshape(shape)

    def product(p, a, b, out, **keywords):
        made.append((p, floats(a, p.m, p.k).copy(), floats(b, p.k, p.n).copy(), keywords))
        floats(out, p.m, p.n)[...] = np.nan
        return True

    def attention(qkv, key, *, out, lse, n_head):
        made.append((n_head, qkv.numpy()))
        out.array[...] = np.nan

    def copied(to, source, size, kind, stream):
        ctypes.memmove(to, source, size)
        return (0,)

    runtime = SimpleNamespace(
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyDeviceToDevice=3), cudaMemcpyAsync=copied
    )
    monkeypatch.setattr(device, "runtime", lambda: runtime)
    monkeypatch.setattr(device, "stream", lambda: 0)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(products, "run", product)
    monkeypatch.setattr(flash, "attention", attention)
    # What the stand-ins do is no kernel's work.
    monkeypatch.setattr(roofline, "Captured", lambda play, device, varying: play)

    def step():
        for layer in range(3):
            x = tensor(np.full((6, 8), 1.0 + layer, np.float32))
            w = tensor(np.full((8, 4), 10.0 + layer, np.float32))
            wanted = products.Product(6, 4, 8, 8, 4, 4, dtype="float32", out_dtype="float32")
            wanted = wanted._replace(epilogue="bias", accumulate=layer > 0)
            out = empty((6, 4), "float32", CPU)
            products.run(wanted, x.pointer, w.pointer, out.pointer, bias=64)
            flash.attention(x, None, out=out, lse=None, n_head=layer + 1)
            # Its memory goes to others, as in a real step.
            x.array[...], w.array[...] = np.nan, np.nan

    run = SimpleNamespace(device=CPU, eager=lambda: None, step=step)
    play, counts = roofline.bare(run)
    assert counts == {"products": 3, "attention": 3}
    assert products.run is product
    assert flash.attention is attention
    made.clear()
    play()
    play()
    assert len(made) == 12
    for p, a, b, keywords in made[::2]:
        assert (p.epilogue, p.accumulate, keywords) == ("", False, {})
        assert a[0, 0] in (1.0, 2.0)  # two copies, in turn
        assert (a == a[0, 0]).all()
        assert (b == a[0, 0] + 9).all()
    assert [heads for heads, _ in made[1::2]] == [1, 2, 3, 1, 2, 3]
    assert all(np.isfinite(qkv).all() for _, qkv in made[1::2])
