"""The floor under a training step on a GPU: its products and its attention, and nothing else.

One step is run with an ear on the calls of products and of attention, and copies of what they read
are kept: numbers as they really occur, since a GPU multiplies zeros, and numbers that have decayed
to a few bits, at less power and so faster. Those calls are then made again in their order, each
product plain (no bias, no gelu, nothing added to), reading the copies and writing where nobody
reads. So no call's result is another's operand, however often they are repeated.
"""

import functools

from forge.backends.cuda import cudnn_sdpa, device, flash, products
from forge.dtypes import ITEMSIZE
from forge.graph import Captured
from forge.tensor import Tensor, empty, empty_like

# Copies of a call's operands that repetitions take in turn: two are more than the L2 cache holds.
COPIES = 2
ATTENTION = ("attention", "attention_backward")


def bare(run):
    """A captured function that makes the calls of one step of `run`, and how many there are."""
    calls, restore = Calls(run.device), []
    full = products.run

    def product(wanted, a, b, out, **keywords):
        calls.product(full, wanted, a, b)
        return full(wanted, a, b, out, **keywords)

    products.run = product
    for module in (cudnn_sdpa, flash):
        for name in ATTENTION:
            kernel = getattr(module, name)
            restore.append((module, name, kernel))
            setattr(module, name, calls.attention(kernel))
    run.eager()
    try:
        run.step()
        device.synchronize()
    finally:
        products.run = full
        for module, name, kernel in restore:
            setattr(module, name, kernel)

    def play():
        for call in calls.made:
            call()
        return ()

    number = sum(call.func is full for call in calls.made)
    counts = {"products": number, "attention": len(calls.made) - number}
    return Captured(play, run.device, ()), counts


class Calls:
    """Calls that can be made again: `made`, in order."""

    def __init__(self, on):
        self.device = on
        self.made = []
        # By what identifies a call: its copies so far, then taken in turn.
        self.kept = {}
        # Where results go, by bytes: never read.
        self.sinks = {}

    def product(self, full, wanted, a, b):
        """Note a product of the matrices at the addresses a and b."""
        p = wanted._replace(epilogue="", accumulate=False)
        rows_a, rows_b = (p.k if p.trans_a else p.m), (p.n if p.trans_b else p.k)
        sizes = [
            ((p.batch - 1) * step + rows * ld) * ITEMSIZE[p.dtype]
            for step, rows, ld in ((p.step_a, rows_a, p.lda), (p.step_b, rows_b, p.ldb))
        ]
        a, b = self.copies(p, lambda: [self.bytes_at(*x) for x in zip((a, b), sizes, strict=True)])
        room = ((p.batch - 1) * p.step_c + p.m * p.ldc) * ITEMSIZE[p.out_dtype]
        self.made.append(functools.partial(full, p, a.pointer, b.pointer, self.sink(room).pointer))

    def attention(self, kernel):
        """The kernel, its calls noted: Tensors as arguments are read, as keywords written."""

        def call(*args, **keywords):
            shapes = tuple(x.shape for x in args if isinstance(x, Tensor))
            copies = self.copies((kernel, shapes), lambda: [self.copy(x) for x in args])
            outs = {k: self.like(x) if isinstance(x, Tensor) else x for k, x in keywords.items()}
            self.made.append(functools.partial(kernel, *copies, **outs))
            return kernel(*args, **keywords)

        return call

    def copies(self, key, make):
        """The next copies of operands for this kind of call."""
        kept, turn = self.kept.setdefault(key, ([], [0]))
        if len(kept) < COPIES:
            kept.append(make())
            return kept[-1]
        turn[0] += 1
        return kept[turn[0] % COPIES]

    def bytes_at(self, address, size):
        """A copy of the GPU's memory."""
        out = empty((size,), "bool", self.device)
        cuda = device.runtime()
        kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        result = cuda.cudaMemcpyAsync(out.pointer, address, size, kind, device.stream())
        device.check("a copy on the GPU", result)
        return out

    def copy(self, x):
        if not isinstance(x, Tensor):
            return x
        out = empty_like(x)
        self.device.memory.copy(x, out)
        return out

    def sink(self, size):
        if size not in self.sinks:
            self.sinks[size] = empty((size,), "bool", self.device)
        return self.sinks[size]

    def like(self, x):
        """A Tensor of x's shape in a sink of its own kind."""
        key = x.shape, x.dtype
        if key not in self.sinks:
            self.sinks[key] = empty_like(x)
        return self.sinks[key]
