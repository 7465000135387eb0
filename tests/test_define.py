"""`@op`: signatures, recording, and definitions that are refused."""

import importlib.util
import inspect
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import forge
from forge import ArgumentError, DtypeError, GradientError, Tape, TapeError, ops, tensor
from forge.extend import Record, empty_like, kernels, op


def ref(array, dtype="float64"):
    return forge.tensor(array, dtype, "reference")


@op(saves=("x", "w"), name="test.affine")
def affine(x, w, bias=None, *, gain=1.0, into=None, record: Record | None = None):
    """gain (x w) + bias."""
    out = ops.scale(ops.mul(x, w), gain)
    return out if bias is None else ops.add(out, bias)


@affine.rule
def _(node, dy):
    dx = ops.scale(dy, node.gain)
    return {"x": dx * node.w, "w": dx * node.x, "bias": dy}


def plain(x, w, bias=None, *, gain=1.0, into=None):
    """The same signature without Forge."""


@op(saves=("a", "b"), name="test.keywords")
def keywords(a, b=None, *, gain=1.0, into=None, record: Record | None = None):
    """A body that says what it was called with."""
    keywords.seen = (a, b, gain, into, record)
    return empty_like(a)


@keywords.rule
def _(node, dy):
    return {"a": None, "b": None}


def test_it_looks_like_the_function():
    assert keywords.__name__ == "keywords"
    assert keywords.__module__ == __name__
    assert keywords.__doc__.startswith("A body")
    assert list(inspect.signature(keywords).parameters) == ["a", "b", "gain", "into"]
    assert keywords.primitive.name == "test.keywords"


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda f, a, b: f(a), (True, None, 1.0)),
        (lambda f, a, b: f(a, b), (True, True, 1.0)),
        (lambda f, a, b: f(b=b, a=a, gain=2.0), (True, True, 2.0)),
        (lambda f, a, b: f(a, gain=3.0), (True, None, 3.0)),
    ],
)
def test_arguments_are_bound_as_python_binds_them(call, expected, tracked):
    a, b = ref([1.0]), ref([2.0])
    tape = Tape()
    out = call(keywords, *((tape.leaf(a), tape.leaf(b)) if tracked else (a, b)))
    assert out.__class__ is (forge.Var if tracked else forge.Tensor)
    seen = keywords.seen
    assert seen[0] is a
    assert seen[1] is (b if expected[1] else None)
    assert seen[2:4] == (expected[2], None)
    assert (seen[4] is not None) == tracked


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, a: f(), "missing 1 required positional argument: 'a'"),
        (lambda f, a: f(a, a, a), "takes from 1 to 2 positional arguments but 3"),
        (lambda f, a: f(a, a=a), "multiple values for argument 'a'"),
        (lambda f, a: f(a, gian=2.0), "unexpected keyword argument 'gian'"),
    ],
)
def test_wrong_arguments_get_pythons_message(call, message, tracked):
    a = ref([1.0])
    with pytest.raises(TypeError, match=rf"keywords\(\).*{message}"):
        call(keywords, Tape().leaf(a) if tracked else a)


def test_a_var_in_any_place_records():
    tape = Tape()
    x = ref([2.0])
    keywords(x, tape.leaf(x))
    keywords(x, b=tape.leaf(x))
    keywords(a=tape.leaf(x))
    assert [list(node.inputs) for node in tape.nodes] == [["b"], ["b"], ["a"]]


def test_defaults_reach_the_rule():
    tape = Tape()
    x = tape.leaf(ref([2.0]))
    y = affine(x, ref([3.0]))
    assert tape.backward(y)[x].item() == 3.0


def test_a_lambda_may_be_an_op():
    double = op(name="test.double")(lambda x, *, by=2.0: ops.scale(x, by))
    double.rule(lambda node, dy: {"x": ops.scale(dy, node.by)})
    x = Tape().leaf(ref([3.0]))
    assert x.tape.backward(double(x))[x].item() == 2.0


def test_no_record_without_a_tape():
    keywords(ref([1.0]))
    assert keywords.seen[-1] is None


