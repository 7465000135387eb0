"""The CUDA backend's kernels without a GPU: interpreted against the reference, and compiled.

Triton decides at import whether it interprets, so both happen in processes of their own.
"""

import ctypes
import functools
import importlib
import importlib.util
import math
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import triton_interpreter
from forge.backends import cuda, registry
from forge.errors import DeviceError
from forge.tensor import Device, empty, tensor
from forge.verify import CASES, check

# Not imported here: this module is loaded in the interpreter's process before it knows.
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton: pip install -e '.[cuda]'", allow_module_level=True)

# Bytes of shared memory that a block may have, by architecture.
ARCHITECTURES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# Rows of the table with more numbers than this take the interpreter longer than they are worth.
SMALL = 200


def use_cuda_kernels():
    """Let Device("cpu") of this process be served by the CUDA backend, but for the products."""
    import forge.backends.reference.linear as products

    sys.modules["forge.backends.cuda.linear"] = products
    registry.BACKENDS["cpu"] = "forge.backends.cuda"


def start_interpreter():
    use_cuda_kernels()
    triton_interpreter.start()


def process(start):
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=start)


@pytest.fixture(scope="module")
def interpreted():
    """Calls a function in a process where Triton interprets."""
    with process(start_interpreter) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="module")
def apart():
    """Calls a function in a process where Triton compiles."""
    with process(use_cuda_kernels) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def small(case):
    return sum(x.size for x in case.arguments().values() if isinstance(x, np.ndarray)) <= SMALL


def failures_of_rows(name, dtype):
    cases = [c for c in CASES if c.op == name and dtype in c.dtypes and small(c)]
    assert cases
    results = [check(case, "cpu", dtype) for case in cases]
    return [(result.case, result.failures) for result in results if not result.ok]


PRODUCTS = {"linear", "matmul", "matmul_gelu_backward", "mlp"}
OPS = sorted({c.op for c in CASES if small(c)} - PRODUCTS - {"reshape"})
BF16 = {c.op for c in CASES if small(c) and "bfloat16" in c.dtypes}
ROWS = [(op, dtype) for op in OPS for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(
    ("name", "dtype"), [row for row in ROWS if row[1] != "bfloat16" or row[0] in BF16]
)
def test_rows_of_the_table(interpreted, name, dtype):
    assert interpreted(failures_of_rows, name, dtype) == []


def errors(family, name, *args, out, **keywords):
    """Relative errors in norm of a kernel's outputs {name: (shape, dtype)} from the reference's."""
    results = []
    for backend in ("cuda", "reference"):
        kernel = getattr(importlib.import_module(f"forge.backends.{backend}.{family}"), name)
        outputs = {key: empty(*spec, Device("cpu")) for key, spec in out.items()}
        for x in outputs.values():
            # Kernels that add find something to add to.
            x.array.fill(0.5)
        kernel(*args, **outputs, **keywords)
        results.append([x.numpy().astype(np.float64) for x in outputs.values()])
    return [
        np.linalg.norm(got - want) / np.linalg.norm(want)
        for got, want in zip(*results, strict=True)
    ]


def random(*shape, dtype="float32", seed=0):
    return tensor(np.random.default_rng(seed).standard_normal(shape), dtype)


def runs_of_equal_ids(count, vocabulary):
    ids = np.random.default_rng(1).integers(0, vocabulary, count)
    ids[: count // 2] = 0
    order = tensor(np.argsort(ids, kind="stable"))
    out = {"out": ((vocabulary, 33), "float32")}
    return errors("embedding", "scatter_add_rows", tensor(ids), random(count, 33), order, out=out)


@pytest.mark.parametrize(("count", "vocabulary"), [(33, 9), (64, 2), (700, 3), (1200, 1)])
def test_runs_of_equal_ids_that_cross_pieces(interpreted, count, vocabulary):
    assert max(interpreted(runs_of_equal_ids, count, vocabulary)) < 1e-6


def attention_errors(dtype, B, T, H, D, p):
    C = H * D
    qkv, dout = random(B, T, 3 * C, dtype=dtype), random(B, T, C, dtype=dtype, seed=1)
    key = tensor([7, 5]) if p else None
    keywords = {"n_head": H, "p": p, "site": 3, "first_sample": 1}
    specs = {"out": ((B, T, C), dtype), "lse": ((B, H, T), "float32")}
    forward = errors("attention", "attention", qkv, key, out=specs, **keywords)
    out, lse = (empty(*spec, Device("cpu")) for spec in specs.values())
    definition = importlib.import_module("forge.backends.reference.attention")
    definition.attention(qkv, key, out=out, lse=lse, **keywords)
    specs = {"dqkv": (qkv.shape, dtype)}
    args = (qkv, out, dout, lse, key)
    return forward + errors("attention", "attention_backward", *args, out=specs, **keywords)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 8e-3)])
