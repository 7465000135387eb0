"""What a checkpoint says besides its arrays: the `state` in its `state.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge.checkpoint import Checkpoint
from forge.config import Config
from forge.data.text import Dataset
from forge.data.tokenizer import Tokenizer, from_dict
from forge.errors import CheckpointError, ConfigError, DataError
from forge.run.metrics import Row

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Stored:
    """The state of a run between two steps.

    `sample` is the number of samples taken; `data`, `sha256` and `val_sha256` name the data and its
    tokens; `frozen` are the automatic choices; `val_loss` was measured at this step, `best` is the
    `step` and `val_loss` of the best checkpoint. `open_row` is this step's row of `metrics.jsonl`
    where the run was stopped before its validation was done.
    """

    sample: int
    config: Config
    tokenizer: Tokenizer
    data: str
    sha256: str
    val_sha256: str
    frozen: Mapping[str, Any]
    val_loss: float | None
    best: dict[str, Any] | None
    open_row: Row | None

    def changed_data(self, dataset: Dataset) -> bool:
        """Whether these are other tokens to train on."""
        return self.sha256 != dataset.sha256

    def changed_validation(self, dataset: Dataset) -> bool:
        """Whether these are other tokens to validate on."""
        return self.val_sha256 != dataset.val_sha256

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values, which `read` reads back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["config"] = dataclasses.asdict(self.config)
        values["tokenizer"] = self.tokenizer.to_dict()
        return values


def read(saved: Checkpoint) -> Stored:
    """The state of a checkpoint; raises `CheckpointError` where this version does not know it."""
    try:
        values = dict(saved.state)
        values["config"] = Config(**values["config"])
        values["tokenizer"] = from_dict(values["tokenizer"])
        return Stored(**values)
    except (ConfigError, DataError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"[checkpoint] expected a run's state in {saved.path}, got: {error}; "
            "it may come from another version of Forge"
        ) from None
