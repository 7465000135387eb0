"""The tape: what is recorded, what is kept and freed, and what a sweep does and refuses."""

import gc
import weakref

import numpy as np
import pytest

import forge
from forge import (
    DeviceError,
    DtypeError,
    ShapeError,
    Tape,
    TapeError,
    Var,
    ops,
)
from forge.extend import op
from forge.tensor import Device, Storage

REFERENCE = Device("reference")


def ref(array, dtype="float64"):
    return forge.tensor(array, dtype, REFERENCE)


def normal(*shape, seed=0):
    return ref(np.random.default_rng(seed).standard_normal(shape))


def same(tensor, array):
    np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-12, atol=1e-15)


def rule_of(result, *, saves=("x",), name="test.op"):
    """An op on x and scale that returns x's copy, and whose rule returns `result(node, dy)`."""

    @op(saves=saves, name=name)
    def apply(x, other=None):
        return ops.scale(x, 1.0)

    apply.rule(result)
    return apply


@pytest.fixture
def flat():
    """Run a function twenty times without the collector: memory must stay as it was."""

    def check(run):
        run()
        gc.collect()
        gc.disable()
        try:
            before = REFERENCE.pool.in_use, sum(type(x) is Storage for x in gc.get_objects())
            for _ in range(20):
                run()
            after = REFERENCE.pool.in_use, sum(type(x) is Storage for x in gc.get_objects())
        finally:
            gc.enable()
        assert after == before

    return check


# Recording


def test_values_are_numbered_and_edges_point_back():
    tape = Tape()
    x, w = tape.leaf(normal(2, 3)), tape.leaf(normal(3, 12))
    q, k, _ = ops.split_heads(x @ w, 2)
    y = ops.sum(q * k + k)
    assert (x.id, w.id) == (0, 1)
    first = 2
    for index, node in enumerate(tape.nodes):
        assert (node.index, node.first) == (index, first)
        assert all(identity < first for identity in node.inputs.values())
        first += len(node.op.outputs)
    assert y.id == first - 1
    assert [node.op.name for node in tape.nodes][:4] == ["matmul", "split_heads", "mul", "add"]


def test_plain_tensors_record_nothing():
    tape = Tape()
    tape.leaf(normal(2, 2))
    out = ops.gelu(normal(2, 2) @ normal(2, 2))
    assert type(out) is forge.Tensor
    assert not tape.nodes


def test_recorded_values_have_the_bits_of_plain_ones():
    x, w = normal(5, 3), normal(3, 4)
    y = ops.gelu(Tape().leaf(x) @ w)
    assert y.value.numpy().tobytes() == ops.gelu(x @ w).numpy().tobytes()
    assert (y.shape, y.dtype, y.device) == ((5, 4), "float64", REFERENCE)


def test_only_declared_saves_are_kept():
    tape = Tape()
    a, b = tape.leaf(normal(3)), normal(3)
    ops.tanh(a * b + a)
    mul, add, tanh = tape.nodes
    assert set(mul.saved) == {"a", "b"}
    assert not add.saved
    assert set(tanh.saved) == {"out"}


def test_a_rule_sees_its_saves_and_attributes_and_nothing_else():
    seen = {}

    @op(saves=("x",), name="test.curious")
    def curious(x, y, gain=2.0, *, names_of=("a",)):
        return ops.scale(x, gain)

    @curious.rule
    def _(node, dy):
        seen.update(x=node.x, gain=node.gain, names_of=node.names_of, names=node.names())
        seen.update(spec=node.spec("y"), out=node.spec("out"), wants=node.wants("y"))
        for name in ("y", "out", "z"):
            with pytest.raises(TapeError, match=rf"\[test.curious\] .*'{name}'; it saves x"):
                getattr(node, name)
        with pytest.raises(TapeError, match="expected an input or output, got 'gain'"):
            node.spec("gain")
        return {"x": ops.scale(dy, node.gain)}

    tape = Tape()
    x, y = normal(3), normal(2, 2)
    leaf = tape.leaf(x)
    tape.backward(curious(leaf, y), ref(np.ones(3)))
    assert seen["x"] is x
    assert (seen["gain"], seen["names_of"], seen["names"]) == (2.0, ("a",), ["x", "y"])
    assert (seen["spec"].shape, seen["out"].shape, seen["wants"]) == ((2, 2), (3,), False)


def test_no_gradient_flows_through_integers():
    tape = Tape()
    x = tape.leaf(ref([1.7, -2.2]))
    whole = ops.cast(x, "int64")
    assert type(whole) is forge.Tensor
    same(tape.backward(ops.sum(ops.cast(whole, "float64") * x))[x], [1.0, -2.0])


