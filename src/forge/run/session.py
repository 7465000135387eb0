"""A run from its settings to its end: begun or resumed, advanced, checkpointed."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np

from forge import checkpoint
from forge.data.text import Dataset
from forge.data.tokenizer import Tokenizer
from forge.errors import NonFiniteError
from forge.run import choices, metrics
from forge.run.events import Events
from forge.run.folder import RunFolder
from forge.run.interrupt import Interrupt
from forge.run.report import Reporter, Told
from forge.run.stored import Stored, read
from forge.run.trainer import Step, Trainer
from forge.run.writer import Writer


class Session:
    """A run that is open: its folder is locked, its state is in memory."""

    def __init__(
        self,
        folder: RunFolder,
        trainer: Trainer,
        dataset: Dataset,
        tokenizer: Tokenizer,
        chosen: choices.Choices,
        saved: checkpoint.Checkpoint | None,
        notices: list[str],
    ) -> None:
        self.folder = folder
        self.trainer = trainer
        self.config = trainer.config
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.choices = chosen
        self.notices = notices
        self.val_loss: float | None = None
        self.best: dict[str, Any] | None = None
        self._open_row: metrics.Row | None = None
        if saved is not None:
            stored = read(saved)
            self._open_row = stored.open_row
            if not stored.changed_validation(dataset):
                self.val_loss, self.best = stored.val_loss, stored.best
        self.resumed_at = None if saved is None else saved.step
        self._saved = self.resumed_at
        self._frozen = False

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.folder.close()

    def train(self, reporter: Reporter) -> bool:
        """Make the steps that are left; returns whether all were made.

        False: Ctrl-C, SIGTERM or SIGHUP stopped it, with a checkpoint written. Raises
        `NonFiniteError`, with a checkpoint of the weights before it written; what the reporter
        fails with, also after a checkpoint, as `BrokenPipeError` where its reader has left; and
        `OSError` where the disk fails.
        """
        choices.prepare_training(self.config, self.trainer.device)
        writer = Writer(self.folder.checkpoints)
        log = Log(self.folder, self.trainer.step)
        asked = "stopping after this step, to write a checkpoint; again to leave at once"
        stop = Interrupt(lambda: told.notice(asked))
        told = Told(reporter, stop)
        with ExitStack() as stack:
            # The check after every step says what NumPy would only warn of.
            stack.enter_context(np.errstate(all="ignore"))
            stack.enter_context(stop)
            stack.callback(log.close)
            stack.callback(writer.close)
            try:
                self._loop(told, writer, log, stop)
            except NonFiniteError:
                # The weights are those before the step: good to look at, or to go on from.
                self._save_last(writer, log)
                raise
            self._save_last(writer, log)
            told.settle()
            return not stop.requested

    def _loop(self, reporter: Reporter, writer: Writer, log: Log, stop: Interrupt) -> None:
        trainer, clock = self.trainer, Clock()
        if self._open_row is not None:
            self._finish(self._open_row, reporter, writer, log, stop)
        while trainer.step < self.config.steps and not stop.requested:
            clock.start()
            done = trainer.advance()
            self._freeze(reporter)
            writer.check()
            rate = clock.stop(done.tokens)
            reporter.step(trainer.step, done, rate, logged=self._logs(trainer.step))
            self._finish(_row(trainer.step, done, rate), reporter, writer, log, stop)
            if self._logs(trainer.step):
                clock = Clock()

    def _finish(
        self,
        row: metrics.Row,
        reporter: Reporter,
        writer: Writer,
        log: Log,
        stop: Interrupt,
    ) -> None:
        """What follows a step: validation, its row, a checkpoint, each where it is due."""
        config, trainer, step = self.config, self.trainer, self.trainer.step
        self.val_loss = self._open_row = None
        at_end = step == config.steps
        if trainer.validation is not None and (at_end or _due(step, config.eval_every)):
            self.val_loss = trainer.evaluate(lambda: stop.requested)
            if self.val_loss is None:
                # Stopped meanwhile: the resumed run validates first, and then writes the row.
                self._open_row = row
                return
            row = {**row, "val_loss": self.val_loss}
            reporter.evaluated(step, self.val_loss)
        if self._logs(step) or self.val_loss is not None:
            log.write(row)
        if at_end or _due(step, config.checkpoint_every):
            self._save(writer, log)

    def _freeze(self, reporter: Reporter) -> None:
        """After the first step: keep with the run which algorithms compute its products."""
        if self._frozen:
            return
        self._frozen = True
        if self._froze_more():
            reporter.notice(f"products: {self.choices.products_in_words()}, kept in frozen.json")

    def _froze_more(self) -> bool:
        more = self.choices.learn_products()
        if more:
            self.folder.write_frozen(self.choices.frozen())
        return more

    def _logs(self, step: int) -> bool:
        return step == self.config.steps or _due(step, self.config.log_every)

    def _save_last(self, writer: Writer, log: Log) -> None:
        """Write a checkpoint of this step, if there is none, and wait for it."""
        if self._saved != self.trainer.step:
            self._save(writer, log)
        writer.wait()

    def _save(self, writer: Writer, log: Log) -> None:
        """Begin to write a checkpoint of this step."""
        step, loss = self.trainer.step, self.val_loss
        best = loss is not None and (self.best is None or loss < self.best["val_loss"])
        if best:
            self.best = {"step": step, "val_loss": loss}
        # Validation has products of its own.
        self._froze_more()
        log.sync()
        writer.wait()
        writer.save(step, self.trainer.snapshot(), self._state(), best=best, keep=self.config.keep)
        self._saved = step

    def _state(self) -> dict[str, Any]:
        return Stored(
            sample=self.trainer.sample,
            config=self.config,
            tokenizer=self.tokenizer,
            data=self.dataset.name,
            sha256=self.dataset.sha256,
            val_sha256=self.dataset.val_sha256,
            frozen=self.choices.frozen(),
            val_loss=self.val_loss,
            best=self.best,
            open_row=self._open_row,
        ).to_json()


class Log:
    """The rows of a run: in `metrics.jsonl`, and as TensorBoard's events."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        self._metrics = metrics.Metrics(folder.metrics)
        self._events = Events(folder.path, step)

    def write(self, row: metrics.Row) -> None:
        """Write a row to both."""
        self._metrics.write(row)
        self._events.write(row)

    def sync(self) -> None:
        """Flush to disk what a checkpoint must not know alone."""
        self._metrics.sync()

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._events.close()


class Clock:
    """Tokens per second of the steps alone, without what stands between them."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0
        self._start = 0.0

    def start(self) -> None:
        """A step begins."""
        self._start = time.perf_counter()

    def stop(self, tokens: int) -> float:
        """A step of so many tokens ended; returns the rate of all so far."""
        self._seconds += time.perf_counter() - self._start
        self._tokens += tokens
        return self._tokens / max(self._seconds, 1e-9)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _row(step: int, done: Step, rate: float) -> metrics.Row:
    return {
        "step": step,
        "loss": done.loss,
        "lr": done.lr,
        "grad_norm": done.norm,
        "tokens_per_s": round(rate, 1),
    }
