"""Recomputation: dropped by name or by block, made again with the same bits; and plans."""

import functools
import gc
import re

import numpy as np
import pytest

import forge
from forge import NonFiniteError, ShapeError, Tape, TapeError, ops
from forge.extend import empty_like, op
from forge.tensor import Device

REFERENCE = Device("reference")
BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 2, 16, 32, 4, 40
EVERY_NAME = {
    f"{name}.{output}"
    for name, primitive in Tape.primitives.items()
    if primitive.rule is not None
    for output in primitive.made
}


def ref(array, dtype="float64"):
    return forge.tensor(array, dtype, REFERENCE)


def parameters(device, dtype):
    """Two blocks of a transformer, an embedding and a final norm."""
    rng = np.random.default_rng(0)
    shapes = {"wte": (VOCABULARY, WIDTH), "wpe": (LENGTH, WIDTH), "g": (WIDTH,), "b": (WIDTH,)}
    for i in range(2):
        shapes |= {
            f"{i}.qkv.w": (WIDTH, 3 * WIDTH),
            f"{i}.qkv.b": (3 * WIDTH,),
            f"{i}.proj.w": (WIDTH, WIDTH),
            f"{i}.proj.b": (WIDTH,),
            f"{i}.g": (WIDTH,),
            f"{i}.b": (WIDTH,),
            f"{i}.fc.w": (WIDTH, 4 * WIDTH),
            f"{i}.fc.b": (4 * WIDTH,),
            f"{i}.out.w": (4 * WIDTH, WIDTH),
            f"{i}.out.b": (WIDTH,),
            f"{i}.next.g": (WIDTH,),
            f"{i}.next.b": (WIDTH,),
        }
    return {
        name: forge.tensor(0.3 * rng.standard_normal(shape), dtype, device)
        for name, shape in shapes.items()
    }


def transformer(tape, p, *, blocks=False, nested=False, dropout=0.1):
    """The loss of two blocks; `blocks` puts each into a recompute block of its own."""
    device = p["wte"].device
    rng = np.random.default_rng(1)
    ids = forge.tensor(rng.integers(0, VOCABULARY, (BATCH, LENGTH)), "int64", device)
    targets = forge.tensor(rng.integers(0, VOCABULARY, (BATCH, LENGTH)), "int64", device)
    key = forge.tensor([3, 4], "int64", device)
    x = ops.embedding(ids, p["wte"], p["wpe"])
    y = ops.layernorm(x, p["g"], p["b"])

    def attend(i, x, y):
        qkv = ops.linear(y, p[f"{i}.qkv.w"], p[f"{i}.qkv.b"])
        mixed = ops.attention(qkv, HEADS, dropout, key, site=3 * i)
        branch = ops.linear(mixed, p[f"{i}.proj.w"])
        return ops.add_layernorm(x, branch, p[f"{i}.proj.b"], p[f"{i}.g"], p[f"{i}.b"])

    def block(i, x, y):
        if nested:
            with tape.recompute():
                x, y = attend(i, x, y)
        else:
            x, y = attend(i, x, y)
        fc, out = ((p[f"{i}.{name}.w"], p[f"{i}.{name}.b"]) for name in ("fc", "out"))
        if i == 0:
            branch = ops.mlp(y, *fc, *out)
        else:
            branch = ops.linear(ops.linear(y, *fc, gelu="tanh"), *out)
        branch = ops.dropout(branch, dropout, key, site=3 * i + 1)
        return ops.add_layernorm(x, branch, None, p[f"{i}.next.g"], p[f"{i}.next.b"])

    for i in range(2):
        if blocks:
            with tape.recompute():
                x, y = block(i, x, y)
        else:
            x, y = block(i, x, y)
    return ops.linear_cross_entropy(y, p["wte"], targets)


def train(device="reference", dtype="float64", recompute=(), retain=False, **how):
    """Loss and gradients by name; bytes in use before backward; peak of the pool."""
    device = Device(device)
    p = parameters(device, dtype)
    into = {name: forge.tensor(np.zeros(x.shape), dtype, device) for name, x in p.items()}
    pool = device.pool
    gc.disable()  # What others left in cycles would be freed meanwhile.
    pool.reset_peak()
    start = pool.in_use
    tape = Tape(recompute=recompute)
    leaves = {name: tape.leaf(x, into=into[name]) for name, x in p.items()}
    loss = transformer(tape, leaves, **how)
    held = pool.in_use - start
    if retain:
        tape.backward(loss, retain=True)
        for x in into.values():
            x.array.fill(0)
    tape.backward(loss)
    peak = pool.peak - start
    gc.enable()
    return {"loss": loss.value, **into}, held, peak


