"""Which algorithm computes which product: a run's own table first, then the machine's.

Algorithms are chosen by timing, and another one may add in another order. So what was chosen once
stays: on the machine, in `$XDG_CACHE_HOME/forge/products-<hash>.json`; in a run, in its
`frozen.json`, which goes with its folder and outlives the machine's file.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forge import cache

# A product by an algorithm: a function of the addresses of a, b and out, of alpha, and of the
# addresses of bias and pre. It raises `RefusedError` where its library does not take it.
Kernel = Callable[[int, int, int, float, int, int], None]
# How an algorithm of cuDNN begins.
CUDNN = "cudnn "
# The 64 bytes of one of cuBLASLt, as hexadecimal; or the name of a plan of cuDNN.
_WRITTEN = re.compile(rf"[0-9a-f]{{128}}|{CUDNN}[\w=]+")


class RefusedError(Exception):
    """A library does not take an algorithm for a product; it says so before it computes."""


def intact(algorithms: Any) -> bool:
    """Whether it is a table as it is written: algorithms by product."""
    return isinstance(algorithms, dict) and all(
        isinstance(value, str) and _WRITTEN.fullmatch(value) for value in algorithms.values()
    )


class Table:
    """The algorithms by product, of this machine's file and of the run at hand.

    `used` are those that this process has computed with since the run began.
    """

    def __init__(self, path: Path) -> None:
        self.used: dict[str, str] = {}
        self._path = path
        self._run: dict[str, str] = {}
        self._tuned: dict[str, str] = {}
        self._machine, complaint = _read(path)
        if complaint:
            warnings.warn(f"products are timed anew: {complaint} in {path}", stacklevel=2)

    def begin_run(self, algorithms: Mapping[str, str]) -> None:
        """From here on these go before the machine's."""
        self._run, self.used = dict(algorithms), {}

    def find(self, product: str) -> str | None:
        """The algorithm for a product, if there is one."""
        return self._run.get(product) or self._machine.get(product)

    def use(self, product: str, algorithm: str, *, tuned: bool) -> None:
        """Note what computes a product; what was just `tuned` is written to the machine's file."""
        self.used[product] = algorithm
        if tuned:
            self._tuned[product] = self._machine[product] = algorithm
            self._save()

    def refuse(self, product: str) -> None:
        """Drop an algorithm that the library does not take."""
        lost = "; the same bits are no longer promised" if product in self._run else ""
        text = f"the library refuses the algorithm kept for a product, which is timed anew{lost}"
        warnings.warn(f"{text}: {product}", stacklevel=2)
        self._run.pop(product, None)
        self._machine.pop(product, None)

    def _save(self) -> None:
        """Add to the file what this process found; others may have added to it meanwhile."""
        written = json.dumps({**_read(self._path)[0], **self._tuned}, indent=0)
        try:
            cache.put(self._path, written.encode())
        except OSError as error:
            # A full or read-only disk costs the next start time, not this run.
            warnings.warn(f"products are timed anew next time: {error}", stacklevel=2)


def _read(path: Path) -> tuple[dict[str, str], str]:
    """The table in a file, and what is wrong with it, or nothing."""
    try:
        table = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as error:
        return {}, f"{type(error).__name__}: {error}"
    if not intact(table):
        return {}, "expected algorithms as they were written, got others"
    return table, ""
