"""Whom a run tells how it goes, and what follows where that fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Protocol

from forge.run.interrupt import Interrupt
from forge.run.trainer import Step


class Reporter(Protocol):
    """What a run tells while it goes on."""

    def notice(self, text: str) -> None:
        """Something the user should know."""

    def step(self, step: int, done: Step, tokens_per_s: float, *, logged: bool) -> None:
        """A step was made; `logged`: it also went into `metrics.jsonl`."""

    def evaluated(self, step: int, val_loss: float) -> None:
        """The held-out loss was measured, in nats per token."""


class Told:
    """A reporter that may fail: the run is then asked to stop, and tells nothing more.

    So the failure ends a run between two steps, with a checkpoint, and never amid one.
    """

    def __init__(self, reporter: Reporter, stop: Interrupt) -> None:
        self._reporter = reporter
        self._stop = stop
        self._failure: OSError | None = None

    def notice(self, text: str) -> None:
        """Something the user should know."""
        self._tell(partial(self._reporter.notice, text))

    def step(self, step: int, done: Step, tokens_per_s: float, *, logged: bool) -> None:
        """A step was made."""
        self._tell(partial(self._reporter.step, step, done, tokens_per_s, logged=logged))

    def evaluated(self, step: int, val_loss: float) -> None:
        """The held-out loss was measured."""
        self._tell(partial(self._reporter.evaluated, step, val_loss))

    def settle(self) -> None:
        """Raise what the reporter failed with: `BrokenPipeError` where its reader has left."""
        if self._failure is None:
            return
        if self._failure.errno == errno.EIO:
            raise BrokenPipeError(errno.EPIPE, "the terminal hung up") from self._failure
        raise self._failure

    def _tell(self, tell: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            tell()
        except OSError as error:
            self._failure = error
            self._stop.request()