def assert_same_bits(some, others):
    for name in some:
        assert some[name].numpy().tobytes() == others[name].numpy().tobytes(), name


WAYS = {
    "a norm's output": {"recompute": {"add_layernorm.y"}},
    "a gelu's output": {"recompute": {"linear.out"}},
    "an extra that can be remade": {"recompute": {"mlp.hidden"}},
    "an extra that cannot": {"recompute": {"mlp.pre"}},
    "extras": {"recompute": {"mlp.pre", "mlp.hidden", "attention.lse", "layernorm.mean"}},
    "all three": {"recompute": {"add_layernorm.y", "linear.out", "mlp.hidden"}},
    "chains": {"recompute": {"linear.out", "add_layernorm.y", "add_layernorm.sum", "dropout.out"}},
    "every output": {"recompute": EVERY_NAME},
    "blocks": {"blocks": True},
    "nested blocks": {"blocks": True, "nested": True},
    "inner blocks": {"nested": True},
    "blocks and names": {"blocks": True, "recompute": {"add_layernorm.y", "linear.out"}},
    "nested blocks and every name": {"blocks": True, "nested": True, "recompute": EVERY_NAME},
}


DEVICES = {"reference": "float64", "cpu": "float32"}


@functools.cache
def kept(device):
    """What is computed without recomputation."""
    return train(device, DEVICES[device])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("retain", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_the_same(way, retain, device):
    again, _, _ = train(device, DEVICES[device], retain=retain, **WAYS[way])
    assert_same_bits(kept(device)[0], again)


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_smaller(way):
    _, held, peak = train(**WAYS[way])
    _, all_held, all_peak = kept("reference")
    assert held < all_held
    # Where the residual stream itself is dropped, the first rule that asks makes all of it again.
    assert peak < all_peak or way in ("chains", "every output")


def test_memory_is_smaller_by_what_was_dropped():
    sizes = {}
    for names in ((), ("linear.out",), ("mlp.hidden",), ("mlp.pre",), ("add_layernorm.y",)):
        sizes[names] = train(recompute=names)[1]
    row = BATCH * LENGTH * WIDTH * 8
    # Of both blocks the packed projection (3C), of the second gelu's output (4C), which is an extra
    # of the first's mlp; nothing keeps the branches.
    assert sizes[()] - sizes["linear.out",] == (2 * 3 + 4) * row
    assert sizes[()] - sizes["mlp.hidden",] == 4 * row
    assert sizes[()] - sizes["mlp.pre",] == 4 * row
    # Three of the four norms' outputs are read by a linear, the last by the loss.
    assert sizes[()] - sizes["add_layernorm.y",] == 3 * row


@pytest.mark.usefixtures("gc_paused")
def test_nothing_but_inputs_is_kept_of_a_block():
    tape = Tape()
    x = tape.leaf(ref(np.ones((64, 32))))
    before = REFERENCE.pool.in_use
    with tape.recompute():
        y = ops.exp(ops.layernorm(ops.tanh(x), ref(np.ones(32)), ref(np.zeros(32))))
    held = REFERENCE.pool.in_use - before
    # The output, whose Var is still here, and the norm's two parameters.
    assert held == 64 * 32 * 8 + 2 * 256
    del y
    assert REFERENCE.pool.in_use - before == 2 * 256


# By name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("linear", "\"op.value\" of an op, got 'linear'; did you mean linear.out?"),
        (
            "linear.output",
            "one of linear's out, pre, got 'linear.output'; did you mean linear.out?",
        ),
        ("linear.x", "one of linear's out, pre, got"),
        ("mlp.hiden", "one of mlp's out, pre, hidden, got 'mlp.hiden'; did you mean mlp.hidden?"),
        ("mlp.w_out", "one of mlp's"),
        ("linaer.out", "\"op.value\" of an op, got 'linaer.out'; did you mean linear.out?"),
        (".out", '"op.value" of an op'),
        ("", '"op.value" of an op'),
    ],
)
def test_unknown_names_are_refused(name, words):
    with pytest.raises(TapeError, match=re.escape(f"[recompute] expected {words}")):
        Tape(recompute=[name])


def counting(saves=("out",), remake=False, exact=None):
    """exp as an op that counts how often its body runs."""
    calls = []

    @op(saves=saves, name="test.counted")
    def counted(x, *, record=None):
        calls.append("run")
        if record is not None and "twin" in saves:
            record.keep(twin=ops.exp(x))
        return ops.exp(x)

    @counted.rule
    def _(node, dy):
        return {"x": dy * getattr(node, saves[0])}

    if remake:

        @counted.remake("out", needs=("x",), exact=exact)
        def _(node):
            calls.append("remake")
            return ops.exp(node.x)

    return counted, calls


