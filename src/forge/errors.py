"""The errors Forge raises, one class per kind of mistake.

Every message reads `[op or command] expected …, got …`, with the shapes, dtypes and devices that
matter, followed by one hint.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class ForgeError(Exception):
    """Base of every error that Forge raises on purpose."""


class ShapeError(ForgeError, ValueError):
    """Shapes or ranks that do not fit together."""


class DtypeError(ForgeError, TypeError):
    """A dtype that the op does not take."""


class DeviceError(ForgeError, RuntimeError):
    """A device that is absent, unknown, or differs between arguments."""


class DeviceLostError(DeviceError):
    """A device that failed at work it was given; what it held is lost."""


class OutOfMemoryError(DeviceError, MemoryError):
    """A device without room for what was asked."""


class ArgumentError(ForgeError, ValueError):
    """An attribute (a probability, a form, an axis) out of its range."""


class TapeError(ForgeError, RuntimeError):
    """A tape used in a way that would give wrong gradients."""


class GradientError(ForgeError, RuntimeError):
    """A gradient that a rule got wrong, or that does not exist."""


class NonFiniteError(ForgeError, ArithmeticError):
    """A value or gradient became infinite or not a number."""


class FallbackError(ForgeError, RuntimeError):
    """A reference kernel would have served where `strict` forbids it."""


class ConfigError(ForgeError, ValueError):
    """A setting that is unknown, of the wrong type, or out of range."""


class DataError(ForgeError, ValueError):
    """Data that is missing, empty, too short or unreadable."""


class CheckpointError(ForgeError, RuntimeError):
    """A checkpoint that is absent, torn, edited or of another format."""


def installing(extra: str) -> str:
    """How to get the packages of one of Forge's extras: it is installed from a clone."""
    return f"in a clone of Forge, pip install -e '.[{extra}]' installs what it needs"


# What other libraries have as attributes of an array.
_ELSEWHERE = {
    "T": "ops.transpose(x, (1, 0))",
    "backward": "tape.backward(loss), a mapping from leaves to gradients",
    "cpu": "forge.tensor(x, device='cpu')",
    "cuda": "forge.tensor(x, device='cuda')",
    "detach": "x of a Tensor, x.value of a Var",
    "float": "ops.cast(x, 'float32')",
    "grad": "tape.backward(loss)[leaf]",
    "requires_grad": "tape.leaf(x), which gives a Var",
    "to": "forge.tensor(x, device=…), or ops.cast(x, dtype)",
} | {
    name: f"ops.{name}(x)"
    for name in (
        "exp",
        "gelu",
        "log",
        "max",
        "mean",
        "reshape",
        "softmax",
        "sum",
        "tanh",
        "transpose",
    )
}


def no_attribute(x: Any, name: str) -> Any:
    """Raise `AttributeError` for an attribute that a Tensor or Var lacks, with what there is."""
    hint = _ELSEWHERE.get(name)
    if "value" in type(x).__slots__ and hasattr(type(x.value), name):
        hint = f"x.value.{name}"
    raise _absent(type(x).__name__, name, hint)


# Names that a hint lists where none is near.
MOST = 8


def attribute_hints(elsewhere: Mapping[str, str]) -> Callable[[Any, str], Any]:
    """A class's `__getattr__`: raises `AttributeError` that says what there is for a name."""

    def missing(x: Any, name: str) -> Any:
        raise _absent(type(x).__name__, name, elsewhere.get(name))

    return missing


def _absent(kind: str, name: str, hint: str | None) -> AttributeError:
    article = "an" if kind[0] in "AEIOU" else "a"
    return AttributeError(
        f"[{kind}] expected an attribute of {article} {kind}, got {name!r}"
        + (f"; write {hint}" if hint else "")
    )


def nearest(word: str, words: Iterable[str]) -> str:
    """A hint for a misspelt name, whatever its case: what it begins or is near to, else some."""
    by_case = {each.lower(): each for each in words}
    word = word.lower().replace("-", "_")
    near = [word] if word in by_case else [each for each in by_case if each.startswith(word)][:1]
    if not word or not near:
        alike = {
            each: difflib.SequenceMatcher(None, each, word).ratio()
            for each in difflib.get_close_matches(word, by_case, n=3)
        }
        # Those that are as near as the nearest, or hardly less.
        near = [each for each, ratio in alike.items() if ratio > max(alike.values()) - 0.05]
    if not near:
        some = [*by_case.values()][:MOST]
        return f"choose from: {', '.join(some)}{', …' if len(some) < len(by_case) else ''}"
    *first, last = (by_case[each] for each in near)
    return f"did you mean {', '.join(first) + ' or ' if first else ''}{last}?"


def no_single_name(op: str, names: Iterable[str], error: type[ForgeError]) -> None:
    """Raise `error` for a str where names are expected: it would be taken letter by letter."""
    if isinstance(names, str):
        raise error(f"[{op}] expected several names, got the str {names!r}; pass ({names!r},)")
