"""Make gpt2_tiny.safetensors with PyTorch: `python tests/golden/make.py` (needs `make dev`).

A GPT-2 of 2 blocks, 2 heads, width 12, vocabulary 17 and context 9, all in float64: initial
parameters, a batch with ignored targets, logits, loss, every gradient, and the losses of ten steps
of AdamW with clipping at 0.5.
"""

from pathlib import Path

import numpy as np
import torch
import torch_gpt2
from safetensors.numpy import save_file

L, H, C, V, T, B = 2, 2, 12, 17, 9, 3
LR, DECAY, CLIP, STEPS = 1e-2, 0.1, 0.5, 10


def initial(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Parameters with nothing at zero or one, so that no gradient vanishes by symmetry."""
    shapes = {"wte.weight": (V, C), "wpe.weight": (T, C)}
    for layer in range(L):
        shapes |= {
            f"h.{layer}.{name}": shape
            for name, shape in {
                "ln_1.weight": (C,),
                "ln_1.bias": (C,),
                "attn.c_attn.weight": (C, 3 * C),
                "attn.c_attn.bias": (3 * C,),
                "attn.c_proj.weight": (C, C),
                "attn.c_proj.bias": (C,),
                "ln_2.weight": (C,),
                "ln_2.bias": (C,),
                "mlp.c_fc.weight": (C, 4 * C),
                "mlp.c_fc.bias": (4 * C,),
                "mlp.c_proj.weight": (4 * C, C),
                "mlp.c_proj.bias": (C,),
            }.items()
        }
    shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    return {
        name: rng.normal(1.0 if "ln_" in name and "weight" in name else 0.0, 0.3, shape)
        for name, shape in shapes.items()
    }


def main() -> None:
    """Compute and write the file."""
    rng = np.random.default_rng(20261201)
    arrays = initial(rng)
    ids = rng.integers(0, V, (B, T))
    targets = rng.integers(0, V, (B, T))
    targets[0, 5:] = -100
    targets[2, :] = -100
    out = {f"param.{name}": array for name, array in arrays.items()}
    out |= {"ids": ids, "targets": targets}
    p = torch_gpt2.parameters(arrays, torch.float64)
    optimizer = torch_gpt2.adamw(p, LR, DECAY)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = torch_gpt2.forward(p, torch.tensor(ids), H)
        loss = torch_gpt2.loss(logits, torch.tensor(targets))
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            out["logits"] = logits.detach().numpy()
            out |= {f"grad.{name}": w.grad.numpy().copy() for name, w in p.items()}
        torch.nn.utils.clip_grad_norm_(p.values(), CLIP)
        optimizer.step()
    out["losses"] = np.array(losses)
    save_file(
        {name: np.ascontiguousarray(array) for name, array in out.items()},
        Path(__file__).with_name("gpt2_tiny.safetensors"),
    )


if __name__ == "__main__":
    main()
