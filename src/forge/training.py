"""The training step, its replay when a number is not finite, and evaluation.

`train_step` is meant to be read, copied and changed. All that varies from step to step comes in as
Tensors on the device, so that a step can be captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forge import ops
from forge.autograd.tape import Tape
from forge.data.loader import HostBatch
from forge.models.gpt2 import GPT2, Rng
from forge.optim.adamw import AdamW
from forge.params import Params
from forge.tensor import Device, Tensor, tensor, zeros


class Micro(NamedTuple):
    """A micro-batch on the device: ids and targets [b, T], their sorted order, its first sample."""

    inputs: Tensor
    targets: Tensor
    order: Tensor
    first_sample: int


class Batch(NamedTuple):
    """A batch on the device; `weight` is 1 / the number of targets in all its micro-batches."""

    micros: list[Micro]
    weight: Tensor


@dataclass(frozen=True)
class State:
    """What a step takes besides parameters and data: dropout's key (seed, step), and the rate."""

    key: Tensor
    lr: Tensor

    def rng(self, micro: Micro) -> Rng:
        """The random numbers of a micro-batch: the same however the batch is split."""
        return Rng(self.key, micro.first_sample)


class StepResult(NamedTuple):
    """Scalars on the device: loss in nats per token, the gradient's norm, 1 if both are finite."""

    loss: Tensor
    norm: Tensor
    finite: Tensor


def train_step(
    model: GPT2, params: Params, grads: Params, optimizer: AdamW, batch: Batch, state: State
) -> StepResult:
    """One optimizer step on a batch; params, grads and the optimizer change in place.

    Where loss or gradient are not finite, params and optimizer stay as they were.
    """
    grads.zero_()
    loss = zeros((), params.flat.dtype, params.flat.device)
    for micro in batch.micros:
        tape = Tape()
        part = model.loss(
            params.leaves(tape, into=grads),
            micro.inputs,
            micro.targets,
            weight=batch.weight,
            rng=state.rng(micro),
            order=micro.order,
        )
        tape.backward(part)
        loss = ops.add(loss, part.value)
    norm, finite = optimizer.step_(params, grads, loss, state.lr)
    return StepResult(loss, norm, finite)


def explain(model: GPT2, params: Params, batch: Batch, state: State) -> None:
    """Replay a step that was not finite, checking every op; raises `NonFiniteError` naming it.

    Returns where the replay finds nothing, which leaves the sum of finite gradients as the cause.
    """
    for micro in batch.micros:
        tape = Tape(anomaly=True)
        part = model.loss(
            params.leaves(tape),
            micro.inputs,
            micro.targets,
            weight=batch.weight,
            rng=state.rng(micro),
            order=micro.order,
        )
        tape.backward(part)


def evaluate(model: GPT2, params: Mapping[str, Tensor], batches: Iterable[HostBatch]) -> float:
    """Mean loss in nats over all targets of the batches that count; NaN where there are none."""
    device = next(iter(params.values())).device
    total, count = 0.0, 0
    for batch in batches:
        for micro in batch.micros:
            one = tensor(1.0, device=device)
            part = model.loss(
                params,
                tensor(micro.inputs, device=device),
                tensor(micro.targets, device=device),
                weight=one,
            )
            total += part.item()
        count += batch.target_count
    return total / count if count else float("nan")


def to_device(batch: HostBatch, device: Device) -> Batch:
    """Copy a batch of the loader to the device."""
    micros = [
        Micro(
            tensor(micro.inputs, device=device),
            tensor(micro.targets, device=device),
            tensor(micro.order, device=device),
            micro.first_sample,
        )
        for micro in batch.micros
    ]
    weight = 1.0 / batch.target_count if batch.target_count else 0.0
    return Batch(micros, tensor(np.float32(weight), device=device))


def step_state(seed: int, step: int, lr: float, device: Device) -> State:
    """The inputs of update number `step`, counted from 0."""
    return State(
        tensor(np.array([seed, step]), device=device), tensor(np.float32(lr), device=device)
    )
