"""Ctrl-C, SIGTERM and SIGHUP, asked politely."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

EXIT_INTERRUPTED = 130
# Windows has none.
_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)


def with_hangup(*numbers: signal.Signals) -> list[signal.Signals]:
    """The signals, and SIGHUP unless it is ignored, as nohup has it."""
    hangup = [] if _HANGUP is None or signal.getsignal(_HANGUP) == signal.SIG_IGN else [_HANGUP]
    return [*numbers, *hangup]


def leave(number: int, frame: FrameType | None) -> None:
    """A handler of SIGTERM and SIGHUP for commands that have nothing to save: as Ctrl-C."""
    if number == _HANGUP:
        # The shell and the system each send one when a terminal goes.
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class Interrupt:
    """While entered, the first Ctrl-C, SIGTERM or SIGHUP sets `requested`.

    A second Ctrl-C or SIGTERM leaves at once. SIGHUP never does, nor counts as a first one: when a
    terminal goes, the shell and the system each send one, and a session's end SIGTERM as well. One
    that is ignored stays so. `notify` is called once. Off the main thread, where Python can't
    handle signals, it does nothing.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.requested = False
        self._impatient = False
        self._notify = notify
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in with_hangup(signal.SIGINT, signal.SIGTERM):
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
        if number != _HANGUP:
            if self._impatient:
                # Not SystemExit: that would wait for the checkpoint being written.
                os._exit(EXIT_INTERRUPTED)
            self._impatient = True
        if not self.requested:
            self.requested = True
            self._notify()

    def request(self) -> None:
        """Set `requested`, which no signal did."""
        self.requested = True
