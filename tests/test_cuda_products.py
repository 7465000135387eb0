"""Products on the GPU: what is asked of cuBLASLt, and which of its algorithms is taken."""

import ctypes
import importlib.util
import json
import types

import numpy as np
import pytest

from forge import graph, ops, tensor
from forge.backends.cuda import device as gpu
from forge.backends.cuda import precision
from forge.backends.cuda.algorithms import Table
from forge.errors import ConfigError, DeviceError, DeviceLostError, OutOfMemoryError
from forge.run import choices
from forge.tensor import Device

if importlib.util.find_spec("nvmath") is None:
    pytest.skip("needs nvmath-python: pip install 'forge-gpt[cuda]'", allow_module_level=True)

from nvmath.bindings import cublasLt

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
    assert all(1e-4 < error < 4e-3 for error in found), found


# ---- Which algorithm: a library and a card that do what a test wants


class FailedError(cublasLt.cuBLASLtError):
    """The library's own would ask the library for its text."""

    def __init__(self, status):
        Exception.__init__(self, f"status {status}")
        self.status = status


class Library:
    """cuBLASLt with the algorithms 0 … 3 of each product, which take these times."""

    times = (3.0, 1.0, 2.0, 4.0)

    def __init__(self, patch, cache):
        self.ran = []
        self.timed = 0
        self.refused = set()
        # cublasStatus_t: NOT_SUPPORTED.
        self.status = 15
        self.card = gpu.Card("A card", 90, 100, 13000)
        for name in ("matmul_preference_destroy", "matmul_desc_set_attribute"):
            patch.setattr(cublasLt, name, lambda *args: None)
        for name in ("matmul_preference_set_attribute", "matrix_layout_set_attribute"):
            patch.setattr(cublasLt, name, lambda *args: None)
        for name in ("matmul_desc_create", "matrix_layout_create", "matmul_preference_create"):
            patch.setattr(cublasLt, name, lambda *args: 1)
        patch.setattr(cublasLt, "get_version", lambda: 130100)
        patch.setattr(cublasLt, "matmul", self.matmul)
        patch.setattr(cublasLt, "matmul_algo_get_heuristic", self.heuristic)
        patch.setattr(gpu, "card", lambda: self.card)
        patch.setattr(gpu, "stream", lambda: 0)
        patch.setattr(gpu, "synchronize", lambda: None)
        patch.setattr(cublaslt, "_handle", lambda: 1)
        patch.setattr(cublaslt, "_workspace", lambda: types.SimpleNamespace(address=0))
        patch.setattr(cublaslt, "empty", lambda *args: types.SimpleNamespace(pointer=0))
        patch.setattr(cublaslt, "Device", lambda name: None)
        patch.setattr(cublaslt._Plan, "_time", lambda plan, *args: self.time(plan))
        patch.setenv("XDG_CACHE_HOME", str(cache))
        self.folder = cache / "forge"
        self.forget()

    def forget(self):
        """As in another process."""
        for each in (cublaslt._plan, cublaslt._table, cublaslt.chosen_for):
            each.cache_clear()

    @staticmethod
    def number(address):
        return ctypes.c_uint8.from_address(address).value

    def matmul(self, *args):
        number = self.number(args[12])
        if number in self.refused:
            raise FailedError(self.status)
        self.ran.append(number)

    def heuristic(self, *args):
        for number in range(len(self.times)):
            start = args[8] + number * cublasLt.matmul_heuristic_result_dtype.itemsize
            ctypes.memset(start, 0, 64)
            ctypes.memset(start, number, 1)
        ctypes.c_int32.from_address(args[9]).value = len(self.times)

    def time(self, plan):
        self.timed += 1
        return self.times[plan.algorithm[0]]

    def run(self, n=512):
        """Compute a product of this width; the algorithm that did."""
        product = cublaslt.Product(512, n, 512, 512, n, n)
        assert cublaslt.run(product, 256, 512, 1024)
        return self.ran[-1]

    def file(self):
        (path,) = self.folder.glob("cublaslt-*.json")
        return path


@pytest.fixture
def library(monkeypatch, tmp_path):
    made = Library(monkeypatch, tmp_path)
    yield made
    monkeypatch.undo()
    made.forget()


def other(algorithms, number):
    """The same table with another algorithm for all."""
    return {key: f"{number:02x}" + value[2:] for key, value in algorithms.items()}


def test_the_fastest_algorithm_is_taken_and_kept(library):
    assert library.run() == 1
    timed = library.timed
    assert timed == 4 * cublaslt.ROUNDS
    library.forget()
    library.times = (1.0, 2.0, 3.0, 4.0)
    assert library.run() == 1
    assert library.timed == timed
    assert list(cublaslt.used().values()) == list(json.loads(library.file().read_text()).values())


def test_a_runs_table_goes_before_the_machines_and_outlives_it(library):
    library.run()
    frozen = other(cublaslt.used(), 2)
    cublaslt.begin_run(frozen)
    assert cublaslt.used() == {}
    assert library.run() == 2
    assert cublaslt.used() == frozen
    library.file().unlink()
    library.forget()
    timed = library.timed
    cublaslt.begin_run(frozen)
    assert library.run() == 2
    assert library.timed == timed
    cublaslt.begin_run({})
    assert library.run() == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{torn", "JSONDecodeError"),
        ("[]", "expected algorithms as they were written, got others"),
        ('{"a product": "xyz"}', "got others"),
        ("\udcff", "UnicodeDecodeError"),
    ],
)
def test_a_file_that_is_torn_or_edited_is_told_and_replaced(library, text, complaint):
    library.run()
    whole = library.file().read_text()
    library.file().write_bytes(text.encode(errors="surrogateescape"))
    library.forget()
    with pytest.warns(UserWarning, match=f"products are timed anew: .*{complaint}.* in /"):
        assert library.run() == 1
    assert library.file().read_text() == whole


