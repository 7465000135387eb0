"""Runs that are killed, stopped and resumed: real processes, the same bits as if undisturbed."""

import errno
import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge import checkpoint
from forge.cli import main
from forge.run import metrics
from forge.run.interrupt import Interrupt
from forge.run.report import Told

STEPS = 120
SETTINGS = {
    "n-layer": 1,
    "n-head": 2,
    "n-embd": 16,
    "block-size": 16,
    "batch-size": 4,
    "dropout": 0.1,
    "steps": STEPS,
    "log-every": 1,
    "eval-every": 25,
    "eval-batches": 1,
    "checkpoint-every": 10,
    "device": "reference",
}


def flags(**changes):
    settings = {**SETTINGS, **{key.replace("_", "-"): value for key, value in changes.items()}}
    return [f"--{key}={value}" for key, value in settings.items()]


def start(*arguments, **keywords):
    command = [sys.executable, "-m", "forge", "train", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **keywords
    )


def run(*arguments):
    with start(*arguments) as process:
        out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    return out


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.001)


def logged(folder):
    """Rows of the run's metrics, but for the rate."""
    return [
        {key: value for key, value in row.items() if key != "tokens_per_s"}
        for row in metrics.read(folder / "metrics.jsonl")
    ]


def lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def weights(folder, step=STEPS):
    return (folder / "checkpoints" / f"step-{step}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run(*flags(), f"--out={folder}")
    return folder


def test_killed_at_any_moment_it_ends_with_the_same_bits(straight, tmp_path):
    folder = tmp_path / "run"
    command = [*flags(), f"--out={folder}", "--resume"]
    half_written = folder / "checkpoints"

    def amid_a_checkpoint():
        return lines(folder) > 60 and any(half_written.glob(".step-*.tmp"))

    for moment in (
        folder.exists,
        lambda: lines(folder) > 5,
        lambda: lines(folder) > 34,
        amid_a_checkpoint,
    ):
        with start(*command) as process:
            until(lambda moment=moment: moment() or process.poll() is not None)
            process.kill()
        assert process.returncode == -signal.SIGKILL
    out = run(*command)
    assert "from step" in out
    assert weights(folder) == weights(straight)
    assert logged(folder) == logged(straight)
    optimizer = "checkpoints/step-120/optimizer.safetensors"
    assert (folder / optimizer).read_bytes() == (straight / optimizer).read_bytes()
    assert not list(half_written.glob(".*"))


def test_on_the_cpu_too_and_on_any_number_of_threads(tmp_path, capsys):
    changes = {"device": "cpu", "n_head": 3, "n_embd": 36, "block_size": 21, "schedule_steps": 12}

    def train(folder, steps, threads):
        arguments = flags(**changes, steps=steps, threads=threads, checkpoint_every=5)
        assert main(["train", *arguments, f"--out={tmp_path / folder}", "--resume"]) == 0

    train("straight", 12, 1)
    for steps, threads in ((4, 3), (7, 1), (12, 2)):
        train("in-parts", steps, threads)
    assert weights(tmp_path / "in-parts", 12) == weights(tmp_path / "straight", 12)
    losses = [[r["loss"] for r in logged(tmp_path / f)] for f in ("in-parts", "straight")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop_it_writes_a_checkpoint(straight, tmp_path, number):
    folder = tmp_path / "run"
    with start(*flags(checkpoint_every=0), f"--out={folder}") as process:
        until(lambda: lines(folder) > 20)
        process.send_signal(number)
        if number == signal.SIGHUP:
            # The shell and the system each send one: the second is not impatience.
            process.send_signal(number)
        out, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error == ""
    saved = checkpoint.newest(folder / "checkpoints")
    assert f"Stopped at {saved.name.replace('-', ' ')}; go on with" in out
    run("--resume", f"--out={folder}")
    assert weights(folder) == weights(straight)
    assert logged(folder) == logged(straight)


def ignore_hangup():
    """What nohup does before it starts a program."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_under_nohup_a_hangup_is_nothing(straight, tmp_path):
    folder = tmp_path / "run"
    with start(*flags(), f"--out={folder}", preexec_fn=ignore_hangup) as process:
        for count in (0, 20):
            until(lambda count=count: lines(folder) > count)
            process.send_signal(signal.SIGHUP)
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert weights(folder) == weights(straight)


def test_a_reader_that_leaves_ends_a_training_with_a_checkpoint(straight, tmp_path):
    folder = tmp_path / "run"
    with start(*flags(checkpoint_every=0), f"--out={folder}") as process:
        until(lambda: lines(folder) > 20)
        process.stdout.close()
        error = process.stderr.read()
        process.wait(timeout=30)
    assert process.returncode == 130
    step = checkpoint.load(checkpoint.newest(folder / "checkpoints")).step
    assert error == (
        "forge: [train] expected a reader of what it prints, got none any more, and stopped at "
        f"step {step}; go on with: forge train --resume --out {folder}\n"
    )
    run("--resume", f"--out={folder}")
    assert weights(folder) == weights(straight)
    assert logged(folder) == logged(straight)


def test_a_reader_that_was_never_there(tmp_path, capsys):
    folder = tmp_path / "run"
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "forge", "train", *flags(steps=3), f"--out={folder}"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=30)
    os.close(write)
    assert done.returncode == 130
    assert "stopped at step 0; go on with: forge train --resume --out" in done.stderr
    assert done.stderr.count("\n") == 1
    assert main(["plot", str(folder), f"--out={tmp_path / 'a.png'}"]) == 2
    assert capsys.readouterr().err == (
        f"forge: [plot] expected logged steps, got none in {folder} yet; let it train for "
        f"--log-every steps, or go on with: forge train --resume --out {folder}\n"
    )
    run("--resume", f"--out={folder}")


def test_a_terminal_that_goes_ends_a_training_with_a_checkpoint(straight, tmp_path):
    """A dropped connection: SIGHUP, and whatever is written to the terminal fails."""
    folder = tmp_path / "run"
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "forge", "train", *flags(checkpoint_every=0)]
        os.execv(sys.executable, [*command, f"--out={folder}"])
    until(lambda: lines(folder) > 20)
    os.close(terminal)
    ended = []

    def gone():
        ended[:] = os.waitpid(pid, os.WNOHANG)
        return ended[0] == pid

    until(gone)
    assert os.waitstatus_to_exitcode(ended[1]) == 130
    assert checkpoint.load(checkpoint.newest(folder / "checkpoints")).step >= 20
    run("--resume", f"--out={folder}")
    assert weights(folder) == weights(straight)
    assert logged(folder) == logged(straight)


def test_output_that_cannot_be_written_ends_a_training_with_a_checkpoint(tmp_path):
    """To a full disk, say, while the run's own has room."""
    folder = tmp_path / "run"

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    # Room for the settings and some steps of 70 bytes; the run's own files stay below the limit.
    text = tmp_path / "log.txt"
    text.write_bytes(b"-" * ((1 << 16) - 4096))
    command = [sys.executable, "-m", "forge", "train", *flags(n_embd=4, checkpoint_every=0)]
    with text.open("ab") as log:
        done = subprocess.run(
            [*command, f"--out={folder}"],
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limited,
            timeout=30,
        )
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("\n") == 1
    assert checkpoint.load(checkpoint.newest(folder / "checkpoints")).step < STEPS


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EPIPE, BrokenPipeError),
        (errno.EIO, BrokenPipeError),
        (errno.ENOSPC, OSError),
    ],
)
def test_a_reporter_that_fails_is_told_nothing_more(number, kind):
    said = []

    class Failing:
        def notice(self, text):
            said.append(text)
            raise OSError(number, os.strerror(number))

        def evaluated(self, step, val_loss):
            said.append(step)

    stop = Interrupt(lambda: None)
    told = Told(Failing(), stop)
    told.settle()
    told.evaluated(1, 2.0)
    assert not stop.requested
    told.notice("a")
    told.evaluated(2, 2.0)
    assert stop.requested
    assert said == [1, "a"]
    with pytest.raises(kind):
        told.settle()


