"""Every setting of a training run, in one flat frozen dataclass.

A TOML file and command-line flags fill the same fields: `n_layer` in the file is `--n-layer` on the
command line. Each field says its meaning, unit, range, and what a change of it means to a resumed
run; `settings` lists all that for help pages. The defaults are a recipe that trains a small GPT on
the default text in about a minute on two cores.
"""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tomli_w

from forge.errors import ConfigError, nearest

T = TypeVar("T")

# What another value means to a run that is resumed with it. "mathematics": another run, refused
# unless allowed by name. "data": another run if the tokens differ, which their digest tells, since
# files may move. "run": the same run.
Effect = Literal["mathematics", "data", "run"]
EFFECTS: dict[str, Effect] = {
    "Model": "mathematics",
    "Data": "data",
    "Training": "mathematics",
    "Machine": "run",
    "Run": "run",
}


def _setting(default: T, section: str, help: str, limits: str = "") -> T:
    """A field with its help; `limits` is its range, as in mathematics, and its unit."""
    end = 1 + max(limits.rfind("]"), limits.rfind(")"))
    range_, unit = limits[:end], limits[end:].strip()
    metadata = {"section": section, "help": help, "range": range_, "unit": unit}
    field: T = dataclasses.field(default=default, metadata=metadata)
    return field