def test_a_dropped_value_is_made_once_for_all_that_ask():
    counted, calls = counting()
    tape = Tape(recompute={"test.counted.out"})
    x = tape.leaf(ref([0.5]))
    y = counted(x)
    z = ops.exp(y) * y * y
    assert calls == ["run"]
    assert tape.backward(z)[x].item() == pytest.approx(
        np.exp(np.exp(0.5)) * np.exp(0.5) ** 2 * (2 + np.exp(0.5))
    )
    assert calls == ["run", "run"]


def test_what_was_made_serves_to_make_more():
    first, first_calls = counting(saves=())
    second, second_calls = counting(saves=())
    for each in (first, second):
        each.rule(lambda node, dy: {"x": dy})
    tape = Tape(recompute={"test.counted.out"})
    a = first(tape.leaf(ref([0.5])))
    b = second(a)
    # The sweep meets the square of `a` first, then that of `b`, which is made from `a`.
    tape.backward(b * b + a * a)
    assert (first_calls, second_calls) == (["run"] * 2, ["run"] * 2)


def test_nothing_is_made_that_no_rule_asks_for():
    counted, calls = counting(saves=("x",))
    tape = Tape(recompute={"test.counted.out"})
    x = tape.leaf(ref([0.5]))
    tape.backward(counted(x) + x)
    assert calls == ["run"]


def test_a_remake_is_used_where_one_is_declared():
    counted, calls = counting(remake=True)
    tape = Tape(recompute={"test.counted.out"})
    x = tape.leaf(ref([0.5]))
    tape.backward(counted(x))
    assert calls == ["run", "remake"]


@pytest.mark.parametrize("exact", [True, False])
def test_an_op_is_rerun_where_its_remake_gives_other_bits(exact):
    asked = []
    counted, calls = counting(remake=True, exact=lambda out: asked.append(out.shape) or exact)
    tape = Tape(recompute={"test.counted.out"})
    tape.backward(counted(tape.leaf(ref([0.5]))))
    assert calls == ["run", "remake" if exact else "run"]
    assert asked == [(1,)]


def test_a_block_reruns_even_where_a_remake_is_declared():
    counted, calls = counting(saves=("twin",), remake=True)
    tape = Tape()
    x = tape.leaf(ref([0.5]))
    with tape.recompute():
        y = counted(x)
    assert tape.backward(y)[x].item() == pytest.approx(np.exp(0.5))
    assert calls == ["run", "run"]


def test_a_remake_does_not_make_what_it_does_not_read():
    """linear's gelu comes from its pre-activation alone: the dropped input stays dropped."""
    counted, calls = counting(saves=("x",))
    seen = []

    @op(saves=("x",), name="test.last")
    def last(x):
        return ops.scale(x, 1.0)

    @last.rule
    def _(node, dy):
        assert node.x is not None
        seen.append(list(calls))
        return {"x": dy}

    tape = Tape(recompute={"linear.out", "test.counted.out"})
    x, w = tape.leaf(ref(np.ones((2, 3)))), tape.leaf(ref(np.ones((3, 4))))
    y = last(ops.linear(counted(x), w, gelu="tanh"))
    tape.backward(y, ref(np.ones((2, 4))))
    assert seen == [["run"]]
    assert calls == ["run", "run"]


@pytest.mark.usefixtures("gc_paused")
def test_a_view_is_dropped_with_its_base():
    tape = Tape(recompute={"tanh.out"})
    x = tape.leaf(ref(np.ones((64, 32))))
    before = REFERENCE.pool.in_use
    y = ops.tanh(x)
    z = ops.reshape(ops.reshape(y, (32, 64)), (2048,))
    out = ops.sum(z * z)
    del y, z
    assert REFERENCE.pool.in_use - before < 2 * 256 + 1
    t = np.tanh(1.0)
    np.testing.assert_allclose(tape.backward(out)[x].numpy(), 2 * t * (1 - t * t), rtol=1e-12)


def test_a_view_may_be_dropped_alone():
    tape = Tape(recompute={"reshape.out"})
    x = tape.leaf(ref(np.full((2, 3), 2.0)))
    z = ops.reshape(x, (6,))
    assert tape.backward(ops.sum(z * z))[x].numpy().tolist() == [[4.0] * 3] * 2


