"""PyTorch's side of the benchmarks: GPT-2 as nanoGPT writes it, and at PyTorch's best.

python benchmarks/torch_side.py WORK DEVICE MODEL PRECISION B T THREADS STYLE ATTENTION MODE

WORK is train, first (one step, and the end) or decode. STYLE `nanogpt`: fp32 weights, under
autocast (bf16) or alone (fp32); the model also returns its logits, which the loop holds until the
next, as there. `best`: it returns the loss alone; in bf16 weights, activations and residual stream
are bf16, with fp32 masters that the optimizer updates. Both: fused AdamW, gradients clipped to norm
1. ATTENTION: flash, cudnn, math, or any, which leaves it to PyTorch. MODE: eager, or one of
torch.compile's (default, max-autotune, reduce-overhead), with fullgraph.

decode: greedy, a token at a time. Compiled, it goes through a static cache behind a mask, as
gpt-fast does; `math` has the compiler make attention out of products, which gpt-fast found faster,
and tunes its kernels by coordinate descent, also as there. Eager, it sees what the cache holds.
"""

import contextlib
import gc
import sys
import time

import torch
from sides import Side, decoded, largest, predicted, refuse, report, windows
from torch import nn
from torch_model import GPT


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def memory(device):
    """Bytes of the GPU in use, whoever holds them; 0 on a CPU."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def compiled(function, mode):
    if mode == "eager":
        return function
    return torch.compile(function, mode=None if mode == "default" else mode, fullgraph=True)


def decay(parameters):
    matrices = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


class Training:
    """A model, its optimizer, and its step on a batch of new random tokens.

    New, as on one batch the gradients vanish, and a GPU takes less power for small numbers.
    """

    def __init__(self, side, sizes, batch, style, attention, mode):
        self.side = side
        self.low = side.precision == "bf16"
        self.autocast = style == "nanogpt" and self.low
        self.model = GPT(sizes, attention, side.device)
        self.masters = self.parameters = list(self.model.parameters())
        if style == "best" and self.low:
            self.masters = [p.detach().clone() for p in self.parameters]
            self.model.to(torch.bfloat16)
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        settings = {"lr": 6e-4, "betas": (0.9, 0.95), "fused": True}
        self.optimizer = torch.optim.AdamW(decay(self.masters), **settings)
        self.forward = compiled(self.model if style == "nanogpt" else self.model.loss, mode)
        self.result = None
        self.tokens = sizes["vocab_size"], (2, batch, side.length)

    def step(self):
        """One step; the GPU may still be at it on return."""
        ids, targets = torch.randint(*self.tokens, device=self.side.device)
        cast = contextlib.nullcontext()
        if self.autocast:
            cast = torch.autocast(self.side.device, torch.bfloat16)
        with cast:
            # Only now does the result before go.
            self.result = self.forward(ids, targets)
        loss = self.result[-1] if isinstance(self.result, tuple) else self.result
        loss.backward()
        apart = self.masters is not self.parameters
        if apart:
            torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.parameters])
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        if apart:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        self.model.zero_grad(set_to_none=True)
        return loss


def release():
    """Return what nothing refers to any more."""
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def fitting(side, *how):
    """The largest batch that fits on the GPU: predicted on small models, then tried downwards."""
    if side.device != "cuda":
        refuse("the largest batch is sought on a GPU alone: name one with --batch")

    def peak(layers):
        training = Training(side, {**side.sizes, "n_layer": layers}, 4, *how)
        training.step()
        training.step()
        found = torch.cuda.max_memory_allocated()
        del training
        release()
        return found

    def fits(batch):
        if batch > first:
            return False
        try:
            training = Training(side, side.sizes, batch, *how)
            for _ in range(3):
                training.step()
            torch.cuda.synchronize()
            found.append(training)
        except torch.OutOfMemoryError:
            training = None
        # Only now does no traceback hold the tensors of a step that failed.
        if not found:
            release()
        return bool(found)

    room = 0.97 * torch.cuda.mem_get_info()[0]
    # Weights and moments, and with masters their gradients and the bf16 copy.
    each = 18 if how[0] == "best" and side.precision == "bf16" else 12
    first = predicted(side, peak, room, each)
    found = []
    return largest(fits), found[0]


def train(side, *how):
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if side.precision == "fp32" else "high")
    torch.empty(1, device=side.device)
    used = memory(side.device)
    start = time.perf_counter()
    if side.batch:
        batch, training = side.batch, Training(side, side.sizes, side.batch, *how)
    else:
        batch, training = fitting(side, *how)
    first = training.step().item()
    warm = time.perf_counter() - start
    training.step()
    measured = windows(training.step, lambda: wait(side.device), side.device)
    allocated = torch.cuda.max_memory_allocated() if side.device == "cuda" else 0
    report(
        **measured,
        batch=batch,
        memory=memory(side.device) - used,
        allocated=allocated,
        first_step=warm,
        losses=[first, training.step().item()],
    )


def first(side, *how):
    """One step: what a start costs."""
    report(loss=Training(side, side.sizes, side.batch, *how).step().item())


@torch.no_grad()
def decode(side, _style, attention, mode):
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[side.precision]
    torch.set_float32_matmul_precision("highest")
    if attention == "math":
        torch._inductor.config.coordinate_descent_tuning = True
    torch.empty(1, device=side.device)
    used = memory(side.device)
    model = GPT(side.sizes, attention, side.device).to(dtype).eval()
    N = side.sizes["block_size"]
    model.remember(side.batch, N, side.device, dtype)
    token = compiled(model.token, mode)
    ids = torch.zeros(side.batch, 1, dtype=torch.long, device=side.device)
    positions = list(range(*decoded(N)))
    if mode != "eager":
        positions = torch.tensor(positions, device=side.device).split(1)
    number = 0

    def step():
        nonlocal ids, number
        ids = token(ids, positions[number % len(positions)])
        if mode == "reduce-overhead":
            # The next replay writes where this one did.
            ids = ids.clone()
        number += 1

    start = time.perf_counter()
    for _ in range(5):
        step()
    wait(side.device)
    warm = time.perf_counter() - start
    measured = windows(step, lambda: wait(side.device), side.device)
    # A graph that could not be captured would be launched kernel by kernel: say so.
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    used = memory(side.device) - used
    report(**measured, batch=side.batch, memory=used, first_step=warm, uncaptured=skipped)


if __name__ == "__main__":
    chosen = Side.of(sys.argv[1:])
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        refuse("PyTorch here sees no GPU")
    {"train": train, "first": first, "decode": decode}[chosen.work](chosen, *sys.argv[8:11])
