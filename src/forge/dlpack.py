"""DLPack: arrays handed to other libraries and taken from them, without a copy.

A capsule holds a C structure with an address, a shape, a dtype and a device, and the function that
frees it; Python alone can make neither. NumPy can, for the host and the dtypes it knows. So NumPy
makes and takes all capsules, of an array that spans the right addresses, and the two fields that it
must not see are changed in the structure meanwhile: the device (the GPU, whose memory NumPy never
touches) and the type (bfloat16, which it sees as uint16). https://dmlc.github.io/dlpack
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from forge import dtypes
from forge.errors import ArgumentError, DeviceError, DtypeError, ShapeError

# DLDeviceType and DLDataTypeCode; the other device types are memory of the host too, which a GPU
# can reach.
CPU, CUDA = 1, 2
HOST = {CPU, 3, 11, 13}
UINT, BFLOAT = 1, 4
# What NumPy reads: integers, floats, complex numbers, booleans.
KNOWN = {0, UINT, 2, 5, 6}
# The version of the structure that NumPy reads and writes.
VERSION = (1, 0)


class _DLTensor(ctypes.Structure):
    """The start of the C structure, up to the fields that are changed here."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


# Bytes before it in the structure of a capsule of this name: nothing; version, context, deleter,
# flags.
_NAMES = {b"dltensor": 0, b"dltensor_versioned": 32}

_valid = ctypes.pythonapi.PyCapsule_IsValid
_valid.argtypes, _valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


def give(array: np.ndarray, device: int, **keywords: Any) -> Any:
    """A capsule of an array, said to lie on a device of this type.

    `keywords` are NumPy's: `max_version`, and on the host also `copy`.
    """
    low = array.dtype.name == "bfloat16"
    capsule = (array.view(np.uint16) if low else array).__dlpack__(**keywords)
    tensor = _tensor(capsule)
    tensor.device_type = device
    if low:
        tensor.code = BFLOAT
    return capsule


def span(address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> np.ndarray:
    """An array that only says where a GPU's memory lies, and keeps its owner."""
    size = max(1, int(np.prod(shape)) * dtype.itemsize)
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    memory.owner = owner
    return np.ndarray(shape, dtype, buffer=memory)


def place(producer: Any) -> int:
    """Where an object with `__dlpack__` lies: CPU or CUDA; raises `DeviceError` for elsewhere.

    Raises `DtypeError` for an object without it.
    """
    if not hasattr(producer, "__dlpack_device__"):
        raise DtypeError(
            f"[from_dlpack] expected an array that speaks DLPack, got {type(producer).__name__}; "
            "forge.tensor copies what NumPy reads"
        )
    device, index = (int(x) for x in producer.__dlpack_device__())
    if device in HOST:
        return CPU
    if (device, index) != (CUDA, 0):
        raise DeviceError(
            "[from_dlpack] expected an array on the host or the first GPU, got DLPack's device "
            f"type {device}, number {index}; copy it to the host first"
        )
    return CUDA


def take(producer: Any, stream: int | None) -> np.ndarray:
    """What an object with `__dlpack__` hands over, strided as it is, as an array that frees it.

    On a GPU the array only says where it lies, and it is ready on `stream`. Raises `DeviceError`
    and `DtypeError` for what Forge cannot hold.
    """
    keywords = {} if place(producer) == CPU else {"stream": stream}
    try:
        capsule = producer.__dlpack__(**keywords, max_version=VERSION)
    except TypeError:
        # How a library that is older than the versions says so.
        capsule = producer.__dlpack__(**keywords)
    tensor = _tensor(capsule)
    said = tensor.device_type, tensor.device_id, tensor.code
    low = (tensor.code, tensor.bits) == (BFLOAT, 16)
    if tensor.lanes != 1 or not (low or tensor.code in KNOWN):
        raise DtypeError(
            f"[from_dlpack] expected one of {', '.join(dtypes.NAMES)}, got DLPack's type code "
            f"{tensor.code} of {tensor.bits} bits, {tensor.lanes} lanes; convert it first"
        )
    tensor.device_type, tensor.device_id = CPU, 0
    if low:
        tensor.code = UINT
    array = np.from_dlpack(_Again(capsule))
    # Its maker may look at them when it frees it.
    tensor.device_type, tensor.device_id, tensor.code = said
    if array.flags.c_contiguous and _valid(capsule, b"used_dltensor"):
        # Structures without a version cannot say that they are read-only; NumPy takes all for it.
        array = span(array.ctypes.data, array.shape, array.dtype, array)
    return array.view(dtypes.to_numpy("bfloat16")) if low else array


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array, if Forge can hold it as it lies; raises `ShapeError` or `ArgumentError`."""
    if not array.flags.c_contiguous:
        raise ShapeError(
            f"[from_dlpack] expected a contiguous array, got strides {array.strides} of shape "
            f"{array.shape}; make it contiguous first, or copy it with forge.tensor"
        )
    if not array.flags.writeable:
        raise ArgumentError(
            "[from_dlpack] expected memory that may be written, got a read-only array; "
            "copy it with forge.tensor"
        )
    return array


class _Again:
    """A capsule as NumPy wants to be handed it."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0


def _tensor(capsule: Any) -> _DLTensor:
    """The structure in a capsule; valid until it is freed."""
    for name, start in _NAMES.items():
        if _valid(capsule, name):
            return _DLTensor.from_address(_pointer(capsule, name) + start)
    raise DtypeError(
        f"[from_dlpack] expected a capsule of DLPack, unused, got {capsule!r}; "
        "hand over the array itself"
    )
