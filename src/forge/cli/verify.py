"""`forge verify`."""

from __future__ import annotations

import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from forge import verify as table
from forge.cli.flags import JSON, REPEATED
from forge.cli.output import Console, ReaderLeftError, silence
from forge.models import GPT2Config
from forge.run import choices, model
from forge.tensor import Device

_LINE = "{:24} {:9} {:>5} {:>9} {:>9} {}"


def verify(
    *,
    device: str = "auto",
    op: Annotated[tuple[str, ...], REPEATED] = (),
    model_: Annotated[Path | None, Parameter(name="--model")] = None,
    verbose: Annotated[bool, REPEATED] = False,
    json_: Annotated[bool, JSON] = False,
) -> int:
    """Hold every op's kernels and gradients on this machine to their definitions.

    The definitions are plain NumPy in float64; errors are relative, in norm, the largest of all
    cases of an op in a dtype. Exit code 1 when any case fails; those that fail are shown.

    Parameters
    ----------
    device
        auto, cpu, cuda or reference.
    op
        Only this op; repeatable.
    model_
        Also the shapes of this trained model: a run or a checkpoint folder.
    verbose
        Show every case.
    json_
        Print one JSON document, with every case.
    """
    place, reason = choices.find_device(device)
    shapes = None if model_ is None else model.load(model_, place).model.config
    if not op:
        choices.prepare(place, "all")
    start = time.perf_counter()
    try:
        results = _check(place, reason, op, shapes, verbose, json_)
    except BrokenPipeError as error:
        # Exit code 0 would say that all passed.
        raise ReaderLeftError(
            "[verify] expected a reader of the verdicts, got none any more, and checked no further"
        ) from error
    failed = sum(not result.ok for result in results)
    seconds = time.perf_counter() - start
    summary = f"{len(results)} cases, {failed} failed, {seconds:.0f} s"
    try:
        print(table.as_json(results) if json_ else summary, flush=True)
    except BrokenPipeError:
        # All is checked: the exit code says how it went, read or not.
        silence(sys.stdout)
    return 1 if failed else 0


def _check(
    place: Device,
    reason: str,
    ops: tuple[str, ...],
    shapes: GPT2Config | None,
    verbose: bool,
    json_: bool,
) -> list[table.Result]:
    """Check, and show what was found of each op, unless it will be a document."""
    results: list[table.Result] = []
    console = Console(soft_wrap=True)
    # The cases of an op come one after the other.
    for name, cases in groupby(table.run(place, ops=ops or None, model=shapes), lambda r: r.op):
        of_op = list(cases)
        if not results and not json_:
            console.print(f"device {place.name} ({reason})")
            console.print(_LINE.format("op", "dtype", "cases", "forward", "gradient", "verdict"))
        results += of_op
        if json_:
            continue
        for dtype in dict.fromkeys(result.dtype for result in of_op):
            _show(console, name, dtype, [r for r in of_op if r.dtype == dtype], verbose)
    return results


def _show(
    console: Console, op: str, dtype: str, results: list[table.Result], verbose: bool
) -> None:
    failed = [result for result in results if not result.ok]
    gradients = [r.gradient_error for r in results if r.gradient_error is not None]
    line = _LINE.format(
        op,
        dtype,
        len(results),
        f"{max(result.forward_error for result in results):.1e}",
        f"{max(gradients):.1e}" if gradients else "–",
        f"{len(failed)} FAILED" if failed else "ok",
    )
    console.print(line, style="bold red" if failed else None, markup=False)
    for result in results if verbose else failed:
        console.print(f"  {result.case}: {'; '.join(result.failures) or 'ok'}", markup=False)
