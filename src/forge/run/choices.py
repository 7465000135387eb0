"""What a run chooses by itself, with its reasons: device, micro-batch size, threads, algorithms.

The choices are frozen in the run's `frozen.json` at its first start, and a resumed run makes the
same. With them stand the versions of all that computes: where one differs, the same bits are no
longer promised.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge import training
from forge.config import Config
from forge.errors import ConfigError, DeviceError, nearest
from forge.run.trainer import model_of, optimizer_of
from forge.tensor import Device, zeros

# The packages whose arithmetic a step is made of.
_COMPUTING = ("numpy", "numba", "llvmlite", "scipy-openblas32", "ml_dtypes")
# What --device takes.
DEVICES = ("auto", "cpu", "cuda", "reference")
# Weights and two moments, which wait on the host while a checkpoint is written.
_SNAPSHOT_COPIES = 3


@dataclass
class Choices:
    """The automatic choices of a run; `reasons` says why, by name.

    On a GPU `products` has the `algorithms` that compute its products, and what they were
    `chosen_for`: card, driver and library.
    """

    device: str
    micro_batch: int
    memory: int
    threads: int
    versions: dict[str, str]
    reasons: dict[str, str] = field(default_factory=dict)
    tf32: bool = False
    products: dict[str, Any] = field(default_factory=dict)

    def frozen(self) -> dict[str, Any]:
        """What `frozen.json` holds of them: threads change no result, so they are free."""
        return {
            "device": self.device,
            "micro_batch": self.micro_batch,
            "tf32": self.tf32,
            "reasons": self.reasons,
            "versions": self.versions,
            "products": self.products,
        }

    def learn_products(self) -> bool:
        """Add the algorithms of products that came up since; whether there were any."""
        if self.device != "cuda":
            return False
        from forge.backends.cuda import products

        before: dict[str, str] = self.products["algorithms"]
        now = {**before, **products.used()}
        self.products["algorithms"] = now
        return now != before

    def products_in_words(self) -> str:
        """How many algorithms the table of products has, and the start of its SHA-256."""
        algorithms = self.products.get("algorithms", {})
        if not algorithms:
            return ""
        digest = hashlib.sha256(json.dumps(algorithms, sort_keys=True).encode()).hexdigest()
        return f"{len(algorithms)} algorithms, table {digest[:12]}"


def choose(config: Config, frozen: Mapping[str, Any]) -> Choices:
    """Choose for a resolved configuration; what is frozen stays, unless a setting says otherwise.

    Raises `DeviceError`, and `ConfigError` for what the device cannot do or hold.
    """
    reasons: dict[str, str] = {}
    device = _device(config, frozen, reasons)
    threads = use_threads(device, config.threads)
    reasons["threads"] = _threads_reason(config)
    if config.precision == "bf16" and (lack := lacks_bf16(device)):
        raise ConfigError(f"[train] expected --precision fp32 on {device.name}, got bf16; {lack}")
    use_tf32(device, config.tf32)
    micro_batch, memory = _micro_batch(config, device, frozen, reasons)
    return Choices(
        device.name,
        micro_batch,
        memory,
        threads,
        versions(device),
        reasons,
        config.tf32,
        _products(device, frozen),
    )


def find_device(name: str) -> tuple[Device, str]:
    """The device that a name means, and why; `auto` is the GPU where it can be used.

    Raises `DeviceError` for a device that is not there.
    """
    if name not in DEVICES:
        near = nearest("cuda" if "gpu" in name.lower() else name, DEVICES)
        raise DeviceError(f"[device] expected {', '.join(DEVICES)}, got {name!r}; {near}")
    if name != "auto":
        return Device(name), f"as --device {name} says"
    try:
        return Device("cuda"), "a GPU that can be used"
    except DeviceError:
        return Device("cpu"), "no GPU that this version can use"


def lacks_bf16(device: Device) -> str:
    """Why training in bf16 would be slower than in fp32 on a device; empty where it is not."""
    if device.kind == "cuda":
        return ""
    if device.kind != "cpu":
        return "it is for checks, not for speed"
    from forge.backends.cpu import micro

    if micro.FAST:
        return ""
    return (
        "this processor lacks AVX512-BF16, so products of bfloat16 are slower than fp32's; "
        "ops on bfloat16 Tensors work"
    )


def use_threads(device: Device, number: int | None) -> int:
    """Set the number of CPU threads, by default one per core; returns it."""
    if device.kind != "cpu":
        return number or 1
    from forge.backends.cpu import threads

    threads.set_threads(number or threads.default_threads())
    return threads.get_threads()


def use_tf32(device: Device, allowed: bool) -> None:
    """Let products of float32 round their operands to TF32, or not, from here on.

    Raises `ConfigError` where the device cannot.
    """
    if device.kind == "cuda":
        from forge.backends.cuda import precision

        precision.allow_tf32(allowed)
    elif allowed:
        raise ConfigError(
            f"[train] expected --tf32 on a GPU, got it on {device.name}, which multiplies float32 "
            "as it is; leave it out"
        )


def prepare(device: Device, *kinds: str, precision: str = "fp32") -> None:
    """Compile the device's kernels for these kinds of work, unless this machine has them.

    "train", "dropout", "eval", "generate" or "all"; `precision` is what a model computes in, or
    "int8" where its weights are.
    """
    if device.kind == "cpu":
        from forge.backends.cpu import prepare

        dtypes = {"bf16": "bfloat16", "int8": "int8"}
        prepare.prepare(*kinds, dtype=dtypes.get(precision, "float32"))


def prepare_training(config: Config, device: Device) -> None:
    """Compile the device's kernels for training, if that has not been done on this machine."""
    dropout = ["dropout"] if config.dropout else []
    prepare(device, "train", *dropout, precision=config.precision)


