"""Weights in int8: how they are made, their products, and a model that decodes with them."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import forge
from forge import ArgumentError, Device, ops, tensor
from forge.backends.cpu import quantized, threads
from forge.checkpoint import load, save
from forge.cli.app import main
from forge.generate import Sampling, generate
from forge.models import GPT2, GPT2Config
from forge.run import model as stored
from forge.tensor import Tensor

CPU, REFERENCE = Device("cpu"), Device("reference")
f32 = np.float32
MODEL = GPT2(GPT2Config(vocab_size=61, block_size=24, n_layer=2, n_head=3, n_embd=36))


@pytest.fixture
def rng():
    return np.random.default_rng(11)


# ---- The dtype ----


def test_a_tensor_of_int8_holds_what_it_was_given():
    values = np.arange(-128, 128, dtype=np.int8).reshape(16, 16)
    for made in (
        tensor(values),
        tensor(values.astype(np.int64), "int8"),
        tensor(values * 1.0, "int8"),
    ):
        assert made.dtype == "int8"
        assert made.nbytes == 256
        np.testing.assert_array_equal(made.numpy(), values)
    np.testing.assert_array_equal(np.from_dlpack(tensor(values)), values)
    assert forge.from_dlpack(values.copy()).dtype == "int8"
    assert tensor(True, "int8").item() == 1


# ---- Quantization ----


def statement(x):
    """Row by row, in the words of the definition."""
    q, scale = np.zeros(x.shape, np.int8), np.zeros(len(x), f32)
    for n, row in enumerate(x):
        largest = max(abs(value) for value in row)
        scale[n] = f32(largest) / f32(127)
        for k, value in enumerate(row):
            # Python rounds ties to even.
            q[n, k] = round(float(value / scale[n])) if largest else 0
    return q, scale


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_quantize_is_its_definition(rng, device):
    x = rng.standard_normal((9, 50)).astype(f32)
    x[3] = 0.0
    x[4] = np.linspace(-127, 127, 50).round() / 4  # exact
    x[5, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]  # ties
    x[5, 6:] = 0
    x[6] *= 1e30
    q, scale = ops.quantize(tensor(x, device=device))
    wanted = statement(x)
    np.testing.assert_array_equal(q.numpy(), wanted[0])
    np.testing.assert_array_equal(scale.numpy(), wanted[1])
    assert q.numpy()[5, :6].tolist() == [127, 0, 2, 2, 0, -2]
    assert (np.abs(q.numpy()).max(1) == [127, 127, 127, 0, 127, 127, 127, 127, 127]).all()


def test_what_is_hardly_a_number_stays_in_range():
    x = np.array([[2e-43, -1e-43], [1e-45, 0.0], [3e38, -3e38]], f32)
    q, scale = ops.quantize(tensor(x))
    assert np.abs(q.numpy().astype(int)).max() <= 127
    assert np.isfinite(scale.numpy()).all()


def test_a_weight_moves_by_half_a_step_at_most(rng):
    x = rng.standard_normal((40, 129)).astype(f32)
    q, scale = ops.quantize(tensor(x))
    moved = np.abs(ops.dequantize(q, scale).numpy().astype(np.float64) - x)
    assert (moved <= 0.5001 * scale.numpy()[:, None]).all()
    assert moved.max() > 0.4 * scale.numpy().min()


def test_bfloat16_is_quantized_by_its_float32_value(rng):
    x = tensor(rng.standard_normal((3, 20)), "bfloat16")
    low, wide = ops.quantize(x), ops.quantize(ops.cast(x, "float32"))
    assert [y.dtype for y in low] == ["int8", "float32"]
    for a, b in zip(low, wide, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    q, scale = low
    rounded = ops.dequantize(q, scale, "bfloat16")
    wanted = ops.cast(ops.dequantize(q, scale), "bfloat16")
    assert rounded.numpy().tobytes() == wanted.numpy().tobytes()


# ---- Products ----


def draw(rng, rows, N, K):
    x = tensor(rng.standard_normal((rows, K)).astype(f32))
    w = tensor(rng.integers(-127, 128, (N, K), dtype=np.int8))
    scale = tensor(rng.uniform(0.5, 2, N).astype(f32) / 127)
    return x, w, scale, tensor(rng.standard_normal(N).astype(f32))


@pytest.mark.parametrize("rows", [1, 8, 32, 33, 60])
@pytest.mark.parametrize(("N", "K"), [(3, 5), (768, 129), (1001, 768), (190, 3072)])
def test_products_against_float64(rng, rows, N, K):
    x, w, scale, bias = draw(rng, rows, N, K)
    whole = w.numpy().astype(np.float64) * scale.numpy()[:, None]
    wanted = x.numpy().astype(np.float64) @ whole.T + bias.numpy()
    got = ops.quantized_linear(x, w, scale, bias).numpy()
    assert np.linalg.norm(got - wanted) < 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("gelu", [None, "tanh", "erf"])
def test_a_product_has_the_same_bits_on_any_number_of_threads(rng, thread_counts, gelu):
    for rows, N, K in ((1, 2305, 768), (5, 768, 3072), (3, 7, 33), (32, 500, 300), (70, 500, 300)):
        given = draw(rng, rows, N, K)
        results = []
        for count in thread_counts:
            threads.set_threads(count)
            results.append(ops.quantized_linear(*given, gelu=gelu).numpy().tobytes())
        assert all(result == results[0] for result in results)


def test_a_rows_bits_depend_on_nothing_beside_it(rng):
    x, w, scale, bias = draw(rng, 32, 777, 300)
    whole = ops.quantized_linear(x, w, scale, bias).numpy()
    for start, stop in ((0, 1), (3, 4), (2, 27), (31, 32)):
        part = ops.quantized_linear(tensor(x.numpy()[start:stop]), w, scale, bias).numpy()
        np.testing.assert_array_equal(part, whole[start:stop])


def test_rows_past_the_fours_are_products_too(rng):
    """N of every remainder, from less than four rows on, in one strip and in many."""
    for N in (1, 2, 3, 4, 5, 767, 1538, 1539):
        x, w, scale, _ = draw(rng, 2, N, 768)
        wanted = x.numpy() @ (w.numpy().astype(f32) * scale.numpy()[:, None]).T
        np.testing.assert_allclose(
            ops.quantized_linear(x, w, scale).numpy(), wanted, rtol=1e-4, atol=1e-3
        )


FEATURES = (
    "+64bit,+adx,+aes,+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+popcnt,+sse4.2,+sse4.1,+lzcnt,+movbe",
    ",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd",
)
ASSEMBLY = """
import re, numba
from forge.backends.cpu import compiler, few_rows
dots = numba.njit(fastmath=compiler.FASTMATH, **compiler.OPTIONS)(few_rows.dots.py_func)
dots.compile("void(float32[:,::1], int8[:,::1], float32[:,::1], int64, int64)")
text = next(iter(dots.inspect_asm().values()))
loop = max(re.split(r"\\n[.]LBB", text), key=lambda part: part.count("vfmadd231ps"))
loop = loop[: loop.index("\\tj")]
count = {name: loop.count(name) for name in ("vpmovsxbd", "vcvtdq2ps", "vfmadd231ps", "%rsp")}
print(*count.values(), "%zmm" in loop)
"""


@pytest.mark.parametrize(
    ("processor", "more", "wide"), [("znver3", 0, "False"), ("znver4", 1, "True")]
)
def test_the_inner_loop_widens_in_registers_and_spills_nothing(processor, more, wide):
    """A load that widens, a conversion and a multiply-add for each register of weights."""
    features = "".join(FEATURES[: 1 + more])
    done = subprocess.run(
        [sys.executable, "-c", ASSEMBLY],
        env={**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features},
        capture_output=True,
        text=True,
        timeout=300,
    )
    widened, converted, added, spilled, zmm = done.stdout.split()
    assert int(added) >= 4, done.stderr
    assert widened == converted == added, done.stdout
    assert (spilled, zmm) == ("0", wide), done.stdout


# ---- A model ----


def both(device=CPU):
    """MODEL's parameters in float32 and in int8."""
    arrays = MODEL.init(3)
    params = MODEL.zeros(device)
    params.load_(arrays)
    return params.compute, MODEL.quantized(arrays, device)


