"""Training on the GPU against itself, against the CPU, and through the command line.

Each test is written once for all devices and runs small on the host, so that on a card nothing is
new but the card; there the sizes are those that matter.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from forge import Tape, tensor
from forge.cli import main
from forge.data.loader import Loader
from forge.graph import Captured
from forge.models import GPT2, GPT2Config
from forge.models.gpt2 import Rng
from forge.optim.adamw import AdamW
from forge.tensor import Device
from forge.training import step_state, to_device, train_step


def on_a_gpu(*values):
    return pytest.param(*values, marks=pytest.mark.cuda)


TINY = GPT2Config(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=48)
SMALL = GPT2Config(
    vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=48, resid_pdrop=0.1, attn_pdrop=0.1
)
GPT2_124M = GPT2Config()
WIDE = GPT2Config(vocab_size=512, n_layer=4, resid_pdrop=0.1, attn_pdrop=0.1)


def gradients(device, precision, config, batch, recompute=(), times=1):
    """Loss, gradients by name, and the peak of memory, of one step's forward and backward."""
    place, model = Device(device), GPT2(config)
    params = model.zeros(place, precision)
    params.load_(model.init(3))
    grads = params.zeros_like()
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (batch, config.block_size + 1))
    inputs, targets = (tensor(x, device=place) for x in (ids[:, :-1], ids[:, 1:]))
    key = step_state(7, 2, 1e-3, place).key
    gc.disable()  # What others left in cycles would be freed meanwhile.
    for _ in range(times):
        # The first time other memory is needed as well: algorithms are chosen.
        grads.zero_()
        place.pool.reset_peak()
        before = place.pool.in_use
        tape = Tape(recompute=set(recompute))
        loss = model.loss(params.leaves(tape, into=grads), inputs, targets, rng=Rng(key))
        tape.backward(loss)
    peak = place.pool.peak - before
    gc.enable()
    return loss.value.item(), grads.numpy(), peak


@pytest.mark.parametrize(
    ("device", "config", "batch", "bound"),
    [("reference", TINY, 2, 2e-2), on_a_gpu("cuda", GPT2_124M, 4, 3e-2)],
)
def test_a_bfloat16_step_agrees_with_a_float32_one(device, config, batch, bound):
    """On the card: GPT-2 124M at T = 1024, with the algorithms that timing chose."""
    exact, wanted, _ = gradients(device, "fp32", config, batch)
    loss, found, _ = gradients(device, "bf16", config, batch)
    errors = {
        name: np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
        for name, gradient in wanted.items()
    }
    worst = max(errors, key=errors.get)
    print(f"loss {exact:.5f} and {loss:.5f}; worst gradient {worst}: {errors[worst]:.2e}")
    print(f"median of {len(errors)} gradients: {np.median(list(errors.values())):.2e}")
    assert loss == pytest.approx(exact, rel=2e-3)
    assert errors[worst] < bound, worst


@pytest.mark.parametrize(
    ("device", "precision", "config", "batch"),
    [
        ("reference", "bf16", SMALL, 2),
        ("cpu", "fp32", SMALL, 2),
        ("cpu", "bf16", SMALL, 2),
        on_a_gpu("cuda", "bf16", WIDE, 4),
        on_a_gpu("cuda", "fp32", WIDE, 2),
    ],
)
def test_recomputation_has_the_same_bits_in_less_memory(device, precision, config, batch):
    kept = gradients(device, precision, config, batch, times=2)
    dropped = {"add_layernorm.y", "linear.out", "mlp.hidden", "dropout.out"}
    remade = gradients(device, precision, config, batch, dropped, times=2)
    assert remade[0] == kept[0]
    for name, gradient in kept[1].items():
        assert (remade[1][name] == gradient).all(), name
    print(f"peak {remade[2] / 2**20:.1f} MiB of {kept[2] / 2**20:.1f}")
    assert remade[2] < 0.9 * kept[2]


# ---- 200 steps on one text: the source of these tests

T, B = 64, 12
BABY = GPT2Config(vocab_size=256, block_size=T, n_layer=4, n_head=4, n_embd=128)
LR = 5e-4


def text():
    """Some hundred thousand bytes that every checkout carries along."""
    parts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("test_[a-t]*.py"))]
    return np.frombuffer(b"".join(parts), np.uint8)


def losses(device, precision, steps, config=BABY):
    place, model = Device(device), GPT2(config)
    params = model.zeros(place, precision)
    params.load_(model.init(1))
    grads, optimizer = params.zeros_like(), AdamW(params)
    loader = Loader(text(), config.block_size, B, 1)
    step = Captured(train_step, place, ("batch", "state"))
    found = []
    for number in range(steps):
        batch = to_device(loader.batch(first_sample=B * number), place)
        rate = LR * min(1.0, (1 + number) / 20)
        state = step_state(1, number, rate, place)
        result = step(model, params, grads, optimizer, batch, state)
        found.append(float(result.loss))
    return np.array(found)