@pytest.mark.parametrize("call", [ops.add, ops.matmul, ops.gelu_backward, ops.sub])
def test_vars_of_two_tapes_are_refused(call):
    a, b = (Tape().leaf(ref([[1.0]])) for _ in range(2))
    name = call.primitive.name
    with pytest.raises(TapeError, match=rf"\[{name}\] expected Vars of one tape, got '\w+' from"):
        call(a, b)
    with pytest.raises(TapeError, match=name):
        call(b, a)


def test_an_op_without_a_rule_refuses_a_var_by_name():
    @op(name="test.ruleless")
    def ruleless(x):
        return empty_like(x)

    ruleless(ref([1.0]))
    with pytest.raises(GradientError, match=r"\[test\.ruleless\] expected Tensors, got a Var"):
        ruleless(Tape().leaf(ref([1.0])))


NOT_DIFFERENTIABLE = {
    name: function
    for name in ops.__all__
    if getattr(function := getattr(ops, name), "primitive", None)
    and function.primitive.differentiable == "no"
}


@pytest.mark.parametrize("name", NOT_DIFFERENTIABLE)
def test_ops_that_are_not_differentiable_refuse_a_var(name):
    x = Tape().leaf(ref([1.0]))
    required = [
        p
        for p in inspect.signature(NOT_DIFFERENTIABLE[name]).parameters.values()
        if p.default is p.empty
    ]
    args = [x for p in required if p.kind is not p.KEYWORD_ONLY]
    with pytest.raises(GradientError, match=rf"\[{name}\] expected Tensors, got a Var"):
        NOT_DIFFERENTIABLE[name](*args, **{p.name: x for p in required if p.kind is p.KEYWORD_ONLY})


def test_every_other_op_has_a_rule():
    for name, primitive in Tape.primitives.items():
        if not name.startswith("test."):
            assert (primitive.rule is None) == (primitive.differentiable == "no"), name


def test_in_place_ops_and_backward_ops_say_that_they_end_there():
    assert {"adamw_", "kv_append_", "scatter_add_rows_", "attention_backward"} <= set(
        NOT_DIFFERENTIABLE
    )


def test_buffers_are_for_rules():
    x = ref([[1.0, 2.0]])
    with pytest.raises(TapeError, match=r"\[sum_rows\] expected no 'into' while recording"):
        ops.sum_rows(Tape().leaf(x), into=ref([0.0, 0.0]))


def test_variadic_inputs_are_named_by_number():
    tape = Tape()
    a, b = ref([[1.0], [2.0]]), ref([[3.0]])
    va, vb = tape.leaf(a), tape.leaf(b)
    y = ops.concat(va, b, vb, axis=0)
    node = tape.nodes[0]
    assert node.inputs == {"xs0": va.id, "xs2": vb.id}
    assert list(node.constants) == ["xs1"]
    grads = tape.backward(y, ref([[1.0], [2.0], [3.0], [4.0]]))
    assert grads[va].numpy().tolist() == [[1.0], [2.0]]
    assert grads[vb].numpy().tolist() == [[4.0]]


def test_variadic_order_beyond_ten():
    tape = Tape()
    xs = [ref([float(i)]) for i in range(12)]
    y = ops.concat(*xs[:-1], tape.leaf(xs[-1]))
    assert y.value.numpy().tolist() == [float(i) for i in range(12)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outputs": ("x",)}, "named unlike outputs"),
        ({"saves": ("mask",)}, "save parameters and outputs, got \\['mask'\\]"),
        ({"differentiable": "thrice"}, "differentiable="),
    ],
)
def test_definitions_that_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=rf"\[refused\] expected .*{message}"):

        @op(**arguments)
        def refused(x):
            return x


def test_a_parameter_may_not_hide_what_a_rule_calls():
    with pytest.raises(ArgumentError, match="got \\['spec', 'wants'\\]"):

        @op()
        def refused(x, spec, *, wants):
            return x


def test_a_remake_names_an_output():
    @op(name="remade")
    def remade(x):
        return x

    with pytest.raises(ArgumentError, match=r"\[remade\] expected to remake one of \['out'\]"):
        remade.remake("y", needs=("x",))


