"""From the command to the end of the first training step: on a fresh machine, and later.

python benchmarks/start.py [--device cpu|cuda] [--model baby|124M] [--peers NAMES] [--rounds N]

A side starts with empty caches ($XDG_CACHE_HOME for Forge's kernels and cubins, Inductor's and
Triton's folders for PyTorch's), and again with what the first start left there. Seconds of the
whole process: Python, imports, compilation, the model, one step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sides import Side, default_threads, environment

TORCH = "torch_side.py"
SIDES = {
    "Forge": ("forge_side.py", ()),
    "PyTorch, nanoGPT eager": (TORCH, ("nanogpt", "any", "eager")),
    "PyTorch, nanoGPT compiled": (TORCH, ("nanogpt", "any", "default")),
    "JAX jit": ("jax_side.py", ()),
}
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def seconds_of(side, script, options, folder, python):
    """Seconds of a process that does one step; None, with the reason shown, if it fails."""
    words = [python, str(Path(__file__).parent / script), *map(str, side), *options]
    caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
    start = time.perf_counter()
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment(side) | caches
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{script}: skipped, exit {done.returncode}: {reason}", file=sys.stderr)
        return None
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=["baby", "124M"], default="baby")
    parser.add_argument("--peers", default="", help="as well, any of: eager,compiled,jax")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--jax", default=sys.executable, help="the Python that has JAX")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    B, T = (12, 64) if args.model == "baby" else (1, 1024)
    precision = "bf16" if args.device == "cuda" else "fp32"
    threads = default_threads(args.device) if args.threads is None else args.threads
    side = Side("first", args.device, args.model, precision, B, T, threads)
    names = [n for n in SIDES if n == "Forge" or n.split()[-1] in args.peers.split(",")]
    if "jax" in args.peers.split(","):
        names.append("JAX jit")
    found = {name: ([], []) for name in names}
    for _ in range(args.rounds):
        for name in names:
            script, options = SIDES[name]
            python = args.jax if script == "jax_side.py" else sys.executable
            with tempfile.TemporaryDirectory() as folder:
                for times in found[name]:
                    seconds = seconds_of(side, script, options, folder, python)
                    if seconds is not None:
                        times.append(seconds)
    rows = [
        {"side": name, "first_start": statistics.median(cold), "later": statistics.median(warm)}
        for name, (cold, warm) in found.items()
        if cold and warm
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'first step, ' + args.model + ' ' + args.device:34} {'fresh':>8} {'later':>8}")
    for row in rows:
        print(f"{row['side']:34} {row['first_start']:7.1f}s {row['later']:7.1f}s")


if __name__ == "__main__":
    main()
