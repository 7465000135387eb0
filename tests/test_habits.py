"""What a user of PyTorch or nanoGPT writes out of habit gets an error that says what to write."""

import copy
import pickle
import re

import numpy as np
import pytest

import forge
from forge import Tape, ops, training
from forge.data.loader import Loader
from forge.errors import ArgumentError, ConfigError, DtypeError, TapeError
from forge.extend import op
from forge.graph import Captured
from forge.models import GPT2, GPT2Config
from forge.optim.adamw import AdamW
from forge.tensor import Device, tensor

CPU = Device("cpu")
MODEL = GPT2(GPT2Config(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=8))
PARAMS = MODEL.zeros(CPU)
LOADER = Loader(np.arange(200) % 11, block_size=8, batch_size=4)


def host_batch():
    return LOADER.batch(first_sample=0)


def step_on(batch, step=training.train_step):
    state = training.step_state(1, 0, 1e-3, CPU)
    return step(MODEL, PARAMS, PARAMS.zeros_like(), AdamW(PARAMS), batch, state)


def captured_on(batch):
    return step_on(batch, Captured(training.train_step, CPU, varying=("batch", "state")))


X = tensor(np.ones((2, 3), np.float32))

HABITS = [
    (lambda: AdamW(PARAMS).step(), AttributeError, "an AdamW, got 'step'; write optimizer.step_("),
    (lambda: AdamW(PARAMS).zero_grad(), AttributeError, "write grads.zero_()"),
    (lambda: AdamW(PARAMS).nonsense, AttributeError, "got 'nonsense'"),
    (lambda: AdamW(PARAMS, frozen=["wpe"]), ArgumentError, "got wpe; did you mean wpe.weight?"),
    (lambda: AdamW(PARAMS, frozen=["wte.wieght"]), ArgumentError, "did you mean wte.weight?"),
    (lambda: AdamW(PARAMS, frozen=["?"]), ArgumentError, "choose from: wte.weight, wpe.weight, h."),
    (lambda: AdamW(PARAMS, frozen="wpe.weight"), ArgumentError, "pass ('wpe.weight',)"),
    (lambda: MODEL.parameters(), AttributeError, "params = model.zeros(device)"),
    (lambda: MODEL.train(), AttributeError, "rng=…"),
    (lambda: ops.relu(X), AttributeError, "[ops] expected an op, got 'relu'; write ops.maximum("),
    (lambda: ops.layernrom(X), AttributeError, "did you mean layernorm?"),
    (lambda: ops.cat([X, X]), AttributeError, "ops.concat(*xs)"),
    (lambda: X > 1, DtypeError, "[compare] expected numbers, got a Tensor; compare x.item(), or"),
    (lambda: X >= 1.0, DtypeError, "got a Tensor"),
    (lambda: Tape().leaf(X) < X, DtypeError, "got a Var; compare x.value.item(), or"),
    (lambda: step_on(host_batch()), AttributeError, "write training.to_device(batch, device)"),
    (lambda: captured_on(host_batch()), DtypeError, "a batch with training.to_device"),
    (lambda: Captured(step_on, CPU, varying="batch"), ArgumentError, "pass ('batch',)"),
    (lambda: Tape(recompute="mlp.hidden"), TapeError, "names, got the str 'mlp.hidden'; pass ("),
    (lambda: op(saves="x", name="f")(lambda x: x), ArgumentError, "got the str 'x'; pass ('x',)"),
    (lambda: op(outputs="y", name="f")(lambda x: x), ArgumentError, "got the str 'y'; pass ('y',)"),
    (lambda: GPT2Config(embd_pdrop=1.0), ConfigError, "0 <= embd_pdrop < 1, got 1.0"),
    (lambda: GPT2Config(resid_pdrop=-0.1), ConfigError, "0 <= resid_pdrop < 1, got -0.1"),
    (lambda: GPT2Config(attn_pdrop=float("nan")), ConfigError, "0 <= attn_pdrop < 1, got nan"),
    (
        lambda: forge.value_and_grad(lambda a: ops.sum(a))(a=X),
        DtypeError,
        "by position, got (), and by name a; what is passed by name is a constant",
    ),
    (lambda: forge.value_and_grad(lambda a: a)(3), DtypeError, "got (3,), and by name nothing"),
]


@pytest.mark.parametrize(("call", "error", "words"), HABITS)
def test_a_habit_gets_a_hint(call, error, words):
    with pytest.raises(error, match=re.escape(words)) as raised:
        call()
    assert re.match(r"\[\w+\] expected .+, got ", str(raised.value))


def test_hints_name_what_there_is():
    """So that they stay true: every call that a hint of the ops writes is of an op."""
    for hint in ops._ELSEWHERE.values():
        for name in re.findall(r"ops\.(\w+)\(", hint):
            assert name in ops.__all__
    for name in ops._ELSEWHERE:
        assert name not in ops.__all__
    x = tensor([0.25, 4.0])
    for name, function in (("sqrt", np.sqrt), ("sigmoid", lambda v: 1.0 / (1.0 + np.exp(-v)))):
        made = eval(ops._ELSEWHERE[name], {"ops": ops, "x": x})
        np.testing.assert_allclose(made.numpy(), function(x.numpy()), rtol=1e-6)


def test_objects_with_hints_are_still_copied_and_asked():
    assert pickle.loads(pickle.dumps(MODEL)) == copy.deepcopy(MODEL) == MODEL
    assert copy.copy(AdamW(PARAMS)).beta1 == 0.9
    assert not hasattr(MODEL, "parameters")
    assert not hasattr(ops, "relu")
    assert copy.deepcopy(host_batch()).next_index == 4


def test_a_constant_by_name_is_no_argument_to_differentiate():
    weight = tensor(np.float32(3.0))
    _, gradients = forge.value_and_grad(lambda x, w: ops.sum(x * w))(tensor([1.0]), w=weight)
    assert [g.numpy().tolist() for g in gradients] == [[3.0]]
