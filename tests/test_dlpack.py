"""Arrays of other libraries: in and out without a copy, on the host and on a GPU."""

import contextlib
import gc
import importlib.util
import weakref

import ml_dtypes
import numpy as np
import pytest

import forge
from forge import dlpack, ops
from forge.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from forge.pool import Buffer, HostMemory, Pool
from forge.tensor import Device, empty, full

DTYPES = ["float32", "float64", "bfloat16", "int64", "bool"]
ONES = [[1, 0, 1], [0, 1, 1]]


class Exporter:
    """Another library's array, which speaks DLPack only; `old` ones know of no versions."""

    def __init__(self, array, *, device=(1, 0), old=False, code=None):
        self.array = array
        self.code = code
        self.device = device
        self.old = old
        self.streams = []

    def __dlpack__(self, **keywords):
        if self.old and "max_version" in keywords:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.streams.append(keywords.pop("stream", None))
        capsule = dlpack.give(self.array, self.device[0], **keywords)
        if self.code is not None:
            dlpack._tensor(capsule).code = self.code
        return capsule

    def __dlpack_device__(self):
        return self.device


def test_what_speaks_dlpack_is_copied_in():
    array = np.arange(6.0).reshape(2, 3)
    x = forge.tensor(Exporter(array.T))
    array[0, 0] = 9.0
    assert x.dtype == "float64"
    assert x.numpy().tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_taken_is_shared(dtype, old):
    array = np.array(ONES).astype(forge.tensor(1.0, dtype).numpy().dtype)
    x = forge.from_dlpack(Exporter(array, old=old))
    assert (x.shape, x.dtype, x.device.name) == ((2, 3), dtype, "cpu")
    assert np.shares_memory(x.array, array)
    array[0, 1] = 1
    assert x.numpy()[0, 1] == 1
    again = forge.from_dlpack(x.view((3,), 3))
    assert again.pointer == x.pointer + 3 * array.itemsize
    assert (again.numpy() == array[1]).all()


def test_bfloat16_goes_to_numpy_as_a_copy():
    x = forge.tensor([1.5], "bfloat16")
    with pytest.raises(RuntimeError, match="dtype"):
        np.from_dlpack(x)
    assert np.asarray(x).dtype == ml_dtypes.bfloat16


def test_what_cannot_be_shared_is_refused_by_name():
    array = np.arange(6.0).reshape(2, 3)
    frozen = array.copy()
    frozen.flags.writeable = False
    for bad, error, message in (
        (array.T, ShapeError, r"expected a contiguous array, got strides \(8, 24\)"),
        (frozen, ArgumentError, "got a read-only array; copy it with forge.tensor"),
        (array.astype(np.float16), DtypeError, "expected one of float32, .*, got NumPy's float16"),
        ([1.0], DtypeError, "expected an array that speaks DLPack, got list; forge.tensor copies"),
        (Exporter(array, code=10), DtypeError, "got DLPack's type code 10 of 64 bits, 1 lanes"),
        (Exporter(array, code=4), DtypeError, "got DLPack's type code 4 of 64 bits, 1 lanes"),
        (Exporter(array, device=(8, 0)), DeviceError, "DLPack's device type 8, number 0"),
        (Exporter(array, device=(2, 3)), DeviceError, "DLPack's device type 2, number 3"),
    ):
        with pytest.raises(error, match=message):
            forge.from_dlpack(bad)
    assert forge.tensor(frozen).numpy().tolist() == frozen.tolist()


def test_a_used_capsule_is_refused():
    class Careless(Exporter):
        capsule = np.ones(3).__dlpack__()

        def __dlpack__(self, **keywords):
            return self.capsule

    careless = Careless(None)
    forge.from_dlpack(careless)
    with pytest.raises(DtypeError, match="expected a capsule of DLPack, unused, got"):
        forge.from_dlpack(careless)


def test_the_owner_is_kept_as_long_as_the_tensor_and_no_longer():
    array = np.arange(5.0)
    alive = weakref.ref(array)
    x = forge.from_dlpack(array)
    y = x.view((2,), 3)
    del array, x
    gc.collect()
    assert y.numpy().tolist() == [3, 4]
    assert alive() is not None
    del y
    gc.collect()
    assert alive() is None


def test_a_capsule_that_nobody_takes_frees_what_it_holds():
    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    room = np.zeros(3, np.float32)
    for versions in ({}, {"max_version": (1, 0)}):
        dlpack.give(dlpack.span(room.ctypes.data, (3,), room.dtype, owner), dlpack.CUDA, **versions)
    del owner
    gc.collect()
    assert alive() is None


# ---- With PyTorch


def torch_dtype(name):
    import torch

    return getattr(torch, name)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES)
