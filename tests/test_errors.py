"""Misuse of ops: the right class, and a message that names the op and what it got."""

import math
from collections import Counter

import pytest

import forge
from forge import ops
from forge.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GradientError,
    ShapeError,
    TapeError,
)
from forge.ops.token import BLOCK, CACHES
from forge.tensor import Tensor, tensor
from forge.verify import CASES
from forge.verify.trial import outputs, tensors
from misuses import PRODUCTS, b, f, i

CPU, REFERENCE = forge.Device("cpu"), forge.Device("reference")


# These take any dtype.
ANY_DTYPE = {
    *(f"{op}-x" for op in ("reshape", "transpose", "slice", "cast", "take")),
    *("unslice-dy", "all_finite-values0"),
}


def rows():
    """A row of each op, with every Tensor argument that it has there."""
    for op in sorted({case.op for case in CASES}):
        case = next(c for c in CASES if c.op == op and c.attributes.get("p") in (None, 0.1, 0.2))
        given = tensors(case.arguments(), "float32", CPU)
        names = [name for name, x in given.items() if isinstance(x, Tensor)]
        yield from (pytest.param(case, name, id=f"{op}-{name}") for name in names)


ROWS = list(rows())
COUNT = Counter(row.values[0].op for row in ROWS)
PAIRED = [row for row in ROWS if COUNT[row.values[0].op] > 1]


def misuse(case, name, change):
    """The error of the case's op where one argument is changed."""
    given = tensors(case.arguments(), "float32", CPU)
    given[name] = change(given[name])
    with pytest.raises(forge.ForgeError) as caught:
        outputs(case, given)
    message = str(caught.value)
    assert message.startswith(f"[{case.op}] expected "), message
    assert ", got " in message
    return caught.type, message


@pytest.mark.parametrize(("case", "name"), ROWS)
def test_an_array_is_not_a_tensor(case, name):
    kind, message = misuse(case, name, lambda x: x.numpy())
    assert kind is DtypeError
    assert "ndarray" in message


@pytest.mark.parametrize(("case", "name"), PAIRED)
def test_tensors_live_on_one_device(case, name):
    kind, message = misuse(case, name, lambda x: tensor(x, device=REFERENCE))
    assert kind is DeviceError
    assert "reference" in message
    assert "cpu" in message


@pytest.mark.parametrize(("case", "name"), [row for row in ROWS if row.id not in ANY_DTYPE])
def test_floats_and_integers_are_not_mixed_up(case, name):
    swap = {"float32": "int64", "int64": "float32", "int8": "float32", "bool": "float32"}
    kind, message = misuse(case, name, lambda x: tensor(x, swap[x.dtype]))
    assert kind is DtypeError
    assert "float32" in message or "int64" in message


# What the table's rows cannot say: an op, a call of it, the error, and words of its message.

KEY = i(1, 2)
CACHE = f(2, 3, 10, 4)

