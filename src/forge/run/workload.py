"""What benchmarks run: a model in training, and a model that decodes, on random numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from forge import ops, training
from forge.backends import registry
from forge.data.loader import Loader
from forge.errors import ArgumentError
from forge.graph import Captured
from forge.models.gpt2 import GPT2, Cache, GPT2Config
from forge.optim.adamw import AdamW
from forge.params import Int8Params, Params
from forge.tensor import Device, Tensor, tensor

# Sizes that are measured: the one of configs/baby.toml, on bytes, and GPT-2's smallest.
MODELS = {
    "baby": GPT2Config(vocab_size=256, block_size=64, n_layer=4, n_head=4, n_embd=128),
    "124M": GPT2Config(),
}
# The kernel that a precision's products need, and its dtype.
_SERVES = {
    "fp32": ("linear", "float32"),
    "bf16": ("linear", "bfloat16"),
    "int8": ("quantized_linear", "float32"),
}


class Training:
    """A model in training on tokens that come through the loader, as in a real run.

    `length` tokens in each of `batch` samples; `train_step` is the step to run.
    """

    def __init__(
        self,
        config: GPT2Config,
        batch: int,
        length: int,
        device: Device,
        precision: str = "fp32",
        train_step: Callable[..., training.StepResult] = training.train_step,
    ) -> None:
        self.device = device
        self.model = GPT2(config)
        params = parameters(self.model, device, precision)
        if not isinstance(params, Params):
            raise ArgumentError(
                f"[bench] expected --precision fp32 or bf16 to train in, got {precision}"
            )
        self.params = params
        self.grads = self.params.zeros_like()
        self.optimizer = AdamW(self.params)
        self.train_step = train_step
        self.feed(batch, length)

    def feed(self, batch: int, length: int) -> None:
        """Train on batches of this size from now on."""
        V = self.model.config.vocab_size
        tokens = np.random.default_rng(0).integers(0, V, 64 * batch * length)
        self._loader = Loader(tokens.astype(np.uint16), length, batch, 0)
        self._batch = batch
        self._number = 0
        self._host = self._loader.batch(first_sample=0)
        self.eager(captured=True)

    def eager(self, *, captured: bool = False) -> None:
        """Run each step as it is from now on, or captured."""
        varying = ("batch", "state")
        self._step = (
            Captured(self.train_step, self.device, varying) if captured else self.train_step
        )

    def step(self) -> training.StepResult:
        """One step on the next batch; a GPU may still be at it on return."""
        result = self._step(*self._arguments())
        self._number += 1
        # A GPU computes meanwhile.
        self._host = self._loader.batch(first_sample=self._number * self._batch)
        return result

    def repeating(self) -> Callable[[], training.StepResult]:
        """A function that does the step on one batch, without loader and transfer.

        As `step` does it, but on a GPU eagerly: no kernel of a graph can be watched.
        """
        if self.device.kind == "cuda":
            self.eager()
        step, arguments = self._step, self._arguments()
        return lambda: step(*arguments)

    def _arguments(self) -> tuple[Any, ...]:
        batch = training.to_device(self._host, self.device)
        state = training.step_state(0, self._number, 6e-4, self.device)
        return self.model, self.params, self.grads, self.optimizer, batch, state


class Decoding:
    """A model that decodes greedily, a token at a time for each of `batch` samples.

    Its caches are full up to where it begins, a tenth of the context, and it goes on to seven
    eighths, again and again.
    """

    def __init__(
        self, config: GPT2Config, batch: int, device: Device, precision: str = "fp32"
    ) -> None:
        self.device = device
        self.model = GPT2(config)
        self.params = parameters(self.model, device, precision)
        N = config.block_size
        self._first, self._room = N // 10, max(1, N * 7 // 8 - N // 10)
        dtype = self.params.compute["wpe.weight"].dtype
        self._cache = self.model.cache(batch, N, device, dtype)
        self._ids = tensor(np.zeros((batch, 1), np.int64), device=device)
        self._number = 0
        self.eager(captured=True)

    @property
    def weights(self) -> int:
        """Bytes of weights that each token reads: all but the positions, which are looked up."""
        compute = self.params.compute
        return sum(x.nbytes for name, x in compute.items() if name != "wpe.weight")

    def eager(self, *, captured: bool = False) -> None:
        """Run each step as it is from now on, or captured."""
        self._step = (
            Captured(self._choose, self.device, ("ids", "pos")) if captured else self._choose
        )

    def step(self) -> Tensor:
        """The next token of every sample, int64 [batch, 1]."""
        pos = np.full(len(self._ids), self._first + self._number % self._room)
        moved = tensor(pos, device=self.device)
        self._ids = self._step(self.params.compute, self._ids, self._cache, moved)
        self._number += 1
        return self._ids

    def repeating(self) -> Callable[[], Tensor]:
        """A function that does the next step: on a GPU eagerly, so that kernels can be watched."""
        if self.device.kind == "cuda":
            self.eager()
        return self.step

    def _choose(self, params: Any, ids: Tensor, cache: Cache, pos: Tensor) -> Tensor:
        logits = self.model.decode(params, ids, cache, pos)
        chosen: Tensor = ops.reshape(ops.argmax(logits), ids.shape)
        return chosen


def parameters(model: GPT2, device: Device, precision: str) -> Params | Int8Params:
    """Parameters with random numbers; raises `ArgumentError` for what the device is no good at."""
    kernel, dtype = _SERVES.get(precision, ("", ""))
    if not kernel or registry.implementation(kernel, device.kind, dtype) != device.kind:
        raise ArgumentError(
            f"[bench] expected a precision that {device.kind} has kernels for, got {precision}; "
            "see `forge kernels`"
        )
    if precision == "int8":
        return model.quantized(_initial(model), device)
    params = model.zeros(device, precision)
    params.load_(_initial(model))
    return params


def _initial(model: GPT2) -> dict[str, np.ndarray]:
    """Like `model.init`, but all blocks have the same numbers: 1.5 billion would take 15 s."""
    layers = model.config.n_layer
    one = GPT2(dataclasses.replace(model.config, n_layer=1)).init(0)
    for name, array in one.items():
        if name.endswith("c_proj.weight"):
            array /= math.sqrt(layers)
    return {name: one[re.sub(r"^h\.\d+\.", "h.0.", name)] for name in model.shapes()}


def wait(device: Device) -> None:
    """Return when the device has done what it was given."""
    if device.kind == "cuda":
        from forge.backends.cuda.device import synchronize

        synchronize()


def used_memory(device: Device) -> int:
    """Bytes of a GPU that are in use, whoever holds them; 0 on a CPU."""
    if device.kind != "cuda":
        return 0
    from forge.backends.cuda.device import memory_info

    free, total = memory_info()
    return total - free
