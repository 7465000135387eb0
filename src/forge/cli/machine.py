"""Where a command computes."""

from __future__ import annotations

from forge.errors import ArgumentError
from forge.run import choices
from forge.tensor import Device


def place(device: str, threads: int | None) -> Device:
    """The device that `--device` names, with `--threads` CPU threads at work."""
    if threads is not None and threads < 1:
        raise ArgumentError(
            f"[threads] expected --threads of at least 1, got {threads}; leave it out for all cores"
        )
    found, _ = choices.find_device(device)
    choices.use_threads(found, threads)
    return found
