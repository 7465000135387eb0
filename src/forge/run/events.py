"""TensorBoard's event files, beside `metrics.jsonl` and with the same numbers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from forge.run.metrics import Row


class Events:
    """The event file of a run; after a resume, TensorBoard drops what came after `step`.

    Written by the calling thread: tensorboardX's own thread dies of a full disk with a traceback,
    and then blocks who writes to it for ever. It begins with the first row: to import tensorboardX
    takes 70 ms, which the first step need not wait for.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._step = step
        self._writer: Any = None

    def write(self, row: Row) -> None:
        """Add the numbers of a row, each under its name."""
        if self._writer is None:
            self._begin()
        for name, value in row.items():
            if name != "step":
                self._write(row["step"], summary=self._scalar(name, value))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _begin(self) -> None:
        tensorboardx = _tensorboardx()
        self._event = tensorboardx.proto.event_pb2.Event
        self._scalar = tensorboardx.summary.scalar
        self._writer = tensorboardx.event_file_writer.EventsWriter(str(self._folder / "events"))
        log = tensorboardx.proto.event_pb2.SessionLog
        self._write(self._step + 1, session_log=log(status=log.START))

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(step=step, wall_time=time.time(), **content))


def _tensorboardx() -> Any:
    """The package, kept from importing PyTorch where that is installed: 1.4 s for nothing."""
    before: ModuleType | None = sys.modules.get("torch")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tensorboardX.event_file_writer
        import tensorboardX.proto.event_pb2
        import tensorboardX.summary
    finally:
        del sys.modules["torch"]
        if before is not None:
            sys.modules["torch"] = before
    return tensorboardX
