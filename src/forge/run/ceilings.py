"""What this machine can do at most: multiply-adds in a second, and bytes to and from its memory.

On a CPU these are loops that do nothing else, on the threads that kernels run on. The rate is that
of fused multiply-adds on float32 in registers, so products can come near it and nothing passes it,
by the seconds that the threads computed: a busy machine would else be taken for a slow one. In
bfloat16, and on a GPU, it is that of one large product; a GPU's bytes are those of a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from forge.backends import registry
from forge.run import speed
from forge.tensor import Device, tensor

# Elements of the arrays that are read and copied: 256 MiB, which no cache holds.
_ELEMENTS = 1 << 26
# Rounds of each loop, of which the fastest counts: on a shared machine it was disturbed least.
_ROUNDS = 7
_TURNS = 1_000_000
# Pieces for each thread, so that one that was held up does not keep the others waiting.
_PIECES = 4
# What operations are of.
LOOP, PRODUCT = "multiply-adds", "one large product"


class Ceilings(NamedTuple):
    """Operations in a second, two for each multiply-add; bytes in a second read, and copied.

    A copied byte counts twice, as it is read and written. `read` is None on a GPU. `of` says what
    the operations are of.
    """

    flops: float
    read: float | None
    copy: float
    of: str


def measure(device: Device, precision: str = "fp32") -> Ceilings:
    """Measure them on a device; takes about two seconds."""
    if device.kind == "cuda":
        return Ceilings(speed.peak_flops(device, precision), None, _cuda_copy(device), PRODUCT)
    from forge.backends.cpu import threads
    from forge.run import ceiling_loops as loops

    pieces = _PIECES * threads.get_threads()
    source = np.ones(_ELEMENTS, np.float32)
    target = np.zeros(_ELEMENTS, np.float32)
    sums = np.zeros(pieces, np.float32)
    operations = float(loops.FLOPS) * _TURNS * pieces
    seconds = _fastest(lambda: loops.multiply_add(sums, _TURNS, 0.5), time.process_time)
    flops, of = operations * threads.get_threads() / seconds, LOOP
    if precision == "bf16" and registry.implementation("matmul", "cpu", "bfloat16") == "cpu":
        flops, of = speed.peak_flops(device, precision), PRODUCT
    read = source.nbytes / _fastest(lambda: loops.read(source, sums))
    copy = 2 * source.nbytes / _fastest(lambda: loops.copy(source, target, pieces))
    return Ceilings(flops, read, copy, of)


def _fastest(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of some rounds, the first of which compiles."""
    seconds = []
    for _ in range(1 + _ROUNDS):
        start = clock()
        run()
        seconds.append(clock() - start)
    return min(seconds[1:])


def _cuda_copy(device: Device) -> float:
    from forge.backends.cuda.device import Event

    source = tensor(np.ones(4 * _ELEMENTS, np.float32), device=device)
    target = tensor(source, device=device)
    seconds = []
    for _ in range(1 + _ROUNDS):
        start = Event(timing=True).record()
        device.memory.copy(source, target)
        seconds.append(Event(timing=True).record().since(start) / 1e3)
    return 2 * source.nbytes / min(seconds[1:])
