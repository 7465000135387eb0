"""`forge verify`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from forge import verify as table
from forge.cli.flags import JSON, REPEATED
from forge.run import choices, model

# Columns of a line but for the case, which gets what the terminal has left.
_LINE = "{:22} {:{case}} {:9} {:>8} {:>8} {}"
_OTHERS = 22 + 9 + 8 + 8 + len("verdict") + 5


def verify(
    *,
    device: str = "auto",
    op: Annotated[tuple[str, ...], REPEATED] = (),
    model_: Annotated[Path | None, Parameter(name="--model")] = None,
    json_: Annotated[bool, JSON] = False,
) -> int:
    """Hold every op's kernels and gradients on this machine to their definitions.

    The definitions are plain NumPy in float64; an error is relative, in norm, the largest of all
    outputs or gradients of a row. Exit code 1 when any row fails.

    Parameters
    ----------
    device
        auto, cpu, cuda or reference.
    op
        Only this op; repeatable.
    model_
        Also the shapes of this trained model: a run or a checkpoint folder.
    json_
        Print one JSON document.
    """
    place, reason = choices.find_device(device)
    shapes = None if model_ is None else model.load(model_, place).model.config
    start = time.perf_counter()
    results: list[table.Result] = []
    console = Console(highlight=False, soft_wrap=True)
    for result in table.run(place, ops=op or None, model=shapes):
        if not json_ and not results:
            console.print(f"device {place.name} ({reason})")
            titles = ("op", "case", "dtype", "forward", "gradient", "verdict")
            console.print(_LINE.format(*titles, case=_case_width(console)))
        results.append(result)
        if not json_:
            _show(console, result)
    failed = [result for result in results if not result.ok]
    if json_:
        print(table.as_json(results))
    else:
        seconds = time.perf_counter() - start
        console.print(f"{len(results)} rows, {len(failed)} failed, {seconds:.0f} s")
    return 1 if failed else 0


def _show(console: Console, result: table.Result) -> None:
    width = _case_width(console)
    line = _LINE.format(
        result.op,
        result.case if len(result.case) <= width else result.case[: width - 1] + "…",
        result.dtype,
        f"{result.forward_error:.1e}",
        "–" if result.gradient_error is None else f"{result.gradient_error:.1e}",
        "ok" if result.ok else f"FAILED: {'; '.join(result.failures)}",
        case=width,
    )
    console.print(line, style=None if result.ok else "bold red", markup=False)


def _case_width(console: Console) -> int:
    return max(20, min(48, console.width - _OTHERS))
