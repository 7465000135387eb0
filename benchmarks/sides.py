"""What the sides of a benchmark share: the models, the clock, and how results travel.

A side is one program on one peer: a process that prints its result as the last line, in JSON.
"""

import json
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
WINDOWS = 7


def decoded(room):
    """First and last position that decoding goes through, again and again, in a cache."""
    return room // 10, room * 7 // 8


class Side(NamedTuple):
    """What to measure: `work` is train, decode or one that the side itself names."""

    work: str
    device: str
    model: str
    precision: str
    B: int
    T: int

    @classmethod
    def of(cls, words):
        return cls(*words[:4], *map(int, words[4:6]))


def windows(step, wait, device):
    """Seconds a step: the median of several windows of steps in a row, after the warm-up."""
    start = time.perf_counter()
    count = 0
    while count < 2 or time.perf_counter() - start < WARM_UP[device]:
        step()
        wait()
        count += 1
    each = (time.perf_counter() - start) / count
    steps = max(1, round(MEASURED[device] / WINDOWS / each))
    times = []
    for _ in range(WINDOWS):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times)


def report(**result):
    """Print a side's result."""
    print(json.dumps(result), flush=True)


def run(script, side, *options, limit=300):
    """The result of a side in a process of its own; None, with the reason shown, if it fails."""
    words = [sys.executable, str(Path(__file__).parent / script), *map(str, side), *options]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        print(f"{script} {' '.join(map(str, side))}: over {limit} s", file=sys.stderr)
        return None
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-3:])
        print(f"{script} {' '.join(map(str, side))} {options}: {tail}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])