def test_unwanted_gradients_are_not_computed():
    calls = []

    def rule(node, dy):
        calls.append((node.wants("x"), node.wants("other")))
        return {"x": dy, "other": dy}

    tape = Tape()
    y = rule_of(rule)(normal(3), tape.leaf(normal(3)))
    tape.backward(y, ref(np.ones(3)))
    assert calls == [(False, True)]


def test_a_leaf_is_a_floating_tensor():
    tape = Tape()
    for wrong in (ref([1], "int64"), ref([True], "bool"), np.ones(3), 1.0, tape.leaf(ref(1.0))):
        with pytest.raises(DtypeError, match=r"\[leaf\] expected a floating Tensor"):
            tape.leaf(wrong)


# The sweep


def test_gradients_of_a_small_network():
    x, w, b = normal(4, 3), normal(3, 2, seed=1), normal(2, seed=2)
    tape = Tape()
    vx, vw, vb = map(tape.leaf, (x, w, b))
    loss = ops.sum(ops.exp(vx @ vw + vb))
    grads = tape.backward(loss)
    e = np.exp(x.numpy() @ w.numpy() + b.numpy())
    same(grads[vx], e @ w.numpy().T)
    same(grads[vw], x.numpy().T @ e)
    same(grads[vb], e.sum(axis=0))


@pytest.mark.parametrize("uses", [1, 2, 3, 5])
@pytest.mark.parametrize("leaf", [True, False])
def test_gradients_of_a_value_used_several_times_are_summed(uses, leaf):
    tape = Tape()
    x = tape.leaf(normal(4))
    value = x if leaf else ops.scale(x, 1.0)
    total = ops.tanh(value)
    for i in range(1, uses):
        total = total + ops.scale(value, float(i))
    slope = 1.0 - np.tanh(x.value.numpy()) ** 2 + sum(range(uses))
    same(tape.backward(total, ref(np.ones(4)))[x], slope)


def test_adding_in_place_does_not_touch_a_gradient_that_is_used_elsewhere():
    """add's rule returns one object for both inputs, which here is also the seed and b's own."""
    tape = Tape()
    a, b, c = (tape.leaf(normal(3, seed=i)) for i in range(3))
    seed = ref([1.0, 10.0, 100.0])
    total = ops.scale(a, 5.0) + (ops.scale(a, 3.0) + (a + b) + c)
    total = a + total + a
    grads = tape.backward(total, seed)
    s = np.array([1.0, 10.0, 100.0])
    same(seed, s)
    same(grads[a], 11 * s)
    same(grads[b], s)
    same(grads[c], s)


def test_the_first_sum_is_new_and_then_it_is_added_to(monkeypatch):
    calls = []

    class Counting(Tape.arithmetic):
        @staticmethod
        def add(a, b):
            calls.append("add")
            return ops.add(a, b)

        @staticmethod
        def add_(a, b):
            calls.append("add_")
            Counting.__base__.add_(a, b)

    monkeypatch.setattr(Tape, "arithmetic", Counting)
    tape = Tape()
    x = tape.leaf(normal(3))
    same(tape.backward(x + x + x + x, ref(np.ones(3)))[x], 4 * np.ones(3))
    assert calls == ["add", "add_", "add_"]


@pytest.mark.parametrize("uses", [2, 3, 4])
def test_a_value_added_to_itself(uses):
    tape = Tape()
    x = tape.leaf(normal(3))
    total = x
    for _ in range(uses - 1):
        total = total + x
    same(tape.backward(total, ref(np.ones(3)))[x], uses * np.ones(3))


@pytest.mark.parametrize("shapes", [((3, 1), (4,)), ((), (2, 3)), ((1, 1), (2, 3)), ((0, 1), (3,))])
@pytest.mark.parametrize("function", [ops.add, ops.sub, ops.mul, ops.div])
def test_broadcast_gradients_are_summed(function, shapes):
    values = [ref(2.0 + np.random.default_rng(i).random(s)) for i, s in enumerate(shapes)]
    tape = Tape()
    a, b = map(tape.leaf, values)
    y = function(a, b)
    seed = normal(*y.shape)
    grads = tape.backward(y, seed)
    x, z, dy = (v.numpy() for v in (*values, seed))
    slopes = {"add": (1, 1), "sub": (1, -1), "mul": (z, x), "div": (1 / z, -x / z**2)}
    for leaf, slope in zip((a, b), slopes[function.primitive.name], strict=True):
        full = dy * slope
        lead = tuple(range(full.ndim - len(leaf.shape)))
        kept = full.sum(axis=lead)
        ones = tuple(i for i, n in enumerate(leaf.shape) if n == 1 != kept.shape[i])
        same(grads[leaf], kept.sum(axis=ones, keepdims=True))


