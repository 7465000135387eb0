"""The state of a run in memory: what a step changes, and what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from forge import training
from forge.checkpoint import Checkpoint
from forge.config import Config
from forge.data.loader import HostBatch, Loader, Validation
from forge.data.text import Dataset
from forge.errors import NonFiniteError
from forge.graph import Captured
from forge.models.gpt2 import GPT2, GPT2Config
from forge.optim.adamw import AdamW
from forge.optim.schedule import CosineSchedule
from forge.params import Params
from forge.run.stored import MODEL, OPTIMIZER, read
from forge.tensor import Device, tensor


class Step(NamedTuple):
    """What a step did: loss in nats per token, learning rate, gradient norm, tokens trained on."""

    loss: float
    lr: float
    norm: float
    tokens: int


def model_of(config: Config) -> GPT2:
    """The model that a resolved configuration describes."""
    assert config.vocab_size is not None
    return GPT2(
        GPT2Config(
            vocab_size=config.vocab_size,
            block_size=config.block_size,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
            embd_pdrop=config.dropout,
            resid_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            layer_norm_epsilon=config.layer_norm_epsilon,
            init_std=config.init_std,
        )
    )


def optimizer_of(config: Config, params: Params) -> AdamW:
    """The optimizer that a configuration describes."""
    return AdamW(
        params,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        max_norm=config.grad_clip or None,
    )


class Trainer:
    """Weights, moments, step and data position, and the functions that move them on.

    `config` is resolved. With a checkpoint it goes on from there, else from the seed's weights.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        device: Device,
        micro_batch: int,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        assert config.warmup_steps is not None
        assert config.schedule_steps is not None
        self.config = config
        self.device = device
        self.micro_batch = micro_batch
        self.model = model_of(config)
        self.params = self.model.zeros(device, config.precision)
        self.optimizer = optimizer_of(config, self.params)
        self.grads = self.params.zeros_like()
        self.loader = Loader(dataset.train, config.block_size, config.batch_size, config.seed)
        self.validation = (
            None
            if dataset.val is None
            else Validation(dataset.val, config.block_size, config.batch_size)
        )
        self.schedule = CosineSchedule(
            config.lr, config.warmup_steps, config.schedule_steps, config.min_lr_ratio
        )
        self._train_step: Callable[..., training.StepResult] = training.train_step
        if not config.eager:
            self._train_step = Captured(training.train_step, device, varying=("batch", "state"))
        self._ahead: tuple[int, HostBatch] | None = None
        self.step = 0
        self.sample = 0
        if checkpoint is None:
            self.params.load_(self.model.init(config.seed))
        else:
            self._restore(checkpoint)

    def advance(self) -> Step:
        """Make one step; raises `NonFiniteError` that names the op, with nothing changed."""
        host = self._batch(self.sample)
        batch = training.to_device(host, self.device)
        lr = self.schedule(self.step)
        state = training.step_state(self.config.seed, self.step, lr, self.device)
        result = self._train_step(self.model, self.params, self.grads, self.optimizer, batch, state)
        # A GPU is still at it, and the next batch costs it nothing.
        self._ahead = host.next_index, self._batch(host.next_index)
        if not result.finite.item():
            self._explain(batch, state, result)
        self.step += 1
        self.sample = host.next_index
        return Step(float(result.loss), lr, float(result.norm), host.tokens)

    def _batch(self, sample: int) -> HostBatch:
        """The batch that begins at a sample, which may be the one prepared ahead."""
        if self._ahead is not None and self._ahead[0] == sample:
            return self._ahead[1]
        return self.loader.batch(first_sample=sample, micro_batch=self.micro_batch)

    def evaluate(self, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Mean loss on the held-out tokens, in nats per token; None once `stop` says so.

        Raises `NonFiniteError` where it is not finite.
        """
        assert self.validation is not None
        total, count = 0.0, 0
        batches = len(self.validation)
        for k in range(min(batches, self.config.eval_batches or batches)):
            if stop():
                return None
            batch = self.validation.batch(k, self.micro_batch)
            loss = training.evaluate(self.model, self.params.compute, [batch])
            total += loss * batch.target_count
            count += batch.target_count
        if not np.isfinite(total):
            raise NonFiniteError(
                f"[eval] expected a finite loss after step {self.step}, got {total}; "
                "a lower --lr may help"
            )
        return total / count

    def snapshot(self) -> dict[str, dict[str, np.ndarray]]:
        """Copies on the host of all that a checkpoint stores, by file and name."""
        m, v = self.optimizer.m.numpy(), self.optimizer.v.numpy()
        moments = {f"m.{name}": array for name, array in m.items()}
        moments |= {f"v.{name}": array for name, array in v.items()}
        return {MODEL: self.params.numpy(), OPTIMIZER: moments}

    def _restore(self, checkpoint: Checkpoint) -> None:
        arrays = checkpoint.arrays
        moments = arrays[OPTIMIZER]
        self.params.load_(arrays[MODEL])
        for letter, buffer in (("m", self.optimizer.m), ("v", self.optimizer.v)):
            prefix = f"{letter}."
            buffer.load_(
                {k.removeprefix(prefix): x for k, x in moments.items() if k.startswith(prefix)}
            )
        self.step = checkpoint.step
        self.sample = read(checkpoint).sample
        self.optimizer.updates = tensor(self.step, "int64", self.device)

    def _explain(
        self, batch: training.Batch, state: training.State, result: training.StepResult
    ) -> None:
        where = (
            f"step {self.step + 1} (samples {self.sample} to "
            f"{self.sample + self.config.batch_size - 1}) has loss {float(result.loss):.4g} and "
            f"gradient norm {float(result.norm):.4g}; no weight was changed"
        )
        try:
            training.explain(self.model, self.params, batch, state)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; {where}") from None
        raise NonFiniteError(
            f"[train] expected a finite gradient norm, got finite gradients of infinite norm; "
            f"{where}"
        )
