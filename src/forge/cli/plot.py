"""`forge plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from forge.errors import ArgumentError, DataError, installing
from forge.run import metrics

_LOG = "metrics.jsonl"
_SUFFIXES = (".png", ".svg")
# Lines until matplotlib's own colours begin again.
_COLORS = 10


def plot(runs: Annotated[tuple[Path, ...], Parameter(name="run")], /, *, out: Path) -> int:
    """Draw the losses of one or more runs: thin lines for training, dots for held-out text.

    Parameters
    ----------
    runs
        Run folders, or files like `metrics.jsonl`.
    out
        Picture to write: its name ends in .png or .svg.
    """
    if out.suffix.lower() not in _SUFFIXES:
        raise ArgumentError(
            f"[plot] expected --out to end in {' or '.join(_SUFFIXES)}, got {out}; rename it"
        )
    if not out.absolute().parent.is_dir():
        raise ArgumentError(
            f"[plot] expected a folder for --out, got {out.parent}, which is none; make it first"
        )
    series = {_label(run, runs): _rows(run) for run in runs}
    figure, axes = _figure(len(series))
    if len(series) == 1:
        ((name, rows),) = series.items()
        axes.set_title(name)
        _draw(axes, rows, "training", "held out")
        axes.legend(frameon=False)
    else:
        axes.set_title("thin: training    dots: held out", fontsize="medium")
        for name, rows in series.items():
            _draw(axes, rows, name, None)
        # Beside the curves: a list of names has no place among them.
        figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(out, dpi=150)
    print(f"Written to {out}")
    return 0


def _rows(run: Path) -> list[metrics.Row]:
    """The logged steps of a run folder, or of a file."""
    if not run.exists():
        raise DataError(
            "[plot] expected a run folder or a file like metrics.jsonl, got a path that does not "
            f"exist: {run}; paths begin at {Path.cwd()}"
        )
    if run.is_dir() and not any((run / name).exists() for name in ("config.toml", _LOG)):
        raise DataError(
            f"[plot] expected a run folder, got {run}, which holds no run; name one that forge "
            "train wrote"
        )
    path = run / _LOG if run.is_dir() else run
    # The file begins with the training; a run stopped before it has none.
    found = metrics.read(path) if path.exists() else []
    rows = [row for row in found if "loss" in row]
    if not rows:
        again = f", or go on with: forge train --resume --out {run}" if run.is_dir() else ""
        raise DataError(
            f"[plot] expected logged steps, got none in {run} yet; let it train for --log-every "
            f"steps{again}"
        )
    return rows


def _label(run: Path, runs: tuple[Path, ...]) -> str:
    """The folder's name, or the whole path where names are not different."""
    names = [other.resolve().name for other in runs]
    return str(run) if len(set(names)) < len(names) else run.resolve().name


def _figure(runs: int) -> tuple[Any, Any]:
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError(f"[plot] expected matplotlib, got none; {installing('plot')}") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    if runs > _COLORS:
        axes.set_prop_cycle(color=colormaps["turbo"].resampled(runs)(range(runs)))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw(axes: Any, rows: list[metrics.Row], training: str, held_out: str | None) -> None:
    """Draw a run; without a label of its own, its held-out line carries the run's."""
    steps, losses = zip(*((row["step"], row["loss"]) for row in rows), strict=True)
    measured = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    alpha = 0.45 if measured else 1.0
    (line,) = axes.plot(steps, losses, linewidth=0.8, alpha=alpha, label=training)
    if measured:
        if held_out is None:
            line.set_label(None)
        axes.plot(
            *zip(*measured, strict=True),
            marker="o",
            markersize=4,
            linewidth=1.8,
            zorder=3,  # above the training of all runs
            color=line.get_color(),
            label=held_out or training,
        )
