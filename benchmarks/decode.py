"""Decoding with a cache: Forge beside PyTorch, each in its own process, in turn.

python benchmarks/decode.py [--device cpu|cuda] [--model baby|124M|1.5B] [--precision bf16|fp32]
       [--batch 1,64] [--rounds N] [--json]

Greedy, a token at a time, at positions from a tenth of the context on; PyTorch with a static cache,
compiled into CUDA graphs (reduce-overhead) on a GPU. Rows as in train_step.py, in tokens/s.
"""

import argparse
import json
import statistics
import sys

from sides import Side, run

MODES = {"cuda": ("reduce-overhead",), "cpu": ("eager", "default")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=["baby", "124M", "1.5B"], default="124M")
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--batch", default="1,64", help="batch sizes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    args = parser.parse_args()
    precision = args.precision or ("bf16" if args.device == "cuda" else "fp32")
    rows = []
    for batch in map(int, args.batch.split(",")):
        side = Side("decode", args.device, args.model, precision, batch, 1)
        sides = {"Forge": ("forge_side.py", ())}
        for mode in MODES[args.device]:
            sides[f"PyTorch, {mode}"] = ("torch_side.py", ("best", "any", mode))
        results = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, (script, options) in sides.items():
                result = run(script, side, *options)
                if result is not None:
                    results[name].append(batch / result["seconds"])
                    rate = f"{results[name][-1]:,.0f} tokens/s"
                    print(f"batch {batch} {name}: {rate}", file=sys.stderr, flush=True)
        rates = {name: statistics.median(found) for name, found in results.items() if found}
        ours = rates.pop("Forge")
        rows += [
            {
                "work": f"decode {args.model} batch {batch} {args.device}",
                "precision": precision,
                "peer": name,
                "peer_precision": precision,
                "peer_value": theirs,
                "forge_value": ours,
                "unit": "tokens/s",
                "ratio": ours / theirs,
            }
            for name, theirs in rates.items()
        ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['work']:28} {row['peer']:26} {row['peer_value']:10,.0f}  "
            f"Forge {row['forge_value']:10,.0f} {row['unit']}  {row['ratio']:.2f}x"
        )


if __name__ == "__main__":
    main()