def versions(device: Device) -> dict[str, str]:
    """Versions of all that a step's bits depend on, and the processor's kind."""
    found = {"forge": _version("forge-gpt"), "python": platform.python_version()}
    found |= {name: _version(name) for name in _COMPUTING}
    if device.kind == "cpu":
        from forge.backends.cpu import blas

        found["BLAS core"] = blas.core()
    if device.kind == "cuda":
        from forge.backends.cuda import versions as cuda_versions

        found |= cuda_versions()
    return found | {"processor": platform.machine(), "system": sys.platform}


def changed(frozen: Mapping[str, Any], now: Choices) -> list[str]:
    """What may give other bits than the run began with, as `numba 0.61 → 0.62`."""
    then = {**frozen.get("versions", {}), **frozen}
    values = {
        **now.versions,
        "device": now.device,
        "micro_batch": now.micro_batch,
        "tf32": now.tf32,
    }
    chosen_for = (x.get("products", {}).get("chosen_for") for x in (frozen, now.frozen()))
    then["products for"], values["products for"] = chosen_for
    return [
        f"{name} {then[name]} → {value}"
        for name, value in values.items()
        if then.get(name) is not None and then[name] != value
    ]


def plan_step(config: Config, device: Device, micro_batch: int) -> int:
    """Bytes that training needs at its peak: a step, and evaluation or a checkpoint's snapshot.

    Recorded, a step keeps its buffers while the model is evaluated.
    """
    plan = Device(f"plan:{device.kind}")
    before = plan.pool.in_use
    plan.pool.reset_peak()
    model = model_of(config)
    params = model.zeros(plan, config.precision)
    grads, optimizer = params.zeros_like(), optimizer_of(config, params)
    shape = (micro_batch, config.block_size)

    def ids(*shape: int) -> Any:
        return zeros(shape, "int64", plan)

    micro = training.Micro(ids(*shape), ids(*shape), ids(shape[0] * shape[1]), 0)
    others = [ids(3, *shape) for _ in range(config.batch_size // micro_batch - 1)]
    batch = training.Batch([micro], zeros((), "float32", plan))
    state = training.step_state(config.seed, 0, config.lr, plan)
    training.train_step(model, params, grads, optimizer, batch, state)
    step, held = plan.pool.peak - before, plan.pool.in_use
    del others
    plan.pool.reset_peak()
    model.loss(params.compute, micro.inputs, micro.targets, weight=batch.weight)
    evaluation = 0 if config.eager else plan.pool.peak - held
    # A GPU's snapshot is on the host, which has room for what a GPU holds.
    snapshot = 0 if device.kind == "cuda" else _SNAPSHOT_COPIES * params.flat.nbytes
    return step + max(evaluation, snapshot)


def available_memory() -> int | None:
    """Bytes that this process may still take, by the system and its control group, if known."""
    limits = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        if _read(limit).strip().isdigit() and _read(used).strip().isdigit():
            limits.append(int(_read(limit)) - int(_read(used)))
    return min(limits, default=None)


def _device(config: Config, frozen: Mapping[str, Any], reasons: dict[str, str]) -> Device:
    if config.device == "auto" and "device" in frozen:
        reasons["device"] = "as the run began"
        return Device(str(frozen["device"]))
    device, reasons["device"] = find_device(config.device)
    return device


def _threads_reason(config: Config) -> str:
    if config.threads:
        return "as --threads says"
    named = os.environ.get("NUMBA_NUM_THREADS")
    return "as NUMBA_NUM_THREADS says" if named else "as many as cores"


def _micro_batch(
    config: Config, device: Device, frozen: Mapping[str, Any], reasons: dict[str, str]
) -> tuple[int, int]:
    """The micro-batch size and the bytes it needs: 0 for an eager step, which is not planned."""
    available = available_memory()
    if device.kind == "cuda":
        from forge.backends.cuda.device import memory_info

        available = memory_info()[0]
    sizes = [n for n in range(config.batch_size, 0, -1) if config.batch_size % n == 0]
    before = frozen.get("micro_batch")
    if config.micro_batch is not None:
        sizes, reason = [config.micro_batch], "as --micro-batch says"
    elif before in sizes:
        sizes, reason = [before], "as the run began"
    else:
        limit = "" if config.eager else ", or as much of it as fits in memory"
        reason = f"the whole batch{limit}"
    if config.eager:
        # Its Python may read values, and stop at a breakpoint: a plan has no values.
        reasons["micro_batch"] = reason
        return sizes[0], 0
    parameters = sum(math.prod(shape) for shape in model_of(config).shapes().values())
    # Weights, gradients, moments and snapshot: no plan of such a size, which would take long.
    size, need = 1, (4 + _SNAPSHOT_COPIES) * 4 * parameters
    if available is None or need <= available:
        for size in sizes:
            need = plan_step(config, device, size)
            if available is None or need <= 0.9 * available:
                reasons["micro_batch"] = reason
                return size, need
    smaller = "--micro-batch" if size > 1 else "--n-embd, --n-layer or --block-size"
    raise ConfigError(
        f"[train] expected a run that fits in the {(available or 0) / 1e9:.1f} GB of memory left "
        f"here, got one that needs {need / 1e9:.1f} GB; try a smaller {smaller}"
    )


def _products(device: Device, frozen: Mapping[str, Any]) -> dict[str, Any]:
    """The run's table of algorithms, from here on in use on a GPU that it was chosen for."""
    before = frozen.get("products", {})
    if before:
        from forge.backends.cuda.algorithms import intact

        if not isinstance(before, dict) or not intact(before.get("algorithms")):
            raise ConfigError(
                "[run] expected the products in frozen.json as they were written, got them edited; "
                "remove them there, and their algorithms are chosen anew"
            )
    if device.kind != "cuda":
        return dict(before)
    from forge.backends.cuda import products

    chosen_for = products.chosen_for()
    algorithms = before["algorithms"] if before.get("chosen_for") == chosen_for else {}
    products.begin_run(algorithms)
    return {"chosen_for": chosen_for, "algorithms": algorithms}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""  # this system has no such file, which sets no limit


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
