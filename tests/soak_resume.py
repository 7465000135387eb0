"""Kill -9 a real run at random moments, many times, and hold what comes out to a calm run's bits.

    python tests/soak_resume.py [KILLS] [SEED] [DEVICE]

Small steps and a checkpoint every five of them, so that kills fall into all that a run does: start,
restore, step, validation, the writing and renaming and removing of checkpoints. Not collected by
pytest: a hundred kills take minutes. test_resume.py has the short form.
"""

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from forge.run import metrics

STEPS = 3000
COMMAND = [
    *(sys.executable, "-m", "forge", "train", "--n-layer=1", "--n-head=2"),
    *("--n-embd=8", "--block-size=8", "--batch-size=2", "--dropout=0.1", f"--steps={STEPS}"),
    *("--log-every=1", "--eval-every=50", "--eval-batches=1", "--checkpoint-every=5"),
]


def logged(folder):
    """All rows of a run, without the rate."""
    rows = metrics.read(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows]


def result(folder):
    """What must be equal to the bit."""
    last = folder / "checkpoints" / f"step-{STEPS}"
    files = [(last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]
    return logged(folder), files


def live(folder, device, seconds):
    """Run or resume it; returns whether it was killed before it had ended."""
    command = [*COMMAND, f"--device={device}", "--resume", f"--out={folder}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return True
    if process.returncode:
        sys.exit(f"exit {process.returncode}: {out.decode()}")
    return False


def moment(rng, whole):
    """From the first import to well into the steps: what a start takes is about 1 s."""
    return rng.uniform(0.2, 1.5 + whole / 10)


def main(kills="100", seed="0", device="reference"):
    """Kill until there were so many; every run that ends is compared."""
    kills, rng = int(kills), random.Random(int(seed))
    with tempfile.TemporaryDirectory() as top:
        calm = Path(top, "calm")
        start = time.monotonic()
        live(calm, device, None)
        whole = time.monotonic() - start
        expected = result(calm)
        done = runs = torn = 0
        while done < kills or runs == 0:
            folder = Path(top, f"run-{runs}")
            while live(folder, device, moment(rng, whole) if done < kills else None):
                done += 1
                torn += any(folder.glob("checkpoints/.step-*"))
            runs += 1
            if result(folder) != expected:
                sys.exit(f"other bits after {done} kills, in {folder}")
            print(
                f"{done} kills ({torn} amid a checkpoint), {runs} runs: the same bits", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
