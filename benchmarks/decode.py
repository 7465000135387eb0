"""Decoding with a cache: Forge beside PyTorch, each in its own process, in turn.

python benchmarks/decode.py [--device cpu|cuda] [--model baby|124M|1.5B] [--precision PRECISION]
       [--batch 1,64] [--peers NAMES] [--rounds N] [--threads N] [--profile] [--json]

Greedy, a token at a time, at positions from a tenth of the context on. PyTorch compiled into CUDA
graphs (reduce-overhead) over a static cache on a GPU; on a CPU eager and compiled, in fp32 and
beside it in bf16. Forge is run in the one precision asked for and, on a CPU, with weights in the
others too, int8 among them. Rows as in train_step.py.

On a CPU the last column is the share of the bandwidth that this machine, measured in the same run,
reads its memory with: of the bytes that each token reads, which are all weights as stored and the
keys and values before it.
"""

import argparse
import contextlib
import json
import sys

from sides import Side, decoded, default_threads, run
from table import Peer, chosen, measure, options_of, rows_of, show, show_kernels

FORGE = Peer("Forge", "forge_side.py")
# In ratios these are no peers.
OTHERS = [
    Peer(f"Forge, {precision}", "forge_side.py", (), precision)
    for precision in ("fp32", "bf16", "int8")
]
TORCH = "torch_side.py"
PEERS = {
    "cuda": {
        "fused": Peer("PyTorch, static cache", TORCH, ("best", "any", "reduce-overhead")),
        "math": Peer("PyTorch, as gpt-fast", TORCH, ("best", "math", "reduce-overhead")),
    },
    "cpu": {
        "eager": Peer("PyTorch, eager", TORCH, ("best", "any", "eager")),
        "compiled": Peer("PyTorch, compiled", TORCH, ("best", "any", "default")),
        "eager-bf16": Peer("PyTorch, bf16 eager", TORCH, ("best", "any", "eager"), "bf16"),
        "compiled-bf16": Peer("PyTorch, bf16 compiled", TORCH, ("best", "any", "default"), "bf16"),
    },
}
GROUPS = {"cuda": {}, "cpu": {"bf16": ("eager-bf16", "compiled-bf16")}}
DEFAULT = {
    ("cuda", "bf16"): "fused,math",
    ("cuda", "fp32"): "fused,math",
    ("cpu", "fp32"): "eager,compiled,bf16",
    ("cpu", "bf16"): "bf16",
}
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options_of(parser)
    parser.add_argument("--model", choices=["baby", "124M", "1.5B"], default="124M")
    parser.add_argument("--batch", help="batch sizes (1,64 on a GPU, 1 on a CPU)")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel")
    args = parser.parse_args()
    precision = args.precision or ("bf16" if args.device == "cuda" else "fp32")
    threads = default_threads(args.device) if args.threads is None else args.threads
    names = args.peers or DEFAULT.get((args.device, precision), "none")
    peers = chosen(names, PEERS[args.device], GROUPS[args.device], parser)
    batches = args.batch or ("1,64" if args.device == "cuda" else "1")
    rows = []
    # A table for each batch as soon as it is measured.
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        for batch in map(int, batches.split(",")):
            side = Side("decode", args.device, args.model, precision, batch, 1, threads)
            limits = run("ceilings.py", side) if args.device == "cpu" else None
            sides = [FORGE, *peers]
            if args.device == "cpu":
                sides[1:1] = [other for other in OTHERS if other.precision != precision]
            results = measure(side, sides, args, lambda r: r["batch"])
            work = f"decode {side.model} B={batch} {side.device}"
            rows += rows_of(work, side, peers, results)
            print(f"\n{work} {precision}")
            if limits:
                print(f"at most {limits['read'] / 1e9:,.1f} GB/s read")
            show(results, sides, side, lambda *of, s=side, at=limits: share(*of, s, at))
            if args.profile:
                own = side._replace(work="profile-decode")
                show_kernels(run("forge_side.py", own, limit=args.limit))
    if args.json:
        print(json.dumps(rows, indent=2))


def share(rate, precision, side, limits):
    """What part of the read bandwidth weights and caches take at this rate, in words."""
    if not limits or side.model == "baby":
        # The baby's weights stay in the cache.
        return ""
    stored = side.weights * BYTES[precision] + (4 * side.channels if precision == "int8" else 0)
    low = 2 if precision == "bf16" else 4
    cached = 2 * low * side.sizes["n_layer"] * side.sizes["n_embd"]
    position = sum(decoded(side.sizes["block_size"])) / 2
    read = (stored / side.batch + cached * position) * rate
    return f"{read / limits['read']:.0%} of bandwidth"


if __name__ == "__main__":
    main()
