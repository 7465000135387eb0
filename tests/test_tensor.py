"""Tensor, Device, Storage and the pool: dtypes, sharing, export, reuse."""

import concurrent.futures
import copy
import gc
import pickle
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

import forge
from forge import DeviceError, DtypeError, ShapeError, Tape, TapeError, Tensor, ops
from forge.pool import ALIGNMENT, GRANULE, HostMemory, NoMemory, Pool
from forge.tensor import Device, Spec, Storage, empty, empty_like, full, zeros, zeros_like

CPU = Device("cpu")
OTHERS = [np.zeros(2, np.int32), np.zeros(2, np.float16), "a", [1j], [None]]


# Making Tensors


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (1.5, "float32"),
        (3, "int64"),
        (True, "bool"),
        ([1.0, 2], "float32"),
        (((1, 2), (3, 4)), "int64"),
        ([], "float32"),
        (np.float64(1.5), "float64"),
        (np.float32(1.5), "float32"),
        (np.int64(3), "int64"),
        (np.arange(3.0), "float64"),
        (np.arange(3), "int64"),
        (np.zeros(2, np.float32), "float32"),
        (np.zeros(2, ml_dtypes.bfloat16), "bfloat16"),
        (np.zeros(2, bool), "bool"),
        (range(3), "int64"),
    ],
)
def test_the_dtype_is_kept(array, dtype):
    x = forge.tensor(array)
    assert (x.dtype, x.shape, x.device) == (dtype, np.shape(array), CPU)
    np.testing.assert_array_equal(x.numpy(), np.asarray(array))


@pytest.mark.parametrize("array", OTHERS)
def test_other_dtypes_are_refused(array):
    with pytest.raises(DtypeError, match=r"\[dtype\] expected one of float32, .* convert it with"):
        forge.tensor(array)


def test_a_dtype_is_converted_to():
    assert forge.tensor(np.arange(3, dtype=np.int32), "float32").numpy().tolist() == [0, 1, 2]
    # Python's numbers do not pass through float32 on their way to float64.
    assert forge.tensor(0.1, "float64").item() == 0.1
    assert forge.tensor([0.1], "float64").item() == 0.1
    assert forge.tensor(1 / 3, "bfloat16").item() == 0.333984375
    for wrong in ("float", "int32", np.float32, None.__class__):
        with pytest.raises(DtypeError, match=r"\[tensor\] expected a dtype of float32, .* strings"):
            forge.tensor([1.0], wrong)


def test_a_tensor_is_a_copy():
    array = np.arange(3.0)
    x = forge.tensor(array)
    y = forge.tensor(x)
    array[0] = 7
    x.array[1] = 7
    assert y.numpy().tolist() == [0.0, 1.0, 2.0]
    z = x.numpy()
    z[2] = 9
    assert x.numpy().tolist() == [0.0, 7.0, 2.0]


@pytest.mark.parametrize(
    "array", [np.arange(12.0).reshape(3, 4).T, np.arange(12.0)[::-2], np.broadcast_to(1.0, (2, 3))]
)
def test_strided_arrays_become_contiguous(array):
    x = forge.tensor(array)
    assert x.array.flags.c_contiguous
    np.testing.assert_array_equal(x.numpy(), array)


