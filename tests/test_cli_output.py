"""Output whose reader has left: what each command makes of it, in real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge.cli import main

FAILING = """
import sys
from pathlib import Path
from forge import verify
from forge.cli import main
(first, *_) = verify.run("reference", ops=["exp"])
bad = type(first)(**{**vars(first), "failures": ("dx is wrong",)})
verify.run = lambda *args, **keywords: iter([bad])
sys.exit(main())
"""

STOPPED = """
import sys
from forge.cli import main, train
from forge.run.session import Session
train.introduce = train._mfu = lambda run: None
Session.train = lambda run, reporter: False
sys.exit(main())
"""


def unread(*command, **environment):
    """The exit code and the standard error of a process whose output nobody reads."""
    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        os.close(write)
        _, error = process.communicate(timeout=60)
    return process.returncode, error


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    model = ("--n-layer=1", "--n-head=2", "--n-embd=8", "--block-size=16", "--eval-batches=1")
    assert main(["train", *model, "--steps=1", "--device=reference", f"--out={folder}"]) == 0
    return folder


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["kernels", "kernels --json", "generate RUN", "eval RUN"])
def test_a_reader_that_left_a_list_or_a_text_has_seen_enough(command, unbuffered, trained):
    words = [str(trained) if word == "RUN" else word for word in command.split()]
    if "RUN" in command:
        words.append("--device=reference")
    assert unread("-m", "forge", *words, PYTHONUNBUFFERED=unbuffered) == (0, "")


def test_checks_that_nobody_saw_have_not_passed():
    code, error = unread("-m", "forge", "verify", "--device=reference", "--op=exp", "--op=log")
    assert code == 130
    assert error == (
        "forge: [verify] expected a reader of the verdicts, got none any more, and checked no "
        "further\n"
    )


def test_checks_that_were_all_made_keep_their_verdict():
    """One document is written at the end, when the exit code is known."""
    assert unread("-c", FAILING, "verify", "--json", "--device=reference") == (1, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_with_nothing_to_save_ends_in_a_line(number):
    code = (
        "import os, signal, sys, time\n"
        "from forge.cli import app\n"
        "def wait(*words, **settings):\n"
        f"    for _ in range({1 + (number == signal.SIGHUP)}):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "    time.sleep(60)\n"
        "app.make_app = lambda *words: wait\n"
        "sys.exit(app.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (130, "forge: interrupted\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_the_output_keeps_its_exit_code(trained, unbuffered):
    """What Python's own buffer still holds fails once more when Python ends."""
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux, where nothing can be written to this file")
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "forge", "generate", str(trained), "--device=reference"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=60
        )
    assert done.returncode == 4
    assert done.stderr.startswith("forge: [system] expected files and devices to work, got: No s")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_training_that_was_stopped_says_so_by_its_code_where_nobody_reads_its_line(
    tmp_path, unbuffered
):
    """As Ctrl-C in a pipeline, which ends the reader as well."""
    words = ["train", "--steps=3", f"--out={tmp_path / 'run'}", "--device=reference"]
    code, error = unread("-c", STOPPED, *words, PYTHONUNBUFFERED=unbuffered)
    assert code == 130
    assert error.count("\n") == 1
    assert "expected a reader of what it prints, got none any more" in error
