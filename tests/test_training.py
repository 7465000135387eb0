"""The training step: accumulation, dropout, memory, bits, and what happens at a bad number."""

import gc

import numpy as np
import pytest

from forge import ArgumentError, Device, NonFiniteError, Tape, ops, tensor
from forge.backends.cpu import threads
from forge.data.loader import Loader, Validation
from forge.models import GPT2, GPT2Config
from forge.optim.adamw import AdamW
from forge.params import Params
from forge.training import (
    Batch,
    Micro,
    State,
    evaluate,
    explain,
    step_state,
    to_device,
    train_step,
)

CONFIG = GPT2Config(
    vocab_size=61,
    block_size=24,
    n_layer=2,
    n_head=3,
    n_embd=36,
    embd_pdrop=0.2,
    resid_pdrop=0.1,
    attn_pdrop=0.3,
)
MODEL = GPT2(CONFIG)
QUIET = GPT2(GPT2Config(vocab_size=61, block_size=24, n_layer=2, n_head=3, n_embd=36))
CPU = Device("cpu")


class Run:
    """A model in training, small enough for a test."""

    def __init__(self, model: GPT2 = MODEL, device: Device = CPU, seed: int = 5) -> None:
        self.model, self.device, self.seed = model, device, seed
        self.params = Params(model.shapes(), device)
        self.params.load_(model.init(seed))
        self.grads = self.params.zeros_like()
        self.optimizer = AdamW(self.params, max_norm=1.0)
        tokens = np.random.default_rng(0).integers(0, 61, 3000)
        self.loader = Loader(tokens, 24, 4, seed)

    def state(self, step: int, lr: float = 1e-2) -> State:
        return step_state(self.seed, step, lr, self.device)

    def step(self, step: int, micro_batch: int | None = None) -> tuple[float, float]:
        batch = to_device(
            self.loader.batch(first_sample=4 * step, micro_batch=micro_batch), self.device
        )
        result = train_step(
            self.model, self.params, self.grads, self.optimizer, batch, self.state(step)
        )
        assert result.finite.item() == 1
        return result.loss.item(), result.norm.item()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_two_runs_have_the_same_bits() -> None:
    first, second = Run(), Run()
    for step in range(6):
        assert first.step(step) == second.step(step)
    assert first.params.flat.numpy().tobytes() == second.params.flat.numpy().tobytes()
    other = Run(seed=6)
    assert other.step(0) != first.step(0)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(count: int) -> None:
    one, many = Run(), Run()
    before = threads.get_threads()
    try:
        for step in range(4):
            threads.set_threads(1)
            expected = one.step(step)
            threads.set_threads(count)
            assert many.step(step) == expected
    finally:
        threads.set_threads(before)
    assert many.params.flat.numpy().tobytes() == one.params.flat.numpy().tobytes()


def test_dropout_does_not_depend_on_micro_batches() -> None:
    # At some seeds, as at 5 and 6, AdamW's first steps divide noise by noise: rounding then counts
    # tenfold, and which of them are so depends on the order of sums.
    whole, split = Run(seed=7), Run(seed=7)
    for step in range(3):
        a, b = whole.step(step), split.step(step, micro_batch=1)
        assert a == pytest.approx(b, rel=1e-5)
        assert distance(split.grads.flat.numpy(), whole.grads.flat.numpy()) < 1e-5
    # The masks matter: without dropout the loss is another.
    assert Run(QUIET).step(0)[0] != pytest.approx(Run().step(0)[0], rel=1e-4)


