"""How float32 operands of products are rounded on the GPU: not at all, or to TF32's 10 bits.

One setting of the process, off by default. What depends on it carries it in its own description (a
`Product`, a kernel's constant, the key of a captured step), so that a change takes effect at once.
"""

from __future__ import annotations

_tf32 = False


def allow_tf32(allowed: bool) -> None:
    """Let products of float32 round their operands to TF32, several times as fast; or no more."""
    global _tf32
    _tf32 = allowed


def tf32(dtype: str = "float32") -> bool:
    """Whether products of operands of this dtype round them to TF32."""
    return _tf32 and dtype == "float32"
