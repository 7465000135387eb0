"""A trained model, read from a run or checkpoint to be used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge import checkpoint
from forge.backends import registry
from forge.config import Config
from forge.data.tokenizer import Tokenizer
from forge.errors import ArgumentError, DeviceError
from forge.models.gpt2 import GPT2
from forge.params import Int8Params, Params
from forge.run.choices import lacks_bf16
from forge.run.stored import MODEL, read
from forge.run.trainer import model_of
from forge.tensor import Device


@dataclass(frozen=True)
class Trained:
    """A model with its weights and tokenizer, and where they are from."""

    model: GPT2
    params: Params | Int8Params
    tokenizer: Tokenizer
    config: Config
    path: Path
    step: int
    val_sha256: str


def load(path: str | Path, device: Device | str, precision: str | None = None) -> Trained:
    """The model of a checkpoint folder, a run (its newest checkpoint), or a file `last` or `best`.

    `precision` "fp32" or "bf16" is that of the weights in memory and of what is computed with them,
    by default the run's where the device is fast in it; "int8" is that of the weights alone. What
    the model is to compute with is `params.compute`. Raises `CheckpointError` where there is none,
    and for one that is damaged; `ArgumentError` for another precision; `DeviceError` for int8 where
    nothing computes with it.
    """
    device = Device(device) if isinstance(device, str) else device
    if precision not in (None, "fp32", "bf16", "int8"):
        raise ArgumentError(
            f"[model] expected the precision fp32, bf16 or int8, got {precision!r}; "
            "leave it out for the run's own"
        )
    if precision == "int8":
        check_int8(device)
    saved = checkpoint.load(checkpoint.find(path), only=(MODEL,))
    stored = read(saved)
    config = stored.config
    model = model_of(config)
    if precision is None:
        precision = "fp32" if lacks_bf16(device) else config.precision
    arrays = saved.arrays[MODEL]
    params: Params | Int8Params
    if precision == "int8":
        params = model.quantized(arrays, device)
    else:
        params = model.zeros(device, precision)
        params.load_(arrays)
    return Trained(
        model, params, stored.tokenizer, config, saved.path, saved.step, stored.val_sha256
    )


def check_int8(device: Device) -> None:
    """Raise `DeviceError` unless a device has kernels for weights in int8."""
    if registry.implementation("quantized_linear", device.kind, "float32") != device.kind:
        raise DeviceError(
            f"[model] expected --weights fp32 or bf16 on {device.name}, got int8, which it has no "
            "kernels for; --device cpu has"
        )
