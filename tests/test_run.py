"""A run's folder, metrics, choices and state, in this process."""

import bdb
import dataclasses
import errno
import functools
import json
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from forge import checkpoint, training
from forge.cli import app
from forge.cli.summary import introduce
from forge.config import Config, load_toml
from forge.data.text import load_dataset
from forge.data.tokenizer import ByteTokenizer
from forge.errors import CheckpointError, ConfigError, DataError, DeviceError, NonFiniteError
from forge.run import choices, evaluation, folder, metrics, model, speed
from forge.run.begin import begin, resume
from forge.run.folder import RunFolder
from forge.run.trainer import Trainer
from forge.run.writer import Writer
from forge.tensor import Device

REFERENCE = Device("reference")
SETTINGS = {
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 8,
    "block_size": 16,
    "batch_size": 4,
    "steps": 6,
    "log_every": 1,
    "eval_every": 3,
    "checkpoint_every": 2,
    "eval_batches": 2,
    "device": "reference",
}


class Silent:
    """A reporter that remembers."""

    def __init__(self):
        self.notices, self.steps, self.losses = [], [], []

    def notice(self, text):
        self.notices.append(text)

    def step(self, step, done, tokens_per_s, *, logged):
        assert tokens_per_s > 0
        self.steps.append(step)

    def evaluated(self, step, val_loss):
        self.losses.append((step, val_loss))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i * i % 97} of a text to learn\n" for i in range(300)))
    return path


@pytest.fixture
def settings(text, tmp_path):
    return {**SETTINGS, "data": str(text), "out": str(tmp_path / "run")}


def train(settings, **keywords):
    with begin(None, {**settings, **keywords}) as session:
        report = Silent()
        assert session.train(report)
        return session, report


# ---- The folder


def test_runs_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(2):
        with folder.create(None) as made:
            names.append(made.path.as_posix())
    (tmp_path / "runs" / "41").mkdir()
    (tmp_path / "runs" / "best-of-all").mkdir()
    with folder.create(None) as made:
        names.append(made.path.as_posix())
    assert names == ["runs/1", "runs/2", "runs/42"]
    with folder.reopen(None, may_begin=True) as last:
        assert last.path.as_posix() == "runs/42"


def test_nothing_to_reopen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="expected a run to resume, got none in runs/"):
        folder.reopen(None, may_begin=True)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "checkpoints"])
def test_a_folder_with_a_run_is_not_overwritten(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="which holds a run; go on with it by --resume"):
        folder.create(str(tmp_path))


def test_a_folder_without_a_run_becomes_one(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with folder.create(str(tmp_path)) as made:
        assert not made.exists


def test_one_process_at_a_time(tmp_path):
    with (
        RunFolder(tmp_path),
        pytest.raises(ConfigError, match="where another process trains"),
    ):
        RunFolder(tmp_path)
    with RunFolder(tmp_path):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path):
    code = "import sys, time; from forge.run.folder import RunFolder; from pathlib import Path\n"
    code += "f = RunFolder(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match="another process"):
            RunFolder(tmp_path)
        other.kill()
    RunFolder(tmp_path).close()


def test_damaged_choices_are_refused(tmp_path):
    with RunFolder(tmp_path) as made:
        assert made.read_frozen() == {}
        for text in ("{", "[1]", ""):
            made.frozen.write_text(text)
            with pytest.raises(ConfigError, match=r"frozen\.json, got it torn or edited"):
                made.read_frozen()


# ---- Metrics


def test_metrics_are_cut_back_to_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics.Metrics(path)
    for step in range(1, 6):
        log.write({"step": step, "loss": step / 3})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [row["step"] for row in metrics.read(path)] == [1, 2, 3, 4, 5]
    metrics.cut(path, 3)
    assert metrics.read(path) == [{"step": step, "loss": step / 3} for step in (1, 2, 3)]
    log = metrics.Metrics(path)
    log.write({"step": 4})
    log.close()
    assert path.read_text().endswith('}\n{"step": 4}\n')
    metrics.cut(tmp_path / "absent", 3)


