"""How fast this machine trains and decodes: what `forge bench` measures."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from forge.errors import ArgumentError
from forge.run import choices, speed
from forge.run.ceilings import Ceilings
from forge.run.profile import Profile, profile
from forge.run.workload import MODELS, Decoding, Training, used_memory, wait
from forge.tensor import Device

# Samples of a training step, by model: those that the figures in the README are of.
BATCH = {"baby": 12, "124M": 1}
# Weights of fewer bytes may stay in a cache, and then the memory's bandwidth is no limit.
CACHED = 256 << 20
# What `choices.prepare` calls them.
_KINDS = {"train": "train", "decode": "generate"}
# Parts of a measurement, of which the median counts.
_WINDOWS = 7


class Speed(NamedTuple):
    """A measured work: tokens in a second, seconds of a step, and where they go.

    `first` are the seconds of the first step; `memory` is the most that the device's buffers took,
    in bytes. `operations` and `read` are what a token costs: multiply-adds' operations in training,
    bytes of weights in decoding, where these fit no cache.
    """

    tokens_per_s: float
    seconds: float
    first: float
    memory: int
    profile: Profile
    operations: float = 0.0
    read: int = 0

    def share(self, limits: Ceilings) -> float | None:
        """The part of the machine's ceiling that this is; None where none of them is its limit."""
        if self.operations:
            return self.operations * self.tokens_per_s / limits.flops
        if self.read:
            return self.read * self.tokens_per_s / (limits.read or limits.copy)
        return None


def prepare(device: Device, works: Collection[str], precision: str) -> None:
    """Compile the kernels of train, decode or both now.

    Raises `ArgumentError` for a device that is not for speed, and for training in int8.
    """
    if precision == "int8" and "train" in works:
        raise ArgumentError(
            "[bench] expected --precision fp32 or bf16 to train in, got int8; "
            "forge bench decode --precision int8"
        )
    if device.kind == "reference":
        raise ArgumentError(
            "[bench] expected a device to be fast on, got reference, whose kernels are "
            "definitions; try --device cpu"
        )
    choices.prepare(device, *(_KINDS[work] for work in works), precision=precision)


def train(model: str, device: Device, precision: str, seconds: float) -> Speed:
    """Train a model of `MODELS` for about so many seconds. Raises `ArgumentError`."""
    config = MODELS[model]
    before = _in_use(device)
    run = Training(config, BATCH[model], config.block_size, device, precision)
    found = _measured(run, BATCH[model] * config.block_size, seconds, before)
    return found._replace(operations=speed.flops_per_token(run.model, run.params))


def decode(model: str, device: Device, precision: str, seconds: float) -> Speed:
    """Decode one sample with a model of `MODELS`. Raises `ArgumentError`."""
    before = _in_use(device)
    run = Decoding(MODELS[model], 1, device, precision)
    found = _measured(run, 1, seconds, before)
    return found._replace(read=run.weights if run.weights >= CACHED else 0)


def _measured(run: Training | Decoding, tokens: int, seconds: float, before: int) -> Speed:
    device = run.device
    start = time.perf_counter()
    run.step()
    wait(device)
    first = time.perf_counter() - start
    # The second step is captured; the rest of the warm-up is for clocks and caches.
    each = _repeat(run.step, device, 0.3 * seconds)
    count = max(1, round(0.7 * seconds / _WINDOWS / each))
    windows = max(3, min(_WINDOWS, round(seconds / each)))
    step = statistics.median(_window(run.step, device, count) for _ in range(windows))
    memory = _peak(device) - before
    # A step that is not captured takes its buffers from the device's pool, which has none yet.
    repeat = run.repeating()
    repeat()
    steps = max(2, min(100, round(0.3 * seconds / step)))
    found = profile(repeat, device, steps=steps)
    return Speed(tokens / step, step, first, memory, found)


def _repeat(step: Callable[[], Any], device: Device, seconds: float) -> float:
    """Seconds a step, of as many as fit, and at least two."""
    start, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - start < seconds:
        step()
        wait(device)
        count += 1
    return (time.perf_counter() - start) / count


def _window(step: Callable[[], Any], device: Device, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return (time.perf_counter() - start) / count


def _in_use(device: Device) -> int:
    """Bytes in use: on a GPU by all programs; on a CPU by buffers, whose peak begins anew."""
    # What nothing refers to any more would be freed meanwhile, and be missing from the peak.
    gc.collect()
    if device.kind == "cuda":
        return used_memory(device)
    device.pool.reset_peak()
    return device.pool.in_use


def _peak(device: Device) -> int:
    """The most bytes that were in use since: a GPU's are kept, once taken."""
    return used_memory(device) if device.kind == "cuda" else device.pool.peak