def test_an_independent_leaf_has_none_and_a_root_may_be_a_leaf():
    tape = Tape()
    x, y = tape.leaf(normal(3)), tape.leaf(normal(3))
    seed = normal(3)
    grads = tape.backward(x, seed)
    same(grads[x], seed.numpy())
    assert grads[y] is None


def test_a_root_in_the_middle_of_the_tape():
    tape = Tape()
    x = tape.leaf(ref(2.0))
    y = x * x
    ops.exp(y)
    assert tape.backward(y)[x].item() == 4.0


def test_what_was_recorded_after_the_root_is_freed_first():
    calls = []
    tape = Tape()
    x = tape.leaf(ref(2.0))
    y = rule_of(lambda node, dy: calls.append(kept()) or {"x": dy})(x)
    kept = weakref.ref(ops.exp(y).value.storage)
    assert kept() is not None
    tape.backward(y)
    assert calls == [None]
    assert not tape.nodes


def test_a_node_without_gradient_is_passed_over():
    calls = []
    tape = Tape()
    x = tape.leaf(ref([1.0]))
    rule_of(lambda node, dy: calls.append(dy))(x)
    tape.backward(ops.scale(x, 2.0))
    assert not calls


def test_an_output_without_gradient_is_none_in_the_rule():
    tape = Tape()
    qkv = tape.leaf(normal(2, 12))
    _, k, _ = ops.split_heads(qkv, 2)
    dqkv = tape.backward(ops.sum(k))[qkv].numpy()
    assert dqkv.tolist() == [[0.0] * 4 + [1.0] * 4 + [0.0] * 4] * 2


def test_the_seed_is_one_for_a_root_of_one_element():
    for shape in ((), (1,), (1, 1)):
        tape = Tape()
        x = tape.leaf(ref(np.full(shape, 3.0)))
        assert tape.backward(x * x)[x].item() == 6.0


def test_seeds_that_do_not_fit():
    def sweep(seed=None, root=None):
        tape = Tape()
        x = tape.leaf(normal(2))
        tape.backward(ops.scale(x, 1.0) if root is None else root, seed)

    with pytest.raises(ShapeError, match=r"expected a seed for a root of shape \[2\], got none"):
        sweep()
    with pytest.raises(ShapeError, match=r"the seed as \[2\] float64 on reference, got"):
        sweep(normal(3))
    with pytest.raises(ShapeError, match="the seed"):
        sweep(1.0)
    with pytest.raises(DtypeError, match="the seed"):
        sweep(ref([1.0, 1.0], "float32"))
    with pytest.raises(DeviceError, match="the seed"):
        sweep(forge.tensor([1.0, 1.0], "float64", "cpu"))
    with pytest.raises(TapeError, match="expected a root on this tape, got Tensor"):
        sweep(root=normal(2))
    with pytest.raises(TapeError, match="expected a root on this tape, got Var"):
        sweep(root=Tape().leaf(ref(1.0)))


def test_gradients_are_asked_for_leaves_of_the_tape():
    tape, other = Tape(), Tape()
    x = tape.leaf(ref(1.0))
    y = ops.exp(x)
    grads = tape.backward(y)
    assert grads[x].item() == np.exp(1.0)
    for wrong in (y, other.leaf(ref(1.0))):
        with pytest.raises(TapeError, match="expected a leaf of the swept tape"):
            grads[wrong]
    del tape, x, y
    for _ in range(50):  # The address of a tape that is gone is soon another's.
        with pytest.raises(TapeError):
            grads[Tape().leaf(ref(1.0))]


# What is freed, and when


def test_a_second_sweep_needs_retain():
    tape = Tape()
    x = tape.leaf(ref(2.0))
    y = ops.exp(x) * x
    first = tape.backward(y, retain=True)[x].numpy()
    second = tape.backward(y, retain=True)[x].numpy()
    third = tape.backward(y)[x].numpy()
    assert first == second == third
    for again in (lambda: tape.backward(y), lambda: ops.exp(x), lambda: tape.leaf(ref(1.0))):
        with pytest.raises(TapeError, match=r"backward consumed; .* retain=True"):
            again()


