"""The checker is checked: what is wrong by a thousandth, or otherwise, fails and is named."""

import json
import types

import numpy as np
import pytest

import forge
from forge import ops
from forge.autograd.tape import Tape
from forge.backends import reference, registry
from forge.tensor import Tensor, tensor
from forge.verify import CASES, as_json, check, model_cases, run
from forge.verify.driver import implementation, kernel_of

BY_OP = {name: [case for case in CASES if case.op == name] for name in {c.op for c in CASES}}
PUBLIC = {name for name in ops.__all__ if callable(getattr(ops, name))}
DIFFERENTIATED = sorted({(c.op, name) for c in CASES for name in c.wrt if c.op in Tape.primitives})

# Kernels that serve another op than the one of their name; those of `anomaly` have tests there.
SERVES = {"accumulate": {"add"}, "target_weight": {"cross_entropy"}}
DIAGNOSTIC = {"extent", "finite"}


def failing(name, device="cpu", dtype="float32"):
    """The failures of an op's rows, by op."""
    results = [check(case, device, dtype) for case in BY_OP[name]]
    return {result.op: result.failures for result in results if not result.ok}


@pytest.fixture
def sabotage(monkeypatch):
    """Replace the float32 CPU kernel `name` by `wrong(right, *args, **keywords)`."""

    def install(name, wrong):
        kernels = registry.kernels(tensor(0.0, device="cpu"))
        right = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, **keywords: wrong(right, *args, **keywords)
        )

    return install


def changed_tensors(right, args, keywords):
    """Run a kernel; the Tensors that it wrote to."""
    given = [x for x in (*args, *keywords.values()) if isinstance(x, Tensor)]
    before = [x.numpy() for x in given]
    right(*args, **keywords)
    return [x for x, old in zip(given, before, strict=True) if x.numpy().tobytes() != old.tobytes()]


def test_every_public_op_has_a_row():
    assert set(BY_OP) == PUBLIC


def test_every_gradient_is_in_a_row():
    differentiable = {name for name, primitive in Tape.primitives.items() if primitive.rule}
    own = {name for name in differentiable if name in PUBLIC}
    assert {name for name, _ in DIFFERENTIATED} == own


@pytest.mark.parametrize(("name", "argument"), DIFFERENTIATED)
def test_a_rule_wrong_by_a_thousandth_fails_by_differences(name, argument, monkeypatch):
    primitive = Tape.primitives[name]
    right = primitive.rule

    def wrong(node, *douts):
        gradients = right(node, *douts)
        if gradients.get(argument) is None:
            return gradients
        return {**gradients, argument: ops.scale(gradients[argument], 1.001)}

    monkeypatch.setattr(primitive, "rule", wrong)
    failures = failing(name, "reference", "float64")
    assert failures.keys() == {name}
    assert "check_grads" in str(failures)


@pytest.mark.parametrize("kernel", sorted(reference.KERNELS.keys() - DIAGNOSTIC))
def test_a_kernel_wrong_by_a_thousandth_fails(kernel, sabotage):
    def wrong(right, *args, **keywords):
        for x in changed_tensors(right, args, keywords):
            x.array[...] = x.array * 1.001 if x.dtype != "int64" else x.array + 1

    sabotage(kernel, wrong)
    served = SERVES.get(kernel) or {name for name in PUBLIC if kernel_of(name) == kernel}
    assert served
    for name in served:
        assert failing(name).keys() == {name}


def test_an_op_that_changes_its_input_fails(sabotage):
    def wrong(right, x, *, out):
        right(x, out=out)
        x.array += 1

    sabotage("exp", wrong)
    assert "changed its input x" in str(failing("exp"))


def test_an_op_that_hides_an_in_place_change_fails(monkeypatch):
    body = ops.scale

    def scale(x, factor, into=None):
        version = into.storage.version if into is not None else 0
        out = body(x, factor, into=into)
        out.storage.version = version
        return out

    monkeypatch.setattr(ops, "scale", scale)
    case = next(case for case in BY_OP["scale"] if case.mutates)
    assert "version of into is 0" in str(check(case, "cpu", "float32").failures)


def test_a_kernel_with_other_bits_each_time_fails(sabotage):
    calls = iter(range(10**6))

    def wrong(right, x, *, out):
        right(x, out=out)
        out.array *= 1 + np.float32(2e-7) * (next(calls) % 2)

    sabotage("tanh", wrong)
    assert "has other bits" in str(failing("tanh"))


