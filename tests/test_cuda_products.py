"""Products on the GPU: what is asked of the libraries, and which algorithm is taken."""

import ctypes
import importlib.util
import json
import types

import numpy as np
import pytest

from forge import graph, ops, tensor
from forge.backends import notice
from forge.backends.cuda import device as gpu
from forge.backends.cuda import precision
from forge.backends.cuda.algorithms import Table
from forge.errors import ConfigError, DeviceError, DeviceLostError, OutOfMemoryError
from forge.run import choices
from forge.tensor import Device

if not (importlib.util.find_spec("nvmath") and importlib.util.find_spec("cudnn")):
    pytest.skip("needs the packages of the extra cuda", allow_module_level=True)

import cudnn
from nvmath.bindings import cublasLt

from forge.backends.cuda import cublaslt, cudnn_linear, linear, products


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
    found = []
    monkeypatch.setattr(products, "run", lambda product, *_, **__: found.append(product) or True)
    return found


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
        for module in (products, cudnn_linear):
            patch.setattr(module, "empty", lambda *args: types.SimpleNamespace(pointer=0))
            patch.setattr(module, "Device", lambda name: None)
        patch.setattr(products, "_time", self.time)
        patch.setattr(cudnn, "backend_version", lambda: 91900)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        self.folder = cache / "forge"
        self.forget()

    def forget(self):
        """As in another process."""
        for each in (products._plan, products._table, products.chosen_for):
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
        for number in range(4):
            start = args[8] + number * cublasLt.matmul_heuristic_result_dtype.itemsize
            ctypes.memset(start, 0, 64)
            ctypes.memset(start, number, 1)
        ctypes.c_int32.from_address(args[9]).value = 4

    def time(self, call, number):
        self.timed += 1
        call[0](*call[1:])
        return self.times[self.ran[-1]]

    def run(self, n=512):
        """Compute a product of this width; the algorithm that did."""
        assert products.run(cublaslt.Product(512, n, 512, 512, n, n), 256, 512, 1024)
        return self.ran[-1]

    def file(self):
        (path,) = self.folder.glob("products-*.json")
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
    assert timed == 4 * products.ROUNDS
    library.forget()
    library.times = (1.0, 2.0, 3.0, 4.0)
    assert library.run() == 1
    assert library.timed == timed
    assert list(products.used().values()) == list(json.loads(library.file().read_text()).values())


def test_a_runs_table_goes_before_the_machines_and_outlives_it(library):
    library.run()
    frozen = other(products.used(), 2)
    products.begin_run(frozen)
    assert products.used() == {}
    assert library.run() == 2
    assert products.used() == frozen
    library.file().unlink()
    library.forget()
    timed = library.timed
    products.begin_run(frozen)
    assert library.run() == 2
    assert library.timed == timed
    products.begin_run({})
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
        table.use(product, f"{number:02x}" * 64, tuned=True)
    kept = json.loads(path.read_text())
    assert {key: value[:2] for key, value in kept.items()} == {"a": "01", "b": "02", "c": "03"}
    assert [each.name for each in tmp_path.iterdir()] == ["table.json"]


def test_an_algorithm_that_the_library_refuses_is_chosen_anew(library):
    library.run()
    frozen = products.used()
    library.refused = {1}
    library.forget()
    with pytest.warns(UserWarning, match="refuses the algorithm kept for a product"):
        assert library.run() == 2
    assert next(iter(json.loads(library.file().read_text()).values())).startswith("02")
    products.begin_run(frozen)
    with pytest.warns(UserWarning, match="the same bits are no longer promised"):
        assert library.run() == 2


def test_an_algorithm_refused_within_a_capture_is_chosen_anew_after_it(library, monkeypatch):
    library.run()
    library.refused = {1}
    library.forget()
    monkeypatch.setattr(products.device, "_capturing", True)
    with (
        pytest.warns(UserWarning, match="refuses the algorithm kept for a product"),
        pytest.raises(DeviceError, match="expected no new product while a step is captured"),
    ):
        library.run()
    monkeypatch.setattr(products.device, "_capturing", False)
    assert library.run() == 2


