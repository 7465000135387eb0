"""What `forge train` says before and after: the settings and choices; the result and a sample."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence

from forge.cli.stream import printable, sample
from forge.config import Config, settings
from forge.data.ngram import bigram_bits, witten_bell_bits
from forge.data.tokenizer import ByteTokenizer
from forge.generate import Sampling
from forge.run import choices
from forge.run.session import Session

# The sample at the end: long enough to judge, short enough to read.
_SAMPLE_TOKENS = 400
_SAMPLING = Sampling(temperature=0.8, top_p=0.95)


def row(name: str, text: str) -> None:
    """Print a line with a name in front, wrapped to the terminal."""
    width = max(40, shutil.get_terminal_size().columns)
    lines = textwrap.wrap(text, width - 10, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        shown = line.replace("\N{NO-BREAK SPACE}", " ")
        print(f"{name if number == 0 else '':10}{shown}", flush=True)


def introduce(run: Session) -> None:
    """What is trained, on what, and what was chosen and why."""
    config, dataset, chosen = run.config, run.dataset, run.choices
    for notice in run.notices:
        print(notice)
    held_out = 0 if dataset.val is None else len(dataset.val)
    files = f", {dataset.files} files" if dataset.files > 1 else ""
    skipped = f", {dataset.skipped} others skipped" if dataset.skipped else ""
    row("data", f"{dataset.name}{files}{skipped}")
    row("", f"{len(dataset.train):,} tokens to train on, {held_out:,} held out")
    row("model", f"{run.trainer.params.count:,} parameters: {_shown(config, 'Model')}")
    row("training", _shown(config, "Training"))
    row("steps", _shown(config, "Run"))
    reasons = chosen.reasons
    row("device", f"{chosen.device} ({reasons['device']})")
    row("threads", f"{chosen.threads} ({reasons['threads']})")
    row("micro", f"{chosen.micro_batch} samples ({reasons['micro_batch']})")
    if products := chosen.products_in_words():
        row("products", f"{products} (as the run began)")
    planned = f"{max(1, round(chosen.memory / 1e6)):,} MB of buffers at the peak, by plan"
    row("memory", planned if chosen.memory else "not planned, as --eager leaves the step to you")
    start = "" if run.resumed_at is None else f", from step {run.resumed_at}"
    row("run", f"{run.folder.path}{start}")


def conclude(run: Session) -> None:
    """Held-out loss, a sample, and where everything is."""
    trainer, folder = run.trainer, run.folder
    print()
    if trainer.validation is not None:
        loss = run.val_loss if run.val_loss is not None else trainer.evaluate()
        assert loss is not None
        _compare(run, loss)
    choices.prepare(trainer.device, "generate", precision=trainer.params.precision)
    print("Sample:\n")
    tokens = min(_SAMPLE_TOKENS, 4 * run.config.block_size)
    prompt = run.tokenizer.encode("\n")
    for piece in sample(
        trainer.model, trainer.params.compute, run.tokenizer, prompt, tokens, _SAMPLING
    ):
        print(printable(piece), end="", flush=True)
    print(f"\n\nWritten to {folder.path}:")
    print(f"  checkpoints/step-{trainer.step}/model.safetensors  the weights")
    print("  metrics.jsonl  loss and rate by step; events.out.*  the same, for TensorBoard")
    print("  config.toml  all settings; frozen.json  what was chosen")
    print(f"More text: forge generate {folder.path} --prompt 'The '")


def _shown(config: Config, section: str) -> str:
    """The settings of a section that have a value."""
    values = {s.name: getattr(config, s.name) for s in settings() if s.section == section}
    values.pop("out", None)
    return "  ".join(
        # No break between a name and its value.
        f"{name}\N{NO-BREAK SPACE}{f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in values.items()
        if value is not None
    )


def _compare(run: Session, loss: float) -> None:
    """The held-out loss, beside that of tables counted on the same text."""
    config, held_out = run.config, run.dataset.val
    part = "" if config.eval_batches is None else f" (of {config.eval_batches} batches)"
    if not isinstance(run.tokenizer, ByteTokenizer) or held_out is None:
        print(f"Held-out loss {loss:.4f} nats per token{part}")
        return
    bits = loss / math.log(2)
    print(f"Held-out loss {loss:.4f} nats per byte, {bits:.3f} bits per byte{part}")
    if config.compare_ngrams:
        tables = witten_bell_bits(run.dataset.train, held_out)
        best = min(range(len(tables)), key=tables.__getitem__)
        rows: Sequence[tuple[str, float]] = (
            ("a table of byte pairs", bigram_bits(run.dataset.train, held_out)),
            (f"the best n-gram table (n = {best + 1})", tables[best]),
            ("this model", bits),
        )
        print("\nBits per held-out byte, each learned from the same training text:")
        for name, value in rows:
            print(f"  {name:32} {value:.3f}")
    print()
