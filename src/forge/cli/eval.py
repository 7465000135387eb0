"""`forge eval`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.progress import Progress

from forge.cli.flags import INTEGER, JSON
from forge.cli.machine import place
from forge.cli.output import Console
from forge.data.text import load_dataset, read_text
from forge.data.tokenizer import ByteTokenizer, Tokenizer, Tokens
from forge.errors import DataError
from forge.run import evaluation, model
from forge.run.begin import missing_texts


def evaluate(
    trained: Annotated[Path, Parameter(name="model")],
    /,
    *,
    data: Path | None = None,
    stride: Annotated[int | None, INTEGER] = None,
    device: str = "auto",
    threads: Annotated[int | None, INTEGER] = None,
    weights: Literal["fp32", "bf16", "int8"] | None = None,
    json_: Annotated[bool, JSON] = False,
) -> int:
    """Measure how well a trained model predicts a text.

    The loss is the mean of -log p over all tokens but the first; perplexity is exp(loss); bits per
    byte counts the text's bytes, and so compares models of different tokenizers.

    Parameters
    ----------
    trained
        A run folder (its newest checkpoint), a checkpoint folder, or a file `last` or `best`.
    data
        Text file or folder (default: what the run held out).
    stride
        Distance of the windows in tokens (default: the context length, side by side). Smaller gives
        every token more context, and takes longer.
    device
        auto, cpu, cuda or reference.
    threads
        CPU threads (default: as many as cores).
    weights
        fp32, bf16 or int8: number format of weights and activations (default: the run's precision
        where the device is fast in it, else fp32); int8: that of matrices alone, on a CPU.
    json_
        Print one JSON document.
    """
    where = place(device, threads)
    found = model.load(trained, where, weights)
    name, tokens = _text(found, data)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("eval", total=None)
        result = evaluation.score(
            found.model,
            found.params,
            tokens,
            stride,
            lambda done, windows: bar.update(task, completed=done, total=windows),
        )
    size = _bytes(found.tokenizer, tokens)
    row = {
        "model": str(found.path),
        "data": name,
        "tokens": result.tokens,
        "bytes": size,
        "stride": found.config.block_size if stride is None else stride,
        "loss": result.loss,
        "perplexity": result.perplexity if math.isfinite(result.perplexity) else None,
        "bits_per_byte": result.bits_per_byte(size),
    }
    if json_:
        print(json.dumps(row, indent=1, allow_nan=False))
        return 0
    print(f"{'model':14} {found.path}")
    print(f"{'data':14} {name}: {result.tokens:,} tokens, {size:,} bytes")
    print(f"{'loss':14} {result.loss:.4f} nats per token")
    print(f"{'perplexity':14} {result.perplexity:.3f}")
    print(f"{'bits per byte':14} {result.bits_per_byte(size):.3f}")
    return 0


def _text(found: model.Trained, data: Path | None) -> tuple[str, Tokens]:
    """Name and tokens of the text to score."""
    if data is not None:
        text = read_text(data)
        return text.name, found.tokenizer.tokens(text.data)
    config = found.config
    if missing := missing_texts(config):
        raise DataError(
            "[eval] expected the text that the run held out, got a path that does not exist: "
            f"{getattr(config, missing[0])}; paths begin at {Path.cwd()}: call it from where the "
            "run began, or name a text with --data"
        )
    dataset = load_dataset(
        config.data, found.tokenizer, val_data=config.val_data, val_fraction=config.val_fraction
    )
    if dataset.val is None:
        raise DataError(
            "[eval] expected a text, got a run that held nothing out; name one with --data"
        )
    if dataset.val_sha256 != found.val_sha256:
        raise DataError(
            f"[eval] expected the text that the run held out, got {dataset.name} changed since: "
            "what is held out now may have been trained on; name a text with --data"
        )
    return f"held out of {dataset.name}", dataset.val


def _bytes(tokenizer: Tokenizer, tokens: Tokens) -> int:
    """Bytes of the text that the tokens after the first stand for."""
    if isinstance(tokenizer, ByteTokenizer):
        return len(tokens) - 1
    return len(tokenizer.decode(tokens[1:].tolist()).encode())
