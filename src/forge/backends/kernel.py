"""An entry of a backend's table of kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """A kernel of a backend: the module and name it is found under, and the dtypes it serves."""

    module: str
    name: str
    dtypes: frozenset[str]

    def load(self) -> Callable[..., Any]:
        """The function; its module is imported at the first call, not before it is needed."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.name)
        return function


def table(
    package: str, families: dict[str, tuple[str, ...]], dtypes: frozenset[str]
) -> dict[str, Kernel]:
    """The table of a backend whose kernels are listed by family, one module each."""
    return {
        name: Kernel(f"{package}.{family}", name, dtypes)
        for family, names in families.items()
        for name in names
    }
