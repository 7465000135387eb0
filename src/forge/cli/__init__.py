"""The command line: `forge train`, `generate`, `verify`, `kernels`."""

from forge.cli.app import main

__all__ = ["main"]