@pytest.mark.parametrize(("shape", "p"), [((1, 100, 2, 20), 0.0), ((2, 67, 1, 16), 0.3)])
def test_attention_over_several_blocks(interpreted, dtype, bound, shape, p):
    assert max(interpreted(attention_errors, dtype, *shape, p)) < bound


def rounded_errors(dtype):
    """As above with TF32 allowed, to which the interpreter does not round; what was launched."""
    from forge.backends.cuda import flash, precision

    launch, said = flash.launch, []
    precision.allow_tf32(True)
    try:
        flash.launch = lambda *a, **k: said.append(k.get("ROUNDING")) or launch(*a, **k)
        return attention_errors(dtype, 1, 40, 1, 16, 0.0), said
    finally:
        precision.allow_tf32(False)
        flash.launch = launch


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 8e-3)])
def test_tf32_is_a_constant_of_the_kernels_that_multiply_float32(interpreted, dtype, bound):
    found, said = interpreted(rounded_errors, dtype)
    assert max(found) < bound
    rounding = "tf32" if dtype == "float32" else "ieee"
    assert said == [rounding, None, rounding, rounding]


def cached_errors(T, N, pos):
    B, H, D = 2, 2, 8
    q, k, v = random(B, T, H * D), random(B, H, N, D, seed=1), random(B, H, N, D, seed=2)
    at = tensor(pos) if isinstance(pos, list) else pos
    out = {"out": (q.shape, "float32")}
    return errors("attention", "cached_attention", q, k, v, at, out=out, n_head=H)


@pytest.mark.parametrize(
    ("T", "N", "pos"), [(1, 300, [0, 299]), (1, 1100, [5, 1090]), (5, 200, 130), (40, 90, [50, 3])]
)
def test_cached_attention_over_several_spans(interpreted, T, N, pos):
    assert max(interpreted(cached_errors, T, N, pos)) < 1e-6


def bits_beside(pos):
    """The bits of sample 1 of a batch of two, where the other is at `pos`; each alone if None."""
    from forge.backends.cuda import attention

    q, k, v = random(2, 1, 16), random(2, 2, 1100, 8, seed=1), random(2, 2, 1100, 8, seed=2)
    first = 1 if pos is None else 0
    parts = [tensor(x.array[first:]) for x in (q, k, v)]
    out = empty(parts[0].shape, "float32", Device("cpu"))
    at = tensor([1050] if pos is None else [pos, 1050])
    attention.cached_attention(*parts, at, out=out, n_head=2)
    return out.array[-1].tobytes()


def test_the_bits_of_a_sample_do_not_depend_on_its_neighbours(interpreted):
    assert len({interpreted(bits_beside, pos) for pos in (None, 0, 700, 1099)}) == 1


