"""Tensor, its storage and its device. No maths, no gradients.

A Tensor is a shape and a dtype over a Storage: a buffer from its device's pool, with a version
that in-place ops raise. Reshaped Tensors and the named views of a flat buffer share one Storage,
and so one version. Tensors are contiguous.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.lib.array_utils import byte_bounds

from forge import dlpack, dtypes
from forge.errors import DeviceError, DtypeError, ForgeError, ShapeError, no_attribute
from forge.pool import Buffer, HostMemory, Memory, NoMemory, Pool, rounded

Shape = tuple[int, ...]


class Device:
    """A place where Tensors live and kernels run; `Device("cpu")` is always the same object.

    Names: `cpu`; `cuda`, an NVIDIA GPU, the first that CUDA_VISIBLE_DEVICES shows; `reference`
    (host memory, plain NumPy kernels only); `plan:cpu` and `plan:cuda` (no memory and no kernels:
    the same code then only counts what it would allocate). Raises `DeviceError` for any other name,
    and for `cuda` with the reason where it cannot work.
    """

    __slots__ = ("kind", "memory", "name", "plan", "pool")
    _known: ClassVar[dict[str, Device]] = {}
    # How to reach the memory of each kind of device; `forge.backends.registry` adds "cuda".
    memories: ClassVar[dict[str, Callable[[], Memory]]] = {
        "cpu": HostMemory,
        "reference": HostMemory,
    }

    name: str
    kind: str
    plan: bool
    memory: Memory
    pool: Pool

    def __new__(cls, name: str | Device) -> Device:  # noqa: D102
        if isinstance(name, Device):
            return name
        device = cls._known.get(str(name))
        if device is None:
            device = cls._make(str(name))
            cls._known[device.name] = device
        return device

    @classmethod
    def _make(cls, name: str) -> Device:
        plan, kind = name.startswith("plan:"), name.removeprefix("plan:")
        if kind not in cls.memories:
            raise DeviceError(
                f"[device] expected {', '.join(cls.memories)} or plan:cpu, got {name!r}"
            )
        device = object.__new__(cls)
        device.name, device.kind, device.plan = name, kind, plan
        device.memory = NoMemory() if plan else cls.memories[kind]()
        device.pool = Pool(device.memory, bounded=True)
        return device

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    def __reduce__(self) -> tuple[type[Device], tuple[str]]:
        return Device, (self.name,)


class Storage:
    """A buffer on loan from a pool; `version` counts the in-place changes to it."""

    __slots__ = ("__weakref__", "_pool", "_size", "buffer", "device", "exported", "version")

    def __init__(self, nbytes: int, device: Device) -> None:
        self._size = rounded(nbytes)
        self.device = device
        self.version = 0
        self.exported = False
        self.buffer: Any = None
        self._pool = device.pool
        self.buffer = self._pool.take(self._size)

    def __del__(self) -> None:
        if not self.exported:
            self._pool.give(self._size, self.buffer)
            return
        # What another library may still read must not be handed out again; the system takes it
        # back when the last array of it goes, or when the GPU has done all its work.
        self._pool.give(self._size, None)
        self.device.memory.release(self.buffer)


class Borrowed(Storage):
    """Memory of another library, which `owner` keeps until nothing here works on it."""

    __slots__ = ("_owner",)

    def __init__(self, buffer: Any, owner: Any, device: Device) -> None:
        self.device = device
        self.version = 0
        self.exported = False
        self.buffer = buffer
        self._owner = owner

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.device.memory.settle()


class Tensor:
    """A value: `shape`, `dtype`, `device`, `storage`. Made by `forge.tensor` and by ops."""

    __slots__ = ("array", "device", "dtype", "offset", "shape", "storage")
    __getattr__ = no_attribute

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        storage: Storage,
        array: np.ndarray | None,
        offset: int = 0,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = storage.device
        self.storage = storage
        # The host's view of the buffer; None where the host cannot see it.
        self.array: Any = array
        # Elements before this one in the buffer.
        self.offset = offset

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * dtypes.ITEMSIZE[self.dtype]

    @property
    def pointer(self) -> int:
        """Address of the first element, on the host or the GPU."""
        if self.array is not None:
            address: int = self.array.ctypes.data
            return address
        start: int = self.storage.buffer.address
        return start + self.offset * dtypes.ITEMSIZE[self.dtype]

    def view(self, shape: Shape, offset: int = 0) -> Tensor:
        """`shape` of these elements from element `offset` on, sharing storage and version.

        Raises `ShapeError` where the view would reach past the end.
        """
        if shape == self.shape and offset == 0:
            return self
        array = self.array
        # The array knows its size.
        count, size = math.prod(shape), math.prod(self.shape) if array is None else array.size
        if not 0 <= offset <= offset + count <= size:
            raise ShapeError(
                f"[view] expected at most {size - offset} elements from {offset} on, "
                f"got {shape}; the base has shape {self.shape}"
            )
        if array is not None:
            if count != size:
                array = array.reshape(-1)[offset : offset + count]
            array = array.reshape(shape)
        return Tensor(shape, self.dtype, self.storage, array, self.offset + offset)

    def numpy(self) -> np.ndarray:
        """A copy on the host, of the same dtype (bfloat16 as `ml_dtypes.bfloat16`)."""
        self._check_memory("numpy")
        return self.device.memory.read(self)

    def item(self) -> float | int | bool:
        """The value of a Tensor of one element, as a Python number."""
        if self.size != 1:
            raise ShapeError(f"[item] expected one element, got shape {self.shape}; use numpy()")
        value: float | int | bool = self.numpy().item()
        return float(value) if self.dtype == "bfloat16" else value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise DtypeError(
                "[__array__] expected a copy to be allowed, got copy=False; "
                "numpy.from_dlpack shares the memory"
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the memory itself, as the array API standard says.

        On a GPU the consumer's `stream` waits for what was computed so far; a `dl_device` of the
        host gets a copy. Raises `DeviceError` for any other, and `BufferError` where a copy is
        needed and `copy` is False.
        """
        own = self.__dlpack_device__()
        asked = own if dl_device is None else tuple(map(int, dl_device))
        if asked not in (own, (dlpack.CPU, 0)):
            raise DeviceError(
                f"[__dlpack__] expected DLPack's device {own} or the host's, got {asked}; "
                "copy it there by the other library"
            )
        if asked != own:
            if copy is False:
                raise BufferError("[__dlpack__] expected copy not False from a GPU, got False")
            return dlpack.give(self.numpy(), dlpack.CPU, max_version=max_version)
        if self.array is not None:
            self.device.memory.hand_over(stream)
            self.storage.exported = True
            return dlpack.give(
                self.array, dlpack.CPU, stream=stream, max_version=max_version, copy=copy
            )
        x = self
        if copy:
            x = empty_like(self)
            self.device.memory.copy(self, x)
        x.storage.exported = True
        x.device.memory.hand_over(stream)
        where = dlpack.span(x.pointer, x.shape, dtypes.to_numpy(x.dtype), x.storage)
        return dlpack.give(where, dlpack.CUDA, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        self._check_memory("__dlpack_device__")
        return (dlpack.CUDA if self.device.kind == "cuda" else dlpack.CPU), 0

    def _check_memory(self, what: str) -> None:
        if self.device.plan:
            raise DeviceError(
                f"[{what}] expected a Tensor with memory, got {self!r}; a plan device has none: to "
                "read values in a training step, run it with --eager"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied and pickled by value: a Storage belongs to its pool.
        return tensor, (self.numpy(), self.dtype, self.device)

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("[len] expected at least one dimension, got shape (); use item()")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __repr__(self) -> str:
        head = f"Tensor({list(self.shape)}, {self.dtype}, {self.device.name}"
        if self.device.plan or self.size > 16:
            return head + ")"
        return f"{head}, {np.array2string(self.numpy(), separator=', ', threshold=16)})"


@dataclass(slots=True)
class Spec:
    """Shape, dtype and device of a value that may be gone."""

    shape: Shape
    dtype: str
    device: Device

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype} on {self.device.name}"

    def require(self, op: str, what: str, x: Any, *, wider: bool = False) -> None:
        """Raise `ShapeError`, `DtypeError` or `DeviceError` unless x is such a value.

        With `wider` its dtype may also be a wider floating one.
        """
        error: type[ForgeError]
        if getattr(x, "shape", None) != self.shape:
            error = ShapeError
        elif x.dtype != self.dtype and not (wider and self._narrower_than(x.dtype)):
            error = DtypeError
        elif x.device is not self.device:
            error = DeviceError
        else:
            return
        raise error(f"[{op}] expected {what} as {self}, got {x!r}")

    def _narrower_than(self, dtype: str) -> bool:
        return dtypes.EPSILON.get(dtype, 1.0) < dtypes.EPSILON[self.dtype]


def empty(shape: Shape, dtype: str, device: Device) -> Tensor:
    """A Tensor of undefined content."""
    numpy_dtype = dtypes.to_numpy(dtype)
    storage = Storage(math.prod(shape) * numpy_dtype.itemsize, device)
    buffer = storage.buffer
    if buffer.__class__ is not np.ndarray:
        return Tensor(shape, dtype, storage, None)
    return Tensor(shape, dtype, storage, np.ndarray(shape, numpy_dtype, buffer))


def empty_like(x: Tensor) -> Tensor:
    """A Tensor of x's shape, dtype and device, of undefined content."""
    return empty(x.shape, x.dtype, x.device)


def full(shape: Shape, value: float, dtype: str, device: Device) -> Tensor:
    """A Tensor that holds `value` everywhere."""
    out = empty(shape, dtype, device)
    device.memory.fill(out, value)
    return out


def zeros(shape: Shape, dtype: str, device: Device) -> Tensor:
    """A Tensor of zeros."""
    return full(shape, 0, dtype, device)


def zeros_like(x: Tensor) -> Tensor:
    """A Tensor of zeros of x's shape, dtype and device."""
    return full(x.shape, 0, x.dtype, x.device)


def tensor(array: Any, dtype: str | None = None, device: Device | str | None = None) -> Tensor:
    """A Tensor holding a copy of `array`.

    `array` is anything NumPy reads (numbers, sequences, arrays, Tensors) or that speaks DLPack;
    `dtype` defaults to its own, where Python's floats count as float32 and integers as int64;
    `device` defaults to a Tensor's own, else to the CPU. Raises `DtypeError` for a dtype that Forge
    does not store, and for numbers that are none of int8's.
    """
    if isinstance(array, Tensor):
        device = array.device if device is None else device
        source = array.numpy() if array.array is None else array.array
    else:
        source = _as_numpy(array)
    pythons_own = isinstance(array, float | Sequence) and not isinstance(array, np.generic)
    if dtype is None and pythons_own and source.dtype == np.float64:
        dtype = "float32"
    name = dtypes.from_numpy(source.dtype) if dtype is None else dtypes.check("tensor", dtype)
    if name == "int8":
        dtypes.fits_int8("tensor", source)
    out = empty(source.shape, name, Device("cpu" if device is None else device))
    out.device.memory.write(out, source)
    return out


def _as_numpy(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        return np.asarray(array)
    if dlpack.place(array) == dlpack.CPU:
        return dlpack.take(array, None)
    # Strided or read-only, and of any dtype, as on the host: copied are the bytes that it spans.
    device = Device("cuda")
    taken = dlpack.take(array, device.memory.stream)
    if not taken.size:
        return np.empty(taken.shape, taken.dtype)
    start, stop = byte_bounds(taken)
    whole = Tensor((stop - start,), "bool", Borrowed(Buffer(start), taken, device), None).numpy()
    first = taken.ctypes.data - start
    return np.ndarray(taken.shape, taken.dtype, whole, first, taken.strides)


def from_dlpack(array: Any) -> Tensor:
    """A Tensor on the memory of another library's array, on the host or the GPU, without a copy.

    On a GPU it is ready for what follows here; the array's owner is told when the Tensor is gone.
    A change by either is seen by both, but does not raise the Tensor's version. Raises `DtypeError`
    for a dtype that Forge does not store, `DeviceError` for another place, `ShapeError` for an
    array that is not contiguous and `ArgumentError` for a read-only one: `forge.tensor` copies.
    """
    device = Device("cpu" if dlpack.place(array) == dlpack.CPU else "cuda")
    taken = dlpack.contiguous(dlpack.take(array, device.memory.stream))
    dtype = dtypes.from_numpy(taken.dtype)
    if device.kind == "cpu":
        return Tensor(taken.shape, dtype, Borrowed(None, taken, device), taken)
    buffer = Buffer(taken.ctypes.data)
    return Tensor(taken.shape, dtype, Borrowed(buffer, taken, device), None)
