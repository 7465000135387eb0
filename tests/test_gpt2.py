"""GPT-2 against the committed float64 golden, which PyTorch made (tests/golden/make.py)."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import forge
from forge import Device, Tape, ops, tensor
from forge.errors import ArgumentError, ConfigError, ShapeError
from forge.models import GPT2, GPT2Config
from forge.optim.adamw import AdamW
from forge.params import Params
from forge.training import Batch, Micro, State, train_step

GOLDEN = load_file(Path(__file__).parent / "golden" / "gpt2_tiny.safetensors")
CONFIG = GPT2Config(vocab_size=17, block_size=9, n_layer=2, n_head=2, n_embd=12)
MODEL = GPT2(CONFIG)
WEIGHTS = {k.removeprefix("param."): v for k, v in GOLDEN.items() if k.startswith("param.")}

# In norm per tensor: float64 on the reference, float32 on the CPU.
BACKENDS = [
    ("reference", "float64", 1e-10),
    ("reference", "float32", 1e-5),
    ("cpu", "float32", 1e-5),
]


def make_params(device: str, dtype: str) -> Params:
    params = Params(MODEL.shapes(), Device(device), dtype)
    params.load_(WEIGHTS)
    return params


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-8))


@pytest.mark.parametrize(("device", "dtype", "tolerance"), BACKENDS)
def test_logits_loss_and_gradients(device: str, dtype: str, tolerance: float) -> None:
    params = make_params(device, dtype)
    ids, targets = (tensor(GOLDEN[name], device=device) for name in ("ids", "targets"))
    assert relative(MODEL.logits(params, ids).numpy(), GOLDEN["logits"]) < tolerance
    tape = Tape()
    leaves = params.leaves(tape)
    loss = MODEL.loss(leaves, ids, targets)
    assert loss.value.item() == pytest.approx(GOLDEN["losses"][0], rel=tolerance)
    grads = tape.backward(loss)
    for name, leaf in leaves.items():
        expected = GOLDEN[f"grad.{name}"]
        if name.endswith("c_attn.bias"):
            # The key bias shifts all scores of a query alike: its gradient is rounding alone.
            assert np.abs(grads[leaf].numpy()[12:24]).max() < tolerance
        assert relative(grads[leaf].numpy(), expected) < tolerance, name


@pytest.mark.parametrize(("device", "dtype", "tolerance"), BACKENDS)
def test_ten_losses(device: str, dtype: str, tolerance: float) -> None:
    params = make_params(device, dtype)
    grads = params.zeros_like()
    optimizer = AdamW(params, weight_decay=0.1, max_norm=0.5)
    place = Device(device)
    ids, targets = (tensor(GOLDEN[name], device=device) for name in ("ids", "targets"))
    order = tensor(np.argsort(GOLDEN["ids"].reshape(-1), kind="stable"), device=device)
    count = int((GOLDEN["targets"] != -100).sum())
    batch = Batch([Micro(ids, targets, order, 0)], tensor(1.0 / count, dtype, device))
    state = State(tensor([0, 0], device=place), tensor(np.float32(1e-2), device=place))
    losses = [
        train_step(MODEL, params, grads, optimizer, batch, state).loss.item() for _ in range(10)
    ]
    # The optimizer's float32 scalars (lr, norm) bound what float64 can reach.
    assert losses == pytest.approx(GOLDEN["losses"].tolist(), rel=max(10 * tolerance, 1e-6))


def test_every_parameter_is_named_and_initialised() -> None:
    arrays = MODEL.init(3)
    assert (
        {k: v.shape for k, v in arrays.items()}
        == MODEL.shapes()
        == {k: v.shape for k, v in WEIGHTS.items()}
    )
    assert (arrays["h.1.ln_2.weight"] == 1).all()
    assert (arrays["h.1.ln_2.bias"] == 0).all()
    big = GPT2(GPT2Config(vocab_size=500, block_size=64, n_layer=2, n_head=2, n_embd=160))
    arrays = big.init(0)
    assert arrays["wte.weight"].std() == pytest.approx((2 / (5 * 160)) ** 0.5, rel=0.02)
    assert arrays["h.0.mlp.c_proj.weight"].std() == pytest.approx(0.05 / 2, rel=0.02)
    again, other = big.init(0), big.init(1)
    assert all((arrays[name] == again[name]).all() for name in arrays)
    assert not (arrays["wpe.weight"] == other["wpe.weight"]).any()


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_decoding_agrees_with_the_whole_sequence(device: str) -> None:
    params = make_params(device, "float32")
    ids = GOLDEN["ids"]
    whole = MODEL.logits(params, tensor(ids, device=device)).numpy()
    cache = MODEL.cache(3, 9, Device(device))
    steps = [(0, 4), (4, 5), (5, 8), (8, 9)]
    for first, stop in steps:
        piece = tensor(np.ascontiguousarray(ids[:, first:stop]), device=device)
        logits = MODEL.decode(params, piece, cache, first).numpy()
        assert relative(logits, whole[:, stop - 1]) < 1e-5
    with pytest.raises(ArgumentError, match="there is room for 9"):
        MODEL.decode(params, tensor(ids[:, :1].copy(), device=device), cache, 9)


def test_decoding_with_a_position_per_sample() -> None:
    params = make_params("cpu", "float32")
    ids = GOLDEN["ids"]
    whole = MODEL.logits(params, tensor(ids)).numpy()
    cache = MODEL.cache(3, 9, Device("cpu"))
    MODEL.decode(params, tensor(ids[:, :6].copy()), cache, 0)
    pos = np.array([2, 5, 3])
    logits = MODEL.decode(params, tensor(ids[np.arange(3), pos][:, None]), cache, tensor(pos))
    assert relative(logits.numpy(), whole[np.arange(3), pos]) < 1e-5


def test_attention_equals_its_composite() -> None:
    rng = np.random.default_rng(0)
    qkv = tensor(rng.standard_normal((2, 7, 36)), device="reference")
    q, k, v = ops.split_heads(qkv, 3)
    scores = ops.matmul(q, k, trans_b=True, alpha=1 / 2.0)
    composite = ops.merge_heads(ops.matmul(ops.softmax(scores, causal=True), v), 3)
    assert relative(ops.attention(qkv, 3).numpy(), composite.numpy()) < 1e-14


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_head=3 n_embd=10"):
        GPT2Config(n_embd=10, n_head=3)
    params = make_params("cpu", "float32")
    with pytest.raises(ArgumentError, match=r"\[embedding\] expected positions in \[0, 9\)"):
        MODEL.logits(params, forge.tensor(np.zeros((1, 10), np.int64)))
    with pytest.raises(ArgumentError, match=r"\[embedding\] expected ids in \[0, 17\)"):
        MODEL.logits(params, forge.tensor(np.full((1, 3), 17)))
    with pytest.raises(ShapeError, match=r"wpe\.weight missing and none unknown"):
        params.load_({k: v for k, v in WEIGHTS.items() if k != "wpe.weight"})
    with pytest.raises(ShapeError, match=r"wpe\.weight of shape"):
        params.load_(WEIGHTS | {"wpe.weight": np.zeros((3, 12))})
