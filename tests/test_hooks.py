"""Hooks, anomaly mode, and the summary of a tape."""

import numpy as np
import pytest

import forge
from forge import NonFiniteError, ShapeError, Tape, Var, ops
from forge.autograd.hooks import Memory, Timer, show
from forge.extend import op
from forge.tensor import Device

REFERENCE = Device("reference")


def ref(array, dtype="float64"):
    return forge.tensor(array, dtype, REFERENCE)


def sweep(*hooks, create_graph=False):
    """x -> exp -> split in two, and one output used."""
    tape = Tape(hooks=hooks)
    x = tape.leaf(ref(np.zeros((2, 12))))
    q, _, _ = ops.split_heads(ops.exp(x), 2)
    tape.backward(ops.sum(q), create_graph=create_graph)
    return tape


def test_a_hook_is_called_before_and_after_every_op_and_rule():
    events = []
    sweep(events.append)
    calls = [(e.phase, e.op, e.node, e.outputs is None) for e in events]
    names = ["exp", "split_heads", "sum_to", "reshape"]
    forward = [
        ("forward", name, i, before) for i, name in enumerate(names) for before in (True, False)
    ]
    backward = [
        ("backward", name, i, before)
        for i, name in reversed(list(enumerate(names)))
        for before in (True, False)
    ]
    assert calls == forward + backward


def test_a_hook_sees_values_by_name():
    events = []
    sweep(events.append)
    seen = {
        (e.phase, e.op): (list(e.inputs), list(e.outputs)) for e in events if e.outputs is not None
    }
    assert seen["forward", "split_heads"] == (["qkv"], ["q", "k", "v"])
    assert seen["backward", "split_heads"] == (["dq"], ["dqkv"])
    assert all(type(x) is forge.Tensor for e in events for x in e.inputs.values())


def test_hooks_see_vars_where_the_sweep_is_recorded():
    events = []
    sweep(events.append, create_graph=True)
    last = [e for e in events if (e.phase, e.op) == ("backward", "exp")][-1]
    assert type(last.outputs["dx"]) is Var


def test_hooks_are_called_in_order():
    calls = []
    tape = Tape(hooks=[lambda e: calls.append(1), lambda e: calls.append(2)])
    ops.exp(tape.leaf(ref(1.0)))
    assert calls == [1, 2, 1, 2]


def test_timer_counts_calls_and_seconds():
    timer = Timer()
    sweep(timer)
    assert timer.calls == dict.fromkeys(timer.calls, 1)
    assert ("backward", "exp") in timer.calls
    assert all(seconds > 0 for seconds in timer.seconds.values())
    lines = timer.table().splitlines()
    assert len(lines) == 8
    assert any(line.split()[:2] == ["forward", "split_heads"] for line in lines)
    shares = [float(line.split()[4]) for line in lines]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=1)


