"""What backends tell the user: on standard error, of work that takes a while and is done once."""

from __future__ import annotations

import sys

_said: set[str] = set()


def say(text: str) -> None:
    """Tell the user."""
    sys.stderr.write(f"[forge] {text}\n")
    sys.stderr.flush()


def say_once(text: str) -> None:
    """Tell the user unless this process has done so."""
    if text not in _said:
        _said.add(text)
        say(text)