def test_a_product_that_no_algorithm_computes_is_refused_each_time(library):
    library.refused = {0, 1, 2, 3}
    for _ in range(2):
        with pytest.raises(DeviceError, match="expected a library with a kernel, got none"):
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


def test_a_product_without_a_kernel_is_asked_for_once(library, monkeypatch):
    """The caller has another way, within a capture too."""
    asked = []

    def none(*args):
        asked.append(args)
        ctypes.c_int32.from_address(args[9]).value = 0

    monkeypatch.setattr(cublasLt, "matmul_algo_get_heuristic", none)
    product = cublaslt.Product(512, 512, 512, 512, 512, 512)
    assert not products.run(product, 256, 512, 1024)
    monkeypatch.setattr(products.device, "_capturing", True)
    assert not products.run(product, 256, 512, 1024)
    assert len(asked) == 1
    assert products.used() == {}


# ---- Heavy products, and a second library for some


def test_a_heavy_product_is_timed_on_a_gpu_at_work(library, monkeypatch, capsys):
    """Heated once for several in a row, and again when the GPU may have cooled."""
    monkeypatch.setattr(notice, "_said", set())
    now = [0.0]

    def time(call, number):
        now[0] += 0.125
        return library.time(call, number)

    monkeypatch.setattr(products, "_time", time)
    monkeypatch.setattr(products.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(products, "_heated", [-np.inf])
    timed = []
    for idle in (0.0, products.COOLED / 2, products.COOLED * 2):
        now[0] += idle
        before = library.timed
        wide = products.HEAVY // 512**2 + 8 * len(timed)
        assert products.run(cublaslt.Product(512, wide, 512, 512, wide, wide), 256, 512, 1024)
        timed.append(library.timed - before)
    rounds = 1 + 4 * products.ROUNDS
    heating = round(products.HEATING / 0.125)
    assert timed == [rounds + heating, rounds, rounds + heating]
    assert capsys.readouterr().err.count("timing products of these sizes on this GPU, once") == 1


class Plans:
    """A graph of cuDNN with three plans, of which it does not build the first."""

    names = ("eng0", "eng4_k24=2", "eng7")

    def __init__(self, library):
        self.library = library
        self.built = []

    def build_plan_at_index(self, index):
        if index == 0:
            raise cudnn.cudnnGraphNotSupportedError("not this one")
        self.built.append(index)

    def get_workspace_size_plan_at_index(self, index):
        return 0

    def execute_plan_at_index(self, addresses, workspace, index, handle):
        assert index in self.built
        assert addresses == {1: 256, 2: 512, 3: 2048, 4: 4096, 5: addresses[5]}
        self.library.ran.append(self.names[index])


LAYER = cublaslt.Product(1 << 16, 1024, 512, 512, 1024, 1024, epilogue="bias gelu pre")


@pytest.fixture
def both(library, monkeypatch):
    """cuBLASLt and cuDNN, whose second plan is the fastest of all."""
    graph = library.graph = Plans(library)
    monkeypatch.setattr(cudnn_linear, "_plans", lambda product: (graph, list(graph.names)))
    monkeypatch.setattr(cudnn_linear.cudnn_graph, "handle", lambda: None)
    monkeypatch.setattr(products, "_heat", lambda call: None)
    library.times = {0: 3.0, 1: 1.0, 2: 2.0, 3: 4.0, "eng4_k24=2": 0.9, "eng7": 5.0}
    return library


def layer(library, product=LAYER):
    assert products.run(product, 256, 512, 1024, bias=2048, pre=4096)
    return library.ran[-1]


def test_the_faster_of_two_libraries_computes_a_layer_and_is_kept(both, monkeypatch):
    assert layer(both) == "eng4_k24=2"
    assert both.graph.built == [1, 2]
    assert list(products.used().values()) == ["cudnn eng4_k24=2"]
    timed = both.timed
    both.forget()
    assert layer(both) == "eng4_k24=2"
    assert both.timed == timed
    frozen = json.loads(json.dumps(products.used()))
    begun = {"products": {"chosen_for": products.chosen_for(), "algorithms": frozen}}
    both.file().unlink()
    both.forget()
    assert choices._products(CUDA, begun)["algorithms"] == frozen
    assert layer(both) == "eng4_k24=2"
    assert both.timed == timed


def test_a_plan_that_is_gone_is_chosen_anew(both, monkeypatch):
    layer(both)
    both.forget()
    monkeypatch.setattr(Plans, "names", ("eng0", "eng7"))
    with pytest.warns(UserWarning, match="refuses the algorithm kept for a product"):
        assert layer(both) == 1


def test_only_plans_with_a_name_are_candidates(both, monkeypatch):
    """What could not be read back from a run's frozen.json is not written there."""
    names = ["backend_heuristics", "eng4_k24=-2", "eng1[a]", *Plans.names]
    monkeypatch.setattr(cudnn_linear, "_plans", lambda product: (None, names))
    assert cudnn_linear.candidates(LAYER) == [f"cudnn {name}" for name in Plans.names]


def test_a_missing_cudnn_is_told(library, monkeypatch):
    def gone():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    monkeypatch.setattr(cudnn, "backend_version", gone)
    with pytest.raises(DeviceError, match=r"got no cuDNN \(Unable to find .*pip install"):
        products.chosen_for()


@pytest.mark.parametrize(
    "other",
    [
        {"epilogue": "bias gelu"},
        {"epilogue": "bias"},
        {"ldb": 2048},
        {"lda": 1024},
        {"dtype": "float32"},
        {"out_dtype": "float32"},
        {"trans_b": True},
        {"batch": 2},
    ],
)
def test_only_layers_with_gelu_are_asked_of_cudnn(other):
    assert cudnn_linear.serves(LAYER, 16)
    assert not cudnn_linear.serves(LAYER, 8)
    assert not cudnn_linear.serves(LAYER._replace(**other), 256)


def test_a_light_layer_is_cublaslts(both):
    """Compiling the plans would take longer than it is ever worth."""
    assert layer(both, LAYER._replace(m=1 << 8)) == 1


@pytest.mark.cuda
def test_both_libraries_compute_the_same_layer():
    """On the card: every plan of cuDNN, against float64, to the rounding of bfloat16."""
    x, w = (random(*s, dtype="bfloat16", seed=i) for i, s in enumerate(((512, 256), (256, 384))))
    bias = random(384, dtype="bfloat16", seed=2)
    sums = np.asarray(x.numpy(), np.float64) @ np.asarray(w.numpy(), np.float64) / 16
    w = tensor(np.asarray(w.numpy(), np.float32) / 16, "bfloat16", "cuda")
    sums += np.asarray(bias.numpy(), np.float64)
    inner = np.sqrt(2 / np.pi) * (sums + 0.044715 * sums**3)
    exact = {"pre": sums, "out": 0.5 * sums * (1 + np.tanh(inner))}
    x, bias = (tensor(each, device="cuda") for each in (x, bias))
    product = cublaslt.Product(512, 384, 256, 256, 384, 384, epilogue="bias gelu pre")
    named = cudnn_linear.candidates(product)
    written = cublaslt.Matmul(product, 256).candidates()
    assert named
    assert written
    for algorithm in (*named, *written):
        pre, out = (tensor(np.zeros((512, 384)), "bfloat16", "cuda") for _ in range(2))
        made = cudnn_linear if cudnn_linear.wrote(algorithm) else None
        kernel = (
            made.kernel(product, algorithm)
            if made
            else cublaslt.Matmul(product, 256).kernel(algorithm)
        )
        kernel(x.pointer, w.pointer, out.pointer, 1.0, bias.pointer, pre.pointer)
        for got, want in ((pre, exact["pre"]), (out, exact["out"])):
            error = relative(np.asarray(got.numpy(), np.float64), want)
            assert error < 4e-3, (algorithm, error)


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
    libraries = "cuBLASLt 130100, cuDNN 91900"
    old, new = (f"A card, driver {driver}, {libraries}" for driver in (13000, 13010))
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
