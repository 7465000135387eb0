"""Tensor, its storage and its device. No maths, no gradients.

A Tensor is a shape and a dtype over a Storage: a buffer from its device's pool, with a version
that in-place ops raise. Reshaped Tensors and the named views of a flat buffer share one Storage,
and so one version. Tensors are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from forge import dtypes
from forge.errors import DeviceError, DtypeError, ShapeError
from forge.pool import Pool, rounded

Shape = tuple[int, ...]


class Device:
    """A place where Tensors live and kernels run; `Device("cpu")` is always the same object.

    Names: `cpu`; `reference` (host memory, plain NumPy kernels only); `plan:cpu` (no memory and no
    kernels: the same code then only counts what it would allocate). Raises `DeviceError` for any
    other name.
    """

    __slots__ = ("kind", "name", "plan", "pool")
    _known: ClassVar[dict[str, Device]] = {}

    name: str
    kind: str
    plan: bool
    pool: Pool

    def __new__(cls, name: str | Device) -> Device:  # noqa: D102
        if isinstance(name, Device):
            return name
        device = cls._known.get(name)
        if device is None:
            device = cls._make(name)
            cls._known[name] = device
        return device

    @classmethod
    def _make(cls, name: str) -> Device:
        plan, kind = name.startswith("plan:"), name.removeprefix("plan:")
        if kind not in ("cpu", "reference"):
            raise DeviceError(
                f"[device] expected cpu, reference or plan:cpu, got {name!r}; "
                "this version of Forge computes on the CPU"
            )
        device = object.__new__(cls)
        device.name, device.kind, device.plan = name, kind, plan
        device.pool = Pool(backed=not plan)
        return device

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    def __reduce__(self) -> tuple[type[Device], tuple[str]]:
        return Device, (self.name,)


class Storage:
    """A buffer on loan from a pool; `version` counts the in-place changes to it."""

    __slots__ = ("__weakref__", "_size", "buffer", "device", "exported", "version")

    def __init__(self, nbytes: int, device: Device) -> None:
        self._size = rounded(nbytes)
        self.device = device
        self.version = 0
        self.exported = False
        self.buffer = device.pool.take(self._size)

    def __del__(self) -> None:
        # A buffer another library may still read must not be handed out again.
        buffer = None if self.exported else self.buffer
        self.device.pool.give(self._size, buffer)


class Tensor:
    """A value: `shape`, `dtype`, `device`, `storage`. Made by `forge.tensor` and by ops."""

    __slots__ = ("array", "device", "dtype", "shape", "storage")

    def __init__(
        self, shape: Shape, dtype: str, storage: Storage, array: np.ndarray | None
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = storage.device
        self.storage = storage
        # The host's view of the buffer; None on a plan device, where no kernel runs.
        self.array: Any = array

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

    def view(self, shape: Shape, offset: int = 0) -> Tensor:
        """`shape` of these elements from element `offset` on, sharing storage and version.

        Raises `ShapeError` where the view would reach past the end.
        """
        count = math.prod(shape)
        if offset < 0 or offset + count > self.size:
            raise ShapeError(
                f"[view] expected at most {self.size - offset} elements from {offset} on, "
                f"got {shape}; the base has shape {self.shape}"
            )
        array = self.array
        if array is not None:
            array = array.reshape(-1)[offset : offset + count].reshape(shape)
        return Tensor(shape, self.dtype, self.storage, array)

    def numpy(self) -> np.ndarray:
        """A copy on the host, of the same dtype (bfloat16 as `ml_dtypes.bfloat16`)."""
        return np.array(self._host("numpy"))

    def item(self) -> float | int | bool:
        """The value of a Tensor of one element, as a Python number."""
        if self.size != 1:
            raise ShapeError(f"[item] expected one element, got shape {self.shape}; use numpy()")
        value: float | int | bool = self._host("item").item()
        return float(value) if self.dtype == "bfloat16" else value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise DtypeError(
                "[__array__] expected a copy to be allowed, got copy=False; "
                "numpy.from_dlpack shares the memory"
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **keywords: Any) -> Any:
        if self.dtype == "bfloat16":
            raise DtypeError(
                "[__dlpack__] expected a dtype NumPy can export, got bfloat16; "
                'cast to "float32" first: the copy is exact'
            )
        array = self._host("__dlpack__")
        self.storage.exported = True
        return array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._host("__dlpack_device__").__dlpack_device__()
        return device

    def _host(self, what: str) -> np.ndarray:
        if self.array is None:
            raise DeviceError(
                f"[{what}] expected a Tensor with memory, got {self!r}; a plan device has none"
            )
        array: np.ndarray = self.array
        return array

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
        if self.array is None or self.size > 16:
            return head + ")"
        return f"{head}, {np.array2string(self.array, separator=', ', threshold=16)})"


def empty(shape: Shape, dtype: str, device: Device) -> Tensor:
    """A Tensor of undefined content."""
    numpy_dtype = dtypes.NUMPY[dtype]
    storage = Storage(math.prod(shape) * numpy_dtype.itemsize, device)
    buffer = storage.buffer
    if buffer is None:
        return Tensor(shape, dtype, storage, None)
    return Tensor(shape, dtype, storage, np.ndarray(shape, numpy_dtype, buffer))


def empty_like(x: Tensor) -> Tensor:
    """A Tensor of x's shape, dtype and device, of undefined content."""
    return empty(x.shape, x.dtype, x.device)


def full(shape: Shape, value: float, dtype: str, device: Device) -> Tensor:
    """A Tensor that holds `value` everywhere."""
    out = empty(shape, dtype, device)
    if out.array is not None:
        out.array.fill(value)
    return out


def zeros(shape: Shape, dtype: str, device: Device) -> Tensor:
    """A Tensor of zeros."""
    return full(shape, 0, dtype, device)


def zeros_like(x: Tensor) -> Tensor:
    """A Tensor of zeros of x's shape, dtype and device."""
    return full(x.shape, 0, x.dtype, x.device)


def tensor(array: Any, dtype: str | None = None, device: Device | str | None = None) -> Tensor:
    """A Tensor holding a copy of `array`.

    `array` is anything NumPy reads (numbers, sequences, arrays, Tensors, DLPack exporters); `dtype`
    defaults to its own, where Python's floats count as float32 and integers as int64; `device`
    defaults to the CPU. Raises `DtypeError` for a dtype that Forge does not store.
    """
    if isinstance(array, Tensor):
        device = array.device if device is None else device
        array = array._host("tensor")
    source = _as_numpy(array)
    name = dtypes.from_numpy(source.dtype) if dtype is None else dtypes.check("tensor", dtype)
    out = empty(source.shape, name, Device("cpu" if device is None else device))
    if out.array is not None:
        out.array[...] = source
    return out


def _as_numpy(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array)
    if hasattr(array, "__dlpack__"):
        return np.from_dlpack(array)
    source = np.asarray(array)
    if source.dtype == np.float64 and isinstance(array, float | int | Sequence):
        return source.astype(np.float32)
    return source
