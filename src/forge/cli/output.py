"""Standard output, and what to do once nobody reads it any more."""

from __future__ import annotations

import os
from typing import IO, Any

import rich.console


class ReaderLeftError(Exception):
    """Who read the output has left before the work was done, and that is worth a line."""


class Console(rich.console.Console):
    """rich's, which leaves it to the command what a reader means that has left."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, **settings)

    def on_broken_pipe(self) -> None:
        """Let the error go on: rich ends the process with 1, which is `verify`'s for a failure."""
        raise  # rich calls this while it handles the error


def silence(stream: IO[str]) -> None:
    """Let all that is yet written to a stream go nowhere, and what its buffer holds as well."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