def test_the_benchmark_of_the_wrapper_runs(monkeypatch, capsys):
    path = Path(__file__).parent.parent / "benchmarks" / "overhead.py"
    spec = importlib.util.spec_from_file_location("overhead", path)
    overhead = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(overhead)
    monkeypatch.setattr(overhead, "NODES", 10)
    monkeypatch.setattr(overhead, "ROUNDS", 2)
    for argv in (["overhead"], ["overhead", "--json"]):
        monkeypatch.setattr(sys, "argv", argv)
        overhead.main()
    table, _, document = capsys.readouterr().out.partition("{")
    rows = json.loads("{" + document)["rows"]
    assert len(table.splitlines()) == 2 + len(rows)
    assert all(set(row) == {"wrapper", "record", "backward"} for row in rows.values())


def test_the_worked_example_of_an_op():
    @op(saves=("out",), name="test.reciprocal")
    def reciprocal(x):
        out = empty_like(x)
        kernels(x).div(forge.tensor(1.0, x.dtype, x.device), x, out=out)
        return out

    @reciprocal.rule
    def _(node, dy):
        return {"x": ops.neg(dy * node.out * node.out)}

    assert reciprocal(ref([4.0])).item() == 0.25
    forge.check_grads(reciprocal, ref([0.5, 2.0, -3.0]), order=2)


# What a rule returns is checked


def rule_of(rule):
    """An op that copies x, with a rule of the test's making."""

    @op(name="test.wrong")
    def apply(x):
        return ops.scale(x, 1.0)

    apply.rule(rule)
    return apply


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda node, dy: {}, r"a gradient of 'x', or None, got \[\]"),
        (lambda node, dy: {"y": dy}, r"a gradient of 'x', or None, got \['y'\]"),
        (lambda node, dy: None, "a gradient of 'x', or None, got None"),
        (lambda node, dy: dy, "a gradient of 'x', or None, got Tensor"),
        (lambda node, dy: {"x": ref(np.ones((4, 3)))}, r"dx as \[2, 3\] .* got Tensor\(\[4, 3\]"),
        (lambda node, dy: {"x": ref(np.ones(3))}, r"dx as \[2, 3\] .* got Tensor\(\[3\]"),
        (lambda node, dy: {"x": ops.cast(dy, "float32")}, "dx as .* float64 .* float32"),
        (lambda node, dy: {"x": forge.tensor(dy, device="cpu")}, "dx as .* reference.* cpu"),
        (lambda node, dy: {"x": 1.0}, "dx as .*, got 1.0"),
        (lambda node, dy: {"x": dy.numpy()}, "dx as .*, got array"),
    ],
)
def test_a_wrong_result_names_op_and_input(result, message):
    tape = Tape()
    y = rule_of(result)(tape.leaf(ref(np.ones((2, 3)))))
    expected = rf"\[test.wrong\] expected its rule to return {message}"
    with pytest.raises(GradientError, match=expected):
        tape.backward(y, ref(np.ones((2, 3))))


def test_a_gradient_larger_than_the_input_is_summed():
    tape = Tape()
    x = tape.leaf(ref(np.ones((1, 3))))
    y = rule_of(lambda node, dy: {"x": ref(np.ones((2, 5, 3)))})(x)
    assert tape.backward(y, ref(np.ones((1, 3))))[x].numpy().tolist() == [[10.0] * 3]


def test_a_view_of_the_buffer_is_not_the_buffer():
    def rule(node, dy):
        into = ops.reshape(node.into("x"), (3,))
        return {"x": ops.reshape(ops.scale(ops.reshape(dy, (3,)), 1.0, into=into), (1, 3))}

    tape = Tape()
    y = rule_of(rule)(tape.leaf(ref(np.ones((1, 3))), into=ref(np.zeros((1, 3)))))
    with pytest.raises(GradientError, match="or its buffer once added to"):
        tape.backward(y, ref(np.ones((1, 3))))


def test_a_body_that_returns_no_tensor_is_refused_by_name():
    @op(name="returns_an_array")
    def body(x):
        return x.array

    body.rule(lambda node, dy: {"x": dy})
    with pytest.raises(DtypeError, match=r"\[returns_an_array\] expected its body to return a Ten"):
        body(Tape().leaf(tensor([1.0])))