def test_one_output_of_several_may_be_dropped():
    tape = Tape(recompute={"split_heads.k"})
    qkv = tape.leaf(ref(np.arange(24.0).reshape(2, 12)))
    q, k, _ = ops.split_heads(qkv, 2)
    out = ops.sum(q * k)
    saved = tape.nodes[1].saved
    assert type(saved["a"]) is tuple
    assert type(saved["b"]) is int
    grad = tape.backward(out)[qkv].numpy()
    x = np.arange(24.0).reshape(2, 12)
    np.testing.assert_array_equal(grad, np.hstack([x[:, 4:8], x[:, :4], 0 * x[:, :4]]))


@pytest.mark.usefixtures("gc_paused")
def test_a_long_chain_of_dropped_values():
    tape = Tape(recompute={"tanh.out", "scale.out"})
    x = tape.leaf(ref([0.5]))
    y = x
    for _ in range(2000):
        y = ops.scale(ops.tanh(y), 1.01)
    before = REFERENCE.pool.in_use
    dx = tape.backward(y)[x].item()
    assert before - REFERENCE.pool.in_use <= 256 * 2
    t, slope = 0.5, 1.0
    for _ in range(2000):
        t = np.tanh(t)
        slope *= 1.01 * (1 - t * t)
        t *= 1.01
    assert dx == pytest.approx(slope, rel=1e-9)


def test_a_change_of_what_a_remake_reads_is_named():
    tape = Tape(recompute={"tanh.out"})
    x = ref(np.ones((2, 3)))
    y = ops.tanh(ops.scale(tape.leaf(x), 1.0) * x)
    ops.scatter_add_rows_(x, ref([0], "int64"), ref(np.ones((1, 3))))
    with pytest.raises(TapeError, match=r"\[mul\] expected the saved 'b' of node 1 unchanged"):
        tape.backward(y, ref(np.ones((2, 3))))


def test_a_change_of_an_input_that_only_a_rerun_reads_is_named():
    tape = Tape(recompute={"tanh.out"})
    x = ref(np.ones((2, 3)))
    y = ops.tanh(tape.leaf(x))
    ops.scatter_add_rows_(x, ref([0], "int64"), ref(np.ones((1, 3))))
    with pytest.raises(TapeError, match=r"\[tanh\] expected the saved 'x' of node 0 unchanged"):
        tape.backward(y, ref(np.ones((2, 3))))


# By block


def test_a_block_runs_again_at_most_once_and_only_when_asked():
    counted, calls = counting()
    tape = Tape()
    x = tape.leaf(ref([0.5]))
    with tape.recompute():
        y = counted(counted(x)) * x
        counted(x)
    tape.backward(y)
    assert calls == ["run"] * 3 + ["run"] * 2


@pytest.mark.usefixtures("gc_paused")
def test_extras_of_a_block_are_dropped_and_made_again():
    counted, calls = counting(saves=("twin",))
    tape = Tape()
    x = tape.leaf(ref(np.full(1024, 0.5)))
    before = REFERENCE.pool.in_use
    with tape.recompute():
        y = ops.scale(counted(x), 2.0)
    del y.value
    assert REFERENCE.pool.in_use == before
    grad = tape.backward(y, ref(np.ones(1024)))[x]
    assert grad.numpy().tolist() == [2 * np.exp(0.5)] * 1024
    assert calls == ["run", "run"]


def test_a_value_of_a_block_that_is_used_outside_is_kept_for_outside():
    counted, calls = counting(saves=())
    tape = Tape()
    x = tape.leaf(ref([0.5]))

    @op(saves=("x",), name="test.outside")
    def outside(x):
        return ops.scale(x, 1.0)

    @outside.rule
    def _(node, dy):
        assert node.x.item() == np.exp(0.5)
        assert calls == ["run"]
        return {"x": ops.scale(dy, 3.0)}

    counted.rule(lambda node, dy: {"x": dy})
    with tape.recompute():
        y = counted(x)
    assert tape.backward(outside(y))[x].item() == 3.0
    assert calls == ["run"]


def test_a_block_ends_where_an_exception_leaves_it():
    tape = Tape()
    x = tape.leaf(ref([0.5]))
    with tape.recompute():
        with pytest.raises(ShapeError), tape.recompute():
            ops.matmul(ops.exp(x), x)
        inner = ops.exp(x)
    outer = ops.exp(x)
    kinds = [type(node.saved["out"]) for node in tape.nodes]
    assert kinds == [int, int, tuple]
    assert tape.backward(inner * outer)[x].item() == pytest.approx(2 * np.exp(1.0))


