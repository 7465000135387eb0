"""The CPU backend: kernels by Numba in float32 and bfloat16, products in float32 by OpenBLAS.

What only moves elements takes every dtype. All else that is absent here, or of another dtype, is
served by the reference, and `forge kernels` says so.
"""

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
    "reduce": ("sum_rows", "sum_to", "max", "finite", "extent"),
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
    "update": ("global_norm", "all_finite"),
}

# Of float32 alone: an update's masters and moments, and what meets weights in int8.
WIDE: dict[str, tuple[str, ...]] = {
    "update": ("adamw",),
    "quantized": ("dequantize", "quantized_linear", "quantized_embedding"),
}

MOVERS: dict[str, tuple[str, ...]] = {
    "pointwise": ("where", "cast"),
    "shape": ("transpose", "slice", "unslice", "concat", "broadcast_to", "take"),
}

WORKSPACE = (
    "matmul",
    "linear",
    "matmul_gelu_backward",
    "layernorm",
    "layernorm_backward",
    "add_layernorm",
    "add_layernorm_backward",
    "attention",
    "attention_backward",
    "cached_attention",
    "cross_entropy",
    "linear_cross_entropy",
    "quantized_linear",
)

KERNELS = {
    **table("forge.backends.cpu", FAMILIES, frozenset({"float32", "bfloat16"}), WORKSPACE),
    **table("forge.backends.cpu", WIDE, frozenset({"float32"}), WORKSPACE),
    **table("forge.backends.cpu", MOVERS, frozenset(NAMES)),
}
