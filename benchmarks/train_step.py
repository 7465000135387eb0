"""A training step of Forge beside PyTorch's and JAX's, each in its own process, in turn.

python benchmarks/train_step.py [--device cpu|cuda] [--model baby|124M|1.5B] [--precision bf16]
       [--batch N|max] [--length T] [--peers NAMES] [--rounds N] [--threads N] [--recompute]
       [--roofline] [--profile] [--json]

Every figure is of the machine warmed up: a GPU is limited by its power and slower after seconds.
Sides take turns, and a side's figure is the median of its rounds; what each does is in
`torch_side.py`, `jax_side.py` and `forge_side.py`. `--peers` names some of PEERS below; `best` is
all four of PyTorch's best, and the table names the one that was. `--batch max` lets each side find
the largest batch that fits. Memory is the GPU's in use less an empty context's; on a CPU, what the
process held at most, libraries included. `--json` prints the rows {work, precision, peer,
peer_precision, peer_value, forge_value, unit, ratio}: ratio is Forge's value over the peer's.

Forge's step is captured and replayed, as in a run. `--profile` shows a replay on a CPU, with what
it spends outside of kernels, and the kernels of an eager step on a GPU.

On a CPU the last column is the share of the multiply-adds that this machine, measured in the same
run, can do at most: of six operations for each weight of a matrix and token, as attention's differ
between sides.
"""

import argparse
import contextlib
import json
import sys

from sides import Side, default_threads, run
from table import Peer, chosen, measure, middle, options_of, rows_of, show, show_kernels

FORGE = Peer("Forge", "forge_side.py")
RECOMPUTING = Peer("Forge, recomputing", "forge_side.py", work="train-recompute")

