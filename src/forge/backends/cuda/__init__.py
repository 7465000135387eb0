"""The CUDA backend: products by cuBLASLt, some by cuDNN, as attention is; the rest by Triton.

For NVIDIA GPUs of compute capability 8.0 and newer, in float32 and bfloat16, accumulating in
float32; what only moves elements takes any dtype. The rest is served by the reference, through
copies on the host, and `forge kernels` says so. Nothing here is imported before a device "cuda" is
asked for.
"""

import importlib.metadata

from forge.backends.kernel import table
from forge.dtypes import NAMES

FAMILIES: dict[str, tuple[str, ...]] = {
    "pointwise": (
        "add",
        "sub",
        "mul",
        "div",
        "maximum",
        "scale",
        "accumulate",
        "neg",
        "exp",
        "log",
        "tanh",
        "gelu",
        "gelu_backward",
        "dropout",
    ),
    "linear": ("matmul", "linear", "matmul_gelu_backward"),
    "reduce": ("sum_rows", "sum_to", "max", "argmax", "finite", "extent"),
    "norm": ("layernorm", "layernorm_backward", "add_layernorm", "add_layernorm_backward"),
    "attention": (
        "softmax",
        "softmax_backward",
        "split_heads",
        "unsplit_heads",
        "merge_heads",
        "unmerge_heads",
        "attention",
        "attention_backward",
        "cached_attention",
        "kv_append",
    ),
    "embedding": ("embedding", "scatter_add_rows", "position_backward"),
    "loss": ("target_weight", "cross_entropy", "cross_entropy_backward", "linear_cross_entropy"),
    "update": ("global_norm", "all_finite", "adamw"),
}
MOVERS: dict[str, tuple[str, ...]] = {
    "pointwise": ("where", "cast"),
    "shape": ("transpose", "slice", "unslice", "concat", "broadcast_to", "take"),
}

LOW: dict[str, tuple[str, ...]] = {"token": ("decode_token",)}

KERNELS = {
    **table("forge.backends.cuda", FAMILIES, frozenset({"float32", "bfloat16"})),
    **table("forge.backends.cuda", MOVERS, frozenset(NAMES)),
    **table("forge.backends.cuda", LOW, frozenset({"bfloat16"})),
}


def versions() -> dict[str, str]:
    """The card, its driver and the libraries that a step's bits depend on."""
    from forge.backends.cuda import device

    card = device.card()
    names = ("triton", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend")
    found = {"GPU": card.name, "CUDA driver": str(card.driver)}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found
