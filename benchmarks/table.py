"""What the drivers share: sides measured in turn, the rows of `--json`, and the tables."""

import statistics
import sys
from typing import NamedTuple

from sides import run


class Peer(NamedTuple):
    """A side: its name, its program and that one's options, and what it has of its own."""

    name: str
    script: str
    options: tuple = ()
    precision: str = ""
    work: str = ""


def options_of(parser):
    """The options of all drivers."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--peers", help="names of PEERS, with commas between, or none")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--threads", type=int, help="CPU threads of every side (2 on a CPU)")
    parser.add_argument("--limit", type=int, default=300, help="seconds that a side may take")
    parser.add_argument("--jax", default=sys.executable, help="the Python that has JAX")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")


def chosen(names, known, groups, parser):
    """The peers of a list of names, which may be those of groups."""
    wanted = [name for name in names.split(",") if name not in ("", "none")]
    wanted = [each for name in wanted for each in groups.get(name, (name,))]
    if unknown := [name for name in wanted if name not in known]:
        names = ", ".join([*known, *groups])
        parser.error(f"expected --peers of {names} or none, got {', '.join(unknown)}")
    return [known[name] for name in dict.fromkeys(wanted)]


def measure(side, sides, args, tokens):
    """Results by name, one for each round; `tokens(result)` are those of a step."""
    results = {each.name: [] for each in sides}
    for _ in range(args.rounds):
        for each in sides:
            python = args.jax if each.script == "jax_side.py" else sys.executable
            own = side._replace(
                precision=each.precision or side.precision, work=each.work or side.work
            )
            result = run(each.script, own, *each.options, limit=args.limit, python=python)
            if result is None:
                continue
            result["rate"] = tokens(result) / result["seconds"]
            results[each.name].append(result)
            print(f"{each.name}: {_line(result)}", file=sys.stderr, flush=True)
    return {name: found for name, found in results.items() if found}


def _line(result):
    """A result in a line: it must be worth something when a later side is cut off."""
    parts = [f"{1e3 * result['seconds']:.3f} ms, {result['rate']:,.1f} tokens/s"]
    parts.append(f"batch {result['batch']}, first step {result['first_step']:.1f} s")
    for name, what in (("memory", "in use"), ("allocated", "allocated"), ("rss", "of the host")):
        if result.get(name):
            parts.append(f"{result[name] / 2**30:.2f} GiB {what}")
    if result.get("uncaptured"):
        parts.append(f"{result['uncaptured']} graphs NOT captured")
    parts.append(f"{1e3 * result['cpu']:.3f} ms of CPU, {result['cores']} cores busy")
    if "losses" in result:
        parts.append("loss {:.3f} to {:.3f}".format(*result["losses"]))
    return ", ".join(parts)


def middle(found, key):
    """The median of a side's rounds."""
    return statistics.median(result[key] for result in found)


def row(work, precision, peer, unit, theirs, ours):
    """A row of `--json`: ratio is Forge's value over the peer's."""
    return {
        "work": work,
        "precision": precision,
        "peer": peer.name,
        "peer_precision": peer.precision or precision,
        "peer_value": theirs,
        "forge_value": ours,
        "unit": unit,
        "ratio": ours / theirs,
    }


def rows_of(work, side, peers, results, ours="Forge"):
    """Rate and memory of Forge over those of each peer that ran."""
    if ours not in results:
        return []
    memory = "memory" if side.device == "cuda" else "rss"
    rows = []
    for peer in peers:
        if peer.name not in results:
            continue
        both = results[peer.name], results[ours]
        rates = [middle(found, "rate") for found in both]
        rows.append(row(work, side.precision, peer, "tokens/s", *rates))
        sizes = [middle(found, memory) / 2**30 for found in both]
        rows.append(row(f"{work}, memory", side.precision, peer, "GiB", *sizes))
    return rows


def show(results, sides, side, share):
    """The table, a line for each side; `share(rate, precision)` words its part of a ceiling."""
    memory = "memory" if side.device == "cuda" else "rss"
    print(f"{'':34} {'ms':>9} {'tokens/s':>11} {'GiB':>6} {'Forge is':>9}")
    for each in sides:
        found = results.get(each.name)
        if found is None:
            print(f"{each.name:34} {'–':>9}")
            continue
        rate, milliseconds = middle(found, "rate"), 1e3 * middle(found, "seconds")
        gib = middle(found, memory) / 2**30
        ratio = ""
        if each.name != "Forge" and "Forge" in results:
            ratio = f"{middle(results['Forge'], 'rate') / rate:.2f}x"
        name = each.name if side.batch else f"{each.name}, B={found[0]['batch']}"
        line = f"{name:34} {milliseconds:9.3f} {rate:11,.1f} {gib:6.2f} {ratio:>9}"
        print(f"{line}  {share(rate, each.precision or side.precision)}".rstrip())


def show_kernels(result):
    """A side's table of kernels."""
    if result is None:
        return
    inside = sum(seconds for seconds, _, _ in result["kernels"])
    print("\nForge's kernels, of one step:")
    for seconds, calls, name in result["kernels"]:
        share = seconds / result["seconds"]
        print(f"{1e3 * seconds:10.3f} ms {share:6.1%} {calls:6.0f} x {name}")
    print(f"{1e3 * inside:10.3f} ms in all, of {1e3 * result['seconds']:.3f}")
    if result["outside"] is not None:
        share = result["outside"] / result["seconds"]
        print(f"{1e3 * result['outside']:10.3f} ms {share:6.1%} outside of kernels")