BATCHES = {
    ("cuda", "124M"): (64, 1024),
    ("cuda", "1.5B"): (16, 1024),
    ("cuda", "baby"): (12, 64),
    ("cpu", "124M"): (1, 1024),
    ("cpu", "1.5B"): (1, 1024),
    ("cpu", "baby"): (12, 64),
}
TORCH = "torch_side.py"
# By device and name.
PEERS = {
    "cuda": {
        "nanogpt": Peer("PyTorch, nanoGPT compiled", TORCH, ("nanogpt", "any", "default")),
        "flash": Peer("PyTorch best, flash", TORCH, ("best", "flash", "default")),
        "cudnn": Peer("PyTorch best, cuDNN", TORCH, ("best", "cudnn", "default")),
        "flash-max": Peer("PyTorch best, flash, tuned", TORCH, ("best", "flash", "max-autotune")),
        "cudnn-max": Peer("PyTorch best, cuDNN, tuned", TORCH, ("best", "cudnn", "max-autotune")),
        "jax": Peer("JAX jit", "jax_side.py"),
    },
    "cpu": {
        "nanogpt": Peer("PyTorch, nanoGPT eager", TORCH, ("nanogpt", "any", "eager")),
        "compiled": Peer("PyTorch, nanoGPT compiled", TORCH, ("nanogpt", "any", "default")),
        "autocast": Peer(
            "PyTorch, nanoGPT bf16 autocast", TORCH, ("nanogpt", "any", "eager"), "bf16"
        ),
        "autocast-compiled": Peer(
            "PyTorch, bf16 autocast compiled", TORCH, ("nanogpt", "any", "default"), "bf16"
        ),
        "low": Peer("PyTorch, bf16 weights compiled", TORCH, ("best", "any", "default"), "bf16"),
        "jax": Peer("JAX jit", "jax_side.py"),
    },
}
BEST = ("flash", "cudnn", "flash-max", "cudnn-max")
GROUPS = {
    "cuda": {"best": BEST},
    "cpu": {"best": ("compiled",), "bf16": ("autocast", "autocast-compiled", "low")},
}
# In bf16 on a CPU nanoGPT is under autocast, which `autocast` says; in fp32 its row is shown too.
DEFAULT = {
    ("cuda", "bf16"): "nanogpt,flash,cudnn,jax",
    ("cuda", "fp32"): "nanogpt,jax",
    ("cpu", "fp32"): "nanogpt,compiled,autocast,jax",
    ("cpu", "bf16"): "bf16,jax",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options_of(parser)
    parser.add_argument("--model", choices=["baby", "124M", "1.5B"], default="baby")
    parser.add_argument("--batch", help="samples of a step, or max: the most that fit each side")
    parser.add_argument("--length", type=int, help="tokens of a sample, and the model's context")
    parser.add_argument("--recompute", action="store_true", help="also Forge with recomputation")
    parser.add_argument("--roofline", action="store_true", help="also products and attention alone")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel")
    args = parser.parse_args()
    side = side_of(args)
    names = args.peers or DEFAULT[args.device, side.precision]
    peers = chosen(names, PEERS[args.device], GROUPS[args.device], parser)
    ours = [FORGE, RECOMPUTING] if args.recompute else [FORGE]
    limits = run("ceilings.py", side) if args.device == "cpu" else None
    results = measure(side, ours + peers, args, lambda r: r["batch"] * side.length)
    size = f"B={side.batch}" if side.batch else "B=max"
    work = f"train {side.model} {size} T={side.length} {side.device}"
    best, least = best_of(peers, results)
    rows = []
    for mine in ours:
        named = work if mine is FORGE else f"{work}, recomputing"
        rows += rows_of(named, side, peers, results, mine.name)
        if best:
            found = {**results, "PyTorch at its best": results[best.name]}
            top = best._replace(name="PyTorch at its best")
            rows += rows_of(named, side, [top], found, mine.name)[:1]
            found = {**results, "PyTorch at its best": results[least.name]}
            rows += rows_of(named, side, [top], found, mine.name)[1:]
    if args.json:
        print(json.dumps(rows, indent=2))
    out = sys.stderr if args.json else sys.stdout
    with contextlib.redirect_stdout(out):
        print(f"\n{work} {side.precision}")
        if limits:
            print(
                f"at most {limits['flops'] / 1e9:,.0f} GFLOP/s of {limits['of']}, "
                f"{limits['read'] / 1e9:,.1f} GB/s read, {limits['copy'] / 1e9:,.1f} copied"
            )
        show(results, ours + peers, side, lambda rate, _: share(rate, side, limits))
        if best:
            print(f"PyTorch at its best: {best.name}; with the least memory: {least.name}")
        if args.roofline:
            roofline(side, results, args)
        if args.profile:
            show_kernels(run("forge_side.py", side._replace(work="profile"), limit=args.limit))


def side_of(args):
    B, T = BATCHES[args.device, args.model]
    length = args.length or T
    # As many tokens as otherwise.
    batch = max(1, B * T // length)
    if args.batch:
        batch = 0 if args.batch == "max" else int(args.batch)
    precision = args.precision or ("bf16" if args.device == "cuda" else "fp32")
    threads = default_threads(args.device) if args.threads is None else args.threads
    return Side("train", args.device, args.model, precision, batch, length, threads)


def best_of(peers, results):
    """The fastest of PyTorch's best that ran, and the one of least memory; None without any."""
    ran = [peer for peer in peers if peer.options[:1] == ("best",) and peer.name in results]
    if not ran:
        return None, None
    return (
        max(ran, key=lambda peer: middle(results[peer.name], "rate")),
        min(ran, key=lambda peer: middle(results[peer.name], "memory")),
    )


def share(rate, side, limits):
    """What part of the machine's multiply-adds a rate of tokens is, in words."""
    if not limits:
        return ""
    return f"{6 * side.weights * rate / limits['flops']:.0%} of {limits['of']}"


def roofline(side, results, args):
    """Show the time of a step's products and attention alone, and how much longer the step is."""
    floor = run("forge_side.py", side._replace(work="floor"), limit=args.limit)
    if floor is None:
        return
    milliseconds = 1e3 * floor["seconds"]
    print(
        f"\n{floor['products']} plain products and {floor['attention']} of attention alone: "
        f"{milliseconds:.2f} ms"
    )
    if "Forge" in results:
        step = 1e3 * middle(results["Forge"], "seconds")
        print(f"the step takes {step:.2f} ms, {step / milliseconds:.3f} of it")


if __name__ == "__main__":
    main()