def agree(found, exact, *, first, last):
    """Each of the first 50 losses, and the mean of the last 20, by how much they differ."""
    early = np.abs(found / exact - 1)[:50].max()
    late = abs(found[-20:].mean() / exact[-20:].mean() - 1)
    print(f"first 50: {early:.1e}; last 20: {late:.1e}; loss {exact[0]:.3f} to {exact[-1]:.3f}")
    assert early < first
    assert late < last


@pytest.mark.parametrize(
    ("devices", "steps", "config"),
    [
        (("cpu", "reference", "reference"), 60, TINY),
        on_a_gpu(("cpu", "cuda", "cuda"), 200, BABY),
    ],
)
def test_training_on_one_text_agrees_with_the_cpu(devices, steps, config):
    exact = losses(devices[0], "fp32", steps, config)
    assert exact[-1] < 0.8 * exact[0]
    agree(losses(devices[1], "fp32", steps, config), exact, first=1e-3, last=1e-2)
    agree(losses(devices[2], "bf16", steps, config), exact, first=2e-2, last=1e-2)


# ---- The command line

SETTINGS = {
    "n-layer": 1,
    "n-head": 2,
    "n-embd": 16,
    "block-size": 16,
    "batch-size": 4,
    "dropout": 0.1,
    "micro-batch": 2,
    "steps": 150,
    "log-every": 1,
    "eval-every": 60,
    "eval-batches": 1,
    "checkpoint-every": 20,
}
# Products of a size that is worth timing.
LARGER = {"n-layer": 2, "n-head": 4, "n-embd": 256, "block-size": 128, "batch-size": 16}
ON = {
    "reference": {**SETTINGS, "device": "reference"},
    "cuda": {**SETTINGS, **LARGER, "micro-batch": 4, "precision": "bf16", "device": "cuda"},
}


class Commands:
    """Training in processes of its own, with a table of algorithms of its own."""

    def __init__(self, device, home):
        self.device = device
        self.settings = [f"--{key}={value}" for key, value in ON[device].items()]
        self.home = home
        real = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forge"
        (home / "forge").mkdir()
        # Compiled kernels are as they were.
        for each in real.glob("*") if real.exists() else ():
            if not each.name.startswith("products-"):
                (home / "forge" / each.name).symlink_to(each)
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(home)}

    def start(self, folder, *more):
        command = [sys.executable, "-m", "forge", "train", *self.settings, f"--out={folder}", *more]
        out = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdout=out, stderr=out, text=True)

    def run(self, folder, *more):
        with self.start(folder, *more) as process:
            out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
        return out

    def forget_algorithms(self):
        """Delete the machine's table; whether there was one."""
        found = list((self.home / "forge").glob("products-*.json"))
        for path in found:
            path.unlink()
        return bool(found)


@pytest.fixture(scope="module", params=["reference", on_a_gpu("cuda")])
def commands(request, tmp_path_factory):
    return Commands(request.param, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def straight(commands, tmp_path_factory):
    """The run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    commands.run(folder)
    return folder


def result(folder):
    """The bytes of both files of the last checkpoint, and the logged numbers but for the rate."""
    saved = folder / "checkpoints" / f"step-{SETTINGS['steps']}"
    arrays = [(saved / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return arrays, [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows]


def test_two_runs_have_the_same_bits(commands, straight, tmp_path):
    commands.run(tmp_path / "run")
    assert result(tmp_path / "run") == result(straight)


def test_killed_and_resumed_a_run_ends_with_the_same_bits(commands, straight, tmp_path):
    folder = tmp_path / "run"
    log = folder / "metrics.jsonl"
    with commands.start(folder) as process:
        end = time.monotonic() + 200
        while not log.exists() or log.read_bytes().count(b"\n") < 70:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.001)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    # The run has its algorithms with it.
    assert commands.forget_algorithms() == (commands.device == "cuda")
    out = commands.run(folder, "--resume")
    assert "from step" in out
    assert ("algorithms, table" in out) == (commands.device == "cuda")
    assert result(folder) == result(straight)


@pytest.mark.parametrize("device", ["cpu", on_a_gpu("cuda")])
def test_a_greedy_continuation_is_the_same_on_every_device(device, tmp_path, capsys):
    folder = tmp_path / "run"
    more = {"n-embd": 64, "block-size": 64, "steps": 40, "dropout": 0.0, "device": "reference"}
    settings = {**SETTINGS, "checkpoint-every": 0, **more}
    assert main(["train", *(f"--{k}={v}" for k, v in settings.items()), f"--out={folder}"]) == 0
    capsys.readouterr()
    found = []
    for place in ("reference", device):
        asked = ["--prompt=The ", "--prompt=for x in", "--max-new-tokens=100", "--json"]
        code = main(["generate", str(folder), f"--device={place}", "--temperature=0", *asked])
        assert code == 0
        completions = json.loads(capsys.readouterr().out)["completions"]
        found.append([each["tokens"] for each in completions])
    assert found[0] == found[1]
    assert len(found[0][0]) == 100
