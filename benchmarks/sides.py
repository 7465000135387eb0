"""What the sides of a benchmark share: the models, the clock, memory, and how results travel.

A side is one program on one peer: a process that prints its result as the last line, in JSON.
Drivers start sides in turn, all on the same number of CPU threads, without OPENBLAS_CORETYPE and
OPENBLAS_L2_SIZE, which would cap OpenBLAS and nobody else. Nothing here imports a peer, or Forge.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

MODELS = {
    "baby": {"vocab_size": 256, "block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128},
    "124M": {"vocab_size": 50257, "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768},
    "1.5B": {"vocab_size": 50257, "block_size": 1024, "n_layer": 48, "n_head": 25, "n_embd": 1600},
}
# A GPU is limited by its power: cool, it runs 5 % faster than it can for long.
WARM_UP = {"cuda": 5.0, "cpu": 3.0}
MEASURED = {"cuda": 5.0, "cpu": 8.0}
# Most and least windows of a measurement; few where a step takes seconds.
MOST, LEAST = 7, 3
# Batch sizes that a side tries where it is to find the largest that fits.
BATCHES = (64, 56, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 2, 1)
# Exit code of a side that cannot do what it was asked; its last line on stderr says why.
REFUSED = 3


class Side(NamedTuple):
    """What to measure: `work` is train, decode or one that the side itself names.

    `batch` 0 is the largest that fits; `threads` are CPU threads, 0 as many as the libraries like.
    """

    work: str
    device: str
    model: str
    precision: str
    batch: int
    length: int
    threads: int

    @classmethod
    def of(cls, words):
        return cls(*words[:4], *map(int, words[4:7]))

    @property
    def sizes(self):
        """The model's sizes; its context is as long as the sequences."""
        sizes = MODELS[self.model]
        return {**sizes, "block_size": max(self.length, sizes["block_size"])}

    @property
    def weights(self):
        """Weights of matrices: what a token's products are made of, six operations each."""
        sizes = MODELS[self.model]
        return sizes["n_layer"] * 12 * sizes["n_embd"] ** 2 + sizes["vocab_size"] * sizes["n_embd"]

    @property
    def channels(self):
        """Output channels of these matrices: in int8 each has a scale."""
        sizes = MODELS[self.model]
        return sizes["n_layer"] * 9 * sizes["n_embd"] + sizes["vocab_size"]

    @property
    def parameters(self):
        """All parameters, about."""
        return self.weights + self.sizes["block_size"] * self.sizes["n_embd"]


def decoded(room):
    """First and last position that decoding goes through, again and again, in a cache."""
    return room // 10, room * 7 // 8


def windows(step, wait, device):
    """Seconds a step: the median of several windows of steps in a row, after the warm-up.

    Beside it the CPU seconds of a step, by which sides of one thread compare on a busy machine, and
    the cores at work, which show a side that took more threads than its own.
    """
    start = time.perf_counter()
    count = 0
    while count < 2 or time.perf_counter() - start < WARM_UP[device]:
        step()
        wait()
        count += 1
    each = (time.perf_counter() - start) / count
    number = min(MOST, max(LEAST, round(MEASURED[device] / each)))
    steps = max(1, round(MEASURED[device] / number / each))
    times = []
    busy, begin = time.process_time(), time.perf_counter()
    for _ in range(number):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append((time.perf_counter() - start) / steps)
    busy, passed = time.process_time() - busy, time.perf_counter() - begin
    cpu = busy / (number * steps)
    return {"seconds": statistics.median(times), "cpu": cpu, "cores": round(busy / passed, 2)}


def largest(fits):
    """The first of `BATCHES` for which `fits(batch)`; exits where there is none."""
    for batch in BATCHES:
        if fits(batch):
            return batch
    return refuse("no batch fits")


def predicted(side, peak, room, each):
    """Where in `BATCHES` to begin: the largest that `room` bytes should hold.

    `peak(layers)` is the peak of a training step on a smaller model with a batch of 4: linear in
    the layers and, less `each` bytes a parameter, in the batch. A peer that takes a minute to
    compile for a batch size cannot try them all.
    """
    two, four = peak(2), peak(4)
    whole = two + (four - two) / 2 * (MODELS[side.model]["n_layer"] - 2)
    still = each * side.parameters
    activations = max(whole - still, 1) / 4
    return next((b for b in BATCHES if still + activations * b <= room), BATCHES[-1])


def peak_rss():
    """The most host memory that this process ever held, in bytes."""
    # Not getrusage first, whose figure begins with that of the process which started this one.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(**result):
    """Print a side's result."""
    print(json.dumps({**result, "rss": peak_rss()}), flush=True)


def refuse(reason):
    """End a side that cannot do what it was asked, with the reason."""
    print(reason, file=sys.stderr)
    sys.exit(REFUSED)


def environment(side):
    """A side's environment: the same threads for all, and no cap on OpenBLAS."""
    kept = {k: v for k, v in os.environ.items() if k not in CAPS}
    if side.threads:
        kept |= dict.fromkeys(THREADS, str(side.threads))
    return kept


CAPS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
# Who reads which: Numba; OpenMP, so PyTorch; MKL; NumPy's OpenBLAS; and the last two XLA.
THREADS = (
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NPROC",
    "PJRT_NPROC",
)


def run(script, side, *options, limit=300, python=sys.executable, extra=None):
    """The result of a side in a process of its own; None, with the reason shown, if it fails."""
    words = [python, str(Path(__file__).parent / script), *map(str, side), *options]
    named = " ".join([script, *map(str, side), *options])
    env = environment(side) | (extra or {})
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        print(f"{named}: skipped, over {limit} s", file=sys.stderr, flush=True)
        return None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        tail = "\n".join(lines[-1:] if done.returncode == REFUSED else lines[-6:])
        print(f"{named}: skipped, exit {done.returncode}: {tail}", file=sys.stderr, flush=True)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def default_threads(device):
    """Two on a CPU, as in the figures that are quoted; on a GPU the host's do not matter."""
    return 2 if device == "cpu" else 0