@pytest.mark.usefixtures("gc_paused")
def test_saves_and_gradients_are_freed_as_the_sweep_goes():
    """A chain of n: before each rule, what the later nodes saved and gave is gone already."""
    in_use = []

    def rule(node, dy):
        in_use.append(REFERENCE.pool.in_use)
        return {"x": ops.mul(dy, node.x)}

    link, size = rule_of(rule), 8 * 1024
    tape = Tape()
    y = x = tape.leaf(normal(1024))
    for _ in range(6):
        y = link(y)
    kept = [weakref.ref(node.saved["x"][0].storage) for node in tape.nodes[1:]]
    assert all(ref() is not None for ref in kept)
    seed = ref(np.ones(1024))
    del y.value
    before = REFERENCE.pool.in_use
    grads = tape.backward(y, seed)
    assert all(ref() is None for ref in kept)
    # The first holds only the seed; the next its own gradient, less one save; and so on down.
    assert in_use == [before] + [before + size - i * size for i in range(1, 6)]
    assert not tape.nodes
    assert grads[x].size == 1024


@pytest.mark.usefixtures("gc_paused")
def test_a_summed_gradient_does_not_outlive_its_node():
    """The term that was added in place is gone before the next rule runs."""
    in_use = []

    def rule(node, dy):
        in_use.append(REFERENCE.pool.in_use)
        return {"x": ops.scale(dy, 2.0)}

    link, size = rule_of(rule, saves=()), 8 * 1024
    tape = Tape()
    x = ops.scale(tape.leaf(normal(1024)), 1.0)
    total = link(x) + link(x) + link(x)
    before = REFERENCE.pool.in_use
    tape.backward(total, ref(np.ones(1024)))
    # The seed; one gradient of x; their sum and nothing else.
    assert [n - before for n in in_use] == [size, 2 * size, 2 * size]


def step(fail_in=None, create_graph=False, recompute=()):
    """Like a training step: a block of a transformer, a loss, gradients into buffers."""
    rng = np.random.default_rng(0)
    tape = Tape(recompute=recompute)

    def leaf(*shape):
        value = ref(0.1 * rng.standard_normal(shape))
        return tape.leaf(value, into=None if create_graph else ref(np.zeros(shape)))

    width = 8
    h = leaf(2 * 3, width)
    for i in range(2):
        y = ops.layernorm(h, leaf(width), leaf(width))
        pre = ops.linear(y, leaf(width, 4 * width), leaf(4 * width), gelu="tanh")
        h = h + ops.linear(pre, leaf(4 * width, width), leaf(width))
        if i == 0 and fail_in == "forward":
            ops.matmul(h, leaf(3, 3))
        if i == 0 and fail_in == "rule":
            h = rule_of(lambda node, dy: ops.matmul(dy, ref([[1.0]])))(h)
    loss = ops.sum(h * h)
    grads = tape.backward(loss, create_graph=create_graph)
    assert grads is not None