def test_a_copy_keeps_its_device_unless_told():
    x = forge.tensor([1.0], device="reference")
    assert forge.tensor(x).device is Device("reference")
    assert forge.tensor(x, device="cpu").device is CPU
    assert forge.tensor(x, "float64", "plan:cpu").array is None


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0, 3), (1,), (3, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64", "bool"])
def test_every_shape_and_dtype(shape, dtype):
    assert zeros(shape, dtype, CPU).numpy().tolist() == np.zeros(shape).tolist()
    assert full(shape, 1, dtype, CPU).numpy().tolist() == np.ones(shape).tolist()
    x = empty(shape, dtype, CPU)
    assert (x.shape, x.ndim, x.size) == (shape, len(shape), np.prod(shape, dtype=int))
    assert x.nbytes == x.array.nbytes
    for like in (empty_like(x), zeros_like(x)):
        assert (like.shape, like.dtype, like.device) == (shape, dtype, CPU)
    assert repr(x).startswith(f"Tensor({list(shape)}, {dtype}, cpu, ")


def test_host_values():
    x = forge.tensor([[1.0, 2.0]])
    assert len(x) == 1
    assert forge.tensor(2.5).item() == float(forge.tensor([2.5])) == 2.5
    assert type(forge.tensor(1.0, "bfloat16").item()) is float
    assert type(forge.tensor(3).item()) is int
    assert bool(forge.tensor(1.0))
    assert not forge.tensor([0])
    with pytest.raises(ShapeError, match=r"\[item\] expected one element, got shape \(1, 2\)"):
        x.item()
    with pytest.raises(ShapeError, match=r"\[len\]"):
        len(forge.tensor(1.0))
    assert repr(forge.tensor(np.zeros(17))) == "Tensor([17], float64, cpu)"


def test_a_copied_or_pickled_tensor_is_a_tensor_of_its_own():
    before = CPU.pool.in_use
    x = forge.tensor([1.0, 2.0], "bfloat16")
    for again in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert (again.dtype, again.device) == ("bfloat16", CPU)
        assert again.storage is not x.storage
        assert again.numpy().tolist() == [1.0, 2.0]
    del x, again
    assert CPU.pool.in_use == before


# Devices


def test_devices_are_interned():
    assert Device("cpu") is Device(Device("cpu")) is pickle.loads(pickle.dumps(CPU))
    assert (Device("plan:cpu").kind, Device("plan:cpu").plan) == ("cpu", True)
    assert Device("reference") is not CPU


@pytest.mark.parametrize("name", ["gpu", "", "CPU", "plan:", "plan:gpu", "plan:plan:cpu"])
def test_unknown_devices_are_refused(name):
    with pytest.raises(DeviceError, match=rf"\[device\] expected .*, got '{name}'"):
        Device(name)


def test_spec_says_what_does_not_fit():
    spec = Spec((2,), "float32", CPU)
    spec.require("op", "x", forge.tensor([1.0, 2.0]))
    spec.require("op", "x", forge.tensor([1.0, 2.0], "float64"), wider=True)
    for x, wider, error in (
        (forge.tensor([1.0]), False, ShapeError),
        (1.0, True, ShapeError),
        (forge.tensor([1.0, 2.0], "float64"), False, DtypeError),
        (forge.tensor([1.0, 2.0], "bfloat16"), True, DtypeError),
        (forge.tensor([1, 2]), True, DtypeError),
        (forge.tensor([1.0, 2.0], device="reference"), True, DeviceError),
    ):
        with pytest.raises(error, match=r"\[op\] expected x as \[2\] float32 on cpu, got"):
            spec.require("op", "x", x, wider=wider)


# Sharing


def test_reshape_shares_storage_and_version():
    x = forge.tensor(np.arange(6.0), device="reference")
    y = ops.reshape(x, (2, 3))
    assert y.storage is x.storage
    y.array[1, 2] = 7.0
    assert x.numpy()[5] == 7.0
    ids, rows = (forge.tensor(a, device="reference") for a in ([0], np.ones((1, 3))))
    ops.scatter_add_rows_(y, ids, rows)
    assert x.storage.version == 1


def test_a_view_that_changes_nothing_is_the_tensor_itself():
    x = forge.tensor(np.ones((2, 3)))
    assert x.view((2, 3)) is x
    assert x.view((3, 2)).shape == (3, 2)
    assert x.view((1, 3), 3).offset == 3


def test_views_of_a_flat_buffer():
    flat = forge.tensor(np.arange(10.0))
    a, b = flat.view((2, 2)), flat.view((2, 3), 4)
    inner = b.view((3,), 3)
    assert a.numpy().tolist() == [[0, 1], [2, 3]]
    assert b.numpy().tolist() == [[4, 5, 6], [7, 8, 9]]
    assert inner.numpy().tolist() == [7, 8, 9]
    assert inner.offset == 7
    assert flat.storage is a.storage is b.storage is inner.storage
    assert flat.view((0,), 10).shape == (0,)
    assert (b.pointer - flat.pointer, inner.pointer - flat.pointer) == (4 * 8, 7 * 8)
    for shape, offset in (((11,), 0), ((2,), 9), ((1,), -1), ((-1,), 0), ((3, 3), 2)):
        with pytest.raises(ShapeError, match=r"\[view\] expected at most"):
            flat.view(shape, offset)


def test_views_keep_the_storage_alive():
    before = CPU.pool.in_use
    x = zeros((1024,), "float32", CPU)
    y = x.view((32, 32))
    del x
    assert CPU.pool.in_use == before + 4096
    del y
    assert CPU.pool.in_use == before


def test_a_plans_views_share_too():
    x = zeros((6,), "float32", Device("plan:cpu"))
    y = x.view((3,), 3)
    assert (y.array, y.storage, y.offset) == (None, x.storage, 3)


# Leaving Forge


def test_numpy_reads_a_copy():
    x = forge.tensor([1.0, 2.0])
    array = np.asarray(x)
    array[0] = 5.0
    assert x.numpy()[0] == 1.0
    assert np.asarray(x, dtype=np.float64).dtype == np.float64
    assert np.asarray(forge.tensor([1.0], "bfloat16")).dtype == ml_dtypes.bfloat16
    with pytest.raises(DtypeError, match="from_dlpack shares"):
        np.asarray(x, copy=False)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool"])
def test_dlpack_is_zero_copy(dtype):
    x = forge.tensor([[1, 0], [0, 1]], dtype)
    array = np.from_dlpack(x)
    assert np.shares_memory(array, x.array)
    x.array[0, 0] = 0
    assert array[0, 0] == 0
    again = np.from_dlpack(x.view((2,), 2))
    assert again.tolist() == [0, 1]


def test_exported_memory_is_not_reused_while_a_consumer_lives():
    pool = CPU.pool
    pool.trim()
    x = full((5000,), 3.0, "float32", CPU)
    array = np.from_dlpack(x)
    alive = weakref.ref(x.storage)
    before = pool.in_use
    del x
    assert alive() is None
    assert pool.in_use == before - 5000 * 4 // GRANULE * GRANULE - GRANULE
    assert pool.held == 0
    others = [full((5000,), 7.0, "float32", CPU) for _ in range(3)]
    assert (array == 3.0).all()
    assert not any(np.shares_memory(array, other.array) for other in others)


# In-place ops raise versions


def test_in_place_ops_raise_the_version_of_what_they_write():
    arrays = (np.zeros((3, 2)), [1], np.ones((1, 2)), np.ones((2, 2)))
    x, ids, rows, w = (forge.tensor(a, device="reference") for a in arrays)
    ops.scatter_add_rows_(x, ids, rows)
    assert [t.storage.version for t in (x, ids, rows)] == [1, 0, 0]
    ops.matmul(forge.tensor(rows), w, into=rows)
    assert rows.storage.version == 1
    leaf = Tape().leaf(x)
    y = ops.exp(leaf)
    ops.scatter_add_rows_(y.value, ids, rows)
    with pytest.raises(TapeError, match=r"\[exp\] expected the saved 'out'"):
        y.tape.backward(y, zeros_like(x))


# The pool


def test_a_freed_buffer_is_used_again():
    pool = Pool(HostMemory())
    a = pool.take(1024)
    pool.give(1024, a)
    assert (pool.in_use, pool.peak, pool.held) == (0, 1024, 1024)
    assert pool.take(2048) is not a
    assert pool.take(1024) is a
    assert (pool.in_use, pool.peak, pool.held) == (3072, 3072, 0)


def test_buffers_are_aligned():
    sizes = [GRANULE * n for n in (1, 2, 3, 1000)]
    pool = Pool(HostMemory())
    assert all(pool.take(size).ctypes.data % ALIGNMENT == 0 for size in sizes for _ in range(5))


def test_peak_is_measured_from_a_reset_on():
    pool = Pool(NoMemory())
    for size in (512, 1024):
        pool.take(size)
    pool.give(1024, None)
    assert (pool.in_use, pool.peak) == (512, 1536)
    pool.reset_peak()
    pool.take(256)
    assert (pool.in_use, pool.peak, pool.held) == (768, 768, 0)


def test_nearly_equal_sizes_share_and_empty_ones_count():
    before = CPU.pool.in_use
    x = zeros((100,), "float32", CPU)
    address = x.pointer
    del x
    y = zeros((110,), "float32", CPU)
    assert y.pointer == address
    nothing = zeros((0, 4), "float32", CPU)
    assert CPU.pool.in_use - before == 512 + GRANULE
    assert nothing.size == 0


def test_a_bounded_pool_returns_old_sizes():
    """Prompts of every length: no more waits unused than was ever in use."""
    pool, unbounded = Pool(HostMemory(), bounded=True), Pool(HostMemory())
    for n in range(1, 200):
        for each in (pool, unbounded):
            each.give(n * GRANULE, each.take(n * GRANULE))
    assert pool.peak == 199 * GRANULE
    assert pool.held <= 2 * pool.peak
    assert unbounded.held == 199 * 200 // 2 * GRANULE


def test_a_bounded_pool_keeps_what_was_in_use():
    pool = Pool(HostMemory(), bounded=True)
    pool.give(1024, pool.take(1024))
    pool.take(512)
    assert pool.held == 1024


def test_a_bounded_pool_does_not_trim_a_steady_step():
    pool = Pool(HostMemory(), bounded=True)
    sizes = [GRANULE * n for n in (1, 5, 2, 5, 9)]

    def step():
        taken = [(size, pool.take(size)) for size in sizes]
        for size, buffer in taken:
            pool.give(size, buffer)
        return {buffer.ctypes.data for _, buffer in taken}

    first = step()
    assert all(step() == first for _ in range(5))


def test_memory_that_is_not_there_is_looked_for_in_the_lists():
    class Small(HostMemory):
        free = 4096

        def allocate(self, size):
            if size > self.free:
                raise MemoryError
            self.free -= size
            return super().allocate(size)

        def release(self, buffer):
            self.free += buffer.nbytes

    pool = Pool(Small())
    pool.give(3072, pool.take(3072))
    assert pool.take(4096).nbytes == 4096
    with pytest.raises(MemoryError):
        pool.take(256)


def test_a_failed_allocation_is_not_counted():
    gc.collect()  # what other tests left
    before = CPU.pool.in_use
    with pytest.raises(MemoryError):
        empty((1 << 60,), "float32", CPU)
    gc.collect()
    assert CPU.pool.in_use == before


def test_many_tensors_come_and_go():
    gc.collect()
    before = CPU.pool.in_use
    keep = [forge.tensor(np.zeros(n)) for n in range(100)]
    assert all(isinstance(x, Tensor) and isinstance(x.storage, Storage) for x in keep)
    del keep
    assert CPU.pool.in_use == before


def test_threads_share_a_pool():
    pool = Pool(HostMemory(), bounded=True)

    def work(seed):
        held = []
        for number in np.random.default_rng(seed).integers(1, 5, 3000):
            held.append((256 * int(number), pool.take(256 * int(number))))
            held[-1][1][:8] = seed
            if len(held) > 4:
                size, buffer = held.pop(0)
                assert (buffer[:8] == seed).all()
                pool.give(size, buffer)
        for size, buffer in held:
            pool.give(size, buffer)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as executor:
            list(executor.map(work, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert pool.in_use == 0
    assert pool.held == sum(size * len(free) for size, free in pool._free.items())


def test_a_var_is_neither_a_truth_value_nor_an_array():
    var = Tape().leaf(forge.tensor([1.0]))
    with pytest.raises(TapeError, match=r"\[bool\]"):
        bool(var)
    with pytest.raises(TapeError, match=r"\[numpy\]"):
        np.asarray(var)


# What it is not


def test_attributes_of_other_libraries_get_a_hint():
    x = forge.tensor([[1.0, 2.0]])
    var = Tape().leaf(x)
    for value, kind in ((x, "Tensor"), (var, "Var")):
        for name, hint in (("sum", "ops.sum"), ("T", "ops.transpose"), ("backward", "tape.back")):
            wanted = rf"expected an attribute of a {kind}, got '{name}'; write {hint}"
            with pytest.raises(AttributeError, match=wanted):
                getattr(value, name)
        with pytest.raises(AttributeError, match=r"got 'nonsense'$"):
            _ = value.nonsense
        assert not hasattr(value, "grad")
    with pytest.raises(AttributeError, match=r"got 'numpy'; write x\.value\.numpy$"):
        var.numpy()


def test_weights_in_int8_are_not_advised_to_be_cast():
    q, _ = ops.quantize(forge.tensor([[1.0, 2.0]]))
    for call in (lambda: q + q, lambda: ops.gelu(q), lambda: ops.matmul(q, q, trans_b=True)):
        with pytest.raises(DtypeError, match=r"through ops\.dequantize"):
            call()