def test_asked_twice_it_leaves_at_once(tmp_path):
    code = (
        "import os, signal, time; from forge.run.interrupt import Interrupt\n"
        "with Interrupt(lambda: print('asked', flush=True)):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20)
    assert (done.returncode, done.stdout) == (130, b"asked\n")


def test_two_processes_in_one_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    with start(*flags(steps=100000), f"--out={folder}") as process:
        until(lambda: lines(folder) > 0)
        assert main(["train", "--resume", f"--out={folder}"]) == 2
        process.kill()
    error = capsys.readouterr().err
    assert error.startswith(f"forge: [run] expected a run folder to itself, got {folder}")


def resumed(capsys, folder, *arguments):
    code = main(["train", "--resume", f"--out={folder}", *arguments])
    return code, capsys.readouterr()


@pytest.fixture(scope="module")
def first_half(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first_half") / "run"
    run(*flags(steps=60, schedule_steps=120), f"--out={folder}")
    return folder


@pytest.fixture
def half(first_half, tmp_path):
    """A copy of a run of 60 of 120 steps."""
    return Path(shutil.copytree(first_half, tmp_path / "half"))


def test_a_run_can_be_made_longer(straight, half, capsys):
    # The warm-up is a tenth of the schedule in both.
    code, _ = resumed(capsys, half, "--steps=120")
    assert code == 0
    assert weights(half) == weights(straight)
    losses = [[row["loss"] for row in logged(folder)] for folder in (half, straight)]
    assert losses[0] == losses[1]


def test_what_does_not_change_the_mathematics_may_change(half, capsys, tmp_path):
    same = ["--steps=61", "--log-every=7", "--eval-every=0", "--eval-batches=2", "--keep=5"]
    code, said = resumed(capsys, half, *same, "--checkpoint-every=3", "--micro-batch=2")
    assert code == 0
    assert "micro_batch 4 → 2: the same bits are no longer promised" in said.out
    assert json.loads((half / "frozen.json").read_text())["micro_batch"] == 2
    # The data may lie elsewhere; its tokens tell.
    moved = tmp_path / "moved"
    half.rename(moved)
    assert resumed(capsys, moved, "--steps=62")[0] == 0


@pytest.mark.parametrize(
    ("name", "value", "old"),
    [
        ("lr", "0.1", "0.004"),
        ("batch-size", "8", "4"),
        ("seed", "2", "1337"),
        ("dropout", "0.2", "0.1"),
        ("beta2", "0.5", "0.99"),
        ("schedule-steps", "200", "120"),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(half, capsys, name, value, old):
    code, said = resumed(capsys, half, f"--{name}={value}", "--steps=61")
    assert code == 2
    assert f"{name.replace('-', '_')} {old} → {value}" in said.err
    assert f"--allow-change {name}" in said.err
    code, said = resumed(capsys, half, f"--{name}={value}", "--steps=61", f"--allow-change={name}")
    assert code == 0
    assert f"changed from here on: {name.replace('-', '_')} {old} → {value}" in said.out


@pytest.mark.parametrize("name", ["n-layer", "n-embd"])
def test_a_setting_that_shapes_the_weights_cannot_be_allowed(half, capsys, name):
    for allowed in ((), (f"--allow-change={name}",)):
        code, said = resumed(capsys, half, f"--{name}=32", *allowed)
        assert code == 2
        assert said.err.endswith("→ 32; begin another run, since the weights have other shapes\n")


def test_other_data_is_refused_by_name(half, capsys, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("another text altogether\n" * 200)
    code, said = resumed(capsys, half, f"--data={text}", "--steps=61")
    assert code == 2
    assert "data: other tokens than in the language reference" in said.err
    code, said = resumed(capsys, half, f"--data={text}", "--steps=61", "--allow-change=data")
    assert code == 0
    assert "the best checkpoint is sought anew" in said.out


def test_unknown_field_to_allow(half, capsys):
    code, said = resumed(capsys, half, "--allow-change=lrr")
    assert code == 2
    assert said.err == (
        "forge: [resume] expected a setting after --allow-change, got 'lrr'; did you mean lr?\n"
    )


def test_a_damaged_checkpoint_is_refused_and_a_good_one_offered(half, capsys):
    path = half / "checkpoints" / "step-60" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, said = resumed(capsys, half, "--steps=70")
    assert code == 2
    assert f"expected {path} as it was written" in said.err
    assert f"the newest good one is {half / 'checkpoints' / 'step-50'}" in said.err
    assert len(said.err.splitlines()) == 1


def test_changed_libraries_are_named(half, capsys):
    path = half / "frozen.json"
    frozen = json.loads(path.read_text())
    frozen["versions"]["numpy"] = "1.0"
    path.write_text(json.dumps(frozen))
    code, said = resumed(capsys, half, "--steps=61")
    assert code == 0
    assert "numpy 1.0 → " in said.out
    assert "the same bits are no longer promised" in said.out


def test_resume_of_a_run_that_never_began(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    code, said = resumed(capsys, folder, *flags(steps=3))
    assert code == 0
    assert f"no complete checkpoint in {folder}: starting at step 0" in said.out


def test_resume_of_no_folder_is_a_mistake(tmp_path, capsys):
    """A mistyped --out would train the default model on the default text."""
    code, said = resumed(capsys, tmp_path / "nowhere")
    assert code == 2
    assert "got no such folder; leave out --resume to begin" in said.err
    assert not (tmp_path / "nowhere").exists()


def test_resume_of_a_finished_run_changes_nothing(half, capsys):
    kept = [half / "config.toml", *(half / "checkpoints").rglob("*")]
    before = {path: path.read_bytes() for path in kept if path.is_file()}
    rows = logged(half)
    code, said = resumed(capsys, half)
    assert code == 0
    assert "already; train on with a larger --steps" in said.out
    code, said = resumed(capsys, half, "--steps=7")
    assert code == 2
    assert "expected --steps of at least" in said.err
    assert {p: p.read_bytes() for p in before} == before
    assert logged(half) == rows


def test_settings_that_are_gone_are_the_checkpoints(half, capsys):
    settings = (half / "config.toml").read_text()
    (half / "config.toml").unlink()
    assert resumed(capsys, half)[0] == 0
    assert (half / "config.toml").read_text() == settings


def test_resume_from_another_folder(straight, tmp_path, monkeypatch, capsys):
    """A relative --out means what it says where it is said."""
    monkeypatch.chdir(straight.parent)
    code, said = resumed(capsys, os.path.relpath(straight), f"--steps={STEPS}")
    assert code == 0
    assert "run is at step 120 of 120 already" in said.out


@pytest.mark.parametrize("own", [True, False])
def test_a_text_that_moved_is_named_where_it_is_now(tmp_path, monkeypatch, capsys, own):
    """A relative --data means another file, or none, when the command is called elsewhere."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "a.txt").write_text("a text that is long enough to learn from\n" * 100)
    texts = {"data": "a.txt", **({"val_data": "a.txt"} if own else {})}
    monkeypatch.chdir(first)
    assert main(["train", *flags(**texts, steps=3), "--out=run"]) == 0
    monkeypatch.chdir(second)
    code, said = resumed(capsys, first / "run", "--steps=4")
    assert code == 2
    assert said.err == (
        "forge: [resume] expected the run's text, got a path that does not exist: a.txt; paths "
        f"begin at {second}: say with --data{' and --val-data' if own else ''} where it is now\n"
    )
    assert main(["eval", str(first / "run")]) == 2
    assert "call it from where the run began, or name a text with" in capsys.readouterr().err
    moved = [f"--{name.replace('_', '-')}=../first/a.txt" for name in texts]
    assert resumed(capsys, first / "run", "--steps=4", *moved)[0] == 0
    assert resumed(capsys, first / "run", "--steps=5")[0] == 0
    assert main(["eval", str(first / "run"), "--device=reference"]) == 0


def test_a_full_disk_under_the_logs_ends_the_run(tmp_path):
    """The files of the log may not grow beyond 24 kB; the thread that wrote events once hung."""

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, 24_000))

    command = [*flags(steps=1000, n_embd=4, checkpoint_every=100), f"--out={tmp_path / 'run'}"]
    with start(*command, preexec_fn=limited) as process:
        _, error = process.communicate(timeout=100)
    assert process.returncode == 4
    assert error.startswith("forge: [")
    assert error.count("\n") == 1
    assert checkpoint.load(checkpoint.newest(tmp_path / "run" / "checkpoints"))
