"""The reference backend: every kernel as its plain definition in NumPy.

Clarity only. It takes any floating dtype: float64 as the oracle of all other backends, bfloat16 by
widening to float32 and rounding the result once.
"""

from forge.backends.kernel import table
from forge.dtypes import NAMES

FAMILIES = {
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
        "where",
        "cast",
        "gelu",
        "gelu_backward",
        "dropout",
    ),
    "shape": ("transpose", "slice", "unslice", "concat", "broadcast_to", "take"),
    "linear": ("matmul", "linear", "matmul_gelu_backward"),
    "quantized": ("quantize", "dequantize", "quantized_linear", "quantized_embedding"),
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
    "token": ("decode_token",),
    "embedding": ("embedding", "scatter_add_rows", "position_backward"),
    "loss": ("target_weight", "cross_entropy", "cross_entropy_backward", "linear_cross_entropy"),
    "update": ("global_norm", "all_finite", "adamw"),
}

KERNELS = table("forge.backends.reference", FAMILIES, frozenset(NAMES))
