"""`forge bench`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from rich.table import Table

from forge.cli.flags import INTEGER, JSON
from forge.cli.machine import place
from forge.cli.output import Console
from forge.cli.summary import row
from forge.errors import ArgumentError
from forge.run import bench as measuring
from forge.run import ceilings, speed
from forge.run.choices import lacks_bf16, versions
from forge.run.profile import Profile, peak_rss
from forge.run.workload import MODELS
from forge.tensor import Device

Work = Literal["train", "decode"]
# Kernels that the table shows; those that follow take little.
_SHOWN = 12


def bench(
    work: Work | None = None,
    /,
    *,
    model: Literal["baby", "124M"] = "baby",
    precision: Literal["fp32", "bf16", "int8"] | None = None,
    seconds: float = 5.0,
    device: str = "auto",
    threads: Annotated[int | None, INTEGER] = None,
    json_: Annotated[bool, JSON] = False,
) -> int:
    """Measure how fast this machine trains and decodes, and where the time goes.

    Rates are beside what the machine can do at most, measured in the same run. The model has random
    weights and learns random bytes: nothing is read or written but the cache of kernels.

    Parameters
    ----------
    work
        train or decode (default: both).
    model
        baby has 0.8 million parameters and fits a core's cache, 124M is GPT-2's smallest.
    precision
        fp32 or bf16 (default: bf16 on a GPU, else fp32); int8 weights decode, on a CPU.
    seconds
        About how long to measure each, after a warm-up; on a busy machine take more.
    device
        auto, cpu or cuda.
    threads
        CPU threads (default: as many as cores).
    json_
        Print one JSON document.
    """
    if not 0.0 < seconds <= 3600.0:
        raise ArgumentError(
            f"[bench] expected --seconds above 0, at most 3600, got {seconds}; try 5"
        )
    where = place(device, threads)
    chosen = precision or ("bf16" if where.kind == "cuda" else "fp32")
    works: list[Work] = ["train", "decode"] if work is None else [work]
    console = Console(stderr=True)
    measuring.prepare(where, works, chosen)
    found: dict[str, measuring.Speed] = {}
    for each in works:
        with console.status(f"{each}, about {seconds:.0f} s"):
            measure = measuring.train if each == "train" else measuring.decode
            found[each] = measure(model, where, chosen, seconds)
    memory = peak_rss()
    with console.status("what the machine can do"):
        # Last, since it takes half a gigabyte.
        limits = ceilings.measure(where, chosen)
    document = {
        **_machine(where, model, chosen),
        "ceilings": limits._asdict(),
        "peak_rss": memory,
        **{each: _row(speed_, limits) for each, speed_ in found.items()},
    }
    if json_:
        print(json.dumps(document, indent=1))
        return 0
    _introduce(document)
    if chosen == "bf16" and (lack := lacks_bf16(where)):
        row("note", f"forge train takes fp32 alone here: {lack}")
    for each in works:
        _show(each, found[each], limits)
    return 0


def _machine(device: Device, model: str, precision: str) -> dict[str, Any]:
    threads = None
    if device.kind == "cpu":
        from forge.backends.cpu import threads as pool

        threads = pool.get_threads()
    return {
        "device": device.name,
        "threads": threads,
        "versions": versions(device),
        "model": model,
        "precision": precision,
    }


def _introduce(document: dict[str, Any]) -> None:
    """What was measured, and what the machine can do."""
    threads = document["threads"]
    row("device", document["device"] + ("" if threads is None else f", {threads} threads"))
    c = MODELS[document["model"]]
    row(
        "model",
        f"{document['model']}: {c.n_layer} blocks, width {c.n_embd}, context {c.block_size}, "
        f"vocabulary {c.vocab_size}; {document['precision']}",
    )
    limits = document["ceilings"]
    read = "" if limits["read"] is None else f"{limits['read'] / 1e9:,.1f} GB/s read, "
    row(
        "at most",
        f"{limits['flops'] / 1e9:,.0f} GFLOP/s of {limits['of']}; {read}"
        f"{limits['copy'] / 1e9:,.1f} GB/s copied (read and written)",
    )
    row("memory", f"{document['peak_rss'] / 1e6:,.0f} MB of the host's at most, libraries included")


def _row(found: measuring.Speed, limits: ceilings.Ceilings) -> dict[str, Any]:
    """What `--json` holds of a work."""
    kernels = [
        {"name": r.name, "shapes": r.shapes, "calls": r.calls, "seconds": r.seconds}
        for r in found.profile.rows
    ]
    profile = found.profile
    outside = None if profile.outside is None else profile.outside / profile.seconds
    return {
        "tokens_per_s": found.tokens_per_s,
        "seconds_per_step": found.seconds,
        "first_step_seconds": found.first,
        "share_of_ceiling": found.share(limits),
        "share_outside_kernels": outside,
        "peak_memory": found.memory,
        "kernels": kernels,
    }


def _show(work: Work, found: measuring.Speed, limits: ceilings.Ceilings) -> None:
    per = "a step" if work == "train" else "a token"
    print()
    row(
        work,
        f"{found.tokens_per_s:,.0f} tokens/s, {1e3 * found.seconds:,.3g} ms {per}, "
        f"the first {found.first:,.2g} s; {found.memory / 1e6:,.0f} MB of buffers at most",
    )
    share = found.share(limits)
    if share is not None and work == "train":
        row("", f"{share:.0%} of these operations ({speed.FORMULA} for a token)")
    elif share is not None:
        row("", f"{share:.0%} of this bandwidth (every token reads the weights)")
    _table(found.profile)


def _table(profile: Profile) -> None:
    """The kernels of a step."""
    table = Table(box=None, pad_edge=False)
    for column in ("ms", "share", "calls", "kernel, and the shapes it is given"):
        table.add_column(column, justify="left" if column.startswith("kernel") else "right")

    def add(seconds: float, calls: str, name: str) -> None:
        share = f"{seconds / profile.seconds:.1%}"
        table.add_row(f"{1e3 * seconds:,.3f}", share, calls, name)

    for each in profile.rows[:_SHOWN]:
        add(each.seconds, f"{each.calls:.0f}", str(each))
    rest = profile.rows[_SHOWN:]
    if rest:
        add(sum(r.seconds for r in rest), f"{sum(r.calls for r in rest):.0f}", "all other kernels")
    if profile.outside is not None:
        add(profile.outside, "", "outside of kernels")
    Console(soft_wrap=True).print(table, markup=False)