def test_timer_nests_where_a_rule_records_ops(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    timer = Timer()
    tape = Tape(hooks=[timer])
    x = tape.leaf(ref(0.0))
    tape.backward(ops.exp(x), create_graph=True)
    assert timer.seconds == {
        ("forward", "exp"): 1.0,
        ("backward", "exp"): 3.0,
        ("forward", "mul"): 1.0,
    }


def test_timer_survives_an_op_that_fails(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    timer = Timer()
    tape = Tape(hooks=[timer])
    x = tape.leaf(ref([0.0]))
    with pytest.raises(ShapeError):
        ops.matmul(x, x)
    ops.exp(x)
    assert timer.seconds == {("forward", "exp"): 1.0}


@pytest.mark.usefixtures("gc_paused")
def test_memory_traces_the_pool():
    memory = Memory()
    tape = Tape(hooks=[memory])
    x = tape.leaf(ref(np.zeros(1024)))
    before = REFERENCE.pool.in_use
    y = ops.exp(ops.exp(x))
    assert memory == [
        ("forward", "exp", 0, before + 8192),
        ("forward", "exp", 1, before + 2 * 8192),
    ]
    tape.backward(y, ref(np.ones(1024)))
    assert [row[:3] for row in memory[2:]] == [("backward", "exp", 1), ("backward", "exp", 0)]


def test_show_prints_a_line_per_node(capsys):
    sweep(show)
    out, err = capsys.readouterr()
    assert not out
    lines = err.splitlines()
    assert len(lines) == 8
    assert lines[1].split(maxsplit=3) == [
        "forward",
        "1",
        "split_heads",
        "q [4, 1, 2] float64, k [4, 1, 2] float64, v [4, 1, 2] float64".replace("4, 1", "2, 2"),
    ]


# Anomaly mode


def test_anomaly_names_the_op_and_ranges_forward():
    tape = Tape(anomaly=True)
    x = tape.leaf(ref([1.0, -2.0]))
    y = ops.exp(x)
    with pytest.raises(NonFiniteError) as caught:
        ops.log(y - 1.0 + x)
    assert "[log] expected finite values forward" in str(caught.value)
    assert "in out of node 3; inputs: x: [2] float64 in [-2.86" in str(caught.value)


def test_anomaly_names_the_op_and_ranges_backward():
    tape = Tape(anomaly=True)
    x = tape.leaf(ref([0.0, 1e-200]))
    y = ops.scale(x, 1.0)

    @op(name="test.overflow")
    def overflow(x):
        return ops.scale(x, 1.0)

    @overflow.rule
    def _(node, dy):
        return {"x": ops.exp(dy * 1e3)}

    with pytest.raises(NonFiniteError) as caught:
        tape.backward(overflow(y), ref([1.0, 2.0]))
    text = str(caught.value)
    assert "[test.overflow] expected finite values backward" in text
    assert "in dx of node 1; inputs: dout: [2] float64 in [1, 2]" in text


def test_anomaly_sees_a_gradient_added_into_a_buffer():
    tape = Tape(anomaly=True)
    x = tape.leaf(ref([[1.0]]), into=ref([[np.inf]]))
    with pytest.raises(NonFiniteError, match=r"\[matmul\] .* in da of node 0"):
        tape.backward(ops.matmul(x, ref([[1.0]])))


def test_without_anomaly_nothing_stops():
    tape = Tape()
    x = tape.leaf(ref([0.0]))
    assert not np.isfinite(tape.backward(ops.log(x))[x].item())


# Summary


def test_summary_counts_every_storage_once():
    tape = Tape()
    x, w = tape.leaf(ref(np.ones((64, 32)))), tape.leaf(ref(np.ones((32, 32))))
    frozen = ref(np.ones((64, 32)))
    y = ops.exp(x @ w)
    z = ops.reshape(y, (32, 64))
    loss = ops.sum(z * z + ops.reshape(y * frozen, (32, 64)))
    table = tape.summary().splitlines()
    rows = {int(line.split()[0]): line.split() for line in table[1:-1]}
    size = 64 * 32 * 8
    saved = {i: int(row[2].replace(",", "")) for i, row in rows.items()}
    # exp keeps its output, which the products only share; leaves and plain Tensors are not the
    # tape's; sums and reshapes keep nothing.
    assert saved == {0: 0, 1: size, **dict.fromkeys(range(2, len(rows)), 0)}
    assert rows[1][1:2] + rows[1][3:] == ["exp", "[64,", "32]", "float64"]
    assert table[-1].split() == ["total", f"{size:,}"]
    assert loss.shape == ()


@pytest.mark.usefixtures("gc_paused")
def test_summary_is_what_the_pool_holds_for_the_tape():
    before = REFERENCE.pool.in_use
    tape = Tape()
    x = tape.leaf(ref(np.ones((64, 96))))
    own = REFERENCE.pool.in_use - before
    h = ops.layernorm(x, tape.leaf(ref(np.ones(96))), tape.leaf(ref(np.ones(96))))
    parameters = REFERENCE.pool.in_use
    h = ops.attention(h, 4)
    h = ops.tanh(ops.softmax(h) * h)
    loss = ops.sum(h)
    del h
    total = int(tape.summary().splitlines()[-1].split()[-1].replace(",", ""))
    held = REFERENCE.pool.in_use - before - own
    assert parameters > own
    assert total == pytest.approx(held, rel=0.05)
    del loss


def test_summary_says_what_recomputation_saves():
    def total(recompute):
        tape = Tape(recompute=recompute)
        x = tape.leaf(ref(np.ones((64, 32))))
        ops.exp(ops.tanh(x)) * ops.tanh(x)
        return int(tape.summary().splitlines()[-1].split()[-1].replace(",", ""))

    size = 64 * 32 * 8
    assert total(()) == 3 * size
    assert total({"tanh.out"}) == size
    assert total({"tanh.out", "exp.out"}) == 0


def test_summary_of_multiple_outputs_and_of_nothing():
    assert "q [" not in Tape().summary()
    assert Tape().summary().splitlines()[-1].split() == ["total", "0"]
    tape = sweep()
    assert tape.summary().splitlines()[-1].split() == ["total", "0"]
    tape = Tape()
    ops.split_heads(tape.leaf(ref(np.zeros((1, 12)))), 2)
    assert tape.summary().count("[2, 1, 2] float64") == 3