@dataclass(frozen=True)
class Config:
    """All settings; valid by construction. Raises `ConfigError`, naming the flag and the value."""

    # ---- Model
    n_layer: int = _setting(4, "Model", "transformer blocks", "[1, 1024]")
    n_head: int = _setting(4, "Model", "attention heads per block", "[1, 1024]")
    n_embd: int = _setting(128, "Model", "width of the residual stream", "[1, 131072] channels")
    block_size: int = _setting(128, "Model", "context length", "[1, 1048576] tokens")
    vocab_size: int | None = _setting(
        None, "Model", "size of the vocabulary (default: the tokenizer's)", "[1, 16777216] tokens"
    )
    dropout: float = _setting(
        0.0, "Model", "share of embeddings, attention and branch outputs dropped", "[0, 1)"
    )
    init_std: float | None = _setting(
        None, "Model", "spread of initial weights (default: sqrt(2 / (5 n_embd)))", "(0, 10]"
    )
    layer_norm_epsilon: float = _setting(
        1e-5, "Model", "added to the variance in layernorm", "(0, 1]"
    )

    # ---- Data
    data: str | None = _setting(
        None, "Data", "text file or folder (default: the language reference in Python itself)"
    )
    val_data: str | None = _setting(
        None, "Data", "text file or folder to validate on (default: blocks held out of --data)"
    )
    val_fraction: float = _setting(
        0.1, "Data", "share of --data held out, in 4 KiB blocks, without --val-data", "[0, 0.9]"
    )

    # ---- Training
    batch_size: int = _setting(8, "Training", "samples in one step", "[1, 1048576] samples")
    lr: float = _setting(4e-3, "Training", "peak learning rate", "[0, 100]")
    min_lr_ratio: float = _setting(
        0.1, "Training", "learning rate at the schedule's end, as a share of --lr", "[0, 1]"
    )
    warmup_steps: int | None = _setting(
        None, "Training", "rise of the rate (default: a tenth, at most 100)", "[0, 1e12] steps"
    )
    schedule_steps: int | None = _setting(
        None, "Training", "end of the rate's cosine (default: the first --steps)", "[0, 1e12] steps"
    )
    weight_decay: float = _setting(
        0.1, "Training", "AdamW's decay of matrices and embeddings", "[0, 100]"
    )
    beta1: float = _setting(0.9, "Training", "AdamW's memory of the gradient", "[0, 1)")
    beta2: float = _setting(0.99, "Training", "AdamW's memory of its square", "[0, 1)")
    eps: float = _setting(1e-8, "Training", "AdamW's guard against division by 0", "(0, 1]")
    grad_clip: float = _setting(
        1.0, "Training", "largest norm of the whole gradient; 0: no limit", "[0, inf)"
    )
    seed: int = _setting(
        1337, "Training", "seed of weights, data order and dropout", "[0, 4294967295]"
    )
    precision: Literal["fp32", "bf16"] = _setting("fp32", "Training", "number format of products")
    tf32: bool = _setting(
        False, "Training", "on a GPU, round the operands of fp32 products to TF32's 10 bits"
    )

    # ---- Machine
    device: Literal["auto", "cpu", "cuda", "reference"] = _setting(
        "auto", "Machine", "where to train; auto: the GPU where it can be used"
    )
    threads: int | None = _setting(
        None, "Machine", "CPU threads (default: as many as cores)", "[1, 4096] threads"
    )
    micro_batch: int | None = _setting(
        None, "Machine", "samples computed at a time (default: automatic)", "[1, 1048576] samples"
    )
    eager: bool = _setting(
        False,
        "Machine",
        "run a step's Python each time, for print or pdb in it, and replay nothing",
    )

    # ---- Run
    out: str | None = _setting(None, "Run", "run folder (default: runs/ and the next number)")
    steps: int = _setting(2000, "Run", "length of the run", "[0, 1e12] steps")
    log_every: int = _setting(10, "Run", "interval of logging", "[1, 1e12] steps")
    eval_every: int = _setting(
        500, "Run", "interval of validation; 0: only at the end", "[0, 1e12] steps"
    )
    eval_batches: int | None = _setting(
        None, "Run", "length of a validation (default: all held out)", "[1, 1e12] batches"
    )
    checkpoint_every: int = _setting(
        500, "Run", "interval of checkpoints; 0: only at the end", "[0, 1e12] steps"
    )
    keep: int = _setting(2, "Run", "checkpoints kept besides the best", "[1, 1000000] checkpoints")
    compare_ngrams: bool = _setting(
        False, "Run", "at the end, hold the loss to n-gram tables of the same training bytes"
    )

    def __post_init__(self) -> None:
        for setting in settings():
            value = _typed(setting.name, getattr(self, setting.name), setting.flag)
            object.__setattr__(self, setting.name, value)
            if value is not None and setting.range and not _within(value, setting.range):
                raise ConfigError(
                    f"[config] expected {setting.flag} in {setting.range}, got {value}; "
                    f"it is: {setting.help}"
                )
        if self.n_embd % self.n_head:
            raise ConfigError(
                "[config] expected --n-embd divisible by --n-head, got "
                f"{self.n_embd} and {self.n_head}; try --n-embd "
                f"{self.n_head * max(1, round(self.n_embd / self.n_head))}, or other heads"
            )
        if self.micro_batch and self.batch_size % self.micro_batch:
            raise ConfigError(
                "[config] expected --batch-size divisible by --micro-batch, got "
                f"{self.batch_size} and {self.micro_batch}; "
                f"try --micro-batch {math.gcd(self.batch_size, self.micro_batch)}"
            )
        if self.tf32 and self.precision != "fp32":
            raise ConfigError(
                f"[config] expected --precision fp32 with --tf32, got {self.precision}; "
                "TF32 is a way to multiply float32"
            )
        length = self.steps if self.schedule_steps is None else self.schedule_steps
        if self.warmup_steps is not None and self.warmup_steps > length:
            flag = "--steps" if self.schedule_steps is None else "--schedule-steps"
            raise ConfigError(
                f"[config] expected --warmup-steps of at most {flag}, got "
                f"{self.warmup_steps} and {length}; leave it out for the default"
            )

    def resolved(self, vocab_size: int) -> "Config":
        """This configuration with every default that follows from other fields filled in.

        `vocab_size` is the tokenizer's. A run saves the resolved configuration, so its schedule
        stays what it was when the run is made longer. `micro_batch` and `threads` stay None: they
        are choices of the machine. Raises `ConfigError` for a vocabulary smaller than the
        tokenizer's.
        """
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            raise ConfigError(
                f"[config] expected --vocab-size of at least {vocab_size}, the tokenizer's, "
                f"got {self.vocab_size}; leave it out for the default"
            )
        schedule = self.steps if self.schedule_steps is None else self.schedule_steps
        warmup = min(100, schedule // 10) if self.warmup_steps is None else self.warmup_steps
        std = math.sqrt(2 / (5 * self.n_embd)) if self.init_std is None else self.init_std
        return dataclasses.replace(
            self,
            vocab_size=self.vocab_size or vocab_size,
            init_std=std,
            warmup_steps=warmup,
            schedule_steps=schedule,
        )


# Annotations of all fields, by name, in the order they are written above.
FIELDS: dict[str, Any] = get_type_hints(Config)


@dataclass(frozen=True)
class Setting:
    """One field of `Config`, as help pages and error messages show it."""

    name: str
    default: Any
    section: str
    help: str
    range: str
    unit: str

    @property
    def flag(self) -> str:
        """The field's flag on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def effect(self) -> Effect:
        """What a change of it means to a resumed run."""
        return EFFECTS[self.section]


def settings() -> list[Setting]:
    """All fields of `Config`, in order."""
    return [Setting(f.name, default=f.default, **f.metadata) for f in dataclasses.fields(Config)]


def changed_mathematics(old: Config, new: Config) -> list[str]:
    """Names of the fields whose change makes `new` another run than `old`, in order.

    Both are resolved. Data is not among them: the digest of the tokens tells whether it changed.
    """
    return [
        setting.name
        for setting in settings()
        if setting.effect == "mathematics"
        and getattr(old, setting.name) != getattr(new, setting.name)
    ]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Settings of a TOML file by field name, known and of the right type; raises `ConfigError`."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"[config] expected a readable TOML file, got {error.strerror}: {path}; "
            f"paths begin at {Path.cwd()}"
        ) from None
    except ValueError as error:
        hint = "" if Path(path).suffix == ".toml" else f"; to train on a text: --data {path}"
        raise ConfigError(f"[config] expected TOML in {path}, got: {error}{hint}") from None
    for name, value in values.items():
        if isinstance(value, dict):
            raise ConfigError(
                f"[config] expected flat keys in {path}, got the table [{name}]; "
                "write its keys at the top, without a table"
            )
        if name not in FIELDS:
            raise ConfigError(
                f"[config] expected a setting in {path}, got {name!r}; {setting_like(name)}"
            )
        values[name] = _typed(name, value, f"{name} in {path}")
    return values


def load_toml(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Configuration of a TOML file, where `overrides` (flags, by field name) win."""
    return Config(**{**read_toml(path), **(overrides or {})})


def to_toml(config: Config) -> str:
    """TOML text of a configuration that `load_toml` reads back equal; None is left out."""
    values = dataclasses.asdict(config)
    return tomli_w.dumps({name: value for name, value in values.items() if value is not None})


# What nanoGPT and transformers call settings.
ELSEWHERE = {
    "learning_rate": "lr",
    "max_iters": "steps",
    "max_steps": "steps",
    "warmup_iters": "warmup_steps",
    "lr_decay_iters": "schedule_steps",
    "min_lr": "min_lr_ratio",
    "eval_interval": "eval_every",
    "eval_iters": "eval_batches",
    "log_interval": "log_every",
    "logging_steps": "log_every",
    "save_steps": "checkpoint_every",
    "out_dir": "out",
    "output_dir": "out",
    "dataset": "data",
    "dtype": "precision",
    "gradient_accumulation_steps": "micro_batch",
    "max_grad_norm": "grad_clip",
    "adam_epsilon": "eps",
}
# … and what happens here where they have a setting and Forge has none.
_LOGGED = "every run writes metrics.jsonl, and TensorBoard's events, into its folder"
INSTEAD = {
    "always_save_checkpoint": (
        "a checkpoint is written every --checkpoint-every steps, and the best is kept too"
    ),
    "bias": "every layer and norm has biases here, as in GPT-2",
    "compile": "every step is recorded once and replayed; --eager runs its Python each time",
    "decay_lr": "the rate always falls by a cosine, unless --min-lr-ratio is 1",
    "eval_only": "forge eval RUN measures a trained model",
    "init_from": "--resume goes on with a run; all others begin with random weights",
    "wandb_log": _LOGGED,
    "wandb_project": _LOGGED,
    "wandb_run_name": _LOGGED,
}


def setting_like(word: str) -> str:
    """A hint for a word that is no setting: by another program's name for one, or by spelling."""
    name = word.replace("-", "_")
    return INSTEAD.get(name) or nearest(ELSEWHERE.get(name, name), FIELDS)


_KINDS = {int: "an integer", float: "a number", str: "a path", bool: "true or false"}


def _typed(name: str, value: Any, where: str) -> Any:
    """`value` if it fits the field's annotation (an int fits a float), else `ConfigError`."""
    hint = FIELDS[name]
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value in choices:
            return value
        raise ConfigError(
            f"[config] expected {where} to be one of {', '.join(choices)}, got {value!r}; "
            f"{nearest(str(value), choices)}"
        )
    kinds = get_args(hint) or (hint,)
    if float in kinds and type(value) is int:
        # TOML's integers have no bound; one that no float holds is out of every range.
        return float(value) if abs(value) < 1 << 1000 else math.inf
    if type(value) in kinds and value != "":
        return value
    kind = next(kind for kind in kinds if kind is not NoneType)
    raise ConfigError(
        f"[config] expected {where} to be {_KINDS[kind]}, got {value!r}"
        + ("; leave it out for the default" if NoneType in kinds else "")
    )


def _within(value: float, interval: str) -> bool:
    """Whether a number lies in an interval written as in mathematics: "[0, 1)"."""
    low, high = (float(end) for end in interval[1:-1].split(", "))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below
