"""PyTorch's side of the benchmarks: GPT-2 as nanoGPT writes it, and at PyTorch's best.

python benchmarks/torch_side.py WORK DEVICE MODEL PRECISION B T STYLE ATTENTION MODE

STYLE `nanogpt`: fp32 weights under autocast (bf16) or alone (fp32). `best`: bf16 weights and
residual stream, fp32 masters. ATTENTION: flash, cudnn or any. MODE: eager, default, max-autotune,
reduce-overhead.
"""

import contextlib
import sys
import time

import torch
from sides import MODELS, Side, decoded, report, windows
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Block(nn.Module):
    """One block, with nanoGPT's names."""

    def __init__(self, C, H, attention):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.c_fc, self.mlp_proj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.H, self.attention = H, attention

    def remember(self, B, N, **room):
        """Keep a cache, as a part of the module: so compiled graphs know where it is."""
        C = self.c_proj.in_features
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(B, self.H, N, C // self.H, **room))

    def forward(self, x, pos=None, mask=None):
        B, T, C = x.shape
        heads = self.c_attn(self.ln_1(x)).view(B, T, 3, self.H, C // self.H).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in heads)
        if pos is not None:
            self.keys[:, :, pos] = k
            self.values[:, :, pos] = v
            k, v = self.keys, self.values
        chosen = BACKENDS.get(self.attention)
        with contextlib.nullcontext() if chosen is None else sdpa_kernel(chosen):
            y = functional.scaled_dot_product_attention(
                q, k, v, is_causal=mask is None, attn_mask=None if mask is None else mask
            )
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        wide = functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.mlp_proj(wide)


class GPT(nn.Module):
    """GPT-2 with a tied head; the vocabulary is padded as in nanoGPT."""

    def __init__(self, sizes, attention):
        super().__init__()
        C, V = sizes["n_embd"], -(-sizes["vocab_size"] // 64) * 64
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(sizes["block_size"], C)
        self.blocks = nn.ModuleList(
            Block(C, sizes["n_head"], attention) for _ in range(sizes["n_layer"])
        )
        self.ln_f = nn.LayerNorm(C)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, ids, targets):
        h = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = self.ln_f(h) @ self.wte.weight.t()
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))

    def token(self, ids, pos):
        h = self.wte(ids) + self.wpe(pos)
        for block in self.blocks:
            h = block(h, pos, self.mask[None, None, pos])
        return (self.ln_f(h) @ self.wte.weight.t())[:, -1].argmax(-1, keepdim=True)


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def memory(device):
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


def train(side, style, attention, mode):
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if side.precision == "fp32" else "high")
    torch.empty(1, device=side.device)
    used = memory(side.device)
    start = time.perf_counter()
    model = GPT(MODELS[side.model], attention).to(side.device)
    low = side.precision == "bf16"
    masters = parameters = list(model.parameters())
    if style == "best" and low:
        masters = [p.detach().clone() for p in parameters]
        model.to(torch.bfloat16)
        for master in masters:
            master.grad = torch.zeros_like(master)
    settings = {"lr": 6e-4, "betas": (0.9, 0.95), "fused": True}
    optimizer = torch.optim.AdamW(decay(masters), **settings)
    forward = compiled(model, mode)
    V = MODELS[side.model]["vocab_size"]
    ids, targets = torch.randint(V, (2, side.B, side.T), device=side.device)
    cast = contextlib.nullcontext()
    if style == "nanogpt" and low:
        cast = torch.autocast(side.device, torch.bfloat16)

    def step():
        with cast:
            loss = forward(ids, targets)
        loss.backward()
        if masters is not parameters:
            torch._foreach_copy_([m.grad for m in masters], [p.grad for p in parameters])
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        if masters is not parameters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        model.zero_grad(set_to_none=True)
        return loss

    first = step().item()
    warm = time.perf_counter() - start
    step()
    seconds = windows(step, lambda: wait(side.device), side.device)
    allocated = torch.cuda.max_memory_allocated() if side.device == "cuda" else 0
    report(
        seconds=seconds,
        memory=memory(side.device) - used,
        allocated=allocated,
        first_step=warm,
        losses=[first, step().item()],
    )


@torch.no_grad()
def decode(side, _style, attention, mode):
    low = side.precision == "bf16"
    dtype = torch.bfloat16 if low else torch.float32
    sizes = MODELS[side.model]
    torch.empty(1, device=side.device)
    used = memory(side.device)
    model = GPT(sizes, attention).to(side.device, dtype).eval()
    N = sizes["block_size"]
    for block in model.blocks:
        block.remember(side.B, N, device=side.device, dtype=dtype)
    mask = torch.tril(torch.ones(N, N, dtype=torch.bool, device=side.device))
    model.register_buffer("mask", mask)
    token = compiled(model.token, mode)
    ids = torch.zeros(side.B, 1, dtype=torch.long, device=side.device)
    positions = torch.arange(*decoded(N), device=side.device).split(1)
    number = 0

    def step():
        nonlocal ids, number
        ids = token(ids, positions[number % len(positions)]).clone()
        number += 1

    for _ in range(5):
        step()
    seconds = windows(step, lambda: wait(side.device), side.device)
    report(seconds=seconds, memory=memory(side.device) - used)


if __name__ == "__main__":
    chosen = Side.of(sys.argv[1:])
    {"train": train, "decode": decode}[chosen.work](chosen, *sys.argv[7:10])