def test_matrices_are_in_int8_and_all_else_in_float32():
    params, small = both()
    for name, value in params.items():
        matrix = value.ndim == 2 and name != "wpe.weight"
        assert small[name].dtype == ("int8" if matrix else "float32"), name
        if matrix:
            turned = value.numpy() if name == "wte.weight" else value.numpy().T
            assert small[name].shape == turned.shape
            q, scale = ops.quantize(tensor(turned))
            np.testing.assert_array_equal(small[name].numpy(), q.numpy())
            other = name.removesuffix("weight") + "scale"
            np.testing.assert_array_equal(small[other].numpy(), scale.numpy())
        else:
            np.testing.assert_array_equal(small[name].numpy(), value.numpy())
    assert len(small) == len(params) + 9


def test_other_names_and_shapes_are_refused():
    arrays = MODEL.init(3)
    gone = {name: x for name, x in arrays.items() if name != "ln_f.bias"}
    with pytest.raises(forge.ShapeError, match=r"^\[params\] expected .* got ln_f.bias missing"):
        MODEL.quantized(gone, CPU)
    with pytest.raises(forge.ShapeError, match=r"wpe.weight of shape \[24, 36\], got \[1, 36\]"):
        MODEL.quantized({**arrays, "wpe.weight": arrays["wpe.weight"][:1]}, CPU)


