"""A training step of Forge beside PyTorch's and JAX's, each in its own process, in turn.

python benchmarks/train_step.py [--device cpu|cuda] [--model baby|124M|1.5B] [--precision bf16]
       [--batch N] [--length T] [--peers nanogpt,best,jax] [--rounds N] [--json] [--profile]

Every figure is of the machine warmed up: a GPU is limited by its power and slower after seconds.
Sides take turns, and a side's figure is the median of its rounds. `--json` prints the rows
{work, precision, peer, peer_precision, peer_value, forge_value, unit, ratio}: tokens per second,
then GiB of GPU memory in use less an empty context's; ratio is Forge's over the peer's.
"""

import argparse
import json
import statistics
import sys

from sides import Side, run

BATCHES = {
    ("cuda", "124M"): (64, 1024),
    ("cuda", "1.5B"): (16, 1024),
    ("cuda", "baby"): (12, 64),
    ("cpu", "124M"): (1, 1024),
    ("cpu", "baby"): (12, 64),
}
# Name -> script and its options, for each device.
PEERS = {
    "cuda": {
        "nanogpt": ("PyTorch, nanoGPT compiled", "torch_side.py", ("nanogpt", "any", "default")),
        "flash": ("PyTorch best, flash", "torch_side.py", ("best", "flash", "default")),
        "best": ("PyTorch best, cuDNN", "torch_side.py", ("best", "cudnn", "default")),
        "tuned": ("PyTorch best, max-autotune", "torch_side.py", ("best", "cudnn", "max-autotune")),
        "jax": ("JAX jit", "jax_side.py", ()),
    },
    "cpu": {
        "nanogpt": ("PyTorch, nanoGPT eager", "torch_side.py", ("nanogpt", "any", "eager")),
        "best": ("PyTorch, compiled", "torch_side.py", ("best", "any", "default")),
        "jax": ("JAX jit", "jax_side.py", ()),
    },
}


def measure(side, peers, rounds):
    """Results by name, those of Forge under "Forge": one a round."""
    sides = {"Forge": ("forge_side.py", ())}
    sides |= {PEERS[side.device][peer][0]: PEERS[side.device][peer][1:] for peer in peers}
    results = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (script, options) in sides.items():
            result = run(script, side, *options)
            if result is not None:
                results[name].append(result)
                print(f"{name}: {1e3 * result['seconds']:.2f} ms", file=sys.stderr, flush=True)
    return {name: found for name, found in results.items() if found}


def rows_of(side, results):
    """The rows of `--json`."""
    rows = []
    tokens = side.B * side.T

    def median(name, key):
        return statistics.median(result[key] for result in results[name])

    for name in results:
        if name == "Forge":
            continue
        work = f"train {side.model} B={side.B} T={side.T} {side.device}"
        rates = [tokens / median(each, "seconds") for each in (name, "Forge")]
        rows.append((f"{work} step", name, *rates, "tokens/s"))
        if side.device == "cuda":
            memory = [median(each, "memory") / 2**30 for each in (name, "Forge")]
            rows.append((f"{work} memory", name, *memory, "GiB"))
    return [
        {
            "work": work,
            "precision": side.precision,
            "peer": peer,
            "peer_precision": side.precision,
            "peer_value": theirs,
            "forge_value": ours,
            "unit": unit,
            "ratio": ours / theirs,
        }
        for work, peer, theirs, ours, unit in rows
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=["baby", "124M", "1.5B"], default="baby")
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--peers", default="nanogpt,best,jax", help="of those in PEERS, or none")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--roofline", action="store_true", help="also products and attention alone")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    args = parser.parse_args()
    B, T = BATCHES[args.device, args.model]
    precision = args.precision or ("bf16" if args.device == "cuda" else "fp32")
    side = Side("train", args.device, args.model, precision, args.batch or B, args.length or T)
    peers = [peer for peer in args.peers.split(",") if peer in PEERS[args.device]]
    results = measure(side, peers, args.rounds)
    rows = rows_of(side, results)
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':28} {'ms a step':>10} {'tokens/s':>10} {'GiB':>6} {'Forge is':>9}")
    forge = statistics.median(result["seconds"] for result in results["Forge"])
    for name, found in results.items():
        seconds = statistics.median(result["seconds"] for result in found)
        memory = max(result["memory"] for result in found) / 2**30
        print(
            f"{name:28} {1e3 * seconds:10.2f} {side.B * side.T / seconds:10,.0f} {memory:6.1f} "
            f"{seconds / forge:8.2f}x"
        )
    if args.roofline:
        floor = run("forge_side.py", side._replace(work="floor"))["seconds"]
        print(f"products and attention alone {1e3 * floor:9.2f}; the step is {forge / floor:.3f}x")
    if args.profile:
        profile = run("forge_side.py", side._replace(work="profile"))
        for ms, count, name in profile["kernels"]:
            print(f"{ms:8.3f} ms {count:4} {name}")
        print(f"{profile['total']:8.3f} ms in all")


if __name__ == "__main__":
    main()
