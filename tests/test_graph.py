"""Captured functions: replays have the bits of eager calls, and what a replay can't do raises."""

import contextlib
import gc
import inspect
import threading

import numpy as np
import pytest

import forge
from forge import Device, DeviceError, Tape, ops, tensor, training
from forge.autograd import hooks
from forge.backends import capture, reference, registry
from forge.backends.cpu import threads
from forge.errors import ArgumentError, FallbackError, TapeError
from forge.extend import on_host, op
from forge.generate import Sampling, generate
from forge.graph import Captured
from forge.models import GPT2, GPT2Config
from forge.tensor import empty, empty_like, zeros
from small_run import DROPOUT, SIZES, Run

HOSTS = ["cpu", "reference"]
DEVICES = [*HOSTS, pytest.param("cuda", marks=pytest.mark.cuda)]
PRECISIONS = ["fp32", "bf16"]
CPU = Device("cpu")


def ones(*shape, device="cpu"):
    return tensor(np.ones(shape, np.float32), device=device)


def captured(function, *varying, device="cpu", calls=2):
    """The function captured on ones [3] as its first argument, its only varying one."""
    step = Captured(function, Device(device), varying or ("x",))
    for _ in range(calls):
        step(ones(3, device=device))
    return step


# ---- The same bits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["plain", "dropout"])
def test_captured_steps_have_the_bits_of_eager_ones(device, precision, dropout):
    eager = Run(device, precision, **dropout)
    replayed, again = (Run(device, precision, captured=True, **dropout) for _ in range(2))
    # Four micro-batches.
    expected = eager.steps(10, micro_batch=2)
    assert replayed.steps(10, micro_batch=2) == expected
    assert again.steps(10, micro_batch=2) == expected
    assert eager.bits() == replayed.bits() == again.bits()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_replays_have_the_same_bits_on_any_number_of_threads(thread_counts, precision):
    runs = [Run("cpu", precision, captured=True, **DROPOUT) for _ in range(4)]
    eager = Run("cpu", precision, **DROPOUT)
    expected = eager.steps(5)
    for run, count in zip(runs, thread_counts, strict=True):
        # Recorded with five threads, replayed with another number.
        found = run.steps(2)
        threads.set_threads(count)
        assert found + run.steps(3) == expected
        assert run.bits() == eager.bits()
        threads.set_threads(5)


@pytest.mark.parametrize("device", HOSTS)
def test_a_step_that_recomputes_is_replayed(device, monkeypatch):
    eager = Run(device, **DROPOUT)
    recompute = {"add_layernorm.y", "linear.out", "mlp.hidden"}
    expected = eager.steps(4)
    monkeypatch.setattr(training, "Tape", lambda: Tape(recompute=recompute))
    run = Run(device, captured=True, **DROPOUT)
    assert run.steps(4) == expected
    assert run.bits() == eager.bits()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_changes_where_the_loss_is_not_finite(device):
    run = Run(device, captured=True)
    run.steps(3)
    poisoned = {name: value.numpy() for name, value in run.params.items()}
    poisoned["h.1.mlp.c_fc.bias"][3] = np.inf
    run.params.load_(poisoned)
    before = [x.flat.numpy().tobytes() for x in (run.params, run.optimizer.m, run.optimizer.v)]
    with np.errstate(invalid="ignore"):
        assert [finite for _, _, finite in run.steps(2)] == [0, 0]
    after = [x.flat.numpy().tobytes() for x in (run.params, run.optimizer.m, run.optimizer.v)]
    assert before == after
    assert run.optimizer.updates.item() == 3


@pytest.mark.parametrize("device", DEVICES)
def test_memory_stays_flat_without_a_collector(device):
    run = Run(device, captured=True)
    run.steps(3)

    def used():
        if device == "cuda":
            from forge.backends.cuda.device import memory_info

            return run.device.pool.in_use, memory_info()[0]
        return run.device.pool.in_use, run.device.pool.held

    gc.collect()
    gc.disable()
    try:
        before = used()
        run.steps(20)
        assert used() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("device", HOSTS)
