"""Forge's side of the benchmarks: one measurement in a process of its own.

python benchmarks/forge_side.py WORK DEVICE MODEL PRECISION B T THREADS

WORK: train, train-recompute (half of the activations is dropped and made again), floor
(`roofline.py`), profile and profile-decode (the time of each kernel: of replays on a CPU, and
eagerly on a GPU), decode, first (a step, and the end). Steps and tokens are captured and replayed.
"""

import gc
import sys
import time

from sides import Side, largest, refuse, report, windows

from forge import Tape, training
from forge.errors import ForgeError, OutOfMemoryError
from forge.models import GPT2Config
from forge.run import choices, profile
from forge.run.workload import Decoding, Training, used_memory, wait
from forge.tensor import Device

RECOMPUTE = {"add_layernorm.y", "linear.out", "mlp.hidden"}


def recomputing(model, params, grads, optimizer, batch, state):
    """forge.training.train_step on a tape that recomputes."""
    training.Tape = lambda: Tape(recompute=RECOMPUTE)
    try:
        return training.train_step(model, params, grads, optimizer, batch, state)
    finally:
        training.Tape = Tape


def started(side, train_step=training.train_step):
    """A training that has done its first step, and its batch."""
    device = Device(side.device)
    choices.prepare(device, "train", precision=side.precision)
    config = GPT2Config(**side.sizes)
    how = (side.length, device, side.precision, train_step)
    if side.batch:
        training_ = Training(config, side.batch, *how)
        return training_, side.batch
    if device.kind != "cuda":
        refuse("the largest batch is sought on a GPU alone: name one with --batch")
    training_ = Training(config, 1, *how)

    def fits(batch):
        training_.feed(batch, side.length)
        try:
            for _ in range(3):
                training_.step()
            wait(device)
            return True
        except OutOfMemoryError:
            pass
        # Only now does no traceback hold the Tensors of a step that failed.
        training_.eager()
        gc.collect()
        device.pool.trim()
        return False

    return training_, largest(fits)


def train(side, train_step=training.train_step):
    """Seconds a step, sustained; the losses show that it trains."""
    device = Device(side.device)
    used = used_memory(device)
    start = time.perf_counter()
    run, batch = started(side, train_step)
    first = run.step().loss.item()
    warm = time.perf_counter() - start
    run.step()
    measured = windows(run.step, lambda: wait(device), side.device)
    used = used_memory(device) - used
    last = run.step().loss.item()
    report(**measured, batch=batch, memory=used, first_step=warm, losses=[first, last])


def first(side):
    """One step: what a start costs."""
    run, _ = started(side)
    report(loss=run.step().loss.item())


def floor(side):
    """Seconds for nothing but a step's products and its attention."""
    import roofline

    run, batch = started(side)
    run.step()
    play, counts = roofline.bare(run)
    play()
    play()
    measured = windows(play, lambda: wait(run.device), side.device)
    report(**measured, batch=batch, **counts)


def profiled(side):
    """The time of each kernel in a training step, at sustained clocks."""
    run, batch = started(side)
    profile_of(run, batch, side)


def profiled_decoding(side):
    """The time of each kernel in decoding a token; on a GPU with the time to launch it."""
    config = GPT2Config(**side.sizes)
    choices.prepare(Device(side.device), "generate", precision=side.precision)
    run = Decoding(config, side.batch, Device(side.device), side.precision)
    profile_of(run, side.batch, side)


def profile_of(run, batch, side):
    run.step()
    measured = windows(run.step, lambda: wait(run.device), side.device)
    repeat = run.repeating()
    repeat()
    steps = 3 if side.device == "cuda" else max(2, min(200, round(3.0 / measured["seconds"])))
    found = profile.profile(repeat, run.device, steps=steps)
    rows = [(row.seconds, row.calls, str(row)) for row in found.rows]
    report(kernels=rows, seconds=found.seconds, outside=found.outside, batch=batch)


def decode(side):
    """Seconds for a token of every sample, greedy, each fed back on the device."""
    device = Device(side.device)
    used = used_memory(device)
    start = time.perf_counter()
    choices.prepare(device, "generate", precision=side.precision)
    run = Decoding(GPT2Config(**side.sizes), side.batch, device, side.precision)
    for _ in range(3):
        run.step()
    wait(device)
    warm = time.perf_counter() - start
    measured = windows(run.step, lambda: wait(device), side.device)
    used = used_memory(device) - used
    report(**measured, batch=side.batch, memory=used, first_step=warm, weights=run.weights)


WORK = {
    "train": train,
    "train-recompute": lambda side: train(side, recomputing),
    "first": first,
    "floor": floor,
    "profile": profiled,
    "decode": decode,
    "profile-decode": profiled_decoding,
}


def main():
    side = Side.of(sys.argv[1:])
    try:
        if side.threads:
            choices.use_threads(Device(side.device), side.threads)
        WORK[side.work](side)
    except ForgeError as error:
        refuse(str(error))


if __name__ == "__main__":
    main()
