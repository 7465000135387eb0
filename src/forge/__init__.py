"""Forge: a tape, ops, and GPTs that train with them."""

from forge import models, ops
from forge.autograd.check import check_grads, value_and_grad
from forge.autograd.node import Var
from forge.autograd.tape import Tape
from forge.backends.registry import strict
from forge.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    DeviceLostError,
    DtypeError,
    FallbackError,
    ForgeError,
    GradientError,
    NonFiniteError,
    OutOfMemoryError,
    ShapeError,
    TapeError,
)
from forge.tensor import Device, Tensor, from_dlpack, tensor

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Device",
    "DeviceError",
    "DeviceLostError",
    "DtypeError",
    "FallbackError",
    "ForgeError",
    "GradientError",
    "NonFiniteError",
    "OutOfMemoryError",
    "ShapeError",
    "Tape",
    "TapeError",
    "Tensor",
    "Var",
    "check_grads",
    "from_dlpack",
    "models",
    "ops",
    "strict",
    "tensor",
    "value_and_grad",
]
