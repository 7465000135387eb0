"""Products on the GPU: what is asked of cuBLASLt, and which of its algorithms is taken."""

import importlib.util
import types

import numpy as np
import pytest

from forge import graph, ops, tensor
from forge.backends.cuda import precision

if importlib.util.find_spec("nvmath") is None:
    pytest.skip("needs nvmath-python: pip install 'forge-gpt[cuda]'", allow_module_level=True)

from forge.backends.cuda import cublaslt, linear


@pytest.fixture
def tf32():
    precision.allow_tf32(True)
    yield
    precision.allow_tf32(False)


def random(*shape, dtype="float32", seed=0, device="cpu"):
    return tensor(np.random.default_rng(seed).standard_normal(shape), dtype, device)


@pytest.fixture
def asked(monkeypatch):
    """The products that kernels ask for, of which none is computed."""
    products = []
    monkeypatch.setattr(cublaslt, "run", lambda product, *_, **__: products.append(product) or True)
    return products


def ask(dtype):
    x, w, bias = (random(*shape, dtype=dtype) for shape in ((8, 16), (16, 24), (24,)))
    out = random(8, 24, dtype=dtype)
    how = {"trans_a": False, "trans_b": False, "alpha": 1.0, "b_rows": None, "accumulate": False}
    linear.matmul(x, w, None, out=out, **how)
    linear.linear(x, w, bias, out=out, pre=None, gelu=None)


def test_a_product_with_tf32_is_another_product(asked, tf32):
    from nvmath.bindings import cublas

    ask("float32")
    precision.allow_tf32(False)
    ask("float32")
    kinds = cublas.ComputeType
    types = [kinds.COMPUTE_32F_FAST_TF32] * 2 + [kinds.COMPUTE_32F] * 2
    assert [product.compute_type for product in asked] == types
    assert len(set(asked)) == 4


def test_tf32_is_nothing_to_bfloat16(asked, tf32):
    ask("bfloat16")
    assert [product.compute_type for product in asked] == [cublaslt.COMPUTE_32F] * 2


def test_a_captured_function_is_captured_again_where_tf32_changes(monkeypatch, tf32):
    eager, recorded = [], []

    def recording(function, device, fixed, varying, inputs):
        recorded.append(precision.tf32())
        return types.SimpleNamespace(replay=lambda inputs: None)

    monkeypatch.setattr(graph, "_Recording", recording)
    gpu = types.SimpleNamespace(kind="cuda", plan=False)
    step = graph.Captured(lambda x: eager.append(precision.tf32()), gpu, ("x",))
    x = tensor(1.0)
    for allowed in (True, True, True, False, False, True):
        precision.allow_tf32(allowed)
        step(x)
    assert eager == recorded == [True, False]


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def errors_of_products(device):
    """Relative errors of a product and of attention in float32."""
    x, w, qkv = random(256, 512), random(512, 384, seed=1), random(1, 256, 3 * 128, seed=2)
    exact = x.numpy().astype(np.float64) @ w.numpy()
    found = ops.matmul(tensor(x, device=device), tensor(w, device=device)).numpy()
    attention = ops.attention(tensor(qkv, device=device), n_head=2).numpy()
    definition = ops.attention(tensor(qkv, "float64", "reference"), n_head=2).numpy()
    return relative(found, exact), relative(attention, definition)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_float32_is_multiplied_as_it_is(device):
    assert max(errors_of_products(device)) < 1e-6


@pytest.mark.cuda
def test_with_tf32_operands_are_rounded(tf32):
    found = errors_of_products("cuda")
    assert all(5e-5 < error < 2e-3 for error in found), found
