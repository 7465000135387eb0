"""GPT-2 in PyTorch functions, from arrays of Hugging Face's names: the independent oracle.

Written from the paper and from `transformers`' shapes, in the plainest form, with no code of Forge.
"""

import math

import numpy as np
import torch
from torch.nn import functional


def forward(p: dict[str, torch.Tensor], ids: torch.Tensor, n_head: int) -> torch.Tensor:
    """Logits [B, T, V] of ids [B, T]."""
    _, T = ids.shape
    C = p["wte.weight"].shape[1]
    n_layer = sum(name.endswith("ln_1.weight") for name in p)
    mask = torch.tril(torch.ones(T, T, dtype=torch.bool))
    x = p["wte.weight"][ids] + p["wpe.weight"][:T]
    for layer in range(n_layer):
        w = {k.removeprefix(f"h.{layer}."): v for k, v in p.items() if k.startswith(f"h.{layer}.")}
        y = functional.layer_norm(x, (C,), w["ln_1.weight"], w["ln_1.bias"])
        qkv = y @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"]
        q, k, v = (t.unflatten(-1, (n_head, -1)).transpose(1, 2) for t in qkv.split(C, dim=-1))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(C // n_head)
        mixed = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
        mixed = mixed.transpose(1, 2).flatten(2)
        x = x + mixed @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]
        y = functional.layer_norm(x, (C,), w["ln_2.weight"], w["ln_2.bias"])
        wide = functional.gelu(y @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"], approximate="tanh")
        x = x + wide @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]
    x = functional.layer_norm(x, (C,), p["ln_f.weight"], p["ln_f.bias"])
    return x @ p["wte.weight"].T


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the targets that are not -100."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def parameters(arrays: dict[str, np.ndarray], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Leaves that require gradients."""
    return {
        name: torch.tensor(array, dtype=dtype, requires_grad=True) for name, array in arrays.items()
    }


def adamw(p: dict[str, torch.Tensor], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with decay on matrices only, betas 0.9 and 0.95."""
    decayed = [w for w in p.values() if w.dim() == 2]
    rest = [w for w in p.values() if w.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