def test_decoding_is_replayed_and_agrees_with_the_whole_context(device):
    model = GPT2(GPT2Config(**SIZES))
    params = model.zeros(Device(device))
    params.load_(model.init(3))
    calls = []

    class Counted(GPT2):
        def decode(self, params, ids, cache, pos):
            calls.append(ids.shape)
            return super().decode(params, ids, cache, pos)

    prompts, sampling = [np.array([5]), np.array([7])], Sampling(seed=3)
    found = list(generate(Counted(model.config), params.compute, prompts, 20, sampling))
    assert calls == [(2, 1)] * 2
    history = [[5], [7]]
    for token in found:
        history[token.index].append(token.id)
    ids = np.array(history)[:, :20]
    whole = model.logits(params.compute, tensor(ids, device=device)).numpy().astype(np.float64)
    whole -= np.log(np.exp(whole).sum(-1, keepdims=True))
    for index in (0, 1):
        logprobs = [token.logprob for token in found if token.index == index]
        expected = [whole[index, t, history[index][t + 1]] for t in range(20)]
        assert np.allclose(logprobs, expected, atol=1e-5)


# ---- Which recording


def test_another_shape_or_number_is_another_recording():
    ran = []

    def scaled(x, factor):
        ran.append((x.shape, factor))
        return ops.scale(x, float(factor))

    step = Captured(scaled, CPU, ("x", "factor"))
    for shape, factor in [((3,), 2), ((4,), 2), ((3,), 5)] * 4:
        x = tensor(np.arange(float(np.prod(shape))).reshape(shape))
        assert (step(x, factor=factor).numpy() == factor * x.numpy()).all()
    assert sorted(ran) == sorted([((3,), 2), ((4,), 2), ((3,), 5)] * 2)


def test_a_number_that_stays_is_known_by_its_value():
    ran = []

    def scaled(x, factor, mode):
        ran.append(factor)
        return ops.scale(x, factor)

    step = Captured(scaled, CPU, ("x",))
    for text in ["0.5", "0.0", "-0.0"] * 4:
        # Each time other objects.
        result = step(ones(3), float(text), "".join(["a", text])).numpy()
        assert result.tobytes() == np.full(3, float(text), np.float32).tobytes()
    assert len(ran) == 6
    assert len(step._recordings) == 3


def test_inputs_may_be_in_a_dict():
    ran = []
    step = Captured(lambda batch: ran.append(1) or ops.sub(batch["a"], batch["b"]), CPU, ["batch"])
    for k in range(4):
        batch = {"a": ones(3), "b": tensor(np.full(3, float(k), np.float32))}
        assert (step(batch).numpy() == 1 - k).all()
    assert len(ran) == 2


def test_an_input_of_another_device_is_not_copied_to_this_one():
    step = captured(ops.neg)
    for _ in range(2):
        with contextlib.suppress(DeviceError):
            assert step(ones(3, device="reference")).device is Device("reference")


def test_a_function_may_return_nothing():
    total = zeros((3,), "float32", CPU)

    def step(x):
        ops.scale(x, 1.0, into=total)

    function = Captured(step, CPU, ("x",))
    assert [function(ones(3)) for _ in range(4)] == [None] * 4
    assert (total.numpy() == 4).all()


@pytest.mark.parametrize("wrong", [1.5, {"x": ones(3)}, (ones(3), "loss"), Tape().leaf(ones(3))])
def test_what_a_replay_cannot_make_again_is_no_result(wrong):
    total = zeros((3,), "float32", CPU)

    def step(x):
        ops.scale(x, 1.0, into=total)
        return wrong

    function = Captured(step, CPU, ("x",))
    assert function(ones(3)) is wrong
    with pytest.raises(ArgumentError, match=r"\[captured\] expected the function to return Tens"):
        function(ones(3))
    assert (total.numpy() == 1).all()
    assert total.storage.version == 1


def test_results_are_copies_and_tuples_keep_their_kind():
    step = captured(lambda x: training.StepResult(x, ops.scale(x, 2.0), (ops.neg(x),)))
    first, second = step(ones(3)), step(tensor(np.full(3, 2.0, np.float32)))
    assert isinstance(first, training.StepResult)
    assert [first.loss.numpy()[0], first.norm.numpy()[0], first.finite[0].numpy()[0]] == [1, 2, -1]
    assert second.norm.numpy()[0] == 4