@pytest.mark.parametrize("recompute", [(), ("linear.out",)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_steps_keep_memory_flat(flat, create_graph, recompute):
    flat(lambda: step(create_graph=create_graph, recompute=recompute))


@pytest.mark.parametrize("where", ["forward", "rule"])
def test_steps_that_fail_keep_memory_flat(flat, where):
    def run():
        with pytest.raises(ShapeError, match="matmul"):
            step(fail_in=where)

    flat(run)


def test_a_tape_holds_no_var_and_is_in_no_cycle():
    tape = Tape(recompute={"exp.out"})
    x = tape.leaf(normal(3), into=ref(np.zeros(3)))
    with tape.recompute():
        y = ops.exp(x) * x
    watched = [weakref.ref(y.value.storage), weakref.ref(x.value.storage)]
    gc.collect()
    gc.disable()
    try:
        assert not any(isinstance(r, Var) for r in gc.get_referents(tape, *tape.nodes))
        del y, x, tape
        assert [ref() for ref in watched] == [None, None]
    finally:
        gc.enable()


# Buffers


def test_into_accumulates_and_is_not_reported():
    w, x = normal(3, 2), normal(4, 3)
    buffer = ref(np.ones((3, 2)))
    for count in (1, 2):
        tape = Tape()
        leaf, other = tape.leaf(w, into=buffer), tape.leaf(x)
        grads = tape.backward(ops.sum(other @ leaf))
        once = x.numpy().T @ np.ones((4, 2))
        same(buffer, 1.0 + count * once)
        with pytest.raises(TapeError, match="without `into`"):
            grads[leaf]
        assert grads[other] is not None


@pytest.mark.parametrize("function", [lambda w, x: x @ w, lambda w, x: ops.tanh(w) * w + w])
def test_into_a_wider_buffer(function):
    """Both by kernels that accumulate and by the tape; several uses; the root itself."""
    w, x = (ref(v.numpy(), "float32") for v in (normal(3, 3), normal(3, 3, seed=1)))
    buffer = ref(np.full((3, 3), 1e9), "float64")
    tape = Tape()
    leaf = tape.leaf(w, into=buffer)
    y = function(leaf, x)
    tape.backward(y, ref(np.ones((3, 3)), "float32"))
    tape = Tape()
    plain = tape.leaf(w)
    expected = tape.backward(function(plain, x), ref(np.ones((3, 3)), "float32"))[plain].numpy()
    # float32 would keep nothing of the gradient beside 1e9.
    np.testing.assert_allclose(buffer.numpy() - 1e9, expected, rtol=1e-5, atol=1e-6)


def test_a_rule_may_return_the_wider_dtype_of_the_buffer():
    def rule(node, dy):
        return {"x": ref(np.full(2, 1 / 3))}

    buffer = ref(np.zeros(2))
    tape = Tape()
    y = rule_of(rule)(tape.leaf(ref([1.0, 1.0], "float32"), into=buffer))
    tape.backward(y, ref([1.0, 1.0], "float32"))
    assert buffer.numpy().tolist() == [1 / 3, 1 / 3]


def test_a_root_with_a_buffer():
    buffer = ref([1.0])
    tape = Tape()
    tape.backward(tape.leaf(ref([5.0]), into=buffer), ref([2.0]))
    assert buffer.item() == 3.0


def test_writing_a_buffer_raises_its_version():
    buffer = ref([1.0])
    tape = Tape()
    tape.backward(ops.tanh(tape.leaf(ref([5.0]), into=buffer)))
    assert buffer.storage.version == 1


def test_buffers_that_do_not_fit():
    value = ref([1.0, 2.0], "float32")
    for buffer, error in (
        (ref([0.0], "float32"), ShapeError),
        (ref([0.0, 0.0], "bfloat16"), DtypeError),
        (ref([0, 0], "int64"), DtypeError),
        (forge.tensor([0.0, 0.0], "float32", "cpu"), DeviceError),
    ):
        with pytest.raises(error, match=r"\[leaf\] expected `into` as \[2\] float32 on reference"):
            Tape().leaf(value, into=buffer)


def test_buffers_and_create_graph_exclude_each_other():
    buffer = ref([0.0])
    tape = Tape()
    x = tape.leaf(ref([1.0]), into=buffer)
    for root in (ops.exp(x), x):
        with pytest.raises(TapeError, match="without `into` for create_graph"):
            tape.backward(root, create_graph=True)
    assert buffer.item() == 0.0


# Changes in place


def bump(x):
    """An in-place op on a float32 matrix of rows."""
    ops.scatter_add_rows_(x, forge.tensor([0], device=x.device), ops.scale(x[:1], 1.0))


@pytest.mark.parametrize("change", ["the input", "a view", "the output", "a plain argument"])
def test_a_saved_tensor_that_changed_is_named(change):
    tape = Tape()
    x, other = normal(2, 3), normal(2, 3)
    leaf = tape.leaf(x)
    out = ops.exp(ops.scale(leaf, 2.0) * leaf * other)
    bump(
        {
            "the input": x,
            "a view": ops.reshape(x, (3, 2)),
            "the output": out.value,
            "a plain argument": other,
        }[change]
    )
    op_name, saved, node = {
        "the input": ("mul", "b", 1),
        "a view": ("mul", "b", 1),
        "the output": ("exp", "out", 3),
        "a plain argument": ("mul", "b", 2),
    }[change]
    message = (
        rf"\[{op_name}\] expected the saved '{saved}' of node {node} unchanged.*version 0, now 1"
    )
    with pytest.raises(TapeError, match=message):
        tape.backward(out, ref(np.ones((2, 3))))


def test_a_change_to_what_was_not_saved_is_no_error():
    tape = Tape()
    x = normal(2, 3)
    leaf = tape.leaf(x)
    y = ops.scale(leaf, 2.0) + leaf
    bump(x)
    bump(y.value)
    same(tape.backward(y, ref(np.ones((2, 3))))[leaf], np.full((2, 3), 3.0))


def test_views_of_one_buffer_share_its_version():
    flat = ref(np.arange(8.0))
    a, b = flat.view((2, 2)), flat.view((2, 2), 4)
    tape = Tape()
    y = ops.exp(tape.leaf(a)) * a
    bump(b)
    with pytest.raises(TapeError, match=r"\[mul\]"):
        tape.backward(y, ref(np.ones((2, 2))))
