"""The checker is checked: rules that are wrong in every way a rule can be must fail.

Then `value_and_grad`, and derivatives of derivatives.
"""

import numpy as np
import pytest

import forge
from forge import (
    GradientError,
    ShapeError,
    Tape,
    TapeError,
    Var,
    check_grads,
    ops,
    value_and_grad,
)
from forge.extend import empty_like, op


def ref(array, dtype=None):
    return forge.tensor(array, dtype, "reference")


def same(tensor, array):
    np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-12)


def normal(*shape, scale=1.0, seed=0):
    return ref(scale * np.random.default_rng(seed).standard_normal(shape))


def square(factor=1.0, *, backward_factor=1.0, size=1.0):
    """size x^2, whose rule is off by `factor`, and its rule's rule by `backward_factor`."""

    @op(saves=("x", "dy"), name="test.slope")
    def slope(x, dy):
        return ops.scale(ops.mul(x, dy), 2.0 * factor * size)

    @slope.rule
    def _(node, du):
        wrong = 2.0 * factor * backward_factor * size
        return {"x": ops.scale(du * node.dy, wrong), "dy": slope(node.x, du)}

    @op(saves=("x",), name="test.square")
    def apply(x):
        return ops.scale(ops.mul(x, x), size)

    @apply.rule
    def _(node, dy):
        return {"x": slope(node.x, dy)}

    return apply


WRONG = [1.001, 0.999, 1.0005, 0.9995, 2.0, 0.0, -1.0, np.nan]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_right_rule_passes(size, order):
    check_grads(square(size=size), normal(3, 4), order=order)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("factor", WRONG)
def test_a_wrong_rule_fails(factor, size, seed):
    with pytest.raises(GradientError, match=r"\[check_grads\] expected .* argument 0 of "):
        check_grads(square(factor, size=size), normal(3, 4, seed=seed), seed=seed)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("factor", WRONG)
def test_a_wrong_second_order_rule_fails(factor, size):
    function = square(backward_factor=factor, size=size)
    check_grads(function, normal(3, 4))
    with pytest.raises(GradientError, match="argument 0 of a gradient"):
        check_grads(function, normal(3, 4), order=2)


def product(rule):
    """a b c, elementwise, with a rule of the test's making."""

    @op(saves=("a", "b", "c"), name="test.product")
    def apply(a, b, c):
        return ops.mul(ops.mul(a, b), c)

    apply.rule(rule)
    return apply


def right(node, dy):
    return {"a": dy * node.b * node.c, "b": dy * node.a * node.c, "c": dy * node.a * node.b}


MISTAKES = {
    "a missing term": lambda n, dy: {**right(n, dy), "b": None},
    "a sign": lambda n, dy: {**right(n, dy), "c": ops.neg(dy * n.a * n.b)},
    "a missing factor": lambda n, dy: {**right(n, dy), "c": dy * n.a},
    "two swapped": lambda n, dy: {**right(n, dy), "a": right(n, dy)["b"], "b": right(n, dy)["a"]},
    "the upstream gradient left out": lambda n, dy: {**right(n, dy), "c": n.a * n.b},
    "one element of many": lambda n, dy: {**right(n, dy), "a": spoiled(right(n, dy)["a"])},
}


def spoiled(x):
    array = x.numpy()
    array.flat[-1] *= 1.1
    return ref(array)


@pytest.mark.parametrize("order", [1, 2])
def test_several_inputs_pass(order):
    check_grads(product(right), *(normal(5, 3, seed=i) for i in range(3)), order=order)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_fail(mistake):
    with pytest.raises(GradientError, match="check_grads"):
        check_grads(product(MISTAKES[mistake]), *(normal(5, 3, seed=i) for i in range(3)))


def test_third_order():
    check_grads(square(), normal(4), order=3)
    check_grads(lambda x: ops.exp(x) * x, normal(4), order=3)


def test_the_message_has_the_argument_and_both_numbers():
    with pytest.raises(GradientError) as caught:
        check_grads(lambda a, b: ops.mul(a, square(2.0)(b)), ref(1.0), ref(3.0))
    difference, product = (float(word.strip(",")) for word in str(caught.value).split()[2:14:11])
    assert product == pytest.approx(2 * difference, rel=1e-6)
    assert "argument 1" in str(caught.value)


def test_float32_arguments_are_checked_in_float64():
    seen = set()

    def function(x):
        seen.add(x.dtype)
        return ops.tanh(x)

    check_grads(function, ref([0.1, 0.7], "float32"))
    assert seen == {"float64"}


def test_other_arguments_pass_through():
    ids = ref([1, 0, 1])
    check_grads(lambda x, ids, name: ops.take(x, ids), normal(2, 3), ids, "a name", order=2)


def test_an_argument_that_is_not_used_has_no_gradient():
    check_grads(lambda x, y: ops.tanh(x), normal(3), normal(2), order=2)


def test_a_linear_function_has_a_zero_second_derivative():
    check_grads(lambda x: ops.scale(x, 3.0), normal(3), order=2)


def test_a_function_that_leaves_the_tape_is_refused():
    with pytest.raises(TapeError, match="root on this tape"):
        check_grads(lambda x: ops.tanh(getattr(x, "value", x)), normal(3))


def test_a_function_with_large_values_and_small_gradient_passes():
    check_grads(lambda x: ops.tanh(x) + 1e6, normal(3))


def test_empty_and_scalar_arguments():
    check_grads(lambda x: ops.tanh(x), ref(np.zeros((0, 3))))
    check_grads(lambda x: ops.tanh(x), ref(0.3, "float64"), order=2)