@pytest.mark.parametrize("line", ["nonsense", "[]", "{}", '{"step": "1"}'])
def test_metrics_that_are_none_are_refused(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        metrics.read(path)


# ---- The writer


def test_an_error_of_the_writer_is_raised_in_the_training_thread(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    writer = Writer(tmp_path / "checkpoints")
    writer.save(1, {}, {}, best=False, keep=2)
    with pytest.raises(OSError, match="could not write"):
        writer.wait()
    writer.check()
    writer.close()


def test_the_writer_runs_beside_and_one_at_a_time(tmp_path, monkeypatch):
    running, most, gate = [], [], threading.Event()

    def slow(folder, step, arrays, state, *, best, keep):
        running.append(step)
        most.append(len(running))
        assert gate.wait(10)
        running.remove(step)
        return folder / f"step-{step}"

    monkeypatch.setattr(checkpoint, "save", slow)
    writer = Writer(tmp_path)
    writer.save(1, {}, {}, best=False, keep=2)
    assert writer.check() is None
    threading.Timer(0.05, gate.set).start()
    writer.save(2, {}, {}, best=False, keep=2)
    assert writer.wait() == tmp_path / "step-2"
    assert most == [1, 1]
    writer.close()


# ---- Choices


def config(**changes):
    return Config(**{**SETTINGS, **changes}).resolved(256)


@pytest.mark.usefixtures("gc_paused")
def test_the_plan_is_what_a_step_takes():
    """Peak of the pool in a recorded step, against the plan of it, within 5 %."""
    dataset = load_dataset(None, ByteTokenizer())
    settings = config(n_embd=32, block_size=32, batch_size=8, eager=True)
    for micro in (8, 2):
        pool = REFERENCE.pool
        pool.trim()
        before = pool.in_use
        trainer = Trainer(settings, dataset, REFERENCE, micro)
        trainer.advance()
        pool.reset_peak()
        trainer.advance()
        took = pool.peak - before
        planned = choices.plan_step(settings, REFERENCE, micro) - 3 * trainer.params.flat.nbytes
        assert planned == pytest.approx(took, rel=0.05)
        del trainer


@pytest.mark.usefixtures("gc_paused")
def test_the_plan_has_room_for_evaluation_beside_a_recorded_step():
    settings = config(n_embd=32, block_size=128, batch_size=64)
    trainer = Trainer(settings, load_dataset(None, ByteTokenizer()), REFERENCE, 32)
    REFERENCE.pool.trim()
    held = REFERENCE.pool.in_use
    REFERENCE.pool.reset_peak()
    trainer.evaluate()
    took = REFERENCE.pool.peak - held
    snapshot = 3 * trainer.params.flat.nbytes
    assert took > 2 * snapshot  # what follows would say nothing
    recorded = choices.plan_step(settings, REFERENCE, 32)
    eager = choices.plan_step(dataclasses.replace(settings, eager=True), REFERENCE, 32)
    assert recorded - eager + snapshot == pytest.approx(took, rel=0.05)


def test_the_largest_micro_batch_that_fits_is_chosen(monkeypatch):
    settings = config(batch_size=12)
    need = {n: choices.plan_step(settings, REFERENCE, n) for n in (12, 6, 1)}
    monkeypatch.setattr(choices, "available_memory", lambda: int(need[6] / 0.9) + 1)
    assert choices.choose(settings, {}).micro_batch == 6
    monkeypatch.setattr(choices, "available_memory", lambda: need[1] - 1)
    with pytest.raises(ConfigError, match=r"expected a run that fits in .* GB"):
        choices.choose(settings, {})
    monkeypatch.setattr(choices, "available_memory", lambda: None)
    assert choices.choose(settings, {}).micro_batch == 12


def test_an_eager_step_is_not_planned(monkeypatch):
    monkeypatch.setattr(choices, "plan_step", lambda *of: pytest.fail("runs the step"))
    chosen = choices.choose(config(batch_size=12, eager=True), {})
    assert (chosen.micro_batch, chosen.memory) == (12, 0)
    assert choices.choose(config(eager=True, micro_batch=2), {}).micro_batch == 2


def test_frozen_choices_stay_unless_a_setting_says_otherwise():
    frozen = {"device": "reference", "micro_batch": 2}
    again = choices.choose(config(device="auto"), frozen)
    assert (again.device, again.micro_batch) == ("reference", 2)
    assert again.reasons["micro_batch"] == "as the run began"
    assert choices.choose(config(micro_batch=4), frozen).micro_batch == 4
    # Another batch size, which was allowed by name: 2 no longer divides it.
    assert choices.choose(config(batch_size=3), frozen).micro_batch == 3


def test_what_the_machine_lacks_is_named():
    with pytest.raises(ConfigError, match="expected --precision fp32 on reference, got bf16"):
        choices.choose(config(precision="bf16"), {})
    with pytest.raises(DeviceError, match="expected"):
        choices.choose(config(device="cuda"), {})


def test_what_may_change_the_bits_is_named():
    now = choices.Choices("cpu", 4, 0, 1, choices.versions(Device("cpu")))
    old = {**now.frozen(), "versions": {**now.versions, "numpy": "1.0", "gone": "1"}}
    assert choices.changed(now.frozen(), now) == []
    assert choices.changed({}, now) == []
    assert choices.changed(old, now) == [f"numpy 1.0 → {now.versions['numpy']}"]
    other = {**now.frozen(), "device": "cuda", "micro_batch": 2, "tf32": True}
    found = ["device cuda → cpu", "micro_batch 2 → 4", "tf32 True → False"]
    assert choices.changed(other, now) == found


# ---- A run


def test_a_run_leaves_what_the_design_says(settings, tmp_path):
    session, report = train(settings)
    path = tmp_path / "run"
    assert report.steps == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in report.losses] == [3, 6]
    rows = metrics.read(path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_s"}
    assert set(rows[0]) == keys
    assert set(rows[2]) == keys | {"val_loss"}
    assert rows[5]["loss"] < rows[0]["loss"]
    names = sorted(p.name for p in (path / "checkpoints").iterdir())
    assert names == ["best", "last", "step-4", "step-6"]
    assert (path / "checkpoints" / "last").read_text() == "step-6\n"
    assert load_toml(path / "config.toml").out is None
    assert json.loads((path / "frozen.json").read_text())["micro_batch"] == 4
    state = checkpoint.load(path / "checkpoints" / "step-6").state
    assert state["sample"] == 24
    assert state["val_loss"] == rows[5]["val_loss"] == session.best["val_loss"]


def test_steps_match_a_loop_by_hand(settings):
    """The run is `train_step` in a loop, with these batches, rates and keys."""
    session, _ = train({**settings, "dropout": 0.2, "micro_batch": 2})
    config = session.config
    other = Trainer(config, session.dataset, REFERENCE, 2)
    for step in range(config.steps):
        batch = training.to_device(
            other.loader.batch(first_sample=4 * step, micro_batch=2), REFERENCE
        )
        state = training.step_state(config.seed, step, other.schedule(step), REFERENCE)
        training.train_step(other.model, other.params, other.grads, other.optimizer, batch, state)
    assert np.array_equal(other.params.flat.numpy(), session.trainer.params.flat.numpy())


@pytest.mark.parametrize(("eager", "calls"), [(True, 6), (False, 3)])
def test_an_eager_run_calls_its_step_each_time(settings, monkeypatch, eager, calls):
    """Else once for the plan, once as it is and once to be recorded.

    The loop above, too, is eager: the same bits.
    """
    called = []
    step = training.train_step

    @functools.wraps(step)
    def counted(*args, **keywords):
        called.append(args)
        return step(*args, **keywords)

    monkeypatch.setattr(training, "train_step", counted)
    train({**settings, "eager": eager})
    assert len(called) == calls


def test_the_algorithms_of_products_are_kept_with_the_run(settings, monkeypatch, capsys):
    """A device that times algorithms has one for the steps, and one more for validation."""
    came_up = []

    def learn(chosen):
        before = dict(chosen.products.get("algorithms", {}))
        if not came_up or (came_up[-1] == "validated" and len(before) == 1):
            before[str(len(came_up))] = f"{len(came_up):0128x}"
        came_up.append("learned")
        more = before != chosen.products.get("algorithms", {})
        chosen.products = {"chosen_for": "a card", "algorithms": before}
        return more

    evaluate = Trainer.evaluate
    note = lambda *args: came_up.append("validated") or evaluate(*args)  # noqa: E731
    monkeypatch.setattr(choices.Choices, "learn_products", learn)
    monkeypatch.setattr(Trainer, "evaluate", note)
    session, report = train({**settings, "checkpoint_every": 3})
    (notice,) = report.notices
    assert re.fullmatch("products: 1 algorithms, table [0-9a-f]{12}, kept in frozen.json", notice)
    kept = session.folder.read_frozen()["products"]
    assert kept == session.choices.products
    assert len(kept["algorithms"]) == 2
    assert checkpoint.load(session.folder.newest()).state["frozen"]["products"] == kept
    with resume(None, {"out": settings["out"], "steps": 7}, ()) as again:
        assert again.choices.products == kept
        introduce(again)
    assert re.search(
        r"products  2 algorithms, table [0-9a-f]{12} \(as the run", capsys.readouterr().out
    )


def test_the_held_out_loss_is_that_of_all_held_out_tokens(settings):
    session, report = train({**settings, "eval_batches": None})
    trainer = session.trainer
    nats = count = 0
    for batch in trainer.validation:
        for micro in batch.micros:
            for row in range(len(micro.inputs)):
                inputs, targets = micro.inputs[row : row + 1], micro.targets[row]
                ids = training.tensor(inputs, device=REFERENCE)
                logits = trainer.model.logits(trainer.params, ids).numpy()[0].astype(np.float64)
                logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                kept = targets >= 0
                nats -= logprobs[kept, targets[kept]].sum()
                count += kept.sum()
    assert count == len(session.dataset.val) - 1
    assert report.losses[-1][1] == pytest.approx(nats / count, rel=1e-5)


def test_without_validation(settings):
    session, report = train({**settings, "val_fraction": 0.0})
    assert report.losses == []
    assert session.best is None
    assert not (session.folder.checkpoints / "best").exists()


def test_nothing_is_written_before_settings_and_data_are_good(settings, tmp_path):
    for bad in ({"data": str(tmp_path / "absent")}, {"precision": "bf16"}, {"block_size": 10**6}):
        with pytest.raises((ConfigError, DataError)):
            begin(None, {**settings, **bad})
        assert not (tmp_path / "run").exists()


def test_a_number_that_is_not_finite_stops_the_run(settings, tmp_path):
    with begin(None, {**settings, "eval_every": 0}) as session:
        trainer = session.trainer
        good = trainer.advance

        def poisoned():
            done = good()
            if trainer.step == 3:
                trainer.params["h.0.mlp.c_fc.bias"].array[0] = np.inf
            return done

        trainer.advance = poisoned
        with pytest.raises(NonFiniteError) as caught:
            session.train(Silent())
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("[mlp] expected finite values")
    assert "step 4 (samples 12 to 15) has loss nan" in message
    assert "no weight was changed" in message
    saved = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-3")
    moments = saved.arrays["optimizer.safetensors"]
    assert all(np.isfinite(array).all() for array in moments.values())
    assert [row["step"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_validation_that_was_cut_short_is_made_up_for(settings, tmp_path):
    """Stopped amid the validation of step 3: the resumed run has the same rows in the end."""
    straight, _ = train({**settings, "out": str(tmp_path / "straight")})
    with begin(None, settings) as session:
        evaluate = session.trainer.evaluate

        def interrupted(stop):
            os.kill(os.getpid(), 2)
            return evaluate(stop)

        session.trainer.evaluate = interrupted
        report = Silent()
        assert not session.train(report)
    assert "again to leave at once" in report.notices[0]
    assert session.trainer.step == 3
    with resume(None, {"out": settings["out"]}, ()) as session:
        assert session.train(Silent())

    def rows(path):
        return [
            {key: value for key, value in row.items() if key != "tokens_per_s"}
            for row in metrics.read(path / "metrics.jsonl")
        ]

    assert rows(tmp_path / "run") == rows(straight.folder.path)


def test_a_disk_that_fails_surfaces_at_the_next_step(settings, monkeypatch):
    def full(*args, **keywords):
        raise OSError(errno.ENOSPC, "[checkpoint] could not write it")

    with begin(None, {**settings, "steps": 50}) as session:
        monkeypatch.setattr(checkpoint, "save", full)
        with pytest.raises(OSError, match="could not write it"):
            session.train(Silent())
        assert session.trainer.step < 50


# ---- A model to use


def test_a_trained_model_is_read_from_all_its_paths(settings, tmp_path):
    session, _ = train(settings)
    run = tmp_path / "run"
    places = (run, run / "checkpoints", run / "checkpoints" / "last", run / "checkpoints" / "best")
    for place in (*places, run / "checkpoints" / "step-6"):
        found = model.load(place, REFERENCE)
        assert found.step == 6
        assert found.model == session.trainer.model
        assert np.array_equal(found.params.flat.numpy(), session.trainer.params.flat.numpy())


def test_a_state_of_another_version_is_refused(settings, tmp_path):
    train(settings)
    path = tmp_path / "run" / "checkpoints" / "step-6"
    saved = checkpoint.load(path)
    good = saved.state
    later = {**good, "config": {**good["config"], "warp": 9}}
    for state in (later, {**good, "moon": 1}, {**good, "tokenizer": {"kind": "x"}}, {}):
        checkpoint.save(path.parent, 6, saved.arrays, state)
        for use in (lambda: model.load(path, REFERENCE), lambda: resume(None, settings, ())):
            with pytest.raises(CheckpointError, match=r"expected a run.s state in .*step-6, got"):
                use()


# ---- Scores


def plain_score(found, tokens, stride):
    """Every target once, in the first window that has it, by whole forward passes."""
    T = found.config.block_size
    nats = {}
    for start in range(0, len(tokens) - 1, stride):
        piece = tokens[start : start + T + 1].astype(np.int64)
        ids = training.tensor(piece[None, :-1], device=REFERENCE)
        logits = found.model.logits(found.params, ids).numpy()[0].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for i, target in enumerate(piece[1:]):
            nats.setdefault(start + i + 1, -logprobs[i, target])
    assert sorted(nats) == list(range(1, len(tokens)))
    return sum(nats.values()) / len(nats)


@pytest.mark.parametrize("stride", [None, 16, 5, 1])
@pytest.mark.parametrize("length", [2, 16, 17, 18, 70])
def test_a_score_counts_every_token_once(settings, tmp_path, stride, length):
    train({**settings, "steps": 2})
    found = model.load(tmp_path / "run", REFERENCE)
    tokens = np.arange(length, dtype=np.uint8) * 7 % 120
    told = []
    result = evaluation.score(
        found.model,
        found.params,
        tokens,
        stride,
        lambda done, windows: told.append((done, windows)),
    )
    assert result.tokens == length - 1
    assert result.loss == pytest.approx(plain_score(found, tokens, stride or 16), rel=1e-5)
    assert told[-1][0] == told[-1][1]
    assert result.perplexity == pytest.approx(np.exp(result.loss))
    assert result.bits_per_byte(2 * length) == pytest.approx(
        result.loss * (length - 1) / np.log(2) / (2 * length)
    )


def test_a_text_of_one_token_has_no_score(settings, tmp_path):
    train({**settings, "steps": 0})
    found = model.load(tmp_path / "run", REFERENCE)
    with pytest.raises(DataError, match="at least 2 tokens"):
        evaluation.score(found.model, found.params, np.zeros(1, np.uint8))


def test_operations_per_token_are_those_of_the_matrices(settings, tmp_path):
    """6 for each element of a matrix, and for attention half of T² in two products of width C."""
    session, _ = train({**settings, "steps": 0})
    trainer, T, C = session.trainer, 16, 8
    matrices = sum(
        x.size for name, x in trainer.params.items() if x.ndim == 2 and name != "wpe.weight"
    )
    attention = 3 * (2 * 2 * C * T * T / 2) / T
    found = speed.flops_per_token(trainer.model, trainer.params)
    vectors = sum(x.size for x in trainer.params.values() if x.ndim == 1)
    assert found == 6 * matrices + attention + 6 * vectors
    assert 1e6 < speed.peak_flops(REFERENCE) < 1e16


def test_leaving_a_debugger_is_an_interruption(monkeypatch, capsys):
    def quit_it(*words, **options):
        raise bdb.BdbQuit

    monkeypatch.setattr(app, "make_app", lambda *called: quit_it)
    assert app.main(["train"]) == 130
    assert capsys.readouterr().err == "forge: interrupted\n"
