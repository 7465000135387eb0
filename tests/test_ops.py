"""Every op on every device, through the table; and what the table cannot say."""

import math
import re

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge import ops
from forge.backends import registry
from forge.dtypes import to_numpy
from forge.philox import threshold, words
from forge.tensor import Tensor, full, tensor, zeros
from forge.verify import CASES, check
from forge.verify.trial import gradients, outputs, tensors

DEVICES = ["reference", "cpu"]


def rows():
    """Every row in every dtype on the reference, and on the CPU where it has kernels."""
    for number, case in enumerate(CASES):
        for device in DEVICES:
            for dtype in case.dtypes:
                if device == "reference" or dtype != "float64":
                    name = f"{case.op}-{number}-{device}-{dtype}"
                    yield pytest.param(case, device, dtype, id=name)


@pytest.mark.parametrize(("case", "device", "dtype"), list(rows()))
def test_row(case, device, dtype):
    result = check(case, device, dtype)
    assert result.failures == (), f"{case.op} {case.name}"


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.composite], ids=lambda c: f"{c.op} {c.name}"
)
def test_composite_on_the_same_device(case):
    given_ = tensors(case.arguments(), "float32", forge.Device("cpu"))
    fused = outputs(case, given_)
    spelled = outputs(case, given_, case.composite)
    for name, x in fused.items():
        a, b = x.numpy().astype(np.float64), spelled[name].numpy().astype(np.float64)
        # Each side is within the bound of the exact value, the longer chain of roundings within 4.
        assert np.linalg.norm(a - b) <= 5 * case.bound("float32") * np.linalg.norm(b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_a_plan_has_the_shapes_and_dtypes_of_a_run(op, dtype):
    for case in CASES:
        if case.op == op and dtype in case.dtypes:
            drawn = case.arguments()
            run, plan = (tensors(drawn, dtype, forge.Device(d)) for d in ("cpu", "plan:cpu"))
            assert specs(outputs(case, plan)) == specs(outputs(case, run))
            if case.wrt:
                assert gradient_specs(case, plan) == gradient_specs(case, run)


def specs(values):
    return {name: (x.shape, x.dtype) for name, x in values.items()}


def gradient_specs(case, arguments):
    tape = forge.Tape()
    leaves = {name: tape.leaf(arguments[name]) for name in case.wrt}
    out, *_ = outputs(case, {**arguments, **leaves}).values()
    grads = tape.backward(out, full(out.shape, 1.0, out.dtype, out.device))
    return specs({name: grads[leaf] for name, leaf in leaves.items() if grads[leaf] is not None})


@pytest.mark.usefixtures("gc_paused")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op} {c.name}")
def test_a_plan_has_the_peak_of_a_run(case, dtype):
    """To the byte, scratch of the kernels included, recorded and not."""
    peaks = []
    for device in (forge.Device("plan:cpu"), forge.Device("cpu")):
        own = tensors(case.arguments(), dtype if dtype in case.dtypes else "float32", device)
        pool = device.pool
        for run in (outputs, *([gradient_specs] if case.wrt else [])):
            before = pool.in_use
            pool.reset_peak()
            run(case, own)
            peaks.append(pool.peak - before)
    assert peaks[: len(peaks) // 2] == peaks[len(peaks) // 2 :]


@pytest.mark.parametrize(
    ("dtype", "buffer"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float64"), ("float32", "float64")],
)
@pytest.mark.parametrize("op", sorted({case.op for case in CASES if case.wrt}))
def test_buffers_of_every_dtype_wide_enough(op, dtype, buffer):
    """The same gradient, whoever adds it: a kernel, or the tape where none sums that wide."""
    case = next(c for c in CASES if c.op == op and c.wrt)
    if dtype not in case.dtypes:
        pytest.skip(f"no op of {dtype}")
    own = tensors(case.arguments(), dtype, forge.Device("cpu"))
    rng = np.random.default_rng(0)
    results = outputs(case, own).values()
    seeds = [np.asarray(rng.standard_normal(x.shape)).astype(to_numpy(x.dtype)) for x in results]
    expected = gradients(case, own, seeds)
    into = {name: full(own[name].shape, 0.0, buffer, own[name].device) for name in case.wrt}
    gradients(case, own, seeds, into=into)
    for name, x in into.items():
        a, b = x.numpy().astype(np.float64), expected[name].astype(np.float64)
        bound = 2 * case.bound(dtype, gradient=True)
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b), name


# Pointwise ops against NumPy


@pytest.mark.parametrize("device", DEVICES)
@given(shapes=arrays.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=5))
def test_broadcasting_is_numpys(device, shapes):
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(1.0, 2.0, shape).astype(np.float32) for shape in shapes.input_shapes)
    dy = rng.standard_normal(shapes.result_shape).astype(np.float32)
    for op, expected, da, db in (
        (ops.add, a + b, dy, dy),
        (ops.sub, a - b, dy, -dy),
        (ops.mul, a * b, dy * b, dy * a),
        (ops.div, a / b, dy / b, -dy * a / b**2),
    ):
        tape = forge.Tape()
        x, y = (tape.leaf(tensor(v, device=device)) for v in (a, b))
        out = op(x, y)
        grads = tape.backward(out, tensor(dy, device=device))
        np.testing.assert_allclose(out.value.numpy(), expected, rtol=1e-6)
        for leaf, gradient, shape in ((x, da, a.shape), (y, db, b.shape)):
            total = summed(gradient + np.zeros_like(expected), shape)
            np.testing.assert_allclose(grads[leaf].numpy(), total, rtol=1e-4, atol=1e-4)