def test_value_and_grad():
    w, x = normal(3, 2), normal(4, 3, seed=1)
    value, (dw, dx) = value_and_grad(lambda w, x: ops.sum(ops.exp(x @ w)))(w, x)
    e = np.exp(x.numpy() @ w.numpy())
    np.testing.assert_allclose(value.item(), e.sum(), rtol=1e-12)
    np.testing.assert_allclose(dw.numpy(), x.numpy().T @ e, rtol=1e-12)
    np.testing.assert_allclose(dx.numpy(), e @ w.numpy().T, rtol=1e-12)


def test_value_and_grad_passes_the_rest_through():
    def function(x, ids, *, power):
        assert isinstance(ids, forge.Tensor)
        return ops.sum(ops.take(x, ids)) * power

    value, grads = value_and_grad(function)(ref([1.0, 2.0]), ref([1, 1]), power=3.0)
    assert value.item() == 12.0
    assert [g.numpy().tolist() for g in grads] == [[0.0, 6.0]]


def test_value_and_grad_of_constants():
    constant = ref(2.0)
    assert value_and_grad(lambda x: constant)(ref([1.0])) == (constant, (None,))
    value, grads = value_and_grad(lambda x, y: ops.sum(x))(ref([1.0, 2.0]), ref([1.0]))
    assert (value.item(), grads[0].numpy().tolist(), grads[1]) == (3.0, [1.0, 1.0], None)


@pytest.mark.parametrize("function", [ops.tanh, lambda x: x.value, lambda x: 1.0, lambda x: None])
def test_value_and_grad_refuses_what_is_no_scalar(function):
    with pytest.raises(ShapeError, match="value_and_grad"):
        value_and_grad(function)(ref([1.0, 2.0]))


# Derivatives of derivatives


def test_hessian_vector_product():
    """f = sum(exp(A x)): H v = A' diag(exp(A x)) A v."""
    a, x, v = normal(4, 3), normal(3, 1, seed=1), normal(3, 1, seed=2)
    tape = Tape()
    leaf = tape.leaf(x)
    dx = tape.backward(ops.sum(ops.exp(ops.matmul(a, leaf))), create_graph=True)[leaf]
    hv = tape.backward(ops.sum(dx * v))[leaf]
    A, e = a.numpy(), np.exp(a.numpy() @ x.numpy())
    same(dx.value, A.T @ e)
    same(hv, A.T @ (e * (A @ v.numpy())))


def test_third_derivative():
    tape = Tape()
    x = tape.leaf(ref(0.7, "float64"))
    y = ops.tanh(x)
    for _ in range(3):
        y = tape.backward(y, create_graph=True)[x]
    t = np.tanh(0.7)
    same(y.value, (1 - t * t) * (6 * t * t - 2))


def test_a_seed_that_is_a_var_makes_a_product_with_the_jacobian():
    """The gradient of <vjp(u), v> in u is J v."""
    tape = Tape()
    x, u = tape.leaf(normal(3)), tape.leaf(normal(3, seed=1))
    v = normal(3, seed=2)
    vjp = tape.backward(ops.exp(x), u, create_graph=True)[x]
    same(tape.backward(vjp, v)[u], np.exp(x.value.numpy()) * v.numpy())


def test_recorded_gradients_are_vars_even_where_they_are_constant():
    tape = Tape()
    x, y, z = (tape.leaf(ref(2.0, "float64")) for _ in range(3))
    grads = tape.backward(ops.scale(x, 3.0) + y, create_graph=True)
    assert (grads[x].value.item(), grads[y].value.item(), grads[z]) == (3.0, 1.0, None)
    assert tape.backward(grads[x])[x] is None


def test_ops_that_are_differentiable_once_say_so():
    tape = Tape()
    logits = tape.leaf(normal(2, 3))
    loss = ops.cross_entropy(logits, ref([0, 1]))
    with pytest.raises(GradientError, match=r"\[cross_entropy\] .* twice, got one that is so once"):
        tape.backward(loss, create_graph=True)


def test_a_third_derivative_that_does_not_exist_says_so():
    tape = Tape()
    x, gamma, beta = (tape.leaf(normal(*s)) for s in ((2, 3), (3,), (3,)))
    y = ops.sum(ops.exp(ops.layernorm(x, gamma, beta)))
    dx = tape.backward(y, create_graph=True)[x]
    with pytest.raises(GradientError, match=r"\[layernorm_backward\] .* twice"):
        tape.backward(ops.sum(dx * dx), create_graph=True)


def test_extras_are_no_vars_where_the_sweep_is_recorded():
    kinds = {}

    @op(saves=("x", "out", "extra", "other"), name="test.kinds")
    def kind(x, other, *, record=None):
        if record is not None:
            record.keep(extra=empty_like(x))
        return ops.scale(x, 1.0)

    @kind.rule
    def _(node, dy):
        kinds.update({n: type(getattr(node, n)) for n in ("x", "out", "extra", "other")})
        kinds["tracked"] = node.tracked
        return {"x": dy}

    tape = Tape()
    y = kind(tape.leaf(ref([1.0])), ref([1.0]))
    tape.backward(y, create_graph=True)
    assert kinds.pop("tracked")
    assert kinds == {"x": Var, "out": Var, "extra": forge.Tensor, "other": forge.Tensor}


def test_a_check_of_nothing_is_refused():
    for arguments in ((), (np.ones(3),), (forge.tensor([1, 2]),)):
        with pytest.raises(forge.DtypeError, match="expected a floating Tensor among"):
            forge.check_grads(lambda *xs: ref([1.0]), *arguments)
