"""An entry of a backend's table of kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """A kernel of a backend: the module and name it is found under, and the dtypes it serves.

    One with a `workspace` takes memory from the pool beside its results: `<name>_workspace` of the
    same module tells its buffers, in bytes, for the same arguments.
    """

    module: str
    name: str
    dtypes: frozenset[str]
    workspace: bool = False

    def load(self) -> Callable[..., Any]:
        """The function; its module is imported at the first call, not before it is needed."""
        return self._find(self.name)

    def load_workspace(self) -> Callable[..., tuple[int, ...]]:
        """The function that tells the workspace."""
        return self._find(f"{self.name}_workspace")

    def _find(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), name)
        return function


def table(
    package: str,
    families: dict[str, tuple[str, ...]],
    dtypes: frozenset[str],
    workspace: Collection[str] = (),
) -> dict[str, Kernel]:
    """The table of a backend whose kernels are listed by family, one module each.

    `workspace` names those that have one.
    """
    return {
        name: Kernel(f"{package}.{family}", name, dtypes, name in workspace)
        for family, names in families.items()
        for name in names
    }