def test_a_folder_that_cannot_be_written_costs_the_next_start(library, tmp_path):
    library.folder.write_text("a file")
    with pytest.warns(UserWarning, match="products are timed anew") as said:
        assert library.run() == 1
    assert "products are timed anew next time" in str(said[-1].message)


def test_two_processes_keep_each_others_algorithms(tmp_path):
    path = tmp_path / "table.json"
    first, second = Table(path), Table(path)
    for table, product, number in ((first, "a", 1), (second, "b", 2), (first, "c", 3)):
        table.use(product, np.full(64, number, np.uint8), tuned=True)
    kept = json.loads(path.read_text())
    assert {key: value[:2] for key, value in kept.items()} == {"a": "01", "b": "02", "c": "03"}
    assert [each.name for each in tmp_path.iterdir()] == ["table.json"]


def test_an_algorithm_that_the_library_refuses_is_chosen_anew(library):
    library.run()
    frozen = cublaslt.used()
    library.refused = {1}
    library.forget()
    with pytest.warns(UserWarning, match="refuses the algorithm kept for a product"):
        assert library.run() == 2
    assert next(iter(json.loads(library.file().read_text()).values())).startswith("02")
    cublaslt.begin_run(frozen)
    with pytest.warns(UserWarning, match="the same bits are no longer promised"):
        assert library.run() == 2


def test_an_algorithm_refused_within_a_capture_is_chosen_anew_after_it(library, monkeypatch):
    library.run()
    library.refused = {1}
    library.forget()
    monkeypatch.setattr(cublaslt.device, "_capturing", True)
    with (
        pytest.warns(UserWarning, match="refuses the algorithm kept for a product"),
        pytest.raises(DeviceError, match="expected no new product while a step is captured"),
    ):
        library.run()
    monkeypatch.setattr(cublaslt.device, "_capturing", False)
    assert library.run() == 2


def test_a_product_that_no_algorithm_computes_is_refused_each_time(library):
    library.refused = {0, 1, 2, 3}
    for _ in range(2):
        with pytest.raises(DeviceError, match="expected a kernel of cuBLASLt, got none"):
            library.run()


def test_a_lost_gpu_is_no_refused_algorithm(library, monkeypatch):
    library.run()
    kept = library.file().read_text()
    library.refused, library.status = {1}, 13
    library.forget()
    for _ in range(2):
        with pytest.raises(DeviceLostError, match=r"expected cuBLASLt to compute .*got status 13"):
            library.run()
    library.status = 3
    monkeypatch.setattr(gpu, "out_of_memory", lambda wanted: OutOfMemoryError(wanted))
    with pytest.raises(OutOfMemoryError, match="GPU memory for a product"):
        library.run()
    assert library.file().read_text() == kept


# ---- Frozen with the run


CUDA = types.SimpleNamespace(kind="cuda", name="cuda")


def test_a_resumed_run_takes_the_algorithms_it_began_with(library):
    begun = choices.Choices("cuda", 4, 0, 1, {}, products=choices._products(CUDA, {}))
    assert begun.products_in_words() == ""
    assert not begun.learn_products()
    library.run()
    assert begun.learn_products()
    assert not begun.learn_products()
    assert begun.products_in_words().startswith("1 algorithms, table ")
    frozen = json.loads(json.dumps(begun.frozen()))
    frozen["products"]["algorithms"] = other(frozen["products"]["algorithms"], 3)
    again = choices.Choices("cuda", 4, 0, 1, {}, products=choices._products(CUDA, frozen))
    assert library.run() == 3
    assert not again.learn_products()
    assert choices.changed(frozen, again) == []
    assert again.products_in_words() != begun.products_in_words()
    library.run(1024)
    assert again.learn_products()
    assert len(again.products["algorithms"]) == 2


def test_another_driver_is_named_and_its_algorithms_are_chosen_anew(library):
    begun = choices.Choices("cuda", 4, 0, 1, {}, products=choices._products(CUDA, {}))
    library.run()
    begun.learn_products()
    frozen = begun.frozen()
    frozen["products"]["algorithms"] = other(begun.products["algorithms"], 3)
    library.card = gpu.Card("A card", 90, 100, 13010)
    library.forget()
    again = choices.Choices("cuda", 4, 0, 1, {}, products=choices._products(CUDA, frozen))
    old, new = (f"A card, driver {driver}, cuBLASLt 130100" for driver in (13000, 13010))
    assert choices.changed(frozen, again) == [f"products for {old} → {new}"]
    assert library.run() == 1


@pytest.mark.parametrize("products", [5, {"algorithms": 5}, {"algorithms": {"a": "xy"}}, {"a": 1}])
def test_frozen_products_that_were_edited_are_refused(products):
    with pytest.raises(ConfigError, match=r"expected the products in frozen\.json as they were"):
        choices._products(Device("cpu"), {"products": products})


def test_on_a_cpu_the_products_of_a_run_on_a_gpu_are_kept():
    products = {"chosen_for": "a card", "algorithms": {"a product": "00" * 64}}
    assert choices._products(Device("cpu"), {"products": products}) == products
    assert choices._products(Device("cpu"), {}) == {}