def test_what_the_function_keeps_elsewhere_can_be_read():
    kept = []
    step = Captured(lambda x: kept.append(ops.scale(x, 2.0).view((1,), 1)) or x, CPU, ("x",))
    for k in range(4):
        step(tensor(np.full(3, float(k))))
    # An eager call's Tensor is its own; a recorded one holds what the last replay left there.
    assert [x.item() for x in kept] == [0, 6]


def test_a_plan_only_counts():
    plan = Device("plan:cpu")
    ran = []
    step = Captured(lambda x: ran.append(x) or ops.neg(x), plan, ("x",))
    for _ in range(3):
        step(empty((3,), "float32", plan))
    assert len(ran) == 3


def test_a_captured_function_within_another_is_a_part_of_it():
    inner = Captured(lambda x: ops.scale(x, 2.0), CPU, ("x",))
    for _ in range(2):
        inner(ones(3))
    outer = Captured(lambda x: ops.add(inner(x), inner(x)), CPU, ("x",))
    for k in range(4):
        assert (outer(tensor(np.full(3, float(k)))).numpy() == 4 * k).all()


# ---- Memory


@pytest.mark.usefixtures("gc_paused")
def test_a_recording_takes_the_memory_of_a_step():
    def step(x):
        for _ in range(10):
            x = ops.scale(x, 1.5)
        return x

    x = zeros((1 << 16,), "float32", CPU)
    CPU.pool.trim()
    CPU.pool.reset_peak()
    before = CPU.pool.in_use
    del x
    x = zeros((1 << 16,), "float32", CPU)
    eager = step(x)
    peak = CPU.pool.peak - before
    del eager
    replayed = Captured(step, CPU, ("x",))
    for _ in range(2):
        replayed(x)
    (recording,) = replayed._recordings.values()
    assert recording._pool.peak == peak == 2 * x.nbytes
    assert CPU.pool.held <= 2 * x.nbytes  # of the eager call nothing is left


def test_a_recordings_memory_goes_with_it():
    step = captured(lambda x: ops.neg(ops.neg(x)))
    (recording,) = step._recordings.values()
    pool, shared = recording._pool, CPU.pool.in_use
    pool.trim()  # as where memory runs out
    assert min(pool.in_use, pool.held) > 0
    del recording, step
    gc.collect()
    assert (pool.in_use, pool.held) == (0, 0)
    assert CPU.pool.in_use < shared


# ---- What a replay would leave out


@pytest.mark.parametrize("device", DEVICES)
def test_capture_refuses_what_would_go_stale(device):
    step = Captured(lambda x: ops.scale(x, tensor(2.0, device=device)), Device(device), ("x",))
    x = ones(3, device=device)
    assert (step(x).numpy() == 2).all()
    message = "expected no copy from the host while a step is captured"
    for _ in range(2):
        with pytest.raises(DeviceError, match=message):
            step(x)
    assert (ops.scale(x, 3.0).numpy() == 3).all()


OUTSIDE = ones(3)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x: ops.neg(x).numpy(), "copy to the host"),
        (lambda x: x.numpy(), "copy to the host"),
        (lambda x: ops.sum(x).item(), "copy to the host"),
        (lambda x: bool(ops.sum(x)), "copy to the host"),
        (lambda x: str(ops.neg(x)), "copy to the host"),
        (lambda x: OUTSIDE.numpy(), "copy to the host"),
        (lambda x: tensor(OUTSIDE), "copy from the host"),
        (lambda x: np.from_dlpack(OUTSIDE), "hand-over to another library"),
        (lambda x: np.from_dlpack(ops.neg(x)), "hand-over to another library"),
        (lambda x: forge.from_dlpack(np.ones(3)), "array of another library"),
        (lambda x: Tape(hooks=[hooks.show]), "hook on a tape"),
        (lambda x: Tape(anomaly=True), "hook on a tape"),
        (lambda x: Tape.arithmetic.finite(x), "look at values"),
        (lambda x: Tape.arithmetic.describe(x), "look at values"),
        (lambda x: ops.neg(ones(3, device="reference")), "copy from the host|work for reference"),
        (lambda x: ops.neg(ELSEWHERE), "work for reference"),
    ],
)
def test_what_a_replay_cannot_do_again_is_refused(function, what):
    memory, pool, kernel = CPU.memory, CPU.pool, registry.kernels(OUTSIDE).neg

    def step(x):
        function(x)
        return x

    with pytest.raises(DeviceError, match=rf"\[cpu\] expected no ({what}) while a step is captu"):
        captured(step)
    assert CPU.memory is memory
    assert CPU.pool is pool
    assert registry.kernels(OUTSIDE).neg is kernel
    assert (ops.neg(OUTSIDE).numpy() == -1).all()


