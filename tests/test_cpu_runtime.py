"""What lies under the CPU kernels: the thread pool, BLAS, the functions."""

import concurrent.futures
import math
import os
import subprocess
import sys

import numba
import numpy as np
import pytest
from numba.np.ufunc import parallel

from forge.backends.cpu import jit, linear, loss, norm, reduce, threads, update
from forge.backends.cpu.mathlib import exp, normal_cdf, sigmoid, tanh
from forge.dtypes import ITEMSIZE
from forge.errors import ArgumentError
from forge.tensor import Tensor, tensor, zeros_like

f32 = np.float32


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


# ---- Threads ----


def test_the_default_thread_count_is_the_cores_of_this_process():
    code = (
        "import os; os.environ.pop('NUMBA_NUM_THREADS', None); os.sched_setaffinity(0, {min(os."
        "sched_getaffinity(0))})\n"
        "from forge.backends.cpu import threads; print(threads.get_threads())"
    )
    assert run(code) == "1"
    code = "from forge.backends.cpu import threads; print(threads.get_threads())"
    assert run(code, NUMBA_NUM_THREADS="3") == "3"


def test_a_control_groups_quota_limits_the_cores(tmp_path):
    own = tmp_path / "cgroup"
    root = tmp_path / "fs"
    inner = root / "outer" / "inner"
    inner.mkdir(parents=True)
    own.write_text("0::/outer/inner\n")
    assert threads.cgroup_quota(root, own) is None
    (inner / "cpu.max").write_text("max 100000\n")
    assert threads.cgroup_quota(root, own) is None
    (root / "outer" / "cpu.max").write_text("150000 100000\n")
    assert threads.cgroup_quota(root, own) == 1.5
    (inner / "cpu.max").write_text("50000 100000\n")
    assert threads.cgroup_quota(root, own) == 0.5
    own.write_text("4:memory:/x\n3:cpu,cpuacct:/job\n")
    job = root / "cpu,cpuacct" / "job"
    job.mkdir(parents=True)
    (job / "cpu.cfs_period_us").write_text("100000\n")
    (job / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads.cgroup_quota(root, own) is None
    (job / "cpu.cfs_quota_us").write_text("200000\n")
    assert threads.cgroup_quota(root, own) == 2.0


def test_the_thread_count_holds_in_other_python_threads(thread_counts, rng):
    threads.set_threads(2)
    x, total = rng.standard_normal((9, 3)).astype(f32), np.zeros(3, f32)

    def work() -> int:
        reduce._sum_rows["float32", "float32"](x, total)
        return numba.get_num_threads()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == 2


def test_fewer_than_one_thread_is_refused():
    with pytest.raises(ArgumentError, match="at least 1 thread, got 0"):
        threads.set_threads(0)


def test_the_thread_count_never_shows_in_the_bits(thread_counts, rng):
    def normal(*shape: int) -> Tensor:
        return tensor(rng.standard_normal(shape).astype(f32))

    x, w, dy, few = normal(300, 700), normal(700, 1000), normal(300, 1000), normal(3, 700)
    bias, gamma, flat = normal(1000), normal(700), normal(50_000)
    results = []
    for count in thread_counts:
        threads.set_threads(count)
        out = [zeros_like(t) for t in (dy, dy, w, gamma, x, gamma, gamma)]
        product, hidden, dw, rows, dx, dgamma, dbeta = out
        linear.linear(x, w, bias, out=product, pre=hidden, gelu="tanh")
        weight = {"alpha": 1.0, "trans_b": False, "b_rows": None, "accumulate": True}
        linear.matmul(x, dy, None, out=dw, trans_a=True, **weight)
        decoded = zeros_like(normal(3, 1000))
        linear.matmul(few, w, None, out=decoded, trans_a=False, **weight)
        reduce.sum_rows(x, out=rows)
        length = zeros_like(tensor(f32(0)))
        update.global_norm(flat, out=length)
        y, mean, rstd = zeros_like(x), zeros_like(normal(300)), zeros_like(normal(300))
        norm.layernorm(x, gamma, gamma, out=y, mean=mean, rstd=rstd, eps=1e-5)
        norm.layernorm_backward(x, gamma, y, mean, rstd, dx=dx, dgamma=dgamma, dbeta=dbeta)
        results.append([t.numpy().tobytes() for t in (*out, decoded, length, y)])
    assert all(result == results[0] for result in results)


# ---- Products ----


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(("N", "K"), [(768, 300), (1600, 96), (128, 128), (48, 64), (33, 37)])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(rng, N, K, trans_b):
    M = 400
    x = rng.standard_normal((M, K)).astype(f32)
    w = rng.standard_normal((N, K) if trans_b else (K, N)).astype(f32)
    bias = rng.standard_normal(N).astype(f32)

    def rows(start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, N), f32)
        linear.product(x[start:stop], w, bias, out=out, trans_b=trans_b)
        return out

    whole = rows(0, M)
    for start, stop in ((0, 9), (0, 24), (0, 25), (0, 97), (0, 399), (96, 105), (288, 400)):
        np.testing.assert_array_equal(rows(start, stop), whole[start:stop])
    few = rows(0, 8)
    for start, stop in ((0, 1), (3, 4), (2, 8), (7, 8)):
        np.testing.assert_array_equal(rows(start, stop), few[start:stop])