@pytest.mark.usefixtures("gc_paused")
def test_an_exception_while_making_again_leaves_memory_flat():
    @op(saves=("out",), name="test.moody")
    def moody(x):
        if moody.fails:
            raise ZeroDivisionError
        return ops.exp(x)

    moody.rule(lambda node, dy: {"x": dy * node.out})

    def run():
        tape = Tape()
        moody.fails = False
        with tape.recompute():
            y = moody(ops.exp(tape.leaf(ref(np.zeros(100)))))
        moody.fails = True
        with pytest.raises(ZeroDivisionError):
            tape.backward(y, ref(np.ones(100)))

    run()
    before = REFERENCE.pool.in_use
    run()
    assert REFERENCE.pool.in_use == before


def test_dropout_in_a_block_gets_the_same_mask():
    def gradient(block):
        tape = Tape()
        x = tape.leaf(ref(np.ones(1000)))
        if block:
            with tape.recompute():
                y = ops.exp(ops.dropout(x, 0.5, 7))
        else:
            y = ops.exp(ops.dropout(x, 0.5, 7))
        return tape.backward(y, ref(np.ones(1000)))[x].numpy()

    assert gradient(True).tobytes() == gradient(False).tobytes()


# With the rest of the tape


@pytest.mark.parametrize("recompute", [(), {"tanh.out", "exp.out", "matmul.out", "layernorm.out"}])
@pytest.mark.parametrize("block", [False, True])
def test_with_create_graph(recompute, block):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s) for s in ((4, 3), (3, 5), (5,), (5,))]

    def hessian_product(recompute, block):
        tape = Tape(recompute=recompute)
        x, w, gamma, beta = (tape.leaf(ref(a)) for a in arrays)

        def body():
            return ops.exp(ops.tanh(ops.layernorm(ops.tanh(x) @ w, gamma, beta)))

        if block:
            with tape.recompute():
                y = body()
        else:
            y = body()
        first = tape.backward(ops.sum(y), create_graph=True)
        second = tape.backward(ops.sum(first[w] * first[w]) + ops.sum(first[gamma]))
        return [first[v].value for v in (x, w)] + [second[v] for v in (x, w, gamma, beta)]

    plain = hessian_product((), False)
    for a, b in zip(plain, hessian_product(recompute, block), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.usefixtures("gc_paused")
def test_remade_values_are_freed_when_the_sweep_has_passed_their_node():
    sizes = []

    @op(saves=("x",), name="test.watch")
    def watch(x):
        return ops.scale(x, 1.0)

    @watch.rule
    def _(node, dy):
        assert node.x is not None
        sizes.append(REFERENCE.pool.in_use)
        return {"x": dy}

    tape = Tape(recompute={"exp.out"})
    y = x = tape.leaf(ref(np.zeros(1024)))
    for _ in range(3):
        with tape.recompute():
            y = watch(ops.exp(ops.scale(y, 0.0)))
    del y.value
    tape.backward(y, ref(np.ones(1024)))
    assert x is not None
    assert max(sizes) - min(sizes) <= 2 * 8192


def test_anomaly_mode_works_with_recomputation():
    tape = Tape(recompute={"log.out"}, anomaly=True)
    x = tape.leaf(ref([1.0]))
    with tape.recompute(), pytest.raises(NonFiniteError, match=r"\[log\]"):
        ops.log(ops.scale(x, 0.0))


# Plans


@pytest.mark.parametrize("way", [None, *WAYS])
def test_a_plan_tells_the_peak_of_the_real_run(way):
    how = WAYS.get(way, {})
    _, held, peak = train("cpu", "float32", **how)
    _, planned, planned_peak = train("plan:cpu", "float32", **how)
    assert planned == pytest.approx(held, rel=0.05)
    assert planned_peak == pytest.approx(peak, rel=0.05)


@pytest.mark.usefixtures("gc_paused")
def test_a_plan_runs_no_kernel(monkeypatch):
    from forge.backends import registry

    def refuse(*args, **keywords):
        raise AssertionError("a plan ran a kernel")

    monkeypatch.setattr(registry, "_bound", {})
    monkeypatch.setattr("forge.backends.kernel.Kernel.load", lambda self: refuse)
    results, _, peak = train("plan:cpu", "float32", blocks=True, recompute={"linear.out"})
    assert peak > 0
    assert all(x.array is None and x.storage.buffer is None for x in results.values())
    with pytest.raises(AssertionError, match="a plan ran a kernel"):
        train("reference")


def test_a_plan_has_no_values_to_give():
    x = empty_like(forge.tensor([1.0, 2.0], device="plan:cpu"))
    assert repr(x) == "Tensor([2], float32, plan:cpu)"
    for read in (x.numpy, x.__dlpack__, lambda: np.asarray(x), x.__dlpack_device__):
        with pytest.raises(forge.DeviceError, match="a plan device has none"):
            read()