def summed(x, shape):
    """x summed over what broadcasting from `shape` added."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True).reshape(shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["neg", "exp", "tanh", "gelu", "log", "add", "mul", "maximum"])
def test_nan_and_infinity_pass_through(name, device):
    x = np.full((3, 33), 0.5, np.float32)
    x[0, 0], x[1, 32], x[2, 5] = np.nan, np.inf, np.nan
    op = getattr(ops, name)
    args = [tensor(x, device=device)] * (2 if name in ("add", "mul", "maximum") else 1)
    out = op(*args).numpy()
    assert np.isnan(out[[0, 2], [0, 5]]).all()
    assert np.isfinite(out).sum() >= 96
    assert not np.isnan(out[1, 32])


@pytest.mark.parametrize("device", DEVICES)
def test_ieee_at_the_edges(device):
    def make(*values):
        return tensor(np.array(values, np.float32), device=device)

    assert ops.div(make(1, -1, 0), make(0, 0, 0)).numpy().tolist()[:2] == [np.inf, -np.inf]
    assert np.isnan(ops.div(make(0), make(0)).numpy()).all()
    assert ops.log(make(0)).numpy().tolist() == [-np.inf]
    assert np.isnan(ops.log(make(-1)).numpy()).all()
    assert ops.exp(make(100, -200)).numpy().tolist() == [np.inf, 0]
    assert ops.tanh(make(50, -50)).numpy().tolist() == [1, -1]
    assert ops.gelu(make(30, -30)).numpy().tolist() == [30, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_softmax_is_shift_invariant_and_survives_large_scores(device):
    x = np.array([[1e4, 1e4 - 1.0, -1e4]], np.float32)
    small = ops.softmax(tensor(x - 1e4, device=device)).numpy()
    assert (ops.softmax(tensor(x, device=device)).numpy() == small).all()
    assert small[0, 2] == 0
    assert small.sum() == pytest.approx(1)


@pytest.mark.parametrize("device", DEVICES)
def test_masked_scores_do_not_matter(device):
    x = np.random.default_rng(0).standard_normal((2, 7, 9)).astype(np.float32)
    hidden = np.arange(9) > 2 + np.arange(7)[:, None]
    out = ops.softmax(tensor(x, device=device), causal=True, pos=2).numpy()
    x[:, hidden] = np.nan
    assert (ops.softmax(tensor(x, device=device), causal=True, pos=2).numpy() == out).all()
    assert (out[:, hidden] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_attention_does_not_look_ahead(device):
    qkv = np.random.default_rng(0).standard_normal((1, 70, 48)).astype(np.float32)
    out = ops.attention(tensor(qkv, device=device), 2).numpy()
    qkv[:, 40:] = 1e3
    again = ops.attention(tensor(qkv, device=device), 2).numpy()
    assert (again[:, :40] == out[:, :40]).all()


# Dropout

KEY = (1337, 5)


def key(device):
    return tensor(list(KEY), "int64", device)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_keeps_by_the_philox_words_and_divides(device):
    x = np.random.default_rng(0).uniform(1, 2, (3, 5, 33)).astype(np.float32)
    out = ops.dropout(tensor(x, device=device), 0.3, key(device), site=4, first_sample=7, samples=3)
    for sample in range(3):
        keep = words(165, KEY, stream=7 + sample, site=4).reshape(5, 33) >= round(0.3 * 2**32)
        expected = np.where(keep, x[sample] / (1 - 0.3), 0)
        np.testing.assert_allclose(out.numpy()[sample], expected, rtol=1e-6)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_has_one_mask_on_every_device(p):
    masks = [
        ops.dropout(tensor(np.ones((4, 129), np.float32), device=d), p, key(d)).numpy() != 0
        for d in DEVICES
    ]
    assert (masks[0] == masks[1]).all()
    # Five standard deviations of the share kept.
    assert abs(masks[0].mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / masks[0].size)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_does_not_depend_on_the_micro_batches(device):
    rng = np.random.default_rng(0)
    x, qkv = (rng.standard_normal((4, 7, n)).astype(np.float32) for n in (33, 30))

    def dropped(first, stop):
        a = tensor(x[first:stop], device=device)
        b = tensor(qkv[first:stop], device=device)
        options = {"site": 2, "first_sample": first}
        return (
            ops.dropout(a, 0.2, key(device), samples=stop - first, **options).numpy(),
            ops.attention(b, 2, 0.2, key(device), **options).numpy(),
        )

    whole = dropped(0, 4)
    for parts in zip(*(dropped(i, i + 1) for i in range(4)), strict=True):
        same = whole[0] if parts[0].shape[-1] == 33 else whole[1]
        assert (np.concatenate(parts) == same).all()


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_of_probability_zero_is_x_itself(device):
    x = tensor(np.ones((2, 3), np.float32), device=device)
    assert ops.dropout(x, 0.0, None) is x
    var = forge.Tape().leaf(x)
    assert ops.dropout(var, 0.0, None) is var


def test_an_int_key_means_that_seed_at_step_zero():
    x = tensor(np.ones(64, np.float32))
    same = ops.dropout(x, 0.5, tensor([9, 0], "int64")).numpy()
    assert (ops.dropout(x, 0.5, 9).numpy() == same).all()
    assert (ops.dropout(x, 0.5, 10).numpy() != same).any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_word_equal_to_the_threshold_is_kept(device):
    word = int(words(1, KEY)[0])
    p = word * 2.0**-32
    assert threshold(p) == word
    x = tensor(np.ones(1, np.float32), device=device)
    assert ops.dropout(x, p, key(device)).numpy() != 0
    assert ops.dropout(x, p + 2.0**-32, key(device)).numpy() == 0


# Buffers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_into_adds_to_a_float32_buffer_and_returns_it(device, dtype):
    rng = np.random.default_rng(0)
    a, b, into = (rng.integers(-4, 5, s).astype(np.float32) for s in ((7, 5), (7, 3), (5, 3)))
    x, y = (tensor(v, dtype, device) for v in (a, b))
    for call, expected in (
        (lambda buffer: ops.matmul(x, y, trans_a=True, into=buffer), a.T @ b + into),
        (lambda buffer: ops.sum_rows(y, into=buffer.view((15,)).view((3,))), None),
        (lambda buffer: ops.scale(y.view((15,)).view((5, 3)), 2.0, into=buffer), None),
    ):
        buffer = tensor(into, device=device)
        version = buffer.storage.version
        out = call(buffer)
        assert out.storage is buffer.storage
        assert out.dtype == "float32"
        assert buffer.storage.version > version
        if expected is not None:
            assert (buffer.numpy() == expected).all()


def test_reshape_shares_storage_and_version():
    x = tensor(np.arange(6.0, dtype=np.float32))
    y = ops.reshape(x, (2, 3))
    ops.scale(x, 1.0, into=x)
    assert y.storage is x.storage
    assert y.numpy().tolist() == [[0, 2, 4], [6, 8, 10]]


# Operators


def test_operators_are_the_ops():
    a, b = (tensor(np.array(v, np.float32)) for v in ([[1.0, 2.0], [3.0, 4.0]], [[2.0, 8.0]] * 2))
    for got, expected in (
        (a + b, a.numpy() + b.numpy()),
        (a - 1.0, a.numpy() - 1),
        (1 - a, 1 - a.numpy()),
        (3 * a, 3 * a.numpy()),
        (a * b, a.numpy() * b.numpy()),
        (a / b, a.numpy() / b.numpy()),
        (1 / a, 1 / a.numpy()),
        (-a, -a.numpy()),
        (a @ b, a.numpy() @ b.numpy()),
    ):
        assert isinstance(got, Tensor)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


def test_numpys_numbers_are_numbers_on_either_side():
    a = tensor(np.array([1.0, 2.0], np.float32))
    for two in (np.float32(2), np.float64(2), np.int64(2)):
        for x in (a, forge.Tape().leaf(a)):
            for got, expected in (
                (two * x, [2, 4]),
                (x * two, [2, 4]),
                (two + x, [3, 4]),
                (two - x, [1, 0]),
                (x / two, [0.5, 1]),
                (two / x, [2, 1]),
            ):
                assert type(got) is type(x)
                assert np.array(getattr(got, "value", got)).tolist() == expected
    # NumPy would otherwise take the Tensor apart, and the tape would see nothing.
    with pytest.raises(forge.DtypeError, match=r"\[mul\] .*ndarray"):
        np.ones(2, np.float32) * forge.Tape().leaf(a)


def test_where_takes_no_gradient_from_where_it_took_no_value():
    tape = forge.Tape()
    a, b = (tape.leaf(tensor(np.ones(3, np.float32))) for _ in range(2))
    out = ops.where(tensor(np.array([True, False, True])), a, b)
    grads = tape.backward(out, tensor(np.array([np.inf, np.nan, 1.0], np.float32)))
    assert grads[a].numpy().tolist() == [np.inf, 0, 1]
    assert np.isnan(grads[b].numpy()).tolist() == [False, True, False]


@pytest.mark.parametrize("order", [[1, 2, 0], [1, 0, 0], [0, 1, 2]])
def test_only_the_stable_order_is_taken_as_one(order):
    """With any other an id's rows would be several threads', which would race."""
    ids, x = tensor([3, 1, 3]), tensor(np.ones((3, 2), np.float32))
    for call in (
        lambda order: ops.embedding(ids, zeros((4, 2), "float32", x.device), order=order),
        lambda order: ops.scatter_add_rows_(zeros((4, 2), "float32", x.device), ids, x, order),
    ):
        with pytest.raises(forge.ArgumentError, match="the stable order that sorts the ids"):
            call(tensor(order))
        call(tensor([1, 0, 2]))


@pytest.mark.parametrize("key", [True, (0, False), np.array([0, 1]), [0], 1.0, None, (..., ...)])
def test_indices_of_other_kinds_are_refused(key):
    with pytest.raises(forge.ShapeError, match=r"\[index\] expected ints below \d or slices"):
        tensor(np.zeros((2, 3), np.float32))[key]


def test_numpys_integers_are_indices():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert tensor(x)[np.int64(1), np.int32(-1)].item() == x[1, -1]


@given(data=st.data())
def test_indexing_is_numpys(data):
    shape = data.draw(arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5))
    index = data.draw(arrays.basic_indices(shape, allow_newaxis=False))
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    keys = index if isinstance(index, tuple) else (index,)
    backwards = any(isinstance(k, slice) and (k.step or 1) < 0 for k in keys)
    if backwards:
        with pytest.raises(forge.ShapeError, match=r"\[index\]"):
            tensor(x)[index]
    else:
        tape = forge.Tape()
        leaf = tape.leaf(tensor(x))
        out = leaf[index]
        assert (out.value.numpy() == x[index]).all()
        assert out.shape == x[index].shape
        if out is not leaf:
            expected = np.zeros_like(x)
            expected[index] = 1
            ones = tensor(np.ones(out.shape, np.float32))
            assert (tape.backward(out, ones)[leaf].numpy() == expected).all()


# The registry


def test_strict_refuses_what_the_reference_would_serve():
    x = tensor(np.ones(3), "float64")
    assert registry.implementation("exp", "cpu", "float64") == "reference"
    ops.exp(x)
    with forge.strict():
        with pytest.raises(forge.FallbackError, match=r"\[exp\] .*float64"):
            ops.exp(x)
        ops.exp(tensor(np.ones(3), device="reference"))
        with pytest.raises(forge.FallbackError, match=r"\[exp\] .*float64"):
            ops.exp(tensor(x, device="plan:cpu"))
        # Moved, not computed with.
        assert tensor([1, 2, 3])[1:].numpy().tolist() == [2, 3]
        assert ops.cast(x, "float32").dtype == "float32"
    ops.exp(x)


# What is written about them


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_has_the_same_bits_with_and_without_its_gradient(dtype):
    """Two kernels: what is recorded is a pass of its own, and rerunning it must give its value."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        x, wte = (tensor(rng.standard_normal(shape), dtype) for shape in ((7, 9), (50, 9)))
        targets = tensor(rng.integers(0, 50, 7))
        recorded = ops.linear_cross_entropy(forge.Tape().leaf(x), wte, targets).value
        assert recorded.numpy() == ops.linear_cross_entropy(x, wte, targets).numpy()


@pytest.mark.parametrize("name", [n for n in ops.__all__ if callable(getattr(ops, n))])
def test_a_docstring_says_what_the_design_promises(name):
    text = " ".join(getattr(ops, name).__doc__.split())
    for what, pattern in (
        ("whether it is differentiable", r"\b(D|d)ifferentiable (once|twice)\b|Not differentiable"),
        ("which errors it raises", r"\bRaises\b"),
        ("how accurate it is", r"[Ee]xact|[Rr]ounding|\bulp\b|[Ee]rror in|error below|ccura"),
    ):
        assert re.search(pattern, text), f"{name} does not say {what}"
    primitive = getattr(getattr(ops, name), "primitive", None)
    if primitive is not None:
        claimed = {"twice": "ifferentiable twice", "once": "ifferentiable once", "no": "Not diff"}
        assert claimed[primitive.differentiable] in text
