"""Memory that runs out, a GPU that is lost: what is said, and that the last checkpoint stays."""

import types

import pytest

from forge import checkpoint
from forge.backends.cuda import device as gpu
from forge.backends.cuda.memory import CudaMemory
from forge.cli import main
from forge.errors import DeviceLostError, OutOfMemoryError
from forge.pool import HostMemory, Pool
from forge.tensor import Device


class Code(int):
    """An error as CUDA's bindings give it."""

    def __new__(cls, value, name):
        code = super().__new__(cls, value)
        code.name = name
        return code


OK, FULL = Code(0, "cudaSuccess"), Code(2, "cudaErrorMemoryAllocation")
LOST = Code(719, "cudaErrorLaunchFailure")


class Runtime(types.SimpleNamespace):
    """A CUDA runtime with a card of so many bytes."""

    def __init__(self, room):
        super().__init__(
            room=room,
            given={},
            forgotten=0,
            cudaMalloc=self.allocate,
            cudaFree=self.release,
            cudaMemGetInfo=lambda: (OK, self.room, 80 << 30),
            cudaGetLastError=self.forget,
        )

    def allocate(self, size):
        if size > self.room:
            return FULL, 0
        self.room -= size
        address = 256 * (1 + len(self.given))
        self.given[address] = size
        return OK, address

    def release(self, address):
        self.room += self.given[address]
        return (OK,)

    def forget(self):
        self.forgotten += 1
        return (OK,)


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime(3 << 30)
    monkeypatch.setattr(gpu, "runtime", lambda: made)
    monkeypatch.setattr(gpu, "stream", lambda: 0)
    monkeypatch.setattr(gpu, "card", lambda: None)
    return made


def test_what_was_asked_what_is_free_and_what_to_lower(runtime):
    pool = Pool(CudaMemory())
    kept, unused = pool.take(1 << 30), pool.take(1 << 30)
    pool.give(1 << 30, unused)
    # What is unused makes room before anything fails.
    more = pool.take(2 << 30)
    with pytest.raises(OutOfMemoryError) as caught:
        pool.take(5 << 30)
    assert str(caught.value) == (
        "[cuda] expected 5,120 MiB of GPU memory, got 0 MiB free of 81,920; "
        "lower --micro-batch or --block-size, or --n of forge generate"
    )
    # CUDA keeps the error for a later call to find, unless it is asked for it.
    assert runtime.forgotten >= 1
    pool.close()
    pool.give(1 << 30, kept)
    pool.give(2 << 30, more)
    assert runtime.room == 3 << 30


def test_every_call_that_lacks_memory_says_so(runtime):
    message = r"expected GPU memory for a graph, got 3,072 MiB free of 81,920; lower --micro-batch"
    with pytest.raises(OutOfMemoryError, match=message):
        gpu.check("a graph", (FULL, None))
    with pytest.raises(DeviceLostError, match=r"got cudaErrorLaunchFailure; .* last checkpoint"):
        gpu.check("a kernel", (LOST,))
    # A card so full that it cannot be asked.
    runtime.cudaMemGetInfo = lambda: (FULL, None, None)
    with pytest.raises(OutOfMemoryError, match="expected GPU memory for a stream, got none; lower"):
        gpu.check("a stream", (FULL, None))


SETTINGS = {
    "n-layer": 1,
    "n-head": 2,
    "n-embd": 16,
    "block-size": 16,
    "batch-size": 4,
    "dropout": 0.1,
    "steps": 20,
    "eval-every": 0,
    "eval-batches": 1,
    "checkpoint-every": 5,
    "device": "reference",
}


def train(folder, *more):
    return main(["train", *(f"--{k}={v}" for k, v in SETTINGS.items()), f"--out={folder}", *more])


def files(folder, step):
    saved = folder / "checkpoints" / f"step-{step}"
    return [(saved / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OutOfMemoryError("[cuda] expected 5 MiB of GPU memory, got 4; lower --micro-batch"), None),
        (DeviceLostError("[cuda] expected a kernel to succeed, got a loss; start again"), None),
        (MemoryError(), "[memory] expected enough of it, got too little; "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_run_out_of_memory_leaves_its_last_checkpoint(tmp_path, capsys, monkeypatch, error, line):
    calm, folder = tmp_path / "calm", tmp_path / "run"
    assert train(calm) == 0
    capsys.readouterr()
    allocate, save = HostMemory.allocate, checkpoint.save
    scarce = []

    def maybe(self, size):
        if scarce:
            raise error
        return allocate(self, size)

    def saved(path, step, *args, **keywords):
        done = save(path, step, *args, **keywords)
        if step == 10:
            scarce.append(step)
            Device("reference").pool.trim()
        return done

    monkeypatch.setattr(HostMemory, "allocate", maybe)
    monkeypatch.setattr(checkpoint, "save", saved)
    assert train(folder) == 4
    said = capsys.readouterr().err
    assert said.strip() == f"forge: {line or str(error)}".strip()
    monkeypatch.undo()
    newest = checkpoint.newest(folder / "checkpoints")
    assert newest.name == "step-10"
    assert checkpoint.load(newest).step == 10
    assert files(folder, 10) != files(calm, 15)
    assert train(folder, "--resume") == 0
    assert files(folder, 20) == files(calm, 20)
