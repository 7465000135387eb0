"""Ctrl-C and SIGTERM, asked politely."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

EXIT_INTERRUPTED = 130


def leave(number: int, frame: FrameType | None) -> None:
    """A handler of SIGTERM for commands that have nothing to save: as Ctrl-C."""
    raise KeyboardInterrupt


class Interrupt:
    """While entered, the first Ctrl-C or SIGTERM sets `requested`; the second leaves at once.

    `notify` is called at the first one. Off the main thread, where Python can't handle signals, it
    does nothing.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.requested = False
        self._notify = notify
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            # Not SystemExit: that would wait for the checkpoint being written.
            os._exit(EXIT_INTERRUPTED)
        self.requested = True
        self._notify()