def test_to_torch_and_back(dtype):
    import torch

    x = forge.tensor(ONES, dtype)
    shared = torch.from_dlpack(x)
    assert shared.dtype is torch_dtype(dtype)
    assert (shared.data_ptr(), shared.tolist()) == (x.pointer, ONES)
    shared[1, 0] = 1
    assert x.numpy()[1, 0] == 1
    back = forge.from_dlpack(shared)
    assert (back.pointer, back.dtype, back.shape) == (x.pointer, dtype, (2, 3))
    copied = forge.tensor(shared)
    assert (copied.dtype, copied.numpy().tolist()) == (dtype, x.numpy().tolist())
    assert copied.pointer != x.pointer


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_whoever_is_freed_first_the_other_is_whole(dtype):
    import torch

    def churn():
        gc.collect()
        Device("cpu").pool.trim()
        return [full((5000,), 7, dtype, Device("cpu")) for _ in range(3)]

    shared = torch.from_dlpack(full((5000,), 3, dtype, Device("cpu")))
    others = churn()
    assert (shared == 3).all()
    x = full((5000,), 3, dtype, Device("cpu"))
    del shared
    torch.from_dlpack(x)
    others += churn()
    assert (x.numpy() == 3).all()
    taken = forge.from_dlpack(torch.full((5000,), 3, dtype=torch_dtype(dtype)))
    others += churn()
    assert (taken.numpy() == 3).all()
    theirs = torch.full((5000,), 3, dtype=torch_dtype(dtype))
    forge.from_dlpack(theirs)
    others += churn()
    assert (theirs == 3).all()
    del others


# ---- A GPU, feigned: its memory is the host's, which the Tensors do not see


class FeignedMemory(HostMemory):
    stream = 77

    def __init__(self):
        self.said = []
        self.buffers = {}

    def allocate(self, size):
        raw = super().allocate(size)
        self.buffers[raw.ctypes.data] = raw
        return Buffer(raw.ctypes.data)

    def release(self, buffer):
        self.said.append("released")
        del self.buffers[buffer.address]

    def write(self, x, array):
        self.bytes(x)[:] = (
            np.ascontiguousarray(array, forge.dtypes.to_numpy(x.dtype)).reshape(-1).view(np.uint8)
        )

    def read(self, x):
        return self.bytes(x).view(forge.dtypes.to_numpy(x.dtype)).reshape(x.shape).copy()

    def bytes(self, x):
        return dlpack.span(x.pointer, (x.nbytes,), np.dtype(np.uint8), None)

    def copy(self, source, x):
        self.bytes(x)[:] = self.bytes(source)

    def hand_over(self, stream):
        self.said.append(stream)

    def settle(self):
        self.said.append("settled")


@pytest.fixture
def feigned(monkeypatch):
    device = object.__new__(Device)
    device.name, device.kind, device.plan = "cuda", "cuda", False
    device.memory = FeignedMemory()
    device.pool = Pool(device.memory, bounded=True)
    monkeypatch.setitem(Device._known, "cuda", device)
    return device


@pytest.mark.parametrize("versions", [{}, {"max_version": (1, 0)}])
@pytest.mark.parametrize(("dtype", "kind"), [("float32", (2, 32)), ("bfloat16", (4, 16))])
def test_a_capsule_of_a_gpu_says_where_and_what(feigned, dtype, kind, versions):
    x = forge.tensor(ONES, dtype, "cuda")
    assert x.__dlpack_device__() == (2, 0)
    capsule = x.__dlpack__(stream=5, **versions)
    found = dlpack._tensor(capsule)
    assert (found.data, found.device_type, found.device_id) == (x.pointer, 2, 0)
    assert (found.ndim, (found.code, found.bits), found.lanes) == (2, kind, 1)
    assert feigned.memory.said == [5]


def test_memory_given_away_returns_when_both_are_done(feigned):
    x = forge.tensor(np.arange(600.0), device="cuda")
    pointer, in_use = x.pointer, feigned.pool.in_use
    y = forge.from_dlpack(x)
    assert (y.pointer, y.dtype, y.device) == (pointer, "float64", feigned)
    del x
    gc.collect()
    assert feigned.pool.in_use == in_use
    assert (y.numpy() == np.arange(600.0)).all()
    del y
    gc.collect()
    # Waited for before its owner was told; and not handed out again, but returned.
    assert feigned.memory.said == [77, "settled", "released"]
    assert (feigned.pool.in_use, feigned.pool.held, feigned.memory.buffers) == (0, 0, {})


def test_what_a_gpu_holds_is_ready_on_our_stream(feigned):
    theirs = Exporter(np.arange(6.0).reshape(2, 3), device=(2, 0))
    x = forge.from_dlpack(theirs)
    assert (x.pointer, theirs.streams) == (theirs.array.ctypes.data, [77])
    assert x.array is None
    assert forge.tensor(theirs).numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ShapeError, match="expected a contiguous array"):
        forge.from_dlpack(Exporter(theirs.array.T, device=(2, 0)))


