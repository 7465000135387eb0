"""`forge train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from forge.backends import registry
from forge.cli.flags import Flags, given
from forge.cli.output import Console, ReaderLeftError
from forge.cli.progress import Mfu, reporter
from forge.cli.summary import conclude, introduce, row
from forge.run import choices, speed
from forge.run.begin import begin
from forge.run.begin import resume as resume_run
from forge.run.interrupt import EXIT_INTERRUPTED
from forge.run.session import Session

_RESUMING = Parameter(group=Group("Resuming", sort_key=9), negative=(), show_default=False)


def train(
    config: Path | None = None,
    /,
    *,
    flags: Annotated[Flags | None, Parameter(name="*")] = None,
    resume: Annotated[bool, _RESUMING] = False,
    allow_change: Annotated[tuple[str, ...], _RESUMING] = (),
    strict: Annotated[bool, Parameter(group="Machine", negative=(), show_default=False)] = False,
) -> int:
    """Train a GPT; with nothing else, on text that this machine already has.

    Every setting is a flag here and a key of the same name, with `_` for `-`, in CONFIG.toml;
    flags win. Ctrl-C, SIGTERM, SIGHUP (a dropped terminal; not under nohup), and a reader of its
    output that leaves, as `| head` does, finish the step and write a checkpoint, which --resume
    goes on from.

    Parameters
    ----------
    config
        TOML file of settings.
    resume
        Go on with the run in --out (default: the newest in runs/) from its newest checkpoint.
    allow_change
        Name of a setting that may differ from the resumed run's though it changes the mathematics;
        repeatable.
    strict
        Make it an error where a reference kernel would stand in for a missing one.
    """
    if strict:
        registry.forbid_fallbacks()
    settings = given(flags)
    with resume_run(config, settings, allow_change) if resume else begin(config, settings) as run:
        if resume and run.trainer.step == run.config.steps:
            print(
                f"{run.folder.path} is at step {run.trainer.step} of {run.config.steps} already; "
                "train on with a larger --steps"
            )
            return 0
        again = f"forge train --resume --out {run.folder.path}"
        try:
            introduce(run)
            mfu = _mfu(run)
            console = Console(soft_wrap=True)
            with reporter(console, run.trainer.step, run.config.steps, mfu) as report:
                finished = run.train(report)
            if not finished:
                print(f"Stopped at step {run.trainer.step}; go on with\n  {again}", flush=True)
                return EXIT_INTERRUPTED
        except BrokenPipeError as error:
            raise ReaderLeftError(
                "[train] expected a reader of what it prints, got none any more, and stopped at "
                f"step {run.trainer.step}; go on with: {again}"
            ) from error
        conclude(run)
    return 0


def _mfu(run: Session) -> Mfu:
    """How to word the share of the machine's peak that a rate is; compiles the kernels first."""
    trainer = run.trainer
    if trainer.device.kind == "reference":
        return lambda tokens_per_s: ""
    choices.prepare_training(trainer.config, trainer.device)
    peak = speed.peak_flops(trainer.device, trainer.config.precision)
    size = speed.matrix(trainer.device)
    per_token = speed.flops_per_token(trainer.model, trainer.params)
    row(
        "MFU",
        f"({speed.FORMULA}) operations per token, here {per_token / 1e6:,.3g} million, over the "
        f"{peak / 1e9:,.0f} billion a second of a product of two [{size}, {size}] matrices here",
    )
    return lambda tokens_per_s: f"MFU {tokens_per_s * per_token / peak:.0%}  "