ELSEWHERE = ones(3, device="reference")


def test_only_those_kernels_return_what_they_find():
    found = {
        name
        for name, kernel in reference.KERNELS.items()
        if inspect.signature(kernel.load()).return_annotation != "None"
    }
    assert found == registry._FINDERS


@op(differentiable="no")
def _plain(x):
    out = empty_like(x)
    out.array[...] = np.sqrt(x.array)
    return out


@on_host
def _root(x, *, out):
    out.array[...] = np.sqrt(x.array)


@op(differentiable="no")
def _told(x):
    out = empty_like(x)
    _root(x, out=out)
    return out


def test_an_ops_own_numpy_is_told_or_refused():
    step = captured(_told)
    for k in range(3):
        assert (step(tensor(np.full(3, float(k * k)))).numpy() == k).all()
    with pytest.raises(TypeError, match="NoneType") as caught:
        captured(_plain)
    assert "@forge.extend.on_host" in caught.value.__notes__[0]


# ---- What a replay does like an eager call


@pytest.mark.parametrize("device", HOSTS)
@pytest.mark.parametrize("bad", ["inputs", "targets", "order"])
def test_ids_out_of_range_are_an_error_in_a_replay_too(device, bad):
    run = Run(device, captured=True)
    run.steps(3)
    before = run.bits()[0]
    arguments = run.arguments()
    micro = arguments[4].micros[0]
    x = getattr(micro, bad)
    if bad == "order":
        wrong = tensor(x.numpy()[::-1].copy(), device=device)
    else:
        wrong = tensor(np.where(np.arange(x.size).reshape(x.shape) == 40, 61, x.numpy()))
        wrong = tensor(wrong, device=device)
    batch = arguments[4]._replace(micros=[micro._replace(**{bad: wrong})])
    message = "stable order" if bad == "order" else rf"{bad.replace('inputs', 'ids')} in \[0, 61\)"
    with pytest.raises(ArgumentError, match=message):
        run.train_step(*arguments[:4], batch, arguments[5])
    assert run.bits()[0] == before
    eager = Run(device)
    eager.steps(3)
    run.number -= 1
    assert run.steps(1) == eager.steps(1)


@pytest.mark.parametrize("device", HOSTS)
def test_a_full_cache_is_an_error_in_a_replay_too(device):
    model = GPT2(GPT2Config(**SIZES))
    params = model.zeros(Device(device))
    cache = model.cache(1, 24, Device(device))
    step = Captured(model.decode, Device(device), ("ids", "pos"))
    token = tensor([[1]], "int64", device)
    for position in range(3):
        step(params.compute, token, cache, tensor([position], "int64", device))
    with pytest.raises(ArgumentError, match="expected positions in"):
        step(params.compute, token, cache, tensor([24], "int64", device))


@pytest.mark.parametrize("device", HOSTS)
def test_a_tape_sees_what_a_replay_changed(device):
    run = Run(device, captured=True)
    run.steps(3)
    weight = run.params["h.0.mlp.c_fc.weight"]
    tape = Tape()
    x = tape.leaf(zeros((2, 48), "float32", run.device))
    y = ops.sum(ops.matmul(x, weight))
    run.steps(1)
    with pytest.raises(TapeError, match="expected the saved 'b' of node 0 unchanged"):
        tape.backward(y)


@pytest.mark.parametrize("device", HOSTS)
def test_versions_rise_as_in_eager_steps(device):
    eager, replayed = Run(device), Run(device, captured=True)

    def versions(run):
        buffers = (run.params, run.grads, run.optimizer.m, run.optimizer.v)
        return [x.flat.storage.version for x in buffers] + [run.optimizer.updates.storage.version]

    for _ in range(4):
        eager.steps(1)
        replayed.steps(1)
        assert versions(eager) == versions(replayed)


