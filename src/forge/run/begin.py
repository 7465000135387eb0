"""How a run begins: from settings, or from what its folder holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from forge import checkpoint
from forge.config import FIELDS, Config, changed_mathematics, read_toml, setting_like, settings
from forge.data.text import Dataset, load_dataset
from forge.data.tokenizer import ByteTokenizer, Tokenizer
from forge.errors import ConfigError, DataError
from forge.run import choices, metrics
from forge.run.folder import RunFolder, create, reopen
from forge.run.session import Session
from forge.run.stored import read
from forge.run.trainer import Trainer
from forge.tensor import Device

# Settings that say what shapes the weights have.
SHAPING = frozenset({"n_layer", "n_embd", "block_size", "vocab_size"})


def begin(file: Path | None, flags: Mapping[str, Any]) -> Session:
    """A new run, from a TOML file's settings where `flags`, by field name, win.

    Raises `ConfigError`, `DataError`, `DeviceError` before anything is written, `OSError` after.
    """
    config = Config(**{**(read_toml(file) if file else {}), **flags})
    tokenizer = ByteTokenizer()
    dataset = _load_data(config, tokenizer)
    config = config.resolved(tokenizer.vocab_size)
    chosen = choices.choose(config, {})
    trainer = _trainer(config, dataset, chosen, None)
    return _session(create(config.out), trainer, dataset, tokenizer, chosen, None, [])


def resume(file: Path | None, flags: Mapping[str, Any], allow_change: Collection[str]) -> Session:
    """The run in a folder, from its newest checkpoint; settings given here win over its own.

    Without a checkpoint it begins at step 0; without a folder too, if the model, the data or the
    training is described. Raises `ConfigError` for what would make it another
    run and is not in `allow_change`, and `CheckpointError` for a checkpoint that is damaged.
    """
    allowed = {_field(name) for name in allow_change}
    given = {**(read_toml(file) if file else {}), **flags}
    # A command that also says what to train may be the same for the first start and all others.
    described = any(each.effect != "run" for each in settings() if each.name in given)
    folder = reopen(given.get("out"), may_begin=described)
    try:
        return _reopened(folder, given, allowed)
    except BaseException:
        folder.close()
        raise


def missing_texts(config: Config) -> list[str]:
    """Names of the settings whose text is not where they say, as seen from this folder."""
    texts = (("data", config.data), ("val_data", config.val_data))
    return [name for name, path in texts if path is not None and not Path(path).exists()]


def _reopened(folder: RunFolder, given: Mapping[str, Any], allowed: Collection[str]) -> Session:
    newest = folder.newest()
    saved = None if newest is None else checkpoint.load(newest)
    before = folder.settings()
    if saved is not None and not before:
        before = dataclasses.asdict(read(saved).config)
    config = Config(**{**before, **given})
    if saved is not None and config.steps < saved.step:
        raise ConfigError(
            f"[resume] expected --steps of at least {saved.step}, where the run is, got "
            f"{config.steps}; a shorter run is another run"
        )
    tokenizer = ByteTokenizer() if saved is None else read(saved).tokenizer
    missing = [name for name in missing_texts(config) if name not in given]
    if missing:
        flags = " and ".join("--" + name.replace("_", "-") for name in missing)
        raise DataError(
            f"[resume] expected the run's text, got a path that does not exist: "
            f"{getattr(config, missing[0])}; paths begin at {Path.cwd()}: say with {flags} where "
            "it is now"
        )
    dataset = _load_data(config, tokenizer)
    config = config.resolved(tokenizer.vocab_size)
    notices = []
    if saved is None:
        notices.append(f"no complete checkpoint in {folder.path}: starting at step 0")
    else:
        notices += _changes(saved, config, dataset, allowed)
    frozen = folder.read_frozen()
    chosen = choices.choose(config, frozen)
    changed = choices.changed(frozen, chosen)
    if changed:
        notices.append(
            f"since the run began, {', '.join(changed)}: the same bits are no longer promised"
        )
    trainer = _trainer(config, dataset, chosen, saved)
    metrics.cut(folder.metrics, trainer.step)
    return _session(folder, trainer, dataset, tokenizer, chosen, saved, notices)


def _session(
    folder: RunFolder,
    trainer: Trainer,
    dataset: Dataset,
    tokenizer: Tokenizer,
    chosen: choices.Choices,
    saved: checkpoint.Checkpoint | None,
    notices: list[str],
) -> Session:
    folder.write(trainer.config, chosen.frozen())
    return Session(folder, trainer, dataset, tokenizer, chosen, saved, notices)


def _trainer(
    config: Config,
    dataset: Dataset,
    chosen: choices.Choices,
    saved: checkpoint.Checkpoint | None,
) -> Trainer:
    return Trainer(config, dataset, Device(chosen.device), chosen.micro_batch, saved)


def _load_data(config: Config, tokenizer: Tokenizer) -> Dataset:
    return load_dataset(
        config.data, tokenizer, val_data=config.val_data, val_fraction=config.val_fraction
    )


def _changes(
    saved: checkpoint.Checkpoint, config: Config, dataset: Dataset, allowed: Collection[str]
) -> list[str]:
    """What differs from the run so far, in words; refuses what is not allowed by name."""
    stored = read(saved)
    found = {
        name: f"{name} {getattr(stored.config, name)} → {getattr(config, name)}"
        for name in changed_mathematics(stored.config, config)
    }
    if stored.changed_data(dataset):
        found["data"] = f"data: other tokens than in {stored.data}"
    refused = [name for name in found if name not in allowed or name in SHAPING]
    if refused:
        allow = " ".join(f"--allow-change {name.replace('_', '-')}" for name in refused)
        shaped = SHAPING.intersection(found)
        raise ConfigError(
            f"[resume] expected the settings of the run in {saved.path.parent.parent}, got "
            f"{', '.join(found[name] for name in refused)}; begin another run"
            + (", since the weights have other shapes" if shaped else f", or allow it with {allow}")
        )
    notices = [f"changed from here on: {', '.join(found.values())}"] if found else []
    if stored.changed_validation(dataset):
        notices.append("other held-out tokens than before: the best checkpoint is sought anew")
    return notices


def _field(name: str) -> str:
    field = name.replace("-", "_").strip("_")
    if field not in FIELDS:
        raise ConfigError(
            f"[resume] expected a setting after --allow-change, got {name!r}; {setting_like(name)}"
        )
    return field