MISUSES = [
    *PRODUCTS,
    ("add", lambda: ops.add(f(2, 3), f(2, 4)), ShapeError, "[2, 3]", "[2, 4]", "broadcast"),
    ("div", lambda: ops.div(f(2, 3), f(3, 3)), ShapeError, "[2, 3]", "[3, 3]"),
    ("mul", lambda: ops.mul(f(3), f(3, dtype="float64")), DtypeError, "float32", "float64", "cast"),
    ("add", lambda: ops.add(f(3), f(3, dtype="bfloat16")), DtypeError, "bfloat16"),
    ("add", lambda: ops.add(f(3), 1.0), DtypeError, "b: float", "forge.tensor"),
    ("add", lambda: ops.add(f(3), f(3, device="reference")), DeviceError, "cpu", "reference"),
    ("maximum", lambda: ops.maximum(f(2, 3), f(3)), ShapeError, "[2, 3]", "[3]"),
    ("where", lambda: ops.where(f(3), f(3), f(3)), DtypeError, "bool", "float32"),
    ("scale", lambda: ops.scale(f(3), f(2)), ArgumentError, "one element", "[2]"),
    ("scale", lambda: ops.scale(f(3), 2.0, into=f(4)), ShapeError, "into", "[4]"),
    ("scale", lambda: ops.scale(f(3), 2.0, into=f(3, dtype="bfloat16")), DtypeError, "x's dtype"),
    ("cast", lambda: ops.cast(f(3), "float16"), DtypeError, "'float16'", "bfloat16"),
    ("gelu", lambda: ops.gelu(f(3), form="relu"), ArgumentError, "'relu'", "tanh", "erf"),
    ("gelu_backward", lambda: ops.gelu_backward(f(3), f(3), form=None), ArgumentError, "None"),
    ("gelu_backward", lambda: ops.gelu_backward(f(3), f(4)), ShapeError, "[3]", "[4]"),
    ("dropout", lambda: ops.dropout(f(3), 1.0, KEY), ArgumentError, "p < 1", "1.0"),
    ("dropout", lambda: ops.dropout(f(3), -0.1, KEY), ArgumentError, "-0.1"),
    ("dropout", lambda: ops.dropout(f(3), math.nan, KEY), ArgumentError, "nan"),
    ("dropout", lambda: ops.dropout(f(3), 0.1, None), DtypeError, "key: NoneType"),
    ("dropout", lambda: ops.dropout(f(3), 0.1, i(1)), ShapeError, "key", "[2]", "[1]"),
    ("dropout", lambda: ops.dropout(f(3), 0.1, f(2)), DtypeError, "int64", "float32"),
    ("dropout", lambda: ops.dropout(f(3, 5), 0.1, KEY, samples=2), ArgumentError, "15", "2"),
    ("dropout", lambda: ops.dropout(f(3), 0.1, KEY, samples=0), ArgumentError, "samples"),
    ("reshape", lambda: ops.reshape(f(2, 3), (4,)), ShapeError, "6 elements", "[4]", "[2, 3]"),
    ("reshape", lambda: ops.reshape(f(2, 3), (-1, -1)), ShapeError, "[-1, -1]"),
    ("reshape", lambda: ops.reshape(f(2, 3), (-1, 4)), ShapeError, "[-1, 4]"),
    ("reshape", lambda: ops.reshape(f(0, 3), (-1, 0)), ShapeError, "[-1, 0]"),
    ("transpose", lambda: ops.transpose(f(2, 3), (0, 0)), ShapeError, "each axis", "(0, 0)"),
    ("transpose", lambda: ops.transpose(f(2, 3), (0, 2)), ShapeError, "rank-2", "2"),
    ("transpose", lambda: ops.transpose(f(2, 3), (0,)), ShapeError, "(0,)"),
    ("slice", lambda: ops.slice(f(5), (3,), (3,)), ShapeError, "[5]", "[3]"),
    ("slice", lambda: ops.slice(f(5), (-1,), (1,)), ShapeError, "[-1]"),
    ("slice", lambda: ops.slice(f(5), (0, 0), (1, 1)), ShapeError, "[0, 0]"),
    ("slice", lambda: ops.slice(f(5), (0,), (2,), (0,)), ShapeError, "step [0]"),
    ("slice", lambda: ops.slice(f(5), (0,), (-2,)), ShapeError, "[-2]"),
    ("unslice", lambda: ops.unslice(f(3), (3,), (5,)), ShapeError, "[5]"),
    ("index", lambda: f(2, 3)[2], ShapeError, "2"),
    ("index", lambda: f(2, 3)[0, 0, 0], ShapeError, "at most 2"),
    ("index", lambda: f(2, 3)["a"], ShapeError, "'a'"),
    ("concat", lambda: ops.concat(), ArgumentError, "at least one"),
    ("concat", lambda: ops.concat(f(2, 3), f(2, 4)), ShapeError, "[2, 3]", "[2, 4]"),
    ("concat", lambda: ops.concat(f(2, 3), f(2)), ShapeError, "[2, 3]", "[2]"),
    ("concat", lambda: ops.concat(f(2), f(2), axis=1), ShapeError, "axis", "1"),
    ("concat", lambda: ops.concat(f(2), f(2, dtype="float64")), DtypeError, "float64"),
    ("broadcast_to", lambda: ops.broadcast_to(f(2), (3,)), ShapeError, "[2]", "[3]"),
    ("broadcast_to", lambda: ops.broadcast_to(f(2, 3), (3,)), ShapeError, "[2, 3]", "[3]"),
    ("take", lambda: ops.take(f(3, 2), i(0, 3)), ArgumentError, "[0, 3)", "0 to 3"),
    ("take", lambda: ops.take(f(3, 2), i(-1)), ArgumentError, "-1"),
    ("take", lambda: ops.take(f(), i(0)), ArgumentError, "scalar"),
    ("take", lambda: ops.take(f(3), f(1)), DtypeError, "int64"),
    ("cast", lambda: ops.cast(f(3), "int8"), DtypeError, "int8", "float32", "ops.quantize"),
    ("tensor", lambda: tensor([1, 128], "int8"), DtypeError, "-128 to 127", "1 to 128"),
    ("tensor", lambda: tensor([0.5], "int8"), DtypeError, "integers", "ops.quantize"),
    ("tensor", lambda: tensor([math.nan], "int8"), DtypeError, "integers", "nan"),
    ("sum_rows", lambda: ops.sum_rows(f()), ArgumentError, "scalar"),
    ("sum_rows", lambda: ops.sum_rows(f(2, 3), into=f(2)), ShapeError, "into", "[3]", "[2]"),
    ("sum_rows", lambda: ops.sum_rows(f(2, 3), into=[0, 0]), DtypeError, "list"),
    ("sum_to", lambda: ops.sum_to(f(2, 3), (2,)), ShapeError, "[2, 3]", "[2]"),
    ("sum_to", lambda: ops.sum_to(f(3), (2, 3)), ShapeError, "[3]", "[2, 3]"),
    ("sum", lambda: ops.sum(f(2, 3), 2), ShapeError, "rank-2", "2"),
    ("mean", lambda: ops.mean(f(2, 3), -3), ShapeError, "rank-2", "-3"),
    ("mean", lambda: ops.mean(f(0, 3), 0), ArgumentError, "at least one", "[0, 3]"),
    ("max", lambda: ops.max(f(2, 3), (0, 5)), ShapeError, "5"),
    ("max", lambda: ops.max(f(0, 3)), ArgumentError, "at least one", "[0, 3]"),
    ("argmax", lambda: ops.argmax(f(3, 0)), ArgumentError, "at least one", "[3, 0]"),
    ("layernorm", lambda: ops.layernorm(f(2, 3), f(4), f(3)), ShapeError, "gamma", "[3]", "[4]"),
    ("layernorm", lambda: ops.layernorm(f(2, 3), f(3), f(3, 1)), ShapeError, "beta", "[3, 1]"),
    ("layernorm", lambda: ops.layernorm(f(), f(1), f(1)), ShapeError, "[]"),
    ("layernorm", lambda: ops.layernorm(f(2, 0), f(0), f(0)), ShapeError, "C > 0"),
    (
        "layernorm_backward",
        lambda: ops.layernorm_backward(f(2, 3), f(3), f(2, 4), f(2), f(2)),
        ShapeError,
        "dy",
    ),
    (
        "layernorm_backward",
        lambda: ops.layernorm_backward(f(2, 3), f(3), f(2, 3), f(3), f(2)),
        ShapeError,
        "mean",
        "[3]",
    ),
    (
        "add_layernorm",
        lambda: ops.add_layernorm(f(2, 3), f(3), None, f(3), f(3)),
        ShapeError,
        "branch",
        "[2, 3]",
    ),
    (
        "add_layernorm_backward",
        lambda: ops.add_layernorm_backward(f(2), None, f(2, 3), f(3), f(2), f(2)),
        ShapeError,
        "dsum",
    ),
    ("softmax", lambda: ops.softmax(f()), ShapeError, "[]"),
    ("softmax", lambda: ops.softmax(f(3), causal=True), ShapeError, "[..., T, N]", "[3]"),
    ("softmax", lambda: ops.softmax(f(3, 3), causal=True, pos=-1), ArgumentError, "-1"),
    ("softmax_backward", lambda: ops.softmax_backward(f(3), f(4)), ShapeError, "[3]", "[4]"),
    ("split_heads", lambda: ops.split_heads(f(2, 7, 10), 2), ShapeError, "3 × 2 heads", "10"),
    ("split_heads", lambda: ops.split_heads(f(2, 7, 12), 0), ShapeError, "0 heads"),
    ("split_heads", lambda: ops.split_heads(f(12), 2), ShapeError, "rank 2 or 3", "[12]"),
    ("unsplit_heads", lambda: ops.unsplit_heads(None, None, None, 2), ShapeError, "none"),
    ("unsplit_heads", lambda: ops.unsplit_heads(f(4, 2, 3), f(4, 2, 2), None, 2), ShapeError, "dk"),
    ("unsplit_heads", lambda: ops.unsplit_heads(f(3, 2, 3), None, None, 2), ShapeError, "2 heads"),
    ("merge_heads", lambda: ops.merge_heads(f(3, 2, 4), 2), ShapeError, "2 heads", "3"),
    ("merge_heads", lambda: ops.merge_heads(f(3, 2)), ShapeError, "rank 3", "[3, 2]"),
    ("unmerge_heads", lambda: ops.unmerge_heads(f(2, 3), 2), ShapeError, "2 heads", "3"),
    ("attention", lambda: ops.attention(f(2, 7, 10), 2), ShapeError, "10"),
    ("attention", lambda: ops.attention(f(6), 2), ShapeError, "rank 2 or 3", "[6]"),
    ("attention", lambda: ops.attention(f(7, 12), 2, 1.5, KEY), ArgumentError, "1.5"),
    ("attention", lambda: ops.attention(f(7, 12), 2, 0.1), DtypeError, "key"),
    (
        "attention_backward",
        lambda: ops.attention_backward(f(2, 5, 12), f(2, 5, 4), f(2, 5, 3), f(2, 2, 5), 2),
        ShapeError,
        "dout",
    ),
    (
        "attention_backward",
        lambda: ops.attention_backward(f(2, 5, 12), f(2, 5, 3), f(2, 5, 3), f(2, 2, 5), 2),
        ShapeError,
        "out",
    ),
    (
        "attention_backward",
        lambda: ops.attention_backward(f(2, 5, 12), f(2, 5, 4), f(2, 5, 4), f(2, 5), 2),
        ShapeError,
        "lse",
    ),
    (
        "attention_backward",
        lambda: ops.attention_backward(f(2, 5, 12), f(2, 5, 4), f(2, 5, 4), f(2, 3, 5), 3),
        ShapeError,
        "3 × 3 heads",
    ),
    ("cached_attention", lambda: ops.cached_attention(f(2, 12), CACHE, CACHE, 0), ShapeError, "q"),
    (
        "cached_attention",
        lambda: ops.cached_attention(f(2, 1, 11), CACHE, CACHE, 0),
        ShapeError,
        "H D=11",
        "[2, 3, 10, 4]",
    ),
    (
        "cached_attention",
        lambda: ops.cached_attention(f(1, 1, 12), CACHE, CACHE, 0),
        ShapeError,
        "B=1",
    ),
    (
        "cached_attention",
        lambda: ops.cached_attention(f(2, 3, 12), CACHE, CACHE, 8),
        ArgumentError,
        "[0, 10)",
        "8 to 10",
        "there is room for",
    ),
    (
        "cached_attention",
        lambda: ops.cached_attention(f(2, 1, 12), CACHE, CACHE, i(0, 10)),
        ArgumentError,
        "0 to 10",
    ),
    (
        "cached_attention",
        lambda: ops.cached_attention(f(2, 1, 12), CACHE, CACHE, i(0)),
        ShapeError,
        "pos",
        "[2]",
        "[1]",
    ),
    (
        "cached_attention",
        lambda: ops.cached_attention(f(2, 1, 12), CACHE, CACHE, 1.5),
        DtypeError,
        "pos: float",
    ),
    ("decode_token_", lambda: decode_token(pos=i(0, 1, 2)), ShapeError, "pos", "[2]", "[3]"),
    ("decode_token_", lambda: decode_token(wte=f(7, 11)), ShapeError, "[7, 11]", "[2, 3, 10, 4]"),
    ("decode_token_", lambda: decode_token(w_fc=f(12, 24)), ShapeError, "w_fc", "[12, 48]"),
    ("decode_token_", lambda: decode_token(beta=f(11)), ShapeError, "beta", "[12]"),
    ("decode_token_", lambda: decode_token(rows=8), ArgumentError, "rows in [0, 7]", "8"),
    ("decode_token_", lambda: decode_token(ids=i(0, 5), rows=5), ArgumentError, "ids in [0, 5)"),
    ("decode_token_", lambda: decode_token(pos=i(0, 10)), ArgumentError, "there is room for"),
    ("decode_token_", lambda: decode_token(b_out=None), ArgumentError, "14 Tensors", "b_out"),
    ("kv_append_", lambda: ops.kv_append_(CACHE, f(2), f(2, 1, 36), 0), ShapeError, "v_cache"),
    ("kv_append_", lambda: ops.kv_append_(CACHE, CACHE, f(2, 1, 36), -1), ArgumentError, "-1"),
    ("kv_append_", lambda: ops.kv_append_(CACHE, CACHE, f(2, 1, 37), 0), ShapeError, "37"),
    ("kv_append_", lambda: ops.kv_append_(f(2, 3), f(2, 3), f(2, 1, 36), 0), ShapeError, "rank 4"),
    (
        "embedding",
        lambda: ops.embedding(i(0, 7), f(7, 4)),
        ArgumentError,
        "[0, 7)",
        "0 to 7",
        "vocabulary",
    ),
    ("embedding", lambda: ops.embedding(i(5), f(7, 4), rows=5), ArgumentError, "[0, 5)"),
    ("embedding", lambda: ops.embedding(i(5), f(7, 4), rows=8), ArgumentError, "rows", "8"),
    ("embedding", lambda: ops.embedding(f(2), f(7, 4)), DtypeError, "int64", "float32"),
    ("embedding", lambda: ops.embedding(i(0), f(7)), ShapeError, "wte", "[7]"),
    ("embedding", lambda: ops.embedding(i(0), f(7, 4), f(9, 5)), ShapeError, "[N, 4]", "[9, 5]"),
    (
        "embedding",
        lambda: ops.embedding(i(0, 1, 2), f(7, 4), f(2, 4)),
        ArgumentError,
        "positions in [0, 2)",
        "0 to 2",
    ),
    (
        "embedding",
        lambda: ops.embedding(i(0, 1), f(7, 4), order=i(0)),
        ShapeError,
        "order",
        "[2]",
        "[1]",
    ),
    (
        "embedding",
        lambda: ops.embedding(i(0, 1), f(7, 4), order=i(0, 2)),
        ArgumentError,
        "order",
        "0 to 2",
    ),
    (
        "scatter_add_rows_",
        lambda: ops.scatter_add_rows_(f(3, 4), i(3), f(1, 4)),
        ArgumentError,
        "[0, 3)",
    ),
    (
        "scatter_add_rows_",
        lambda: ops.scatter_add_rows_(f(3, 4), i(0), f(2, 4)),
        ShapeError,
        "x",
        "[1, 4]",
        "[2, 4]",
    ),
    (
        "scatter_add_rows_",
        lambda: ops.scatter_add_rows_(f(3, 4, dtype="bfloat16"), i(0), f(1, 4)),
        DtypeError,
        "x's dtype",
        "bfloat16",
    ),
    ("scatter_rows", lambda: ops.scatter_rows(f(2, 4), i(0, 3), 3), ArgumentError, "[0, 3)"),
    ("scatter_rows", lambda: ops.scatter_rows(f(2), i(0, 1), 3), ShapeError, "rank 2"),
    ("add_positions_", lambda: ops.add_positions_(f(3, 4), f(1, 2, 4), 2), ArgumentError, "2 to 3"),
    ("add_positions_", lambda: ops.add_positions_(f(3, 4), f(1, 2, 5)), ShapeError, "x"),
    (
        "cross_entropy",
        lambda: ops.cross_entropy(f(2, 5), i(0, 5)),
        ArgumentError,
        "targets in [0, 5)",
        "0 to 5",
        "vocabulary",
    ),
    ("cross_entropy", lambda: ops.cross_entropy(f(2, 5), i(-1, 0)), ArgumentError, "-1 to 0"),
    (
        "cross_entropy",
        lambda: ops.cross_entropy(f(2, 5), i(0)),
        ShapeError,
        "targets",
        "[2]",
        "[1]",
    ),
    ("cross_entropy", lambda: ops.cross_entropy(f(2, 0), i(0, 0)), ShapeError, "[2, 0]"),
    ("cross_entropy", lambda: ops.cross_entropy(f(2, 5), f(2)), DtypeError, "int64"),
    ("cross_entropy", lambda: ops.cross_entropy(f(1, 5), i(0), f(1)), ShapeError, "weight", "[1]"),
    (
        "cross_entropy_backward",
        lambda: ops.cross_entropy_backward(f(2, 5), i(0, 1), f(3), f(), f()),
        ShapeError,
        "lse",
    ),
    (
        "linear_cross_entropy",
        lambda: ops.linear_cross_entropy(f(2, 3), f(5, 4), i(0, 1)),
        ShapeError,
        "[2, 3]",
        "[5, 4]",
    ),
    (
        "linear_cross_entropy",
        lambda: ops.linear_cross_entropy(f(2, 3), f(5, 3), i(0, 4), rows=4),
        ArgumentError,
        "targets in [0, 4)",
    ),
    (
        "linear_cross_entropy",
        lambda: ops.linear_cross_entropy(f(2, 3), f(5, 3), i(0, 4), rows=6),
        ShapeError,
        "6",
    ),
    ("global_norm", lambda: ops.global_norm(i(1)), DtypeError, "int64"),
    ("all_finite", lambda: ops.all_finite(), ArgumentError, "at least one"),
    ("all_finite", lambda: ops.all_finite(f(), f(2)), ShapeError, "values1", "[2]"),
    ("adamw_", lambda: adamw(grad=f(5)), ShapeError, "grad", "[4]", "[5]"),
    ("adamw_", lambda: adamw(lr=f(1)), ShapeError, "lr", "[1]"),
    ("adamw_", lambda: adamw(tiles=i(0, 4, 0)), ShapeError, "tiles", "[3]"),
    ("adamw_", lambda: adamw(tiles=tensor([[0, 9, 0]], "int64")), ArgumentError, "tiles", "9"),
    ("adamw_", lambda: adamw(working=f(3, dtype="bfloat16")), ShapeError, "working", "[3]"),
    ("adamw_", lambda: adamw(working=f(4)), DtypeError, "working", "bfloat16"),
    ("adamw_", lambda: adamw(rates=f(1, 2, dtype="float64")), DtypeError, "rates", "float64"),
    ("adamw_", lambda: adamw(rates=f(2)), ShapeError, "rates", "[2]"),
    ("adamw_", lambda: adamw(tiles=tensor([[0, 4, 1]], "int64")), ArgumentError, "segments", "1"),
]


