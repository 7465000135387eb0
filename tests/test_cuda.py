"""The GPU: why one cannot be used, and, where there is one, that training there is right."""

import types

import numpy as np
import pytest

from forge import Device, DeviceError, tensor
from forge.backends.cuda import device as gpu
from forge.errors import OutOfMemoryError
from forge.graph import Captured
from forge.models import GPT2, GPT2Config
from forge.pool import Pool
from forge.tensor import empty, full
from small_run import DROPOUT, SIZES, Run


class Runtime(types.SimpleNamespace):
    """A CUDA runtime that says what a test wants it to."""

    def __init__(self, driver=13000, devices=1, major=9, minor=0):
        class Code(int):
            name = "cudaSuccess"

        ok = Code(0)
        failed = Code(0 if devices else 100)
        failed.name = "cudaSuccess" if devices else "cudaErrorNoDevice"
        card = types.SimpleNamespace(
            name=b"A card", major=major, minor=minor, multiProcessorCount=100
        )
        super().__init__(
            cudaDriverGetVersion=lambda: (ok, driver),
            cudaGetDeviceCount=lambda: (failed, devices),
            cudaGetDeviceProperties=lambda number: (ok, card),
            cudaSetDevice=lambda number: (ok,),
        )


@pytest.fixture
def driver(monkeypatch):
    """A driver's library that loads: Python itself."""
    monkeypatch.setattr(gpu, "DRIVER", None)


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        (Runtime(driver=0), r"no NVIDIA driver; install one, or use --device cpu"),
        (Runtime(driver=12040), r"a driver for CUDA 12\.4; update it"),
        (Runtime(devices=0), r"cudaErrorNoDevice, 0 devices; .*CUDA_VISIBLE_DEVICES"),
        (Runtime(major=7, minor=5), r"A card, compute capability 7\.5; Forge needs 8\.0"),
    ],
)
def test_a_gpu_that_cannot_be_used_says_why(monkeypatch, driver, runtime, message):
    monkeypatch.setattr(gpu, "PACKAGES", {"sys": "sys"})
    monkeypatch.setattr(gpu, "runtime", lambda: runtime)
    with pytest.raises(DeviceError, match=message):
        gpu.card.__wrapped__()


@pytest.mark.parametrize("packages", [{}, {"nowhere.at_all": "some-package"}])
def test_without_a_driver_no_package_is_asked_for(monkeypatch, packages):
    monkeypatch.setattr(gpu, "DRIVER", "libnowhere.so.1")
    monkeypatch.setattr(gpu, "PACKAGES", packages)
    with pytest.raises(DeviceError, match=r"no NVIDIA driver; install one, or use --device cpu"):
        gpu.card.__wrapped__()


def test_a_missing_package_is_named(monkeypatch, driver):
    monkeypatch.setattr(gpu, "PACKAGES", {"nowhere.at_all": "some-package"})
    with pytest.raises(
        DeviceError,
        match=r"no package some-package; in a clone of Forge, pip install -e '\.\[cuda\]'",
    ):
        gpu.card.__wrapped__()


def test_a_usable_card_is_described(monkeypatch, driver):
    monkeypatch.setattr(gpu, "PACKAGES", {})
    monkeypatch.setattr(gpu, "runtime", lambda: Runtime(driver=13010, major=12))
    assert gpu.card.__wrapped__() == gpu.Card("A card", 120, 100, 13010)


class Scarce:
    """Memory of two buffers."""

    def __init__(self):
        self.left = 2

    def allocate(self, size):
        if not self.left:
            raise MemoryError
        self.left -= 1
        return object()

    def release(self, buffer):
        self.left += 1


def test_a_pool_gives_up_unused_buffers_before_it_fails():
    pool = Pool(Scarce())
    first, second = pool.take(256), pool.take(512)
    pool.give(256, first)
    third = pool.take(1024)
    with pytest.raises(MemoryError):
        pool.take(2048)
    pool.close()
    pool.give(512, second)
    pool.give(1024, third)
    assert pool.held == 0
    assert pool._memory.left == 2


def test_params_in_bfloat16_and_padded_hold_the_same_numbers():
    model = GPT2(GPT2Config(**SIZES))
    plain = model.zeros(Device("reference"))
    low = model.zeros(Device("reference"), "bf16")
    for params in (plain, low):
        params.load_(model.init(1))
    assert low.compute["ln_f.weight"] is low["ln_f.weight"]
    for name, value in plain.items():
        if "ln_" not in name:
            rounded = value.numpy().astype(low.compute[name].numpy().dtype)
            assert (low.compute[name].numpy() == rounded).all()
    padded = model.zeros(Device("plan:cuda"))
    assert padded.compute["wte.weight"].shape == (128, 48)
    assert padded["wte.weight"].shape == (61, 48)
    assert padded.count == plain.count