def few_rows_errors(m, n, k, padded, gelu):
    from forge.backends.cuda import few_rows

    transposed = padded > 0
    x, bias = random(m, k, dtype="bfloat16"), random(n, dtype="bfloat16", seed=1)
    w = random(*((padded, k) if transposed else (k, n)), dtype="bfloat16", seed=2)
    bias = None if transposed else bias
    out = empty((m, n), "bfloat16", Device("cpu"))
    few_rows.product(x, w, bias, out=out, transposed=transposed, gelu=gelu)
    a, b, got = (y.array.astype(np.float64) for y in (x, w, out))
    want = a @ (b[:n].T if transposed else b)
    if bias is not None:
        want += bias.array.astype(np.float64)
    if gelu:
        want *= 0.5 + 0.5 * np.tanh(math.sqrt(2 / math.pi) * (want + 0.044715 * want**3))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize(
    ("m", "n", "k", "padded", "gelu"),
    [(3, 64, 128, 0, False), (64, 2080, 256, 0, True), (20, 131, 128, 136, False)],
)
def test_products_of_few_rows(interpreted, m, n, k, padded, gelu):
    assert interpreted(few_rows_errors, m, n, k, padded, gelu) < 4e-3


def head_errors(rows_at_a_time):
    from forge.backends.cuda import loss

    whole, loss.CHUNK_BYTES = loss.CHUNK_BYTES, rows_at_a_time * 40 * 4
    N, V, C = 8, 33, 16
    targets = tensor([3, -100, 0, 32, 5, 5, 9, 1])
    wte = random(40, C, seed=1)
    wte.array[V:] = 0
    try:
        return errors(
            "loss",
            "linear_cross_entropy",
            random(N, C),
            wte,
            targets,
            tensor(0.25),
            out={"out": ((), "float32"), "dx": ((N, C), "float32"), "dwte": ((40, C), "float32")},
            rows=V,
            ignore_index=-100,
        )
    finally:
        loss.CHUNK_BYTES = whole


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 8])
def test_the_head_in_chunks(interpreted, rows_at_a_time):
    assert max(interpreted(head_errors, rows_at_a_time)) < 2e-6


def two_stage_errors():
    x = random(40000)
    return [
        *errors("reduce", "sum_to", x, out={"out": ((1,), "float32")}),
        *errors("reduce", "sum_rows", random(70, 600), out={"out": ((600,), "float32")}),
        *errors(
            "pointwise",
            "gelu_backward",
            random(70, 600),
            random(70, 600),
            out={"out": ((70, 600), "float32"), "sums": ((600,), "float32")},
            form="tanh",
        ),
        *errors("update", "global_norm", x, out={"out": ((), "float32")}),
    ]


def test_reductions_in_two_stages(interpreted):
    assert max(interpreted(two_stage_errors)) < 1e-6


# Every kernel as GPT-2 124M uses it, on Tensors without memory; attention in float32 as well.
B, T, C, H, V, PADDED = 64, 1024, 768, 12, 50257, 50304


def bf16(*shape):
    return empty(shape, "bfloat16", Device("plan:cpu"))


def f32(*shape):
    return empty(shape, "float32", Device("plan:cpu"))


def i64(*shape):
    return empty(shape, "int64", Device("plan:cpu"))


