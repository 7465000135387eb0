"""GPT-2 in PyTorch, for the benchmarks: the modules and names of nanoGPT, on packed q, k and v."""

import contextlib

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

# "math" is products and a softmax, which the compiler then fuses itself, as gpt-fast has it.
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Block(nn.Module):
    """One block."""

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
        if isinstance(pos, int):
            # Eager: only what the cache holds so far, and so no mask.
            self.keys[:, :, pos : pos + 1] = k
            self.values[:, :, pos : pos + 1] = v
            k, v = self.keys[:, :, : pos + 1], self.values[:, :, : pos + 1]
        elif pos is not None:
            # Compiled: all of it, whose shape never changes, behind a mask.
            self.keys[:, :, pos] = k
            self.values[:, :, pos] = v
            k, v = self.keys, self.values
        chosen = BACKENDS.get(self.attention)
        with contextlib.nullcontext() if chosen is None else sdpa_kernel(chosen):
            y = functional.scaled_dot_product_attention(
                q, k, v, is_causal=pos is None, attn_mask=mask
            )
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        wide = functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.mlp_proj(wide)


class GPT(nn.Module):
    """GPT-2 with a tied head; the vocabulary is padded as in nanoGPT."""

    def __init__(self, sizes, attention, device):
        super().__init__()
        C, V = sizes["n_embd"], -(-sizes["vocab_size"] // 64) * 64
        with torch.device(device):
            self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(sizes["block_size"], C)
            self.blocks = nn.ModuleList(
                Block(C, sizes["n_head"], attention) for _ in range(sizes["n_layer"])
            )
            self.ln_f = nn.LayerNorm(C)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, ids, targets):
        """Logits and loss, as nanoGPT returns them."""
        h = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = self.ln_f(h) @ self.wte.weight.t()
        rows = logits.view(-1, logits.shape[-1])
        return logits, functional.cross_entropy(rows.float(), targets.view(-1))

    def loss(self, ids, targets):
        """The loss alone: what a caller does not ask for, the compiler need not keep."""
        return self(ids, targets)[1]

    def token(self, ids, pos):
        """The next token, greedily; `pos` is an int, or an int64 [1] where this is compiled."""
        mask = None
        if isinstance(pos, int):
            h = self.wte(ids) + self.wpe.weight[pos]
        else:
            h = self.wte(ids) + self.wpe(pos)
            mask = self.mask[None, None, pos]
        for block in self.blocks:
            h = block(h, pos, mask)
        return (self.ln_f(h) @ self.wte.weight.t())[:, -1].argmax(-1, keepdim=True)

    def remember(self, B, N, device, dtype):
        """Make room for N positions of B samples."""
        for block in self.blocks:
            block.remember(B, N, device=device, dtype=dtype)
        mask = torch.tril(torch.ones(N, N, dtype=torch.bool, device=device))
        self.register_buffer("mask", mask)
