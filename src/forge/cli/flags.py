"""Every field of the configuration as a flag; a flag that was not given is None."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter, Token

from forge.config import FIELDS, Setting, settings


def whole(kind: Any, tokens: Sequence[Token]) -> int:
    """An integer as it is written: 4.5 is none, which the command line would round."""
    text = tokens[-1].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'expected an integer, got "{text}"') from None


def _flag(setting: Setting) -> Any:
    group = Group(setting.section, sort_key=list(_SECTIONS).index(setting.section))
    kind = FIELDS[setting.name] | None
    parameter = Parameter(
        group=group,
        help=_help(setting),
        show_default=False,
        negative=(),
        allow_repeating=True,
        converter=whole if kind == int | None else None,
    )
    return Annotated[kind, parameter]


def _help(setting: Setting) -> str:
    default = "" if setting.default is None else f" (default: {_shown(setting.default)})"
    limits = " ".join(part for part in (setting.range, setting.unit) if part)
    return setting.help[0].upper() + setting.help[1:] + default + (f" · {limits}" if limits else "")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


# A flag that may be repeated, and `--json`: their defaults go without saying.
REPEATED = Parameter(negative=(), show_default=False)
JSON = Parameter(name="--json", negative=(), show_default=False)
INTEGER = Parameter(converter=whole)

_SECTIONS = dict.fromkeys(setting.section for setting in settings())

if TYPE_CHECKING:

    class Flags:
        """The fields of `Config`, each by default None."""

else:
    Flags = dataclasses.make_dataclass(
        "Flags",
        [(setting.name, _flag(setting), dataclasses.field(default=None)) for setting in settings()],
        kw_only=True,
    )
    Flags.__module__ = __name__


def given(flags: Any) -> dict[str, Any]:
    """The flags that the user gave, by field name."""
    return {} if flags is None else {k: v for k, v in vars(flags).items() if v is not None}