@pytest.mark.cuda
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-6), ("bf16", 2e-2)])
def test_training_agrees_with_the_reference(precision, tolerance):
    ours, exact = Run("cuda", precision, **DROPOUT), Run("reference", **DROPOUT)
    for a, b in zip(ours.steps(4), exact.steps(4), strict=True):
        assert a == pytest.approx(b, rel=tolerance)
    for name, gradient in exact.grads.items():
        error = np.linalg.norm(ours.grads[name].numpy() - gradient.numpy())
        assert error <= 10 * tolerance * np.linalg.norm(gradient.numpy()), name


@pytest.mark.cuda
def test_the_bfloat16_copy_follows_the_masters():
    run = Run("cuda", "bf16", captured=True)
    run.steps(4)
    working = run.params.working.numpy()
    assert (run.params.flat.numpy().astype(working.dtype) == working).all()
    stored = run.params.compute["wte.weight"].numpy()
    assert not stored[61:].astype(np.float32).any()


@pytest.mark.cuda
def test_too_much_memory_is_refused_in_one_line_and_harms_nothing():
    cuda = Device("cuda")
    x = full((3,), 2.5, "float32", cuda)
    with pytest.raises(OutOfMemoryError, match=r"expected [\d,]+ MiB of GPU memory, got .* free"):
        empty((1 << 45,), "float32", cuda)
    assert (x.numpy() == 2.5).all()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64", "bool"])
def test_copies_and_fills(dtype):
    cuda = Device("cuda")
    host = tensor(np.random.default_rng(0).integers(0, 2, (70, 13)), dtype)
    x = tensor(host, device=cuda)
    assert (x.numpy() == host.numpy()).all()
    assert (x.view((13,), 26).numpy() == host.numpy()[2]).all()
    for value in (0, 1) if dtype == "bool" else (0, 1, -3):
        assert (full((5, 3), value, dtype, cuda).numpy() == value).all()
    large = np.arange(5_000_003, dtype=np.int64)
    assert (tensor(large, device=cuda).numpy() == large).all()


# The second width is served by one kernel for all blocks.
WIDTHS = [("fp32", 48, 2e-5), ("bf16", 48, 5e-2), ("bf16", 96, 5e-2)]


@pytest.mark.cuda
@pytest.mark.parametrize(("precision", "n_embd", "tolerance"), WIDTHS)
@pytest.mark.parametrize("batch", [2, 6])
def test_decoding_agrees_with_the_whole_context(precision, n_embd, tolerance, batch):
    cuda = Device("cuda")
    model = GPT2(GPT2Config(**{**SIZES, "n_embd": n_embd}))
    params = model.zeros(cuda, precision)
    params.load_(model.init(3))
    ids = np.random.default_rng(1).integers(0, 61, (batch, 20))
    whole = model.logits(params.compute, tensor(ids, device=cuda)).numpy()
    cache = model.cache(batch, 24, cuda, params.compute["wpe.weight"].dtype)
    step = Captured(model.decode, cuda, ("ids", "pos"))
    for position in range(20):
        token = tensor(ids[:, position : position + 1], device=cuda)
        pos = tensor(np.full(batch, position), device=cuda)
        logits = step(params.compute, token, cache, pos).numpy()
        expected = whole[:, position].astype(np.float32)
        assert np.allclose(logits.astype(np.float32), expected, atol=tolerance)


@pytest.mark.cuda
def test_the_logits_of_a_sample_have_the_bits_they_have_alone():
    cuda = Device("cuda")
    model = GPT2(GPT2Config(**{**SIZES, "n_embd": 96, "block_size": 300}))
    params = model.zeros(cuda, "bf16")
    params.load_(model.init(3))
    together, alone = (model.cache(batch, 300, cuda, "bfloat16") for batch in (3, 1))
    rng = np.random.default_rng(1)
    for position in range(280, 290):
        ids, pos = rng.integers(0, 61, (3, 1)), np.array([position, 5, position - 150])
        first, second = (
            model.decode(params.compute, tensor(i, device=cuda), cache, tensor(p, device=cuda))
            for i, cache, p in ((ids, together, pos), (ids[2:], alone, pos[2:]))
        )
        assert first.numpy()[2].tobytes() == second.numpy()[0].tobytes()
