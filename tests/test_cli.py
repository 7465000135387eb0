"""The command line as a user meets it: help, output, one-line errors, exit codes."""

import ctypes
import errno
import importlib.util
import json
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest

from forge import checkpoint, verify
from forge.backends.cpu import prepare
from forge.cli import app, main
from forge.cli.stream import TextStream, printable
from forge.config import load_toml, settings
from forge.data.tokenizer import ByteTokenizer
from forge.errors import CheckpointError, ForgeError, NonFiniteError
from forge.run import metrics

SMALL = [
    *("--n-layer=1", "--n-head=2", "--n-embd=8", "--block-size=16", "--batch-size=2", "--steps=4"),
    *("--log-every=1", "--eval-every=2", "--eval-batches=1", "--checkpoint-every=2"),
    "--device=reference",
]
CONFIGS = Path(__file__).parents[1] / "configs"
COMMANDS = ("train", "generate", "eval", "plot", "verify", "kernels", "bench")


def forge(*arguments, **keywords):
    """A real process, its output piped."""
    command = [sys.executable, "-m", "forge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **keywords)


@pytest.fixture
def call(capsys):
    """A command in this process: its exit code and what it printed."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = forge("train", *SMALL, f"--out={folder}")
    assert done.returncode == 0, done.stderr
    return folder


# ---- Help


def test_help_names_every_command(call):
    for arguments in ((), ("--help",)):
        code, out, _ = call(*arguments)
        assert code == 0
        assert all(re.search(rf"^. {name} ", out, re.MULTILINE) for name in COMMANDS)
        assert "Exit codes: 0 done" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_page_fits_80_columns(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = forge(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: forge {name} ")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


def test_every_setting_has_a_flag_with_help_and_default(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    code, out, _ = call("train", "--help")
    assert code == 0
    for setting in settings():
        line = next(line for line in out.splitlines() if f" {setting.flag} " in line)
        assert setting.help[1:] in line
        if setting.default is not None:
            assert f"(default: {str(setting.default).lower()})" in line.lower()


def test_help_starts_at_once():
    """No kernel, compiler or event writer is loaded to print help."""
    code = "import sys; from forge.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert not modules & {"numba", "tensorboardX", "matplotlib", "torch", "safetensors"}


# ---- A user's mistakes


@pytest.fixture
def files(tmp_path):
    """Files to point at, by name."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"ELF\0\1\2" * 99)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "text.txt").write_text("a text that is long enough to learn from\n" * 100)
    (tmp_path / "no.toml").write_text("n_layer: 3\n")
    (tmp_path / "key.toml").write_text("n_layr = 3\n")
    (tmp_path / "type.toml").write_text('n_layer = "three"\n')
    (tmp_path / "table.toml").write_text("[model]\nn_layer = 3\n")
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    return tmp_path


MISTAKES = {
    "command": ("trian", 'Did you mean "train"?'),
    "flag": ("train --n-layr 3", "Did you mean --n-layer?"),
    "flag of others": ("train --max_iters=3", "Did you mean --steps?"),
    "argument": ("train a.toml b.toml", "b.toml"),
    "number": ("train --steps many", "--steps"),
    "choice": ("train --precision fp8", '"fp8"'),
    "no config": ("train {}/absent.toml", "No such file or directory"),
    "folder as config": ("train {}/folder", "Is a directory"),
    "not TOML": ("train {}/no.toml", "expected TOML in"),
    "key": ("train {}/key.toml", "got 'n_layr'; did you mean n_layer?"),
    "type": ("train {}/type.toml", "to be an integer, got 'three'"),
    "table": ("train {}/table.toml", "the table [model]"),
    "no data": ("train --data {}/absent.txt", "a path that does not exist"),
    "empty data": ("train --data {}/empty.txt", "the empty file"),
    "binary data": ("train --data {}/binary.txt", "NUL bytes"),
    "short data": ("train --data {}/short.txt", "give a longer text"),
    "short for the context": ("train --data {}/text.txt --block-size 5000", "expected at least"),
    "empty folder": ("train --data {}/folder", "expected text files"),
    "data without a name": ("train --data=", "expected --data to be a path, got ''"),
    "out without a name": ("train --out=", "expected --out to be a path, got ''"),
    "out that is a file": ("train --out {}/text.txt", "which is a file or lies in one"),
    "out in a file": (
        "train --resume --n-layer 1 --out {}/text.txt/run",
        "which is a file or lies in one",
    ),
    "half an integer": ("train --n-layer 4.5", 'expected an integer, got "4.5"'),
    "heads": ("train --n-embd 130 --n-head 4", "divisible by --n-head, got 130 and 4"),
    "negative": ("train --n-layer -1", "expected --n-layer in [1, 1024], got -1"),
    "zero": ("train --batch-size 0", "expected --batch-size in"),
    "absurd": ("train --n-layer 1024 --n-embd 131072", "GB of memory left here"),
    "beyond absurd": ("train --n-embd 99999999999", "expected --n-embd in"),
    "nan": ("train --lr nan", "expected --lr in"),
    "micro-batch": ("train --micro-batch 3", "divisible by --micro-batch, got 8 and 3"),
    "device": ("train --device tpu", '"tpu"'),
    "GPU": ("train --device cuda", "expected"),
    "tf32 on a CPU": (
        "train --tf32 --device cpu",
        "expected --tf32 on a GPU, got it on cpu, which",
    ),
    "precision": ("train --precision bf16 --device reference", "expected --precision fp32 on"),
    "nothing to resume": ("train --resume", "expected a run to resume"),
    "allow what": ("train --resume --allow-change lrr", "did you mean lr?"),
    "no model": ("generate", "model"),
    "absent model": ("generate {}/absent", "which does not exist"),
    "model without checkpoint": ("generate {}/folder", "which holds none"),
    "model that is a file": ("generate {}/text.txt", "expected a run or checkpoint"),
    "temperature": ("generate RUN --temperature -1", "--temperature of at least 0, got -1.0"),
    "top-p": ("generate RUN --top-p 0", "--top-p in (0, 1], got 0.0"),
    "top-p above": ("generate RUN --top-p 1.5", "--top-p in (0, 1], got 1.5"),
    "top-k": ("generate RUN --top-k -2", "--top-k of at least 0"),
    "min-p": ("generate RUN --min-p 2", "--min-p in [0, 1]"),
    "n": ("generate RUN --n 0", "--n from 1 to"),
    "absurd n": ("generate RUN --n 100000000", "--n from 1 to"),
    "half a token": ("generate RUN --max-new-tokens 2.5", 'expected an integer, got "2.5"'),
    "no tokens": ("generate RUN --max-new-tokens -1", "--max-new-tokens of at least 0"),
    "long prompt": ("generate RUN --prompt 12345678901234567", "1 to 16 tokens"),
    "empty prompt": ("generate RUN --prompt=", "a prompt of at least one token"),
    "two prompts": ("generate RUN --prompt a --prompt-file b", "or --prompt-file, got both"),
    "no prompt file": ("generate RUN --prompt-file {}/absent", "No such file"),
    "prompt file": ("generate RUN --prompt-file {}/latin.txt", "expected UTF-8 text"),
    "generate's device": ("generate RUN --device tpu", "'tpu'"),
    "generate's threads": ("generate RUN --threads 0", "--threads of at least 1"),
    "stride": ("eval RUN --stride 17", "--stride from 1 to 16"),
    "nothing to score": ("eval RUN --data {}/empty.txt", "the empty file"),
    "suffix": ("plot RUN --out {}/a.pdf", "end in .png or .svg"),
    "no folder to plot in": ("plot RUN --out {}/absent/a.png", "expected a folder for --out"),
    "no run to plot": ("plot {}/folder --out {}/a.png", "folder, which holds no run; name one"),
    "nothing at all to plot": ("plot {}/absent --out {}/a.png", "a path that does not exist: "),
    "nothing in a file": ("plot {}/empty.txt --out {}/a.png", "got none in "),
    "op": ("verify --op gelo", "did you mean gelu?"),
    "op in capitals": ("verify --op MLP", "did you mean mlp?"),
    "another word for a device": ("verify --device gpu", "did you mean cuda?"),
    "verify's model": ("verify --model {}/absent", "which does not exist"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line_and_exit_code_2(name, files, trained, call, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setattr(prepare, "fill", lambda kernels: pytest.fail("compiles before it checks"))
    command, expected = MISTAKES[name]
    before = sorted(files.rglob("*"))
    words = command.replace("RUN", str(trained)).replace("{}", str(files)).split()
    code, out, error = call(*words)
    assert (code, out) == (2, "")
    assert error.startswith("forge: [")
    assert error.count("\n") == 1
    assert expected in error
    assert sorted(files.rglob("*")) == before


def test_an_unreadable_file(files, call):
    if not Path("/proc/self/mem").exists():
        pytest.skip("needs Linux, where this file fails to be read whoever asks")
    code, _, error = call("train", "--data", "/proc/self/mem")
    assert code == 2
    assert "expected readable text, got Input/output error" in error


def test_a_run_from_a_newer_version(trained, tmp_path, call):
    folder = tmp_path / "step-4"
    folder.mkdir()
    for path in (trained / "checkpoints" / "step-4").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    state = folder / "state.json"
    state.write_text(state.read_text().replace('"format": 1', '"format": 7'))
    code, _, error = call("generate", folder)
    assert code == 2
    assert "of format 1 or older, got 7, from a newer version of Forge" in error


def test_debug_shows_where(call):
    code, _, error = call("generate", "absent", "--debug")
    assert code == 2
    assert "Traceback" in error
    assert error.splitlines()[-1].startswith("forge: [checkpoint] expected")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ForgeError("[x] expected a, got b"), 2),
        (CheckpointError("[x] expected a,\n got b"), 2),
        (NonFiniteError("[x] expected finite values"), 3),
        (OSError(errno.ENOSPC, "No space left on device", "/there"), 4),
        (OSError(errno.EFBIG, "[checkpoint] could not write there: too large"), 4),
        (MemoryError("Unable to allocate 1 TiB"), 4),
        (KeyError("a mistake of ours"), 70),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
    ],
)
def test_exit_codes(error, code, monkeypatch, capfd):
    def fails(*args, **keywords):
        raise error

    monkeypatch.setattr(app, "make_app", lambda *words: fails)
    saved = os.dup(1)
    assert main([]) == code
    os.dup2(saved, 1)
    said = capfd.readouterr().err
    assert said.count("\n") == (0 if code == 0 else 1)
    assert "Traceback" not in said


# ---- Training


def test_train_says_what_it_does_in_plain_lines(tmp_path):
    done = forge("train", *SMALL, f"--out={tmp_path / 'run'}", "--compare-ngrams")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for part in (
        "tokens to train on",
        "n_layer 1  n_head 2  n_embd 8",
        "device    reference (as --device reference says)",
        *(f"step {step}/4  loss " for step in (1, 2, 3, 4)),
        "step 2/4  held-out loss",
        "bits per byte (of 1 batches)",
        "a table of byte pairs",
        "the best n-gram table (n = 5)",
        "Sample:",
        f"Written to {tmp_path / 'run'}:",
    ):
        assert part in done.stdout


def test_flags_win_over_the_file_and_the_last_over_the_first(tmp_path, call):
    config = tmp_path / "config.toml"
    config.write_text('n_layer = 1\nn_head = 1\nn_embd = 4\nsteps = 1\ndevice = "reference"\n')
    out = tmp_path / "run"
    code, said, _ = call("train", config, f"--out={out}", "--n-embd=6", "--n-embd", "8")
    assert code == 0
    assert "n_head 1  n_embd 8" in said
    again = tmp_path / "again"
    assert call("train", out / "config.toml", f"--out={again}")[0] == 0
    names = ("checkpoints/step-1/model.safetensors", "config.toml")
    assert all((out / name).read_bytes() == (again / name).read_bytes() for name in names)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_a_configuration(path):
    assert load_toml(path).resolved(256).schedule_steps


def in_terminal(columns, *arguments, **environment):
    """What a terminal of this width gets, and the exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.pop("COLUMNS", None)
        os.environ.pop("NO_COLOR", None)
        os.environ.update(environment, TERM="xterm-256color")
        os.execv(sys.executable, [sys.executable, "-m", "forge", *map(str, arguments)])
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    out = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            break
        if not piece:
            break
        out += piece
    os.close(terminal)
    return out.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_terminal_gets_a_bar_that_fits(tmp_path):
    out, code = in_terminal(80, "train", *SMALL, "--steps=300", f"--out={tmp_path / 'run'}")
    assert code == 0
    assert "\x1b[32m" in out
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out)
    frames = [line for line in re.split(r"[\r\n]+", plain) if line.startswith("train ")]
    assert any(re.search(r"━ 300/300 loss \d\.\d+ +[\d,]+ tok/s +00:00 left$", f) for f in frames)
    assert max(map(len, frames)) <= 80


def test_no_color_is_honoured(tmp_path):
    out, code = in_terminal(80, "train", *SMALL, f"--out={tmp_path / 'run'}", NO_COLOR="1")
    assert code == 0
    assert not re.search(r"\x1b\[[\d;]*3\dm", out)


def test_events_for_tensorboard(trained):
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    (path,) = trained.glob("events.out.tfevents.*")
    data, place, found = path.read_bytes(), 0, []
    while place < len(data):
        head = data[place : place + 8]
        (length,) = struct.unpack("<Q", head)
        assert struct.unpack("<I", data[place + 8 : place + 12])[0] == masked_crc32c(head)
        event = Event.FromString(data[place + 12 : place + 12 + length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        place += 12 + length + 4
    rows = metrics.read(trained / "metrics.jsonl")
    expected = [(row["step"], tag, value) for row in rows for tag, value in row.items()]
    assert [each[:2] for each in found] == [e[:2] for e in expected if e[1] != "step"]
    losses = {step: value for step, tag, value in found if tag == "loss"}
    assert losses == pytest.approx({row["step"]: row["loss"] for row in rows}, rel=1e-6)


def test_training_never_imports_torch(tmp_path):
    code = (
        "import sys; from forge.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "train", *SMALL, f"--out={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


# ---- A disk that fails


def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))


def test_a_full_disk_leaves_the_last_checkpoint_and_exit_code_4(trained, tmp_path):
    """Files may not grow beyond 9 kB: what is left of a full disk, without needing root."""
    run = tmp_path / "run"
    assert forge("train", *SMALL, f"--out={run}").returncode == 0
    before = (run / "checkpoints" / "step-4" / "model.safetensors").read_bytes()
    assert len(before) > 9000
    done = forge("train", "--resume", f"--out={run}", "--steps=9", preexec_fn=limited)
    assert done.returncode == 4
    assert re.fullmatch(
        r"forge: \[checkpoint\] could not write .*step-6: .*; the checkpoints before it stay\n",
        done.stderr,
    )
    last = checkpoint.newest(run / "checkpoints")
    assert last.name == "step-4"
    assert checkpoint.load(last).arrays["model.safetensors"]
    assert (last / "model.safetensors").read_bytes() == before
    assert forge("train", "--resume", f"--out={run}", "--steps=9").returncode == 0


def bound_by_permissions():
    """Take from root, if it is root, the right to write anywhere: it counts from the exec on."""
    PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)


def test_a_folder_that_cannot_be_written(tmp_path):
    run = tmp_path / "run"
    assert forge("train", *SMALL, f"--out={run}").returncode == 0
    (run / "checkpoints").chmod(0o555)
    done = forge("train", "--resume", f"--out={run}", "--steps=9", preexec_fn=bound_by_permissions)
    (run / "checkpoints").chmod(0o755)
    if done.returncode == 0:
        pytest.skip("root may write here whatever the permissions say")
    assert done.returncode == 4
    assert re.fullmatch(r"forge: \[checkpoint\] could not .* Permission denied; .*\n", done.stderr)
    assert checkpoint.load(checkpoint.newest(run / "checkpoints")).step == 4


def test_out_of_memory_while_saving(tmp_path, call, monkeypatch):
    def starved(*args, **keywords):
        raise MemoryError("Unable to allocate 3.2 GiB")

    run = tmp_path / "run"
    assert call("train", *SMALL, f"--out={run}")[0] == 0
    monkeypatch.setattr(checkpoint, "save", starved)
    code, _, error = call("train", "--resume", f"--out={run}", "--steps=9")
    assert (code, error.count("\n")) == (4, 1)
    assert "Unable to allocate 3.2 GiB" in error
    assert checkpoint.load(checkpoint.newest(run / "checkpoints")).step == 4


# ---- Generating


def test_generate_continues_the_prompt(trained, call):
    arguments = ("generate", trained, "--device=reference", "--max-new-tokens=9", "--prompt=The ")
    code, out, error = call(*arguments)
    assert (code, error) == (0, "")
    assert out.startswith("The ")
    assert call(*arguments)[1] == out
    assert call(*arguments, "--seed=1")[1] != out


def test_generate_gives_one_json_document(trained, call):
    arguments = ["generate", trained, "--device=reference", "--max-new-tokens=5", "--json"]
    code, out, _ = call(*arguments, "--prompt=a", "--prompt=bcd", "--n=2")
    assert code == 0
    document = json.loads(out)
    rows = document["completions"]
    assert [row["prompt"] for row in rows] == ["a", "a", "bcd", "bcd"]
    for row in rows:
        assert len(row["tokens"]) == len(row["logprobs"]) == 5
        assert row["finish_reason"] == "length"
        assert row["text"] == bytes(row["tokens"]).decode("utf-8", "replace")
        assert all(value < 0 for value in row["logprobs"])
    assert rows[0]["tokens"] != rows[1]["tokens"]
    alone = json.loads(call(*arguments, "--prompt=bcd")[1])["completions"][0]
    # The reference leaves sums to NumPy, whose order depends on the shape.
    assert alone.pop("logprobs") == pytest.approx(rows[2].pop("logprobs"), abs=1e-6)
    assert alone == rows[2]


def test_generate_ends_before_a_stop_string(trained, call):
    arguments = ["generate", trained, "--device=reference", "--prompt=a", "--json"]
    text = json.loads(call(*arguments, "--max-new-tokens=60")[1])["completions"][0]["text"]
    word = text[7:9]
    stopped = json.loads(call(*arguments, f"--stop={word}")[1])["completions"][0]
    assert stopped["text"] == text[: text.index(word)]
    assert stopped["finish_reason"] == "stop"


def test_generate_says_when_the_context_is_full(trained, call):
    code, _, error = call("generate", trained, "--device=reference", "--max-new-tokens=40")
    assert code == 0
    assert error.count("the context of 16 tokens is full") == 1


def test_generate_reads_standard_input(trained):
    arguments = ("generate", trained, "--device=reference", "--max-new-tokens=3")
    done = forge(*arguments, "--prompt-file=-", input="für")
    assert done.returncode == 0
    assert done.stdout.startswith("für")


def test_an_encoding_without_the_characters_is_no_error(trained):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = forge("generate", trained, "--device=reference", "--prompt=für", env=environment)
    assert done.returncode == 0
    assert done.stdout.startswith("f?r")


@pytest.mark.parametrize("text", ["naïve café – ☃ 𝛼", "plain", ""])
def test_streamed_text_has_whole_characters(text):
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push(byte) for byte in text.encode()] + [stream.flush()]
    assert "".join(pieces) == text == stream.text
    assert "\ufffd" not in "".join(pieces)


def test_control_characters_do_not_reach_a_terminal():
    assert printable("a\x1b[2J\tb\r\n\x7fé\x00") == "a\ufffd[2J\tb\ufffd\n\ufffdé\ufffd"


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (["END"], "one END two", "one "),
        (["END"], "one ENE", "one ENE"),
        (["END"], "one EN", "one EN"),
        (["aab"], "aaab", "a"),
        (["xy", "y"], "axy", "a"),
        (["☃"], "snow ☃ man", "snow "),
        ([""], "all", "all"),
    ],
)
def test_stop_strings(stop, text, shown):
    stream = TextStream(ByteTokenizer(), stop)
    out = ""
    for byte in text.encode():
        out += stream.push(byte)
        assert text.startswith(out)
    out += stream.flush()
    assert (out, stream.text, stream.stopped) == (shown, shown, shown != text)


# ---- The rest


def test_eval_scores_the_held_out_text(trained, call):
    code, out, _ = call("eval", trained, "--device=reference", "--json")
    assert code == 0
    row = json.loads(out)
    assert row["data"].startswith("held out of the language reference")
    assert row["bytes"] == row["tokens"]
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / 0.6931471805599453)
    code, out, _ = call("eval", trained, "--device=reference")
    assert f"{row['loss']:.4f} nats per token" in out


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_draws_runs(trained, call, tmp_path, suffix):
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib: run `make dev`")
    picture = tmp_path / f"loss.{suffix}"
    code, _, _ = call("plot", trained, trained / "metrics.jsonl", f"--out={picture}")
    assert code == 0
    data = picture.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
    else:
        assert xml.dom.minidom.parseString(data).documentElement.tagName == "svg"
        assert b"loss (nats per token)" in data


def test_plot_without_matplotlib(trained, call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, error = call("plot", trained, f"--out={tmp_path / 'a.png'}")
    assert code == 2
    assert "got none; in a clone of Forge, pip install -e '.[plot]' installs" in error


def test_kernels_prints_op_device_dtype_and_implementation(call):
    code, out, _ = call("kernels")
    assert code == 0
    gelu = next(line for line in out.splitlines() if line.startswith("gelu "))
    assert {"cpu", "reference"} <= set(gelu.split())
    rows = json.loads(call("kernels", "--json")[1])
    assert set(rows[0]) == {"kernel", "device", "dtype", "implementation"}


def test_verify_prints_a_line_per_op_and_dtype(call):
    code, out, _ = call("verify", "--op=exp", "--device=reference")
    assert code == 0
    assert re.search(r"^exp +float32 +\d+ +\d.\de-\d+ +\d.\de-\d+ +ok$", out, re.MULTILINE)
    assert re.search(r"^\d+ cases, 0 failed", out, re.MULTILINE)
    assert out.count("\nexp ") == 3
    assert "  x[" in call("verify", "--op=exp", "--device=reference", "--verbose")[1]
    rows = json.loads(call("verify", "--op=exp", "--device=reference", "--json")[1])
    assert all(row["op"] == "exp" and row["ok"] for row in rows)


def test_verify_fails_with_exit_code_1(call, monkeypatch):
    result = next(verify.run("reference", ops=["exp"]))
    bad = type(result)(**{**vars(result), "failures": ("dx is wrong by 1.0e-03",)})
    monkeypatch.setattr(verify, "run", lambda *args, **keywords: iter([result, bad]))
    code, out, _ = call("verify", "--op=exp")
    assert code == 1
    assert re.search(r"^exp .* 1 FAILED\n  .*: dx is wrong by 1.0e-03$", out, re.MULTILINE)
    assert call("verify", "--json")[0] == 1