def gradient_of(micros: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    run = Run(QUIET)
    count = sum(int((targets != -100).sum()) for _, targets in micros)
    batch = Batch(
        [
            Micro(
                tensor(inputs),
                tensor(targets),
                tensor(np.argsort(inputs.reshape(-1), kind="stable")),
                0,
            )
            for inputs, targets in micros
        ],
        tensor(np.float32(1 / count)),
    )
    train_step(run.model, run.params, run.grads, run.optimizer, batch, run.state(0, lr=0.0))
    return run.grads.flat.numpy()


def test_accumulation_weighs_targets_not_micro_batches() -> None:
    """Targets that count are split 900 / 60 / 40 over three micro-batches."""
    rng = np.random.default_rng(1)
    inputs = rng.integers(0, 61, (3, 40, 24))
    targets = rng.integers(0, 61, (3, 40, 24))
    for i, count in enumerate((900, 60, 40)):
        flat = targets[i].reshape(-1)
        flat[rng.permutation(flat.size)[count:]] = -100
    parts = gradient_of([(inputs[i], targets[i]) for i in range(3)])
    whole = gradient_of([(inputs.reshape(120, 24), targets.reshape(120, 24))])
    assert distance(parts, whole) < 2e-6


def test_a_batch_of_ignored_targets_changes_no_gradient() -> None:
    run = Run(QUIET)
    inputs = np.zeros((2, 24), np.int64)
    micro = Micro(
        tensor(inputs), tensor(np.full((2, 24), -100)), tensor(np.arange(48)), first_sample=0
    )
    batch = Batch([micro], tensor(np.float32(0.0)))
    result = train_step(
        run.model, run.params, run.grads, run.optimizer, batch, run.state(0, lr=0.0)
    )
    assert (result.loss.item(), result.norm.item(), result.finite.item()) == (0.0, 0.0, 1)


def test_nothing_changes_where_the_loss_is_not_finite() -> None:
    run = Run(QUIET)
    run.step(0)
    run.params["h.1.mlp.c_fc.bias"].array[3] = np.inf
    before = [x.flat.numpy().tobytes() for x in (run.params, run.optimizer.m, run.optimizer.v)]
    batch = to_device(run.loader.batch(first_sample=4), CPU)
    result = train_step(run.model, run.params, run.grads, run.optimizer, batch, run.state(1))
    assert result.finite.item() == 0
    assert run.optimizer.updates.item() == 1
    after = [x.flat.numpy().tobytes() for x in (run.params, run.optimizer.m, run.optimizer.v)]
    assert before == after
    with pytest.raises(NonFiniteError, match=r"\[mlp\] expected finite values forward.*node"):
        explain(run.model, run.params, batch, run.state(1))


def test_training_learns_and_evaluation_counts_every_target() -> None:
    run = Run(QUIET)
    pattern = np.tile(np.arange(10), 60)
    run.loader = Loader(pattern, 24, 4, 0)
    losses = [run.step(step)[0] for step in range(40)]
    assert losses[0] == pytest.approx(np.log(61), rel=0.1)
    assert losses[-1] < 0.2
    held_out = Validation(pattern[:100], 24, 2)
    loss = evaluate(run.model, run.params, held_out)
    one = tensor(1.0)
    parts = [
        run.model.loss(run.params, tensor(m.inputs), tensor(m.targets), weight=one).item()
        for batch in held_out
        for m in batch.micros
    ]
    assert loss == pytest.approx(sum(parts) / 99, rel=1e-6)


def test_twenty_steps_without_a_collector_keep_memory_flat() -> None:
    run = Run()
    run.step(0)
    run.step(1)
    gc.collect()
    gc.disable()
    try:
        before, objects = CPU.pool.in_use, len(gc.get_objects())
        for step in range(2, 22):
            run.step(step)
        assert CPU.pool.in_use == before
        # 20 steps record about 700 nodes; a leak of one object a step would show.
        assert len(gc.get_objects()) - objects < 20
    finally:
        gc.enable()


PLANNED = {
    "small, with dropout": (CONFIG, 4, 24),
    "baby": (GPT2Config(vocab_size=256, block_size=64, n_layer=4, n_head=4, n_embd=128), 12, 64),
    "many classes": (
        GPT2Config(vocab_size=5000, block_size=64, n_layer=2, n_head=4, n_embd=256),
        5,
        50,
    ),
    "chunks of logits": (
        GPT2Config(vocab_size=40000, block_size=64, n_layer=1, n_head=1, n_embd=16),
        9,
        64,
    ),
    "long": (GPT2Config(vocab_size=65, block_size=300, n_layer=1, n_head=2, n_embd=32), 1, 300),
}


@pytest.mark.parametrize("shape", PLANNED)
def test_the_plan_tells_the_peak_of_a_step(shape: str) -> None:
    """Of the pool, scratch of the kernels included, in a step of two micro-batches."""
    config, samples, length = PLANNED[shape]
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, samples, length))
    peaks = []
    for device in (Device("plan:cpu"), CPU):
        model = GPT2(config)
        params = Params(model.shapes(), device)
        params.load_(model.init(0))
        grads, optimizer = params.zeros_like(), AdamW(params)
        micros = [
            Micro(*(tensor(x, device=device) for x in (part, part, order)), i * samples)
            for i, part in enumerate(ids)
            for order in [np.argsort(part.reshape(-1), kind="stable")]
        ]
        batch = Batch(micros, tensor(np.float32(1 / ids.size), device=device))
        state = step_state(0, 0, 1e-3, device)
        gc.collect()
        before = device.pool.in_use
        device.pool.reset_peak()
        train_step(model, params, grads, optimizer, batch, state)
        peaks.append(device.pool.peak - before)
    planned, measured = peaks
    assert planned == pytest.approx(measured, rel=0.05)


def test_frozen_parameters_are_passed_as_tensors() -> None:
    run = Run(QUIET)
    tape = Tape()
    params = dict(run.params)
    leaf = tape.leaf(params["ln_f.weight"])
    batch = to_device(run.loader.batch(first_sample=0), CPU).micros[0]
    loss = run.model.loss(params | {"ln_f.weight": leaf}, batch.inputs, batch.targets)
    only = tape.backward(loss)[leaf].numpy()
    # The blocks below it record nothing.
    assert tape.summary().count("attention") == 0
    tape = Tape()
    leaves = run.params.leaves(tape)
    grads = tape.backward(run.model.loss(leaves, batch.inputs, batch.targets))
    assert distance(only, grads[leaves["ln_f.weight"]].numpy()) < 1e-6


def test_frozen_parameters_stay() -> None:
    run = Run(QUIET)
    run.optimizer = AdamW(run.params, frozen=["wpe.weight"])
    before = {name: value.numpy() for name, value in run.params.items()}
    run.step(0)
    same = {name for name, value in run.params.items() if (value.numpy() == before[name]).all()}
    assert same == {"wpe.weight"}
    with pytest.raises(ArgumentError, match="expected names of parameters, got wpe"):
        AdamW(run.params, frozen=["wpe"])


def test_decay_is_for_matrices_only() -> None:
    run = Run(QUIET)
    zero = run.params.zeros_like()
    lr = tensor(np.float32(0.5))
    run.optimizer = AdamW(run.params, weight_decay=0.1)
    before = {name: value.numpy() for name, value in run.params.items()}
    run.optimizer.step_(run.params, zero, tensor(0.0), lr)
    for name, value in run.params.items():
        factor = 0.95 if value.ndim == 2 else 1.0
        assert np.allclose(value.numpy(), factor * before[name], rtol=1e-6), name


def test_an_own_loss_out_of_ops() -> None:
    run = Run(QUIET)
    tape = Tape()
    leaves = run.params.leaves(tape)
    ids = tensor(np.arange(24).reshape(1, 24))
    logits = run.model.logits(leaves, ids)
    loss = ops.mean(logits * logits)
    grads = tape.backward(loss)
    assert grads[leaves["wte.weight"]].shape == (61, 36)
