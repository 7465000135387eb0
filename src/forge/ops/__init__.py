"""The ops: functions that run on Tensors and are recorded on Vars."""

from typing import TYPE_CHECKING, Any

from forge.errors import nearest

# `operators` attaches + - * / @ and indexing to Tensor and Var.
from forge.ops import operators as operators
from forge.ops.attention import (
    attention,
    attention_backward,
    cached_attention,
    kv_append_,
    merge_heads,
    softmax,
    softmax_backward,
    split_heads,
    unmerge_heads,
    unsplit_heads,
)
from forge.ops.embedding import add_positions_, embedding, scatter_add_rows_, scatter_rows, take
from forge.ops.linear import linear, matmul, matmul_gelu_backward, mlp
from forge.ops.loss import (
    IGNORE_INDEX,
    cross_entropy,
    cross_entropy_backward,
    linear_cross_entropy,
)
from forge.ops.norm import add_layernorm, add_layernorm_backward, layernorm, layernorm_backward
from forge.ops.pointwise import (
    add,
    cast,
    div,
    dropout,
    exp,
    gelu,
    gelu_backward,
    log,
    maximum,
    mul,
    neg,
    scale,
    sub,
    tanh,
    where,
)
from forge.ops.quantized import dequantize, quantize, quantized_embedding, quantized_linear
from forge.ops.reduce import argmax, max, mean, sum, sum_rows, sum_to
from forge.ops.shape import broadcast_to, concat, reshape, slice, transpose, unslice
from forge.ops.token import decode_token_
from forge.ops.update import adamw_, all_finite, global_norm

__all__ = [
    "IGNORE_INDEX",
    "adamw_",
    "add",
    "add_layernorm",
    "add_layernorm_backward",
    "add_positions_",
    "all_finite",
    "argmax",
    "attention",
    "attention_backward",
    "broadcast_to",
    "cached_attention",
    "cast",
    "concat",
    "cross_entropy",
    "cross_entropy_backward",
    "decode_token_",
    "dequantize",
    "div",
    "dropout",
    "embedding",
    "exp",
    "gelu",
    "gelu_backward",
    "global_norm",
    "kv_append_",
    "layernorm",
    "layernorm_backward",
    "linear",
    "linear_cross_entropy",
    "log",
    "matmul",
    "matmul_gelu_backward",
    "max",
    "maximum",
    "mean",
    "merge_heads",
    "mlp",
    "mul",
    "neg",
    "quantize",
    "quantized_embedding",
    "quantized_linear",
    "reshape",
    "scale",
    "scatter_add_rows_",
    "scatter_rows",
    "slice",
    "softmax",
    "softmax_backward",
    "split_heads",
    "sub",
    "sum",
    "sum_rows",
    "sum_to",
    "take",
    "tanh",
    "transpose",
    "unmerge_heads",
    "unslice",
    "unsplit_heads",
    "where",
]

# What other libraries call what is here, or how it is made of what is here.
_ELSEWHERE = {
    "cat": "ops.concat(*xs)",
    "layer_norm": "ops.layernorm(x, gamma, beta)",
    "log_softmax": "ops.cross_entropy(logits, targets), which takes logits",
    "permute": "ops.transpose(x, axes)",
    "relu": "ops.maximum(x, ops.scale(x, 0.0)), or ops.gelu(x)",
    "scaled_dot_product_attention": "ops.attention(qkv, n_head)",
    "sigmoid": "1.0 / (1.0 + ops.exp(-x))",
    "sqrt": "ops.exp(ops.scale(ops.log(x), 0.5))",
    "squeeze": "ops.reshape(x, shape)",
    "unsqueeze": "ops.reshape(x, shape)",
    "view": "ops.reshape(x, shape)",
}

# Not for mypy, which would take any name for one that is here.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        hint = f"write {_ELSEWHERE[name]}" if name in _ELSEWHERE else nearest(name, __all__)
        raise AttributeError(f"[ops] expected an op, got {name!r}; {hint}")
