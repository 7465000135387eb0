"""`mlp` against the two `linear`s it stands for: the same bits, forward and backward."""

import importlib
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

import forge
from forge import Tape, ops, tensor
from forge.backends import registry
from forge.extend import check_grads
from forge.tensor import Device

# `forge.ops.linear` is the op.
products = importlib.import_module("forge.ops.linear")
NAMES = ("x", "w", "bias", "w_out", "bias_out")
DEVICES = [
    ("reference", "float64"),
    ("reference", "float32"),
    ("cpu", "float32"),
    ("cpu", "bfloat16"),
]


def two_linears(x, w, bias, w_out, bias_out=None, gelu="tanh"):
    return ops.linear(ops.linear(x, w, bias, gelu=gelu), w_out, bias_out)


def arguments(device="reference", dtype="float64", rows=(2, 13), k=24, m=40, n=16, absent=()):
    shapes = {"x": (*rows, k), "w": (k, m), "bias": (m,), "w_out": (m, n), "bias_out": (n,)}
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    return {
        name: None if name in absent else tensor(array, dtype, device)
        for name, array in drawn.items()
    }


def swept(function, given, *, wanted=NAMES, into=False, seed=1, tape=None, **how):
    """The output and the gradients of some arguments, by name."""
    tape = Tape() if tape is None else tape
    wide = {"bfloat16": "float32"}
    buffers, leaves = {}, dict(given)
    for name in wanted:
        x = given[name]
        if x is not None:
            start = np.full(x.shape, 0.25)
            if into:
                buffers[name] = tensor(start, wide.get(x.dtype, x.dtype), x.device)
            leaves[name] = tape.leaf(x, into=buffers.get(name))
    out = function(*leaves.values(), **how)
    dy = np.random.default_rng(seed).standard_normal(out.shape)
    grads = tape.backward(out, tensor(dy, out.dtype, out.device))
    vars_ = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, forge.Var)}
    found = buffers or {name: grads[leaf] for name, leaf in vars_.items()}
    return {"out": out.value, **found}


def assert_same_bits(some, others):
    assert some.keys() == others.keys()
    for name, x in some.items():
        assert x.dtype == others[name].dtype
        assert x.numpy().tobytes() == others[name].numpy().tobytes(), name


@pytest.mark.parametrize("into", [False, True], ids=["returned", "into buffers"])
@pytest.mark.parametrize("gelu", ["tanh", "erf"])
@pytest.mark.parametrize("absent", [(), ("bias",), ("bias_out",), ("bias", "bias_out")])
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_the_bits_are_those_of_two_linears(device, dtype, absent, gelu, into):
    given = arguments(device, dtype, absent=absent)
    found = swept(ops.mlp, given, into=into, gelu=gelu)
    assert_same_bits(found, swept(two_linears, given, into=into, gelu=gelu))


@pytest.mark.parametrize("rows", [(), (1,), (5,), (8,), (3, 3), (130,), (0,)])
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_without_a_var_too(device, dtype, rows):
    given = arguments(device, dtype, rows=rows)
    assert_same_bits({"out": ops.mlp(*given.values())}, {"out": two_linears(*given.values())})


def called(run):
    """The names of the kernels that a function calls, in order."""
    names = []

    def around(name, kernel):
        return lambda *args, **keywords: names.append(name) or kernel(*args, **keywords)

    with registry.watched(around):
        run()
    return names


@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [
        (("x",), ["matmul_gelu_backward", "matmul"]),
        (("w",), ["matmul_gelu_backward", "matmul"]),
        (("bias",), ["matmul_gelu_backward", "sum_rows"]),
        (("w_out",), ["matmul"]),
        (("bias_out",), ["sum_rows"]),
        (("x", "bias_out"), ["sum_rows", "matmul_gelu_backward", "matmul"]),
    ],
)
def test_only_what_is_wanted_is_computed(wanted, kernels):
    given = arguments("cpu", "float32")
    assert called(lambda: swept(ops.mlp, given, wanted=wanted)) == ["linear", "linear", *kernels]


@pytest.mark.parametrize("into", [False, True])
def test_each_argument_may_be_frozen(into):
    given = arguments("cpu", "float32")
    whole = swept(ops.mlp, given, into=into)
    for count in (1, 2, 4):
        for wanted in itertools.combinations(NAMES, count):
            found = swept(ops.mlp, given, wanted=wanted, into=into)
            assert_same_bits(found, {name: whole[name] for name in ("out", *wanted)})


def test_the_biases_gradient_takes_no_pass_of_its_own():
    """With a buffer the kernel adds to it."""
    given = arguments("cpu", "float32")
    kernels = called(lambda: swept(ops.mlp, given, wanted=("bias",), into=True))
    assert kernels == ["linear", "linear", "matmul_gelu_backward"]


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_second_derivatives(gelu):
    given = arguments(rows=(3,), k=4, m=5, n=2)
    check_grads(lambda *xs: ops.mlp(*xs, gelu=gelu), *given.values(), order=2)


