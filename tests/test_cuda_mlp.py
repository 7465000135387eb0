"""The gradient of gelu within a product on the GPU: what cuBLASLt is asked for, without a card."""

import ctypes
import importlib
import importlib.util
import types

import ml_dtypes
import numpy as np
import pytest

from forge import tensor
from forge.backends.reference import linear as definitions
from forge.backends.reference.pointwise import gelu_slope

if not (importlib.util.find_spec("nvmath") and importlib.util.find_spec("cudnn")):
    pytest.skip("needs the packages of the extra cuda", allow_module_level=True)

from nvmath.bindings import cublasLt

from forge.backends.cuda import cublaslt, linear, products


def random(*shape, dtype="bfloat16", seed=0):
    return tensor(np.random.default_rng(seed).standard_normal(shape), dtype)


def in_memory(address, rows, columns, ld):
    """A matrix of bfloat16 as cuBLASLt would find it: rows of `columns`, `ld` elements apart."""
    count = max(rows - 1, 0) * ld + columns
    flat = np.frombuffer((ctypes.c_uint16 * count).from_address(address), ml_dtypes.bfloat16)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (2 * ld, 2))


@pytest.fixture
def computed(monkeypatch):
    """Products that kernels ask for in bfloat16, computed on the host from what is asked alone."""
    asked = []

    def run(p, a, b, out, *, alpha=1.0, bias=0, pre=0):
        asked.append(p)
        assert (p.out_dtype, p.batch, p.accumulate) == ("bfloat16", 1, False)
        x = in_memory(a, *((p.k, p.m) if p.trans_a else (p.m, p.k)), p.lda).astype(np.float32)
        y = in_memory(b, *((p.n, p.k) if p.trans_b else (p.k, p.n)), p.ldb).astype(np.float32)
        total = alpha * ((x.T if p.trans_a else x) @ (y.T if p.trans_b else y))
        assert (bias, pre != 0) == (0, p.epilogue == "gelu backward")
        if p.epilogue == "gelu backward":
            total *= gelu_slope(in_memory(pre, p.m, p.n, p.ldc).astype(np.float32), "tanh")
        in_memory(out, p.m, p.n, p.ldc)[...] = total
        return p.epilogue not in run.refused

    run.refused = ()
    monkeypatch.setattr(products, "run", run)
    for name in ("pointwise", "reduce"):
        reference = importlib.import_module(f"forge.backends.reference.{name}")
        monkeypatch.setattr(linear, name, reference)
    return types.SimpleNamespace(products=asked, run=run)


@pytest.mark.parametrize("with_sums", [False, True])
@pytest.mark.parametrize(
    ("rows", "n", "m", "form", "refused", "epilogues"),
    [
        (24, 16, 40, "tanh", (), ["gelu backward"]),
        (5, 48, 8, "tanh", (), ["gelu backward"]),
        (24, 16, 40, "erf", (), [""]),
        (24, 16, 37, "tanh", (), [""]),
        (24, 13, 40, "tanh", (), [""]),
        (24, 16, 40, "tanh", ("gelu backward",), ["gelu backward", ""]),
        (24, 0, 40, "tanh", (), []),
        (0, 16, 40, "tanh", (), []),
    ],
)
def test_gelus_gradient_is_an_epilogue_where_there_is_one(
    computed, rows, n, m, form, refused, epilogues, with_sums
):
    computed.run.refused = refused
    given = [random(*s, seed=i) for i, s in enumerate(((rows, n), (m, n)))]
    pre = random(rows, m, seed=2)
    found, wanted = ((random(rows, m), random(m, seed=3)) for _ in range(2))
    for kernels, (out, sums) in ((linear, found), (definitions, wanted)):
        how = {"sums": sums if with_sums else None, "form": form}
        kernels.matmul_gelu_backward(*given, pre, out=out, **how)
    assert [product.epilogue for product in computed.products] == epilogues
    for got, want in zip(found, wanted, strict=True):
        want = want.numpy().astype(np.float64)
        assert np.linalg.norm(got.numpy() - want) <= 8e-3 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("epilogue", "addresses", "expected"),
    [
        ("", (0, 0), {"EPILOGUE": 1}),
        ("bias", (32, 0), {"EPILOGUE": 4, "BIAS_DATA_TYPE": 14, "BIAS_POINTER": 32}),
        (
            "bias gelu pre",
            (32, 64),
            {
                "EPILOGUE": 164,
                "BIAS_DATA_TYPE": 14,
                "BIAS_POINTER": 32,
                "EPILOGUE_AUX_LD": 40,
                "EPILOGUE_AUX_POINTER": 64,
            },
        ),
        (
            "gelu backward",
            (0, 64),
            {"EPILOGUE": 192, "EPILOGUE_AUX_LD": 40, "EPILOGUE_AUX_POINTER": 64},
        ),
    ],
)
def test_an_epilogue_is_told_its_addresses(monkeypatch, epilogue, addresses, expected):
    """Numbers as in cublasLtEpilogue_t and cudaDataType_t."""
    told = {}

    def tell(desc, name, cell, size):
        kind = ctypes.c_int32 if size == 4 else ctypes.c_int64
        told[cublasLt.MatmulDescAttribute(name).name] = kind.from_address(cell).value

    monkeypatch.setattr(cublasLt, "matmul_desc_set_attribute", tell)
    for name in ("matmul_desc_create", "matrix_layout_create"):
        monkeypatch.setattr(cublasLt, name, lambda *args: 1)
    for name in ("matmul", "_handle", "_workspace"):
        where = cublasLt if name == "matmul" else cublaslt
        monkeypatch.setattr(where, name, lambda *args: types.SimpleNamespace(address=0))
    monkeypatch.setattr(cublaslt.device, "stream", lambda: 0)
    product = cublaslt.Product(24, 40, 16, 16, 40, 40, epilogue=epilogue)
    cublaslt.Matmul(product, 16).kernel("00" * 64)(256, 512, 1024, 1.0, *addresses)
    assert told == {"TRANSA": 0, "TRANSB": 0, **expected}