def difference(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("device", [CPU, REFERENCE], ids=lambda device: device.name)
def test_logits_are_near_those_of_float32(rng, device):
    """Half a step of 127 in a row of normal numbers is 0.7 % of their size, and noise adds up."""
    params, small = both(device)
    ids = tensor(rng.integers(0, 61, (2, 24)), device=device)
    exact, low = (MODEL.logits(p, ids).numpy() for p in (params, small))
    assert 1e-4 < difference(low, exact) < 0.02
    targets = tensor(rng.integers(0, 61, (2, 24)), device=device)
    losses = [MODEL.loss(p, ids, targets).item() for p in (params, small)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] != losses[0]


def test_decoding_gives_the_logits_of_a_whole_pass(rng):
    _, small = both()
    ids = rng.integers(0, 61, (3, 20))
    whole = MODEL.logits(small, tensor(ids)).numpy()
    cache = MODEL.cache(3, 24, CPU)
    # Prompts of 36 rows, which widen the weights, then token by token.
    first = MODEL.decode(small, tensor(ids[:, :12]), cache, 0).numpy()
    assert difference(first, whole[:, 11]) < 1e-6
    for t in range(12, 20):
        pos = tensor(np.full(3, t))
        got = MODEL.decode(small, tensor(ids[:, t : t + 1]), cache, pos).numpy()
        assert difference(got, whole[:, t]) < 1e-6


def test_generation_has_the_same_bits_on_any_number_of_threads(thread_counts):
    _, small = both()
    prompts = [np.arange(1, 15), np.array([7]), np.arange(3, 9)]

    def tokens(wanted):
        made = generate(MODEL, small, wanted, 12, Sampling(seed=5))
        return [(t.index, t.id, t.logprob) for t in made]

    results = []
    for count in thread_counts:
        threads.set_threads(count)
        results.append(tokens(prompts))
    assert all(result == results[0] for result in results)
    alone = [(1, *rest) for _, *rest in tokens([prompts[1]])]
    assert alone == [token for token in results[0] if token[0] == 1]


def test_a_gradient_passes_through_frozen_weights(rng):
    """Such as to an adapter before them: that of the weights as they were meant."""
    x, w, scale, bias = draw(rng, 6, 10, 7)

    def loss(x, b):
        return ops.sum(ops.quantized_linear(x, w, scale, b, gelu="tanh"))

    def meant(x, b):
        whole = ops.transpose(ops.dequantize(w, scale))
        return ops.sum(ops.linear(x, whole, b, gelu="tanh"))

    (value, grads), (wanted, others) = (forge.value_and_grad(f)(x, bias) for f in (loss, meant))
    assert value.item() == pytest.approx(wanted.item(), rel=1e-5)
    for grad, other in zip(grads, others, strict=True):
        np.testing.assert_allclose(grad.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


def test_arrays_of_int8_go_through_files(tmp_path):
    _, small = both()
    arrays = {name: x.numpy() for name, x in small.items()}
    back = load(save(tmp_path, 1, {"model.safetensors": arrays}, {})).arrays["model.safetensors"]
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


# ---- The command line ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a few steps."""
    folder = tmp_path_factory.mktemp("int8")
    text = folder / "text"
    text.write_text("to be or not to be, that is the question. " * 400)
    words = "--n-layer 1 --n-head 2 --n-embd 32 --block-size 32 --batch-size 4 --steps 30"
    where = ["--device", "cpu", "--data", str(text), "--out", str(folder / "run")]
    assert main(["train", *words.split(), *where]) == 0
    return str(folder / "run")


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_generate_from_the_command_line(trained, capsys, device):
    words = ["generate", trained, "--weights", "int8", "--device", device, "--json"]
    words += ["--prompt", "to be or not to be", "--max-new-tokens", "12", "--n", "2"]
    documents = []
    for _ in range(2):
        assert main(words) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1]
    assert all(len(c["tokens"]) == 12 for c in documents[0]["completions"])


def test_eval_states_what_is_lost(trained, capsys):
    found = {}
    for weights in ("fp32", "int8"):
        assert main(["eval", trained, "--device", "cpu", "--weights", weights, "--json"]) == 0
        found[weights] = json.loads(capsys.readouterr().out)["perplexity"]
    assert found["int8"] != found["fp32"]
    assert found["int8"] == pytest.approx(found["fp32"], rel=0.01)


def test_weights_in_int8_take_a_quarter_of_the_memory(trained):
    params = {name: stored.load(trained, CPU, name).params for name in ("fp32", "int8")}
    with pytest.raises(ArgumentError, match="expected the precision fp32, bf16 or int8, got 'fp8'"):
        stored.load(trained, "cpu", "fp8")

    def size(tensors: dict[str, Tensor]) -> int:
        return sum(x.nbytes for x in tensors.values() if x.ndim == 2)

    positions = 32 * 32 * 4
    sizes = {name: size(p.compute) - positions for name, p in params.items()}
    assert sizes["fp32"] == 4 * sizes["int8"]
    assert params["int8"].precision == "int8"


def test_a_device_without_kernels_for_it_is_refused_in_a_line(trained, capsys, monkeypatch):
    with pytest.raises(forge.DeviceError, match=r"^\[model\] expected --weights fp32 or bf16 on"):
        stored.check_int8(SimpleNamespace(kind="cuda", name="cuda"))
    monkeypatch.setattr(stored.registry, "implementation", lambda *_: "reference")
    for command in ("generate", "eval"):
        assert main([command, trained, "--device", "cpu", "--weights", "int8"]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "expected --weights fp32 or bf16 on cpu, got int8" in line


def test_another_number_of_bits_is_refused_in_a_line(trained, capsys):
    assert main(["generate", trained, "--weights", "int4"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert '"int4"' in line
    assert "int8" in line


def test_the_plan_knows_what_widening_takes():
    w, scale = tensor(np.ones((50, 40)), "int8"), tensor(np.ones(50, f32))
    for rows, wanted in ((32, ()), (33, (4 * 50 * 40,))):
        x, out = tensor(np.ones((rows, 40), f32)), tensor(np.ones((rows, 50), f32))
        found = quantized.quantized_linear_workspace(x, w, scale, None, out=out)
        assert found[: len(wanted)] == wanted
        assert bool(found) == bool(wanted)
