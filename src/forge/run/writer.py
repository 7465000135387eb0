"""Checkpoints written beside the training: one thread, one checkpoint at a time."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forge import checkpoint


class Writer:
    """Saves checkpoints on a thread of its own; what goes wrong there is raised here, once.

    `check` between two steps, `wait` before the next snapshot, so that no two are ever in memory,
    and at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def save(
        self,
        step: int,
        arrays: Mapping[str, checkpoint.Arrays],
        state: Mapping[str, Any],
        *,
        best: bool,
        keep: int,
    ) -> None:
        """Begin to write a checkpoint; `arrays` belong to the writer from now on."""
        self.wait()
        self._pending = self._pool.submit(
            checkpoint.save, self._folder, step, arrays, state, best=best, keep=keep
        )

    def check(self) -> Path | None:
        """The checkpoint that was finished since the last call; raises what its writing raised."""
        if self._pending is None or not self._pending.done():
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Wait for the checkpoint being written; raises what its writing raised."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Wait for the thread; an error that nobody asked for yet is dropped with it."""
        self._pool.shutdown()
