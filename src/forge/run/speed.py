"""Model FLOP utilisation, and what it is a fraction of.

A token of training costs 6 N + 6 L C T operations: forward 2 for every weight of a matrix, backward
twice that; and causal attention, where a position sees T / 2 others on average, 2 C T per block
forward. N counts all parameters but the position embeddings, which are only looked up; the token
embeddings count, as they are also the output matrix. As in llm.c.

The peak is measured, on this machine with these threads: the rate of one large product in the run's
precision. So 100 % means that a step is as fast as if it were that product alone. On a CPU the
seconds count that the threads computed, not those that passed: a machine that was busy with
something else when the run began would otherwise seem slower than the run is later.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from forge import ops
from forge.models.gpt2 import GPT2
from forge.params import Params
from forge.tensor import Device, Tensor, tensor

FORMULA = "6 N + 6 L C T"

# Rounds of a measurement, and seconds of each.
_ROUNDS, _SECONDS = 4, 0.02


def flops_per_token(model: GPT2, params: Params) -> float:
    """Operations that training takes per token."""
    c = model.config
    weights = params.count - params["wpe.weight"].size
    return 6.0 * weights + 6.0 * c.n_layer * c.n_embd * c.block_size


def peak_flops(device: Device, precision: str = "fp32") -> float:
    """Operations per second of a product of two matrices of `matrix(device)`: the best of some."""
    size = matrix(device)
    dtype = "bfloat16" if precision == "bf16" else "float32"
    # Random numbers: a GPU multiplies zeros faster than its power allows otherwise.
    numbers = np.random.default_rng(0).standard_normal((size, size), np.float32)
    a = tensor(numbers, dtype, device)
    _product(a)  # the first one prepares
    if device.kind == "cuda":
        seconds = min(_timed(a, time.perf_counter) for _ in range(_ROUNDS))
    else:
        # All threads' together; no more of them run at once than there are cores.
        seconds = min(_timed(a, time.process_time) for _ in range(_ROUNDS)) / _threads(device)
    return 2.0 * size**3 / seconds


def matrix(device: Device) -> int:
    """The width of matrices that keep the device busy."""
    return 8192 if device.kind == "cuda" else 1024


def _timed(a: Tensor, clock: Callable[[], float]) -> float:
    """Mean seconds of a product."""
    # Some systems count a process's time in ticks, 64 a second.
    tick = time.get_clock_info("process_time").resolution
    count, start = 0, clock()
    end = time.perf_counter() + max(_SECONDS, 4 * tick)
    while time.perf_counter() < end:
        _product(a)
        count += 1
    return (clock() - start) / count


def _product(a: Tensor) -> None:
    # A GPU has done the product when one of its elements can be read.
    ops.matmul(a, a).view((1,)).numpy()


def _threads(device: Device) -> int:
    if device.kind != "cpu":
        return 1
    from forge.backends.cpu import threads

    return min(threads.get_threads(), threads.available_cores())
