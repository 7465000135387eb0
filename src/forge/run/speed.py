"""Model FLOP utilisation, and what it is a fraction of.

A token of training costs 6 N + 6 L C T operations: forward 2 for every weight of a matrix, backward
twice that; and causal attention, where a position sees T / 2 others on average, 2 C T per block
forward. N counts all parameters but the position embeddings, which are only looked up; the token
embeddings count, as they are also the output matrix. As in llm.c.

The peak is measured, on this machine with these threads: the rate of one large product in the run's
precision. So 100 % means that a step is as fast as if it were that product alone.
"""

from __future__ import annotations

import time

import numpy as np

from forge import ops
from forge.models.gpt2 import GPT2
from forge.params import Params
from forge.tensor import Device, tensor

FORMULA = "6 N + 6 L C T"

_SECONDS = 0.1


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
    ops.matmul(a, a).view((1,)).numpy()  # the first one prepares
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        # A GPU has done the product when one of its elements can be read.
        ops.matmul(a, a).view((1,)).numpy()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def matrix(device: Device) -> int:
    """The width of matrices that keep the device busy.

    On a CPU no more than needed: a short product is more often left alone by other processes.
    """
    return 8192 if device.kind == "cuda" else 512