def test_padding_takes_a_small_part_of_the_operands():
    """One group of rows is copied, not all of a tile: of logits that would be 100 MiB."""
    for M, N, K in ((232, 768, 50257), (1024, 768, 3072), (1024, 2304, 768)):
        scratch = sum(linear.product_workspace("float32", "float32", (M, N), K))
        assert scratch < 4 * (M * K + M * N) / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("classes", [1, 256, 9001, 50257, 10**6])
@pytest.mark.parametrize("rows", [0, 1, 23, 240, 768, 1024, 5000])
def test_chunks_of_logits_are_even_and_fit(rows, classes, dtype):
    chunk = loss.chunk_rows(rows, classes, dtype)
    nbytes = chunk * classes * ITEMSIZE[dtype]
    assert nbytes <= loss.LOGITS_BYTES
    assert chunk <= loss.MOST_ROWS
    if rows > chunk >= 24:
        assert chunk % 24 == 0
        count = -(-rows // chunk)
        assert chunk - (rows - (count - 1) * chunk) < 24 * count


def test_products_survive_a_pool_of_more_threads_than_forge_was_given(thread_counts, rng):
    """As where other code calls numba.set_num_threads: no two threads may share scratch."""
    x, w = (rng.standard_normal(shape).astype(f32) for shape in ((3, 25, 500), (3, 500, 2000)))
    threads.set_threads(1)
    linear.product(x, w, out=(expected := np.empty((3, 25, 2000), f32)))
    parallel._set_num_threads(5)
    try:
        for _ in range(20):
            linear.product(x, w, out=(out := np.empty_like(expected)))
            np.testing.assert_array_equal(out, expected)
    finally:
        threads.apply()


def test_numpys_blas_keeps_its_threads():
    code = """
import ctypes
import numpy as np
np.ones((2, 2)) @ np.ones((2, 2))
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "openblas64" in line}
own = [ctypes.CDLL(path) for path in loaded]
own = [getattr(library, "scipy_openblas_get_num_threads64_", None) for library in own]
before = [count() for count in own if count]
from forge.backends.cpu import blas, linear
out = np.empty((64, 64), np.float32)
linear.product(np.ones((64, 64), np.float32), np.ones((64, 64), np.float32), out=out)
after = [count() for count in own if count]
print(before == after, len(before), blas._library().scipy_openblas_get_num_threads(), out[0, 0])
"""
    linear.product(np.ones((64, 64), f32), np.ones((64, 64), f32), out=np.empty((64, 64), f32))
    unchanged, libraries, ours, value = run(code).split()
    if libraries == "0":
        pytest.skip("this NumPy does not use the OpenBLAS of its wheel")
    assert (unchanged, ours, value) == ("True", "1", "64.0")


# ---- Functions ----


def _float64(name: str, x: np.ndarray) -> np.ndarray:
    if name == "exp":
        return np.exp(x)
    if name == "sigmoid":
        return 1.0 / (1.0 + np.exp(-x))
    return np.tanh(x)


@pytest.mark.parametrize(
    ("name", "function", "ulp"),
    [("exp", exp, 0.83), ("sigmoid", sigmoid, 2.2), ("tanh", tanh, 1.4)],
)
def test_functions_keep_their_accuracy_over_all_floats(name, function, ulp):
    @jit.kernel("void(float32[::1], float32[::1])", parallel=False)
    def apply(x, out):
        for i in range(x.size):
            out[i] = function(x[i])

    x = np.arange(0, 2**32, 997, dtype=np.uint64).astype(np.uint32).view(f32)
    out = np.empty_like(x)
    apply.load(stored=False)
    apply(x, out)
    with np.errstate(all="ignore"):
        expected = _float64(name, x.astype(np.float64))
        rounded = expected.astype(f32)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(x))
    # Past 2^127.5 exp is infinite, and below 2^-126.5 it is 0; sigmoid is 0 below 2^-127.5.
    large = rounded > 2.0**127.5
    np.testing.assert_array_equal(np.isinf(out), large)
    small = (np.abs(rounded) < 2.0**-126) & (name != "tanh")
    assert (np.abs(out[small]) <= 2.0**-126).all()
    normal = np.isfinite(rounded) & ~large & ~small
    errors = np.abs(out[normal].astype(np.float64) - expected[normal])
    assert (errors / np.spacing(np.abs(rounded[normal]))).max() <= ulp


def test_the_normal_distribution_keeps_its_tails():
    @jit.kernel("void(float32[::1], float32[::1])", parallel=False)
    def apply(x, out):
        for i in range(x.size):
            out[i] = normal_cdf(x[i])

    x = np.linspace(-12.5, 9.0, 4001).astype(f32)
    out = np.empty_like(x)
    apply.load(stored=False)
    apply(x, out)
    expected = np.array([0.5 * math.erfc(-value / 2.0**0.5) for value in x.astype(np.float64)])
    # The exponent of e is rounded to float32, so the error grows with the square of x.
    assert (np.abs(out - expected) / expected / (1.0 + x.astype(np.float64) ** 2)).max() < 4e-7
