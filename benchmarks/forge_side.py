"""Forge's side of the benchmarks: one measurement in a process of its own.

python benchmarks/forge_side.py WORK DEVICE MODEL PRECISION B T   (see sides.py)
"""

import gc
import sys
import time

import numpy as np
from sides import MODELS, Side, decoded, report, windows

from forge import Tape, ops, training
from forge.data.loader import Loader
from forge.graph import Captured
from forge.models import GPT2, GPT2Config
from forge.optim.adamw import AdamW
from forge.tensor import Device, tensor

# What `recompute` drops and makes again: a third of the activations.
RECOMPUTE = {"add_layernorm.y", "linear.out"}


class Run:
    """A model in training on random tokens that come through the loader, as in a real run."""

    def __init__(self, side: Side, *, recompute=False):
        self.side = side
        self.device = Device(side.device)
        self.used = memory(self.device)
        sizes = MODELS[side.model]
        self.model = GPT2(GPT2Config(**{**sizes, "block_size": max(side.T, sizes["block_size"])}))
        self.params = self.model.zeros(self.device, side.precision)
        self.params.load_(self.model.init(0))
        self.grads = self.params.zeros_like()
        self.optimizer = AdamW(self.params)
        tokens = np.random.default_rng(0).integers(0, sizes["vocab_size"], 64 * side.B * side.T)
        self.loader = Loader(tokens.astype(np.uint16), side.T, side.B, 0)
        self.number = 0
        self.host = self.loader.batch(0)
        self.train_step = Captured(step_of(recompute), self.device, ("batch", "state"))

    def step(self):
        """One step on the next batch; the GPU may still be at it on return."""
        batch = training.to_device(self.host, self.device)
        state = training.step_state(0, self.number, 6e-4, self.device)
        args = self.model, self.params, self.grads, self.optimizer, batch, state
        result = self.train_step(*args)
        self.number += 1
        self.host = self.loader.batch(self.number * self.side.B)
        return result


def step_of(recompute):
    """forge.training.train_step, with a tape that recomputes if asked."""
    if not recompute:
        return training.train_step

    def train_step(model, params, grads, optimizer, batch, state):
        training.Tape = lambda: Tape(recompute=RECOMPUTE)
        try:
            return training.train_step(model, params, grads, optimizer, batch, state)
        finally:
            training.Tape = Tape

    return train_step


def memory(device):
    """Bytes of the GPU in use; 0 on the CPU, where the process is measured from outside."""
    if device.kind != "cuda":
        return 0
    from forge.backends.cuda.device import memory_info

    free, total = memory_info()
    return total - free


def wait(device):
    """Until the GPU has done what it was given."""
    if device.kind == "cuda":
        from forge.backends.cuda.device import synchronize

        synchronize()


def train(side, *, recompute=False):
    """Seconds a step, sustained; the loss shows that it trains."""
    start = time.perf_counter()
    run = Run(side, recompute=recompute)
    first = run.step().loss.item()
    warm = time.perf_counter() - start
    run.step()
    seconds = windows(run.step, lambda: wait(run.device), side.device)
    used = memory(run.device) - run.used
    report(seconds=seconds, memory=used, first_step=warm, losses=[first, run.step().loss.item()])


def floor(side):
    """Seconds for nothing but the step's products and its attention: the roofline.

    Every other kernel is left out, and the epilogues of the products too.
    """
    import importlib

    from forge.backends.cuda import cublaslt

    run = Run(side)
    run.step()
    wait(run.device)
    for family in ("pointwise", "shape", "reduce", "norm", "attention", "embedding", "loss"):
        importlib.import_module(f"forge.backends.cuda.{family}").launch = lambda *_, **__: None
    importlib.import_module("forge.backends.cuda.update").launch = lambda *_, **__: None
    full = cublaslt.run

    def bare(product, a, b, out, *, alpha=1.0, bias=0, pre=0):
        return full(product._replace(epilogue=""), a, b, out, alpha=alpha)

    cublaslt.run = bare
    run.train_step = Captured(training.train_step, run.device, ("batch", "state"))
    run.step()
    run.step()
    report(seconds=windows(run.step, lambda: wait(run.device), side.device))


def profile(side):
    """Milliseconds of each kernel in an eager step, by name and shape, at sustained clocks."""
    from forge.backends import registry
    from forge.backends.cuda.device import Event

    run = Run(side)
    run.step()
    windows(run.step, lambda: wait(run.device), side.device)
    marks = []
    choose = registry._choose

    def timed(name, device, dtype):
        kernel = choose(name, device, dtype)

        def call(*args, **keywords):
            before = Event(timing=True).record()
            result = kernel(*args, **keywords)
            shapes = " ".join(str(list(x.shape)) for x in args if hasattr(x, "shape") and x.ndim)
            marks.append((f"{name} {shapes}", before, Event(timing=True).record()))
            return result

        return call

    registry._choose = timed
    registry._bound.clear()
    run.train_step = training.train_step
    rounds = 3
    for _ in range(rounds):
        run.step()
    wait(run.device)
    times = {}
    for name, before, after in marks:
        total, count = times.get(name, (0.0, 0))
        times[name] = total + after.since(before) / rounds, count + 1
    rows = sorted(((ms, count // rounds, name) for name, (ms, count) in times.items()))[::-1]
    report(kernels=rows, total=sum(ms for ms, _, _ in rows))


def decode(side):
    """Seconds a token, greedy, each fed back on the device."""
    device = Device(side.device)
    used = memory(device)
    sizes = MODELS[side.model]
    model = GPT2(GPT2Config(**sizes))
    params = model.zeros(device, side.precision)
    params.load_(model.init(0))
    dtype = "bfloat16" if side.precision == "bf16" else "float32"
    cache = model.cache(side.B, sizes["block_size"], device, dtype)
    ids = tensor(np.zeros((side.B, 1), np.int64), device=device)
    number = 0
    first, last = decoded(sizes["block_size"])

    def choose(params, ids, cache, pos):
        logits = model.decode(params, ids, cache, pos)
        return ops.reshape(ops.argmax(logits), ids.shape)

    step = Captured(choose, device, ("ids", "pos"))

    def token():
        nonlocal ids, number
        pos = tensor(np.full(side.B, first + number % (last - first)), device=device)
        ids = step(params.compute, ids, cache, pos)
        number += 1

    for _ in range(3):
        token()
    seconds = windows(token, lambda: wait(device), side.device)
    report(seconds=seconds, memory=memory(device) - used)


def main():
    side = Side.of(sys.argv[1:])
    gc.collect()
    work = {
        "train": train,
        "train-recompute": lambda s: train(s, recompute=True),
        "floor": floor,
        "profile": profile,
        "decode": decode,
    }
    work[side.work](side)


if __name__ == "__main__":
    main()
