"""GPT-2 against PyTorch and `transformers`, live: `make dev`, then `pytest -m torch`."""

import sys
from pathlib import Path

import numpy as np
import pytest

from forge import Device, Tape, tensor
from forge.models import GPT2, GPT2Config
from forge.optim.adamw import AdamW
from forge.params import Params
from forge.training import Batch, Micro, State, train_step

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent / "golden"))
import torch_gpt2  # noqa: E402

CONFIG = GPT2Config(vocab_size=101, block_size=40, n_layer=3, n_head=4, n_embd=52)
MODEL = GPT2(CONFIG)


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: v + rng.normal(0, 0.1, v.shape).astype(v.dtype) for k, v in MODEL.init(seed).items()}


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(0, 101, (2, 4, 40))
    targets[0, :13] = -100
    return ids, targets


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"), [("reference", "float64", 1e-10), ("cpu", "float32", 1e-5)]
)
def test_loss_and_gradients(device: str, dtype: str, tolerance: float) -> None:
    arrays, (ids, targets) = weights(1), batch(1)
    p = torch_gpt2.parameters(arrays, torch.float64)
    expected = torch_gpt2.loss(
        torch_gpt2.forward(p, torch.tensor(ids), CONFIG.n_head), torch.tensor(targets)
    )
    expected.backward()
    params = Params(MODEL.shapes(), Device(device), dtype)
    params.load_(arrays)
    tape = Tape()
    leaves = params.leaves(tape)
    loss = MODEL.loss(leaves, tensor(ids, device=device), tensor(targets, device=device))
    assert loss.value.item() == pytest.approx(expected.item(), rel=tolerance)
    grads = tape.backward(loss)
    for name, leaf in leaves.items():
        error = np.linalg.norm(grads[leaf].numpy() - p[name].grad.numpy())
        assert error < tolerance * max(float(p[name].grad.norm()), 1e-3), name


def test_five_steps_of_adamw() -> None:
    arrays, (ids, targets) = weights(2), batch(2)
    p = torch_gpt2.parameters(arrays, torch.float64)
    optimizer = torch_gpt2.adamw(p, lr=1e-2, weight_decay=0.1)
    params = Params(MODEL.shapes(), Device("cpu"))
    params.load_(arrays)
    grads = params.zeros_like()
    ours = AdamW(params, max_norm=0.5)
    order = tensor(np.argsort(ids.reshape(-1), kind="stable"))
    weight = tensor(np.float32(1 / (targets != -100).sum()))
    device_batch = Batch([Micro(tensor(ids), tensor(targets), order, 0)], weight)
    state = State(tensor([0, 0]), tensor(np.float32(1e-2)))
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch_gpt2.loss(torch_gpt2.forward(p, torch.tensor(ids), 4), torch.tensor(targets))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(p.values(), 0.5)
        optimizer.step()
        result = train_step(MODEL, params, grads, ours, device_batch, state)
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-4)
        assert result.norm.item() == pytest.approx(norm.item(), rel=1e-3)


def test_logits_of_transformers_both_ways() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=101,
            n_positions=40,
            n_embd=52,
            n_layer=3,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ).eval()
    ids, _ = batch(3)
    prefix = "transformer."
    names = MODEL.shapes().keys()
    # Theirs into ours.
    state = theirs.state_dict()
    params = Params(MODEL.shapes(), Device("cpu"))
    params.load_({name: state[prefix + name].numpy() for name in names})
    ours = MODEL.logits(params, tensor(ids)).numpy()
    with torch.no_grad():
        assert np.abs(ours - theirs(torch.tensor(ids)).logits.numpy()).max() < 1e-4
    # Ours into theirs.
    arrays = weights(3)
    params.load_(arrays)
    missing, unexpected = theirs.load_state_dict(
        {prefix + name: torch.tensor(array) for name, array in arrays.items()}, strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], [])
    theirs.tie_weights()
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    assert np.abs(MODEL.logits(params, tensor(ids)).numpy() - expected).max() < 1e-4
