"""`metrics.jsonl`: one JSON object per logged step, in order of step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from forge import durable
from forge.errors import DataError

Row = dict[str, Any]


class Metrics:
    """The open file of a run; every row is written through to the system at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def write(self, row: Row) -> None:
        """Append a row."""
        self._file.write(_line(row))
        self._file.flush()

    def sync(self) -> None:
        """Flush to disk, so that a checkpoint never knows of steps that the file lost."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[Row]:
    """All rows of a file; raises `DataError` where it cannot be read.

    The last line may be half a line, of a process that was killed: it is left out.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"[metrics] expected to read {path}, got: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
            known = isinstance(row["step"], int)
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            raise DataError(
                f"[metrics] expected an object with a step, got line {number} of {path}: "
                f"{line[:40].decode(errors='replace')!r}"
            )
        rows.append(row)
    return rows


def cut(path: Path, step: int) -> None:
    """Remove the rows after `step`, which a resumed run writes again."""
    if not path.exists():
        return
    kept = [row for row in read(path) if row["step"] <= step]
    durable.replace(path, b"".join(map(_line, kept)).decode())


def _line(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"
