"""A run's folder: `config.toml`, `frozen.json`, `metrics.jsonl` and `checkpoints/`.

One process at a time works in it. A lock says so, which the system frees with its process, however
that ends: a killed run leaves no stale lock behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from forge import checkpoint, durable
from forge.config import Config, read_toml, to_toml
from forge.errors import ConfigError

RUNS = Path("runs")


class RunFolder:
    """The folder of one run, locked until `close` or the end of the process.

    Raises `ConfigError` where another process trains in it, and `OSError` where it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.frozen = path / "frozen.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(
                f"[run] expected a folder, got {path}, which is a file or lies in one; "
                "give another --out"
            ) from None
        self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_lock(self._lock):
            os.close(self._lock)
            raise ConfigError(
                f"[run] expected a run folder to itself, got {path}, where another process trains; "
                "wait for it, or give another --out"
            )

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others in."""
        os.close(self._lock)

    @property
    def exists(self) -> bool:
        """Whether a run has begun in it."""
        return any(path.exists() for path in (self.config, self.checkpoints, self.metrics))

    def settings(self) -> dict[str, Any]:
        """The settings in its `config.toml`; none where it has not come that far."""
        return read_toml(self.config) if self.config.exists() else {}

    def write(self, config: Config, frozen: Mapping[str, Any]) -> None:
        """Save the settings and the automatic choices; the folder's own name is not among them."""
        durable.replace(self.config, to_toml(_without_out(config)))
        self.write_frozen(frozen)

    def write_frozen(self, frozen: Mapping[str, Any]) -> None:
        """Save the automatic choices alone."""
        durable.replace(self.frozen, json.dumps(frozen, indent=1) + "\n")

    def read_frozen(self) -> dict[str, Any]:
        """The automatic choices of the run so far; none where it has not come that far."""
        if not self.frozen.exists():
            return {}
        try:
            value = json.loads(self.frozen.read_bytes())
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ConfigError(
                f"[run] expected JSON as it was written in {self.frozen}, got it torn or edited; "
                "remove it, and the choices are made anew"
            )
        return value

    def newest(self) -> Path | None:
        """Its newest checkpoint, once what a killed save left behind is removed."""
        checkpoint.clean(self.checkpoints)
        return checkpoint.newest(self.checkpoints)


def create(out: str | None) -> RunFolder:
    """A folder for a new run: `out`, or the next number in `runs/`.

    Raises `ConfigError` where a run is there already.
    """
    if out is None:
        RUNS.mkdir(exist_ok=True)
        number = max(_numbers(), default=0) + 1
        while True:
            try:
                (RUNS / str(number)).mkdir()
            except FileExistsError:
                number += 1
            else:
                return RunFolder(RUNS / str(number))
    folder = RunFolder(Path(out))
    if folder.exists:
        folder.close()
        raise ConfigError(
            f"[run] expected a new run folder, got {out}, which holds a run; "
            "go on with it by --resume, or give another --out"
        )
    return folder


def reopen(out: str | None, *, may_begin: bool) -> RunFolder:
    """The folder of the run to resume: `out`, or the one with the highest number in `runs/`.

    A folder whose run had not got as far as its settings becomes one, and with `may_begin` so does
    one that is not there. Raises `ConfigError` where there is no folder, and none to choose.
    """
    if out is not None:
        if not may_begin and not Path(out).exists():
            raise ConfigError(
                f"[resume] expected a run in {out}, got no such folder; leave out --resume to begin"
            )
        return RunFolder(Path(out))
    numbers = _numbers()
    if not numbers:
        raise ConfigError(
            f"[run] expected a run to resume, got none in {RUNS}/; name its folder with --out"
        )
    return RunFolder(RUNS / str(max(numbers)))


def _without_out(config: Config) -> Config:
    return dataclasses.replace(config, out=None)


def _numbers() -> list[int]:
    if not RUNS.is_dir():
        return []
    return [int(name) for name in os.listdir(RUNS) if re.fullmatch(r"[1-9]\d*", name)]


def _try_lock(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:
        return _try_lock_windows(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_lock_windows(descriptor: int) -> bool:
    import msvcrt

    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError:
        return False
    return True
