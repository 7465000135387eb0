"""How a run looks: a progress bar on a terminal, plain lines where it is piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from forge.cli.output import Console, silence
from forge.run.trainer import Step

# From tokens per second to words, with two spaces behind, or to nothing.
Mfu = Callable[[float], str]


def clock(seconds: float) -> str:
    """A duration as 1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Plain:
    """A line per logged step: loss, learning rate, gradient norm, rate, time left."""

    def __init__(self, first: int, last: int, mfu: Mfu) -> None:
        self._mfu = mfu
        self._first = first
        self._last = last
        self._start = time.monotonic()

    def __enter__(self) -> Plain:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def notice(self, text: str) -> None:
        """Something the user should know."""
        print(text, flush=True)

    def step(self, step: int, done: Step, tokens_per_s: float, *, logged: bool) -> None:
        """Say where it stands, if it was logged."""
        if not logged:
            return
        passed = time.monotonic() - self._start
        left = passed / (step - self._first) * (self._last - step)
        print(
            f"step {step}/{self._last}  loss {done.loss:.4f}  lr {done.lr:.3g}  "
            f"norm {done.norm:.3g}  {tokens_per_s:,.0f} tok/s  "
            f"{self._mfu(tokens_per_s)}{clock(left)} left",
            flush=True,
        )

    def evaluated(self, step: int, val_loss: float) -> None:
        """Say the held-out loss."""
        print(f"step {step}/{self._last}  held-out loss {val_loss:.4f}", flush=True)


class Bar:
    """A bar with step, loss, rate and time left; the held-out losses stay above it."""

    def __init__(self, console: Console, first: int, last: int, mfu: Mfu) -> None:
        self._mfu = mfu
        self._progress = Progress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=last, completed=first, numbers="")
        self._last = last

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, BrokenPipeError):
            # The terminal is gone, and what ends the bar would fail as well.
            silence(sys.stdout)
        self._progress.stop()

    def notice(self, text: str) -> None:
        """Something the user should know."""
        self._progress.console.print(text, markup=False)

    def step(self, step: int, done: Step, tokens_per_s: float, *, logged: bool) -> None:
        """Move the bar."""
        numbers = f"loss {done.loss:.3f}  {tokens_per_s:,.0f} tok/s  {self._mfu(tokens_per_s)}"
        self._progress.update(self._task, completed=step, numbers=numbers)

    def evaluated(self, step: int, val_loss: float) -> None:
        """Say the held-out loss."""
        self._progress.console.print(
            f"step {step}/{self._last}  held-out loss {val_loss:.4f}", markup=False
        )


def reporter(console: Console, first: int, last: int, mfu: Mfu) -> Plain | Bar:
    """What fits where the output goes; `mfu` words the share of the peak that a rate is."""
    kind = partial(Bar, console) if console.is_terminal else Plain
    return kind(first, last, mfu)