def test_a_rule_that_reads_what_it_did_not_save_fails(monkeypatch):
    def greedy(node, dy):
        return {"x": ops.mul(dy, ops.exp(node.x))}

    monkeypatch.setattr(Tape.primitives["exp"], "rule", greedy)
    assert "TapeError" in str(failing("exp"))


def test_a_rule_that_keeps_memory_it_does_not_own_fails(sabotage, monkeypatch):
    kept = types.SimpleNamespace()
    right_rule = Tape.primitives["exp"].rule

    def spying(right, x, *, out):
        kept.memory = x.array  # Without the Storage, the pool hands the memory out again.
        right(x, out=out)

    def rule(node, dy):
        if dy.device.name == "reference":  # the oracle
            return right_rule(node, dy)
        return {"x": ops.mul(dy, ops.exp(tensor(kept.memory, device=dy.device)))}

    sabotage("exp", spying)
    monkeypatch.setattr(Tape.primitives["exp"], "rule", rule)
    assert "dx is wrong" in str(failing("exp"))


def test_an_accumulation_that_overwrites_fails(sabotage):
    def wrong(right, x, *, out):
        out.array[...] = 0
        right(x, out=out)

    sabotage("accumulate", wrong)
    assert "buffer" in str(failing("sub"))


def test_an_exception_in_a_kernel_is_a_failure_of_its_row(sabotage):
    def wrong(right, *args, **keywords):
        raise IndexError("past the end")

    sabotage("softmax", wrong)
    assert "IndexError: past the end" in str(failing("softmax"))


def test_results_say_what_ran():
    results = list(run("cpu", ops=["gelu"]))
    assert {(r.device, r.dtype) for r in results} == {
        ("reference", "float64"),
        ("cpu", "float32"),
        ("cpu", "bfloat16"),
    }
    assert all(r.ok and 0 <= r.forward_error <= r.tolerance for r in results)
    assert all(r.gradient_error <= r.gradient_tolerance for r in results)
    assert {r.implementation for r in results if r.device == "cpu"} == {
        registry.implementation("gelu", "cpu", "float32")
    }
    assert next(r for r in run("cpu", ops=["global_norm"])).gradient_error is None


def test_implementations_follow_the_kernels():
    assert {name for name in PUBLIC if kernel_of(name) is None} == {"reshape"}
    assert implementation("matmul", forge.Device("cpu"), "float64") == "reference"
    assert implementation("reshape", forge.Device("cpu"), "float32") == "cpu"


def test_json_is_strict_and_complete(sabotage):
    def wrong(right, x, *, out):
        out.array.fill(np.nan)

    sabotage("neg", wrong)
    results = list(run("cpu", ops=["neg"]))
    document = json.loads(as_json(results), parse_constant=pytest.fail)
    assert len(document) == len(results)
    assert [row["ok"] for row in document] == [result.ok for result in results]
    bad = [row for row in document if not row["ok"]]
    assert bad[0]["op"] == "neg"
    assert bad[0]["forward_error"] is None
    assert "nan" in bad[0]["failures"][0]


def test_rows_of_an_op_come_one_after_the_other():
    cases = [case for case in CASES if case.op in ("neg", "sum", "transpose")]
    apart = [*cases[::2], *cases[1::2], *cases[:1]]
    ops = [result.op for result in run("reference", cases=apart)]
    assert len([op for op, before in zip(ops, [None, *ops], strict=False) if op != before]) == 3


def test_an_unknown_op_is_refused_with_the_nearest():
    with pytest.raises(forge.ArgumentError, match=r"\[verify\] .*'geluu'; did you mean gelu\?"):
        next(run(ops=["geluu"]))


CONFIG = types.SimpleNamespace(vocab_size=65, block_size=16, n_embd=24, n_head=3)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_models_shapes_pass(device):
    results = list(run(device, cases=[], model=CONFIG))
    assert [r.failures for r in results if not r.ok] == []
    assert "wte[128,24]" in next(r.case for r in results if r.op == "linear_cross_entropy")


def test_a_models_shapes_hold_every_op_of_its_step():
    covered = {case.op for case in model_cases(CONFIG)}
    assert {"embedding", "layernorm", "linear", "attention", "add_layernorm"} <= covered
    assert {"dropout", "linear_cross_entropy", "cached_attention", "adamw_"} <= covered
