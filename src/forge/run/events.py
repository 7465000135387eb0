"""TensorBoard's event files, beside `metrics.jsonl` and with the same numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from forge.run.metrics import Row


class Events:
    """The event file of a run; after a resume, TensorBoard drops what came after `step`."""

    def __init__(self, folder: Path, step: int) -> None:
        self._writer = _tensorboardx().SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, row: Row) -> None:
        """Add the numbers of a row, each under its name."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _tensorboardx() -> Any:
    """The package, kept from importing PyTorch where that is installed: 1.4 s for nothing."""
    before: ModuleType | None = sys.modules.get("torch")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tensorboardX  # type: ignore[import-untyped]
    finally:
        del sys.modules["torch"]
        if before is not None:
            sys.modules["torch"] = before
    return tensorboardX