def adamw(**changes):
    scalars = {"lr": f(), "step": tensor(0), "norm": f(), "finite": tensor(1)}
    arguments = {name: f(4) for name in ("param", "grad", "m", "v")} | scalars
    arguments |= {"tiles": tensor([[0, 4, 0]], "int64"), "rates": f(1, 2), **changes}
    return ops.adamw_(**arguments)


def decode_token(**changes):
    block = {name: f(12) for name in BLOCK} | {name: f(2, 3, 10, 4) for name in CACHES}
    for name, k, m in (("attn", 12, 36), ("proj", 12, 12), ("fc", 12, 48), ("out", 48, 12)):
        block |= {f"w_{name}": f(k, m), f"b_{name}": f(m)}
    block = {name: changes.pop(name, x) for name, x in block.items()}
    rest = {"ids": i(0, 6), "wte": f(7, 12), "wpe": f(10, 12), "gamma": f(12), "beta": f(12)}
    given = [x for x in block.values() if x is not None]
    return ops.decode_token_(*given, **{**rest, "pos": i(0, 1), **changes})


@pytest.mark.parametrize(
    "misuse", [pytest.param(m, id=f"{m[0]}-{n}") for n, m in enumerate(MISUSES)]
)
def test_misuse_is_named(misuse):
    op, call, kind, *words = misuse
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(f"[{op}] expected "), message
    assert ", got " in message
    missing = [word for word in words if word not in message]
    assert not missing, message