def test_a_recorded_sweep_asks_for_no_extra():
    """They are no functions of x; dropped, they are not made again in vain."""
    given = arguments(rows=(3,), k=4, m=5, n=2)

    def sweep(recompute):
        tape = Tape(recompute=recompute)
        leaves = {name: tape.leaf(x) for name, x in given.items()}
        out = ops.mlp(*leaves.values())
        grads = {}

        def first():
            grads.update({"": tape.backward(ops.sum(out * out), create_graph=True)})

        kernels = called(first)
        dx = grads[""][leaves["x"]]
        second = tape.backward(ops.sum(dx * dx))
        return kernels, {name: second[leaf] for name, leaf in leaves.items()}

    (kernels, kept), (again, remade) = (sweep(names) for names in ((), {"mlp.hidden", "mlp.pre"}))
    assert kernels == again
    assert_same_bits(kept, remade)


# Memory


@pytest.mark.usefixtures("gc_paused")
def test_without_a_var_nothing_is_kept():
    given = arguments("reference", rows=(64,))
    pool = Device("reference").pool
    pool.reset_peak()
    before = pool.in_use
    out = ops.mlp(*given.values())
    assert pool.in_use - before == out.nbytes
    # What gelu gave lives until the second product is done.
    assert pool.peak - before == out.nbytes + 64 * 40 * 8


@pytest.mark.usefixtures("gc_paused")
@pytest.mark.parametrize(
    ("wanted", "wide"),
    [(NAMES, 2), (("x",), 1), (("w", "bias"), 1), (("w_out",), 1), (("bias_out",), 0)],
)
def test_only_what_the_wanted_gradients_read_is_kept(wanted, wide):
    given = arguments("reference", rows=(64,))
    pool = Device("reference").pool
    tape = Tape()
    before = pool.in_use
    leaves = {name: tape.leaf(x) if name in wanted else x for name, x in given.items()}
    out = ops.mlp(*leaves.values())
    assert pool.in_use - before == out.value.nbytes + wide * 64 * 40 * 8


# Recomputation


@pytest.mark.parametrize("exact", [True, False], ids=["from pre", "by the first product"])
@pytest.mark.parametrize(("gelu", "absent"), [("tanh", ()), ("erf", ()), ("tanh", ("bias",))])
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_hidden_is_made_again(monkeypatch, device, dtype, gelu, absent, exact):
    """As on a GPU in bfloat16 too, where gelu of what is kept has other bits."""
    if not exact:
        monkeypatch.setattr(products, "_gelu_is_exact", lambda pre: False)
    given = arguments(device, dtype, absent=absent)

    def run(recompute):
        return swept(ops.mlp, given, tape=Tape(recompute=recompute), gelu=gelu)

    assert_same_bits(run(()), run({"mlp.hidden"}))
    plain, remaking = (called(lambda names=names: run(names)) for names in ((), {"mlp.hidden"}))
    assert plain[:2] == remaking[:2] == ["linear", "linear"]
    assert remaking[2:] == ["gelu" if exact else "linear", *plain[2:]]


def test_a_gpu_in_bfloat16_takes_the_product_again():
    places = itertools.product(("cpu", "cuda"), ("float32", "bfloat16"))
    again = [
        (kind, dtype)
        for kind, dtype in places
        if not products._gelu_is_exact(
            SimpleNamespace(device=SimpleNamespace(kind=kind), dtype=dtype)
        )
    ]
    assert again == [("cuda", "bfloat16")]


@pytest.mark.parametrize(
    "dropped", [{"mlp.pre"}, {"mlp.pre", "mlp.hidden"}, {"mlp.out"}, {"mlp.hidden", "mlp.out"}]
)
def test_whatever_is_dropped_the_bits_are_the_same(dropped):
    given = arguments("cpu", "float32")
    again = swept(ops.mlp, given, tape=Tape(recompute=dropped))
    assert_same_bits(swept(ops.mlp, given), again)


# On the card


@pytest.mark.parametrize("device", ["reference", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_in_bfloat16_one_rounding_serves_product_and_slope(device):
    """Of the fused product's sum, where it has an epilogue for it; the two ops round twice."""
    rows, n, m = (64, 48, 80) if device == "reference" else (4096, 768, 3072)
    rng = np.random.default_rng(0)
    dy, pre = rng.standard_normal((rows, n)), rng.standard_normal((rows, m))
    w = rng.standard_normal((m, n)) / math.sqrt(n)
    given = [tensor(x, "bfloat16", device) for x in (dy, w, pre)]
    bias = tensor(np.zeros(m), "float32", device)
    fused = ops.matmul_gelu_backward(*given, into_bias=bias).numpy().astype(np.float64)
    twice = ops.gelu_backward(given[2], ops.matmul(given[0], given[1], trans_b=True))
    wide = [tensor(x, "float64", "reference") for x in given]
    exact = ops.matmul_gelu_backward(*wide).numpy()

    def error(x, other=exact):
        return np.linalg.norm(x - other) / np.linalg.norm(other)

    two = twice.numpy().astype(np.float64)
    # A rounding to 8 bits is wrong by 2^-8 at most, and by 0.42 of that in norm.
    assert error(fused) < 0.5 * 2**-8
    assert error(fused) < 0.85 * error(two)
    assert error(fused, two) < 2**-8
    assert error(bias.numpy(), fused.sum(0)) < 0.5 * 2**-8
