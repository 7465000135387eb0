"""What a writer of ops imports, and nothing more.

See CONTRIBUTING.md for a worked example.
"""

from forge.autograd.check import check_grads
from forge.backends.registry import kernels, on_host
from forge.ops import check
from forge.ops.define import Record, op
from forge.tensor import Tensor, empty, empty_like, zeros, zeros_like

__all__ = [
    "Record",
    "Tensor",
    "check",
    "check_grads",
    "empty",
    "empty_like",
    "kernels",
    "on_host",
    "op",
    "zeros",
    "zeros_like",
]