def test_every_op_has_its_misuses_in_the_list():
    simple = {"sub", "neg", "exp", "log", "tanh", "global_norm"}  # The table's rows say it all.
    assert {case.op for case in CASES} - simple <= {misuse[0] for misuse in MISUSES}


# Vars


def leaf(*shape):
    return forge.Tape().leaf(f(*shape))


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("global_norm", lambda: ops.global_norm(leaf(3))),
        ("all_finite", lambda: ops.all_finite(leaf())),
        ("adamw_", lambda: adamw(grad=leaf(4))),
        ("scatter_add_rows_", lambda: ops.scatter_add_rows_(leaf(3, 4), i(0), f(1, 4))),
        ("add_positions_", lambda: ops.add_positions_(f(3, 4), leaf(1, 2, 4))),
        ("kv_append_", lambda: ops.kv_append_(CACHE, CACHE, leaf(2, 1, 36), 0)),
        ("quantize", lambda: ops.quantize(leaf(3, 4))),
        (
            "matmul_gelu_backward",
            lambda: ops.matmul_gelu_backward(leaf(2, 3), f(5, 3), f(2, 5)),
        ),
        ("cached_attention", lambda: ops.cached_attention(leaf(2, 1, 12), CACHE, CACHE, 0)),
        (
            "attention_backward",
            lambda: ops.attention_backward(leaf(5, 12), f(5, 4), f(5, 4), f(1, 2, 5), 2),
        ),
    ],
)
def test_an_op_without_a_gradient_refuses_a_var(op, call):
    with pytest.raises(GradientError, match=rf"^\[{op}\] expected .*not differentiable"):
        call()


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("attention", lambda x: ops.attention(x, 2)),
        ("embedding", lambda x: ops.embedding(i(0, 1), x)),
        ("quantized_linear", lambda x: ops.quantized_linear(x, b(5, 6), f(5))),
        ("cross_entropy", lambda x: ops.cross_entropy(x, i(*[0] * 6))),
        ("add_layernorm", lambda x: ops.add_layernorm(x, x, None, f(6), f(6))[1]),
    ],
)
def test_an_op_differentiable_once_refuses_a_second_sweep(op, call):
    tape = forge.Tape()
    out = call(tape.leaf(f(6, 6)))
    with pytest.raises(GradientError, match=rf"^\[{op}\] expected .* twice"):
        tape.backward(out, f(*out.shape), create_graph=True)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("scale", lambda x, w: ops.scale(x, w)),
        ("quantized_linear", lambda x, w: ops.quantized_linear(x, b(1, 3), ops.reshape(w, (1,)))),
        ("cross_entropy", lambda x, w: ops.cross_entropy(x, i(0, 0), w)),
        ("linear_cross_entropy", lambda x, w: ops.linear_cross_entropy(x, f(5, 3), i(0, 0), w)),
    ],
)
def test_a_constant_argument_refuses_a_var(op, call):
    tape = forge.Tape()
    out = call(tape.leaf(f(2, 3)), tape.leaf(f()))
    with pytest.raises(
        GradientError, match=rf"^\[{op}\] expected a Tensor for (factor|weight|scale)"
    ):
        tape.backward(out, f(*out.shape))


def test_vars_of_two_tapes_do_not_mix():
    with pytest.raises(TapeError, match=r"^\[add\] expected Vars of one tape, got"):
        ops.add(leaf(3), leaf(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: ops.matmul(a, b, b_rows=2),
        lambda a, b: ops.matmul(a, b, into=f(2, 2)),
        lambda a, b: ops.matmul(ops.reshape(a, (1, 2, 3)), b),
    ],
)
def test_what_matmul_does_not_record(call):
    tape = forge.Tape()
    with pytest.raises(forge.ForgeError, match=r"^\[matmul\] expected "):
        call(tape.leaf(f(2, 3)), tape.leaf(f(3, 2)))
