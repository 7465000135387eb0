"""The CPU backend: float32 kernels by Numba, products by OpenBLAS.

What is absent from `FAMILIES`, and every other dtype, is served by the reference, and
`forge kernels` says so.
"""

from forge.backends.kernel import table

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
        "where",
        "cast",
        "gelu",
        "gelu_backward",
        "dropout",
    ),
    "shape": ("transpose", "slice", "unslice", "concat", "broadcast_to", "take"),
    "linear": ("matmul", "linear"),
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
    "update": ("global_norm", "all_finite", "adamw"),
}

KERNELS = table("forge.backends.cpu", FAMILIES, frozenset({"float32"}))