def call_attention(kernels):
    from forge.backends.cuda import precision

    for make, D, p, tf32 in ((bf16, 64, 0.0, False), (f32, 16, 0.1, False), (f32, 64, 0.1, True)):
        precision.allow_tf32(tf32)
        qkv, out, lse = make(2, T, 6 * D), make(2, T, 2 * D), f32(2, 2, T)
        key = i64(2) if p else None
        how = {"n_head": 2, "p": p, "site": 1, "first_sample": 0}
        kernels.attention(qkv, key, out=out, lse=lse, **how)
        kernels.attention_backward(qkv, out, out, lse, key, dqkv=qkv, **how)
    q, cache = f32(B, 1, C), f32(B, H, T, C // H)
    kernels.cached_attention(q, cache, cache, i64(B), out=q, n_head=H)
    precision.allow_tf32(False)
    cache, scores = bf16(B, H, T, C // H), bf16(B * H, T, T)
    for length, pos in ((1, i64(B)), (T, 0)):
        q, qkv = bf16(B, length, C), bf16(B, length, 3 * C)
        kernels.kv_append(qkv, pos, k_cache=cache, v_cache=cache, q=q, n_head=H)
        kernels.cached_attention(q, cache, cache, pos, out=q, n_head=H)
    long = bf16(2, H, 4 * T, C // H)
    kernels.cached_attention(bf16(2, 1, C), long, long, i64(2), out=bf16(2, 1, C), n_head=H)
    kernels.softmax(scores, out=scores, causal=True, pos=0)
    kernels.softmax_backward(scores, scores, out=scores)


def call_embedding(kernels):
    wte, wpe = bf16(PADDED, C), bf16(T, C)
    for length, pos in ((T, 0), (1, i64(B))):
        x = bf16(B, length, C)
        kernels.embedding(i64(B, length), wte, wpe, out=x, pos=pos)
        kernels.position_backward(x, out=f32(T, C), pos=pos)
    kernels.scatter_add_rows(i64(B * T), bf16(B * T, C), i64(B * T), out=f32(PADDED, C))


def call_few_rows(kernels):
    for m in (5, B):
        for k, n in ((C, 4 * C), (4 * C, C)):
            kernels.product(bf16(m, k), bf16(k, n), bf16(n), out=bf16(m, n), transposed=False)
    kernels.product(bf16(B, C), bf16(PADDED, C), None, out=bf16(B, V), transposed=True)


def call_loss(kernels):
    targets, one, logits, ignore = i64(T), f32(), bf16(T, V), {"ignore_index": -100}
    kernels.target_weight(targets, out=one, **ignore)
    kernels.cross_entropy(logits, targets, one, out=one, lse=f32(T), **ignore)
    kernels.cross_entropy_backward(logits, targets, f32(T), one, one, dlogits=logits, **ignore)
    x, wte = bf16(T, C), bf16(PADDED, C)
    gradients = {"dx": x, "dwte": f32(PADDED, C)}
    kernels.matmul = lambda *args, **keywords: None
    kernels.linear_cross_entropy(x, wte, targets, one, out=one, rows=V, **gradients, **ignore)


def call_norm(kernels):
    x, gamma, rows = bf16(B * T, C), f32(C), f32(B * T)
    how = {"mean": rows, "rstd": rows, "eps": 1e-5}
    kernels.layernorm(x, gamma, gamma, out=x, **how)
    kernels.add_layernorm(x, x, bf16(C), gamma, gamma, sum=x, y=x, **how)
    sums = {"dgamma": gamma, "dbeta": gamma, "dbias": gamma}
    kernels.add_layernorm_backward(x, x, x, gamma, rows, rows, dx=x, **sums)


def call_pointwise(kernels):
    x = bf16(B, T, C)
    kernels.add(x, x, out=x)
    kernels.mul(x, bf16(T, 1), out=x)
    kernels.div(x, bf16(), out=x)
    for name in ("neg", "exp", "log", "tanh"):
        getattr(kernels, name)(x, out=x)
    for form in ("tanh", "erf"):
        kernels.gelu(x, out=x, form=form)
        kernels.gelu_backward(x, x, out=x, sums=None, form=form)
        kernels.gelu_backward(x, x, out=x, sums=f32(C), form=form)
    kernels.maximum(x, x, out=x, mask=x)
    kernels.scale(x, f32(), out=x)
    kernels.accumulate(x, out=f32(B, T, C))
    kernels.where(empty(x.shape, "bool", x.device), x, x, out=x)
    kernels.cast(f32(B, T, C), out=x)
    kernels.dropout(x, i64(2), out=x, p=0.1, site=1, first_sample=0, samples=B)


def call_reduce(kernels):
    x = bf16(B, T, C)
    kernels.sum_rows(bf16(B * T, C), out=f32(C))
    kernels.sum_to(x, out=bf16(B, 1, C))
    kernels.sum_to(x, out=bf16(1, 1, 1))
    kernels.max(x, out=bf16(B, 1, C), mask=x, axis=(1,))
    kernels.argmax(bf16(B, V), out=i64(B))
    kernels.clear_unless_finite(x, i64())
    with pytest.raises(DeviceError):  # from reading the result
        kernels.extent(x)


def call_shape(kernels):
    x = bf16(B, T, C)
    kernels.transpose(x, out=bf16(T, B, C), axes=(1, 0, 2))
    kernels.concat((x, x), out=bf16(B, 2 * T, C), axis=1)
    kernels.take(x, i64(3), out=bf16(3, T, C))
    kernels.broadcast_to(bf16(C), out=x)


def call_update(kernels):
    n = f32(124_475_904)
    scalars = {"lr": f32(), "step": i64(), "norm": f32(), "finite": i64()}
    how = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "max_norm": 1.0, "working": bf16(n.size)}
    kernels.global_norm(n, out=f32())
    kernels.all_finite((f32(), f32()), out=i64())
    kernels.adamw(n, n, n, n, i64(7600, 3), f32(50, 2), **scalars, **how)


CALLS = {
    "attention": call_attention,
    "embedding": call_embedding,
    "few_rows": call_few_rows,
    "loss": call_loss,
    "norm": call_norm,
    "pointwise": call_pointwise,
    "reduce": call_reduce,
    "shape": call_shape,
    "update": call_update,
}


@functools.cache
def variants(family):
    """What a family's launchers ask Triton to compile."""
    from forge.backends.cuda import triton_jit

    wanted = []
    triton_jit._functions.clear()
    triton_jit._binary = wanted.append
    triton_jit.load = lambda *args, **keywords: lambda grid, values: None
    CALLS[family](importlib.import_module(f"forge.backends.cuda.{family}"))
    return wanted


def compiled(family, arch):
    """Name, shared memory and size of each binary."""
    from forge.backends.cuda import triton_jit

    binaries = [triton_jit.compile_variant(variant, arch) for variant in variants(family)]
    return [(binary.name, binary.shared, len(binary.cubin)) for binary in binaries]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", CALLS)
def test_kernels_compile(apart, family, arch):
    binaries = apart(compiled, family, arch)
    assert binaries
    for name, shared, size in binaries:
        assert size > 1000, name
        assert shared <= ARCHITECTURES[arch], name


def roundings():
    return {
        dict(v.constants)["ROUNDING"] for v in variants("attention") if "ROUNDING" in dict(v[2])
    }


def test_kernels_compile_with_and_without_tf32(apart):
    assert apart(roundings) == {"ieee", "tf32"}


def names_of_compiled():
    return {variant.kernel.__name__ for family in CALLS for variant in variants(family)}


def test_no_kernel_is_left_out(apart):
    sources = [path.read_text() for path in Path(cuda.__file__).parent.glob("*.py")]
    kernels = {name for text in sources for name in re.findall(r"@triton\.jit\ndef (_\w+)", text)}
    assert apart(names_of_compiled) == kernels


def test_the_row_kernel_in_cuda_cpp_compiles():
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs cuda-bindings: pip install -e '.[cuda]'")
    from forge.backends.cuda import nvrtc

    assert len(nvrtc.compile_file("cross_entropy.cu", 90, {"THREADS": 640, "VECTORS": 10})) > 1000


def token_kernel(arch, processors, samples):
    """The size of the cubin of the kernel of a whole GPT-2 124M."""
    from forge.backends.cuda import device, nvrtc, token

    device.arch, device.processors = lambda: arch, lambda: processors
    sizes = token._sizes(samples, H, C // H, T, 12, V)
    return len(nvrtc.compile_file("token.cu", arch, sizes))


@pytest.mark.parametrize(
    ("arch", "processors", "samples"), [(80, 108, 1), (90, 132, 4), (100, 148, 1), (120, 20, 1)]
)
def test_the_kernel_of_a_whole_model_compiles(apart, arch, processors, samples):
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs cuda-bindings: pip install -e '.[cuda]'")
    assert apart(token_kernel, arch, processors, samples) > 1000


@pytest.mark.parametrize("damage", [b"", b"\n", None])
def test_a_damaged_binary_is_made_anew(tmp_path, monkeypatch, damage):
    from forge.backends.cuda.triton_jit import Binary, cached

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    binary = Binary("name", 512, 128, b"a cubin\nof two lines")
    made = []

    def make():
        made.append(binary)
        return binary

    assert [cached(("origin", n), make) for n in (1, 2, 1)] == [binary] * 3
    assert len(made) == 2
    files = list((tmp_path / "forge" / "cubins").iterdir())
    for path in files:
        # Cut short, or of the right length with one bit turned.
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    assert [cached(("origin", n), make) for n in (1, 2, 1)] == [binary] * 3
    assert len(made) == 4
    assert sorted((tmp_path / "forge" / "cubins").iterdir()) == sorted(files)


def test_a_cache_that_cannot_be_written_costs_the_next_start(tmp_path, monkeypatch):
    from forge.backends.cuda import device, pointwise, triton_jit

    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr(device, "arch", lambda: 90)
    constants = (("FORM", "tanh"), ("BLOCK", 1024))
    kinds = ("*fp32:16", "*fp32:16", "*fp32:16", "i32:16")
    wanted = triton_jit.Variant(pointwise._gelu_backward, kinds, constants, 4, 3, True)
    with pytest.warns(UserWarning, match="kernels are compiled again next time: .*Not a directory"):
        assert triton_jit._binary(wanted).name == "_gelu_backward"


def test_arguments_lie_where_the_driver_reads_them():
    from forge.backends.cuda import triton_jit

    x = tensor(np.zeros(8, np.float32))
    both = (x, x.view((2,), 1))
    kinds, values = triton_jit.describe((x, None, 7, 2**40, 0.1, (3, -4), both[1], both))
    assert kinds[:5] == ("*fp32:16", None, "i32", "i64:16", "fp32")
    assert kinds[5:] == (("i32", "i32"), "*fp32", "table of 2")
    arguments = triton_jit.Arguments(kinds, hidden=2)
    arguments.fill(values)
    types = (
        ctypes.c_uint64,
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_float,
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_uint64,
        ctypes.c_uint64 * 2,
        ctypes.c_uint64,
        ctypes.c_uint64,
    )
    addresses = (ctypes.c_void_p * len(types)).from_address(arguments.address)
    read = [kind.from_address(at) for kind, at in zip(types, addresses, strict=True)]
    read = [list(x) if isinstance(x, ctypes.Array) else x.value for x in read]
    assert read[:3] == [x.pointer, 7, 2**40]
    assert math.isclose(read[3], 0.1, rel_tol=1e-7)
    assert read[4:] == [3, -4, x.pointer + 4, [x.pointer, x.pointer + 4], 0, 0]


@pytest.mark.cuda
def test_the_row_kernel_in_cuda_cpp_is_its_twin(monkeypatch):
    from forge.backends.cuda import loss

    rows, classes, stride = 300, 8190, 8200
    logits = 3 * np.random.default_rng(0).standard_normal((rows, stride))
    targets = np.random.default_rng(1).integers(0, classes, rows)
    targets[5] = -100
    results = []
    for shared in (loss.SHARED, {}):
        monkeypatch.setattr(loss, "SHARED", shared)
        x = tensor(logits, "bfloat16", "cuda")
        losses = empty((rows,), "float32", x.device)
        weight = tensor(np.float32(0.125), device="cuda")
        loss._each_row(x, tensor(targets, device="cuda"), weight, losses, None, x, classes, -100)
        results.append((losses.numpy(), x.numpy().astype(np.float32)))
    (got_loss, got), (want_loss, want) = results
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-6, atol=1e-6)
    assert np.linalg.norm(got - want) < 4e-3 * np.linalg.norm(want)
    assert not got[:, classes:].any()
    assert not got[5].any()