def test_what_a_gpu_holds_is_copied_as_what_the_host_holds(feigned):
    array = np.arange(24.0).reshape(2, 3, 4)
    frozen = array.copy()
    frozen.flags.writeable = False
    for theirs in (
        array.T,
        array[::-1, 1:, ::2],
        np.broadcast_to(array[:, :1], (2, 5, 4)),
        array[:, :0],
        frozen,
        array.astype(np.float16),
        array.astype(ml_dtypes.bfloat16)[:, 1],
    ):
        results = []
        for place in ((1, 0), (2, 0)):
            x = forge.tensor(Exporter(theirs, device=place), "float32")
            results.append((x.device.name, x.numpy().tolist()))
        assert results == [("cpu", theirs.astype(np.float64).tolist())] * 2
    with pytest.raises(ArgumentError, match="got a read-only array"):
        forge.from_dlpack(Exporter(frozen, device=(2, 0)))


def test_from_a_gpu_to_where_the_consumer_asks(feigned):
    x = forge.tensor(ONES, "int64", "cuda")
    assert np.from_dlpack(x, device="cpu").tolist() == ONES
    with pytest.raises(BufferError, match="expected copy not False"):
        np.from_dlpack(x, device="cpu", copy=False)
    with pytest.raises(DeviceError, match=r"expected DLPack's device \(2, 0\) or the host's"):
        x.__dlpack__(dl_device=(2, 1))
    copy = dlpack._tensor(x.__dlpack__(copy=True))
    assert copy.data != x.pointer


def test_nothing_is_handed_over_within_a_capture(monkeypatch):
    pytest.importorskip("cuda.bindings")
    from forge.backends.cuda import device, memory

    monkeypatch.setattr(device, "_capturing", True)
    with pytest.raises(DeviceError, match="expected no hand-over to another library while a step"):
        object.__new__(memory.CudaMemory).hand_over(1)


def test_nothing_is_taken_within_a_capture(feigned, monkeypatch):
    pytest.importorskip("cuda.bindings")
    from forge.backends.cuda import device, memory

    array = Exporter(np.ones(3, np.float32), device=(2, 0))
    monkeypatch.setattr(type(forge.Device("cuda").memory), "stream", memory.CudaMemory.stream)
    monkeypatch.setattr(device, "_capturing", True)
    for take in (forge.from_dlpack, forge.tensor):
        with pytest.raises(DeviceError, match="expected no array of another library while a step"):
            take(array)


# ---- A GPU


def peer(name):
    """`array(values, dtype)`, `numpy(x)`, `from_dlpack` and a stream of its own, of a library."""
    if name == "torch":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs PyTorch for GPUs")
        return (
            lambda values: torch.tensor(values, device="cuda"),
            lambda x: x.cpu().numpy(),
            torch.from_dlpack,
            torch.cuda.stream(torch.cuda.Stream()),
        )
    import cupy

    return cupy.asarray, cupy.asnumpy, cupy.from_dlpack, cupy.cuda.Stream(non_blocking=True)


# What another library warns of when it is imported is no fault here.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.cuda
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_results_underway_are_waited_for(name, own_stream):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    array, numpy, from_dlpack, stream = peer(name)
    values = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    w = x = forge.tensor(values, device="cuda")
    with stream if own_stream else contextlib.nullcontext():
        their_w = theirs = array(values)
        # Products that take longer than the call of the other library; 45^-1 keeps their size.
        for _ in range(10):
            x = ops.scale(ops.matmul(x, w), 0.022)
            theirs = (theirs @ their_w) * 0.022
        shared = from_dlpack(x)
        doubled = shared + shared
        taken = ops.add(forge.from_dlpack(theirs), forge.from_dlpack(theirs))
        assert np.abs(x.numpy()).max() > 1
        assert (numpy(doubled) == 2 * x.numpy()).all()
        assert (taken.numpy() == 2 * numpy(theirs)).all()
        assert forge.from_dlpack(shared).pointer == x.pointer
        assert (forge.tensor(theirs).numpy() == numpy(theirs)).all()


@pytest.mark.cuda
def test_memory_given_away_on_a_gpu_comes_back():
    from forge.backends.cuda import device as gpu

    free = []
    for _ in range(5):
        x = full((1 << 26,), 2.5, "float32", Device("cuda"))
        y = forge.from_dlpack(x)
        del x
        assert y.view((3,), (1 << 26) - 3).numpy().tolist() == [2.5] * 3
        del y
        gc.collect()
        free.append(gpu.memory_info()[0])
    assert free[1:] == free[:-1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.cuda
def test_bfloat16_on_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs PyTorch for GPUs")
    x = forge.tensor(ONES, "bfloat16", "cuda")
    shared = torch.from_dlpack(x)
    assert (shared.dtype, shared.device.type) == (torch.bfloat16, "cuda")
    assert (shared.data_ptr(), shared.tolist()) == (x.pointer, ONES)
    assert forge.from_dlpack(shared).numpy().tolist() == ONES
    assert empty((0, 3), "float32", Device("cuda")).__dlpack__(stream=1) is not None
