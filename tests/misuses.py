"""Misuses of the products: an op, a call of it, the error, and words of its message."""

import math
from functools import partial

import numpy as np

from forge import ops
from forge.errors import ArgumentError, DtypeError, ShapeError
from forge.tensor import tensor


def f(*shape, dtype="float32", device="cpu"):
    return tensor(np.ones(shape), dtype, device)


def i(*values):
    return tensor(np.array(values), "int64")


def b(*shape):
    return f(*shape, dtype="int8")


PRODUCTS = [
    ("matmul", lambda: ops.matmul(f(2, 3), f(4, 5)), ShapeError, "[2, 3]", "[4, 5]"),
    ("matmul", lambda: ops.matmul(f(3), f(3, 2)), ShapeError, "rank 2 or 3", "[3]"),
    ("matmul", lambda: ops.matmul(f(1, 1, 2, 3), f(3, 2)), ShapeError, "rank 2 or 3"),
    ("matmul", lambda: ops.matmul(f(2, 2, 3), f(3, 3, 2)), ShapeError, "batch"),
    ("matmul", lambda: ops.matmul(f(2, 3), f(2, 3, 4)), ShapeError, "[2, 3, 4]"),
    ("matmul", lambda: ops.matmul(f(2, 2, 3), f(2, 3), trans_a=True), ShapeError, "trans_a=True"),
    ("matmul", lambda: ops.matmul(f(2, 3), f(3, 4), f(3)), ShapeError, "bias", "[4]", "[3]"),
    ("matmul", lambda: ops.matmul(f(2, 3), f(3, 4), b_rows=4), ShapeError, "b_rows=4"),
    ("matmul", lambda: ops.matmul(f(2, 3), f(3, 4), into=f(4, 2)), ShapeError, "into", "[4, 2]"),
    ("matmul", lambda: ops.matmul(f(2, 3), f(3, 4), into=i(1)), DtypeError, "into", "int64"),
    ("matmul", lambda: f(2, 3) @ f(2, 3), ShapeError, "[2, 3]"),
    ("linear", lambda: ops.linear(f(3), f(4, 5)), ShapeError, "[4, 5]", "K is 3 in x and 4 in w"),
    ("linear", lambda: ops.linear(f(2, 3), f(5, 3)), ShapeError, "[in, out]: ops.transpose(w, (1"),
    ("linear", lambda: ops.linear(f(), f(4, 5)), ShapeError, "K is missing in x and 4 in w"),
    ("linear", lambda: ops.linear(f(2, 3), f(3)), ShapeError, "w", "[3]"),
    ("linear", lambda: ops.linear(f(2, 3), f(3, 4), f(3)), ShapeError, "bias", "[3]"),
    ("linear", lambda: ops.linear(f(2, 3), f(3, 4), gelu="relu"), ArgumentError, "'relu'"),
    ("mlp", lambda: ops.mlp(f(2, 3), f(4, 5), f(5), f(5, 2)), ShapeError, "K is 3 in x and 4 in w"),
    ("mlp", lambda: ops.mlp(f(3), f(3, 5), f(5), f(4, 2)), ShapeError, "M is 5 in w and 4 in w_"),
    ("mlp", lambda: ops.mlp(f(3), f(5, 3), f(5), f(3, 5)), ShapeError, "ops.transpose(w, (1, 0))"),
    ("mlp", lambda: ops.mlp(f(3), f(3, 5), f(5), f(3, 5)), ShapeError, "ops.transpose(w_out, (1"),
    ("mlp", lambda: ops.mlp(f(), f(3, 5), f(5), f(5, 2)), ShapeError, "x: []"),
    ("mlp", lambda: ops.mlp(f(2, 3), f(3), f(5), f(5, 2)), ShapeError, "w of rank 2", "[3]"),
    ("mlp", lambda: ops.mlp(f(2, 3), f(3, 5), f(5), f(5)), ShapeError, "w_out of rank 2", "[5]"),
    ("mlp", lambda: ops.mlp(f(2, 3), f(3, 5), f(3), f(5, 2)), ShapeError, "bias", "[5]", "[3]"),
    ("mlp", lambda: ops.mlp(f(3), f(3, 5), f(5), f(5, 2), f(5)), ShapeError, "bias_out", "[2]"),
    ("mlp", lambda: ops.mlp(f(3), f(3, 5), f(5), f(5, 2), gelu="relu"), ArgumentError, "'relu'"),
    ("mlp", lambda: ops.mlp(f(3), f(3, 5), f(5), f(5, 2), gelu=None), ArgumentError, "None"),
    ("mlp", lambda: ops.mlp(f(3), b(3, 5), f(5), f(5, 2)), DtypeError, "ops.quantized_linear"),
    *(
        ("matmul_gelu_backward", partial(ops.matmul_gelu_backward, *given, **how), *error)
        for given, how, *error in (
            ((f(2, 3), f(5, 4), f(2, 5)), {}, ShapeError, "[2, 3]", "[5, 4]", "[2, 5]"),
            ((f(2, 3), f(5, 3), f(3, 5)), {}, ShapeError, "[2, 3]", "[5, 3]", "[3, 5]"),
            ((f(2, 3), f(5, 3), f(2, 4)), {}, ShapeError, "[2, 4]"),
            ((f(1, 2, 3), f(5, 3), f(1, 2, 5)), {}, ShapeError, "dy of rank 2"),
            ((f(2, 3), f(3), f(2, 5)), {}, ShapeError, "w of rank 2"),
            ((f(2, 3), f(5, 3), f(2, 5)), {"form": None}, ArgumentError, "None"),
            ((f(2, 3), f(5, 3), f(2, 5)), {"into_bias": f(3)}, ShapeError, "into_bias", "[3]"),
            ((f(2, 3), f(5, 3), f(2, 5)), {"into_bias": i(5)}, DtypeError, "into_bias"),
        )
    ),
    ("quantize", lambda: ops.quantize(f()), ShapeError, "scalar"),
    (
        "quantize",
        lambda: ops.quantize(tensor([1.0, math.inf])),
        ArgumentError,
        "finite",
        "infinity",
    ),
    ("dequantize", lambda: ops.dequantize(b(3, 4), f(4)), ShapeError, "scale", "[3]", "[4]"),
    ("dequantize", lambda: ops.dequantize(b(3), f(), "int64"), ArgumentError, "floating", "int64"),
    ("dequantize", lambda: ops.dequantize(b(), f()), ShapeError, "scalar"),
    (
        "quantized_linear",
        lambda: ops.quantized_linear(f(2, 3), b(5, 4), f(5)),
        ShapeError,
        "[2, 3]",
        "[5, 4]",
    ),
    ("quantized_linear", lambda: ops.quantized_linear(f(3), b(3), f(3)), ShapeError, "rank 2"),
    ("quantized_linear", lambda: ops.quantized_linear(f(3), f(5, 3), f(5)), DtypeError, "int8"),
    (
        "quantized_linear",
        lambda: ops.quantized_linear(f(3), b(5, 3), f(5, dtype="float64")),
        DtypeError,
        "float64",
    ),
    (
        "quantized_linear",
        lambda: ops.quantized_linear(f(3), b(5, 3), f(5), f(4)),
        ShapeError,
        "bias",
        "[4]",
    ),
    (
        "quantized_linear",
        lambda: ops.quantized_linear(f(3), b(5, 3), f(5), gelu="relu"),
        ArgumentError,
        "'relu'",
    ),
    (
        "quantized_embedding",
        lambda: ops.quantized_embedding(i(0, 7), b(7, 4), f(7)),
        ArgumentError,
        "[0, 7)",
        "vocabulary",
    ),
    (
        "quantized_embedding",
        lambda: ops.quantized_embedding(i(0), b(7, 4), f(7), f(9, 5)),
        ShapeError,
        "wpe",
        "[9, 5]",
    ),
]
