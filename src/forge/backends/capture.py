"""Whether a function is being captured, to be replayed, and what must not happen meanwhile.

One is at a time. It concerns the Python thread that captures; the others go on as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from forge.errors import DeviceError
from forge.tensor import Device

_one_at_a_time = threading.Lock()
# The thread that captures, and the device that it does so on.
_thread: int | None = None
_device = ""


@contextmanager
def capturing(device: Device) -> Iterator[None]:
    """Within this block this thread captures what it gives to the device."""
    global _thread, _device
    with _one_at_a_time:
        _thread, _device = threading.get_ident(), device.name
        try:
            yield
        finally:
            _thread = None


def busy() -> bool:
    """Whether any thread is capturing."""
    return _thread is not None


def here() -> bool:
    """Whether this thread is capturing."""
    return _thread is not None and _thread == threading.get_ident()


def eager(what: str) -> None:
    """Raise `DeviceError` if this thread is capturing: a replay would not do `what` again."""
    if here():
        raise refusal(_device, what)


def refusal(device: str, what: str) -> DeviceError:
    """The error for what can't be captured."""
    return DeviceError(
        f"[{device}] expected no {what} while a step is captured, got one; run it eagerly, as "
        "forge train --eager does, or keep what varies in Tensors made outside of it"
    )