def test_kernels_of_a_replay_are_watched_like_others():
    run = Run("cpu", captured=True)
    seen = []

    def around(name, kernel):
        return lambda *args, **keywords: seen.append(name) or kernel(*args, **keywords)

    names = []
    for _ in range(4):
        with registry.watched(around):
            run.steps(1)
        names.append(sorted(seen))
        seen.clear()
    # Eager, captured with its first replay, replayed.
    assert len(names[0]) > 30
    assert names[0] == names[1] == names[2] == names[3]
    run.steps(1)
    assert seen == []


def test_a_replay_under_strict_refuses_fallbacks():
    step = captured(lambda x: ops.argmax(ops.reshape(x, (1, 3))), calls=3)
    with registry.strict(), pytest.raises(FallbackError, match="expected a cpu kernel"):
        step(ones(3))
    step(ones(3))


def test_other_threads_go_on_while_one_captures():
    """They compute, read and write, and leave nothing in the recording."""
    found = []

    def other(value):
        x = tensor(np.full(3, value))
        y = ops.add(ops.scale(x, 2.0), x)
        CPU.memory.fill(x, 7.0)
        tape = Tape(anomaly=True)
        with registry.watched(lambda name, kernel: kernel):
            z = ops.exp(tape.leaf(x)).value
        found.append([y.numpy()[0], x.numpy()[0], round(np.log(z.numpy()[0]))])

    def step(x):
        y = ops.scale(x, 3.0)
        ops.exp(y)  # its buffer is free again
        thread = threading.Thread(target=other, args=[float(len(found))])
        thread.start()
        thread.join()
        result = ops.neg(y)
        if k == 1:
            # Not in a buffer of the other thread's, which the host sees.
            assert result.array is None
        return result

    function = Captured(step, CPU, ("x",))
    for k in range(4):
        assert (function(tensor(np.full(3, float(k)))).numpy() == -3 * k).all()
    assert found == [[0, 7, 7], [3, 7, 7]]
    (recording,) = function._recordings.values()
    assert len(recording._graph._calls) == 3


def test_two_threads_replay_in_turn():
    function = Captured(lambda x: ops.exp(ops.scale(x, 1.0)), CPU, ("x",))
    size = 1 << 16
    for _ in range(2):
        function(ones(size))
    wrong = []

    def work(value):
        x = tensor(np.full(size, value, np.float32))
        expected = ops.exp(x).numpy()
        for _ in range(100):
            if not (function(x).numpy() == expected).all():
                wrong.append(value)

    workers = [threading.Thread(target=work, args=[float(v)]) for v in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_kernels_bound_by_another_thread_are_not_those_of_a_capture(monkeypatch):
    """It binds them while a capture begins: the capture's must not run, nor its be recorded."""
    begun, binding, results = threading.Event(), threading.Event(), []
    make = registry.Kernels.__init__

    def slow(self, *args):
        make(self, *args)
        if threading.current_thread() is other:
            binding.set()
            begun.wait(0.5)

    def step(x):
        begun.set()
        if capture.here():
            other.join()
        return ops.scale(x, 3.0)

    function = Captured(step, CPU, ("x",))
    function(ones(3))
    begun.clear()
    other = threading.Thread(target=lambda: results.append(ops.scale(ones(3), 2.0).numpy()[0]))
    monkeypatch.setattr(registry.Kernels, "__init__", slow)
    registry._bound.clear()
    other.start()
    binding.wait()
    assert (function(ones(3)).numpy() == 3).all()
    assert results == [2]


def test_two_threads_capture_in_turn():
    results = {}

    def work(factor):
        step = Captured(lambda x: ops.scale(ops.exp(x), factor), CPU, ("x",))
        results[factor] = [step(ones(5)).numpy()[0] for _ in range(30)]

    workers = [threading.Thread(target=work, args=[float(f)]) for f in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for factor, found in results.items():
        assert np.allclose(found, factor * np.e)
    assert len(results) == 4


def test_varying_must_be_parameters():
    with pytest.raises(ArgumentError, match="expected varying parameters out of x, got y"):
        Captured(lambda x: x, "cpu", ("y",))
