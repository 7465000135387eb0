"""`forge generate`."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from forge.cli.flags import INTEGER, JSON, REPEATED
from forge.cli.machine import place
from forge.cli.stream import TextStream, printable
from forge.data.tokenizer import Ids, Tokenizer
from forge.errors import ArgumentError, DataError
from forge.generate import Sampling, Token
from forge.generate import generate as tokens_of
from forge.run import choices, model

# Continuations that grow side by side: each has a cache of its own.
_MOST = 10_000


def generate(
    trained: Annotated[Path, Parameter(name="model")],
    /,
    *,
    prompt: Annotated[tuple[str, ...], REPEATED] = (),
    prompt_file: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    max_new_tokens: Annotated[int, INTEGER] = 300,
    temperature: float = 0.8,
    top_k: Annotated[int, INTEGER] = 0,
    top_p: float = 0.95,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Annotated[tuple[str, ...], REPEATED] = (),
    seed: Annotated[int, INTEGER] = 0,
    n: Annotated[int, INTEGER] = 1,
    device: str = "auto",
    threads: Annotated[int | None, INTEGER] = None,
    weights: Literal["fp32", "bf16", "int8"] | None = None,
    json_: Annotated[bool, JSON] = False,
) -> int:
    """Continue a prompt with a trained model; the text appears as it is made.

    Parameters
    ----------
    trained
        A run folder (its newest checkpoint), a checkpoint folder, or a file `last` or `best`.
    prompt
        Text to continue; repeatable, and several are continued side by side.
    prompt_file
        File with the text to continue; `-` is standard input.
    max_new_tokens
        Most tokens to add.
    temperature
        Below 1 the probable becomes more so; 0 always takes the most probable token.
    top_k
        Choose among the K most probable tokens only; 0: among all.
    top_p
        Choose among the fewest tokens that together have probability P.
    min_p
        Choose among tokens at least P times as probable as the most probable one.
    repetition_penalty
        Above 1, tokens that have occurred become less probable.
    stop
        End where this text would appear; repeatable.
    seed
        The same seed gives the same text.
    n
        Continuations of every prompt, each different.
    device
        auto, cpu, cuda or reference.
    threads
        CPU threads (default: as many as cores).
    weights
        fp32, bf16 or int8: number format of weights and activations (default: the run's precision
        where the device is fast in it, else fp32). bf16 halves what decoding reads per token; int8,
        of matrices alone and on a CPU, quarters it, and is nearly as good (see docs/runs.md).
    json_
        Print one JSON document: texts, tokens and their log-probabilities under the model.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    _check(1 <= n <= _MOST, f"--n from 1 to {_MOST}", n, "it is the number of continuations")
    _check(max_new_tokens >= 0, "--max-new-tokens of at least 0", max_new_tokens, "try 300")
    where = place(device, threads)
    found = model.load(trained, where, weights)
    texts = _prompts(prompt, prompt_file)
    encoded = [_encode(found.tokenizer, text) for text in texts for _ in range(n)]
    streams = [TextStream(found.tokenizer, stop) for _ in encoded]
    chosen: list[list[Token]] = [[] for _ in encoded]
    live = not json_ and len(encoded) == 1
    # What is piped stays as it is.
    shown = printable if sys.stdout.isatty() else str

    def done(token: Token) -> bool:
        chosen[token.index].append(token)
        piece = streams[token.index].push(token.id)
        if live:
            print(shown(piece), end="", flush=True)
        return streams[token.index].stopped

    slid = _SlidNotice(found.config.block_size)
    growing = tokens_of(
        found.model,
        found.params.compute,
        encoded,
        max_new_tokens,
        sampling,
        vocab_size=found.tokenizer.vocab_size,
        streams=list(range(n)) * len(texts),
        done=done,
        slid=slid,
    )
    # Mistakes have been found by now: who made one need not wait for a compiler.
    choices.prepare(where, "generate", precision=found.params.precision)
    if live:
        print(shown(texts[0]), end="", flush=True)
    deque(growing, maxlen=0)
    rests = [stream.flush() for stream in streams]
    if json_:
        print(_document(found, sampling, texts, n, chosen, streams))
    elif live:
        print(shown(rests[0]))
    else:
        for index, stream in enumerate(streams):
            print(f"--- {index // n + 1}.{index % n + 1} ---")
            print(shown(texts[index // n] + stream.text))
    return 0


class _SlidNotice:
    """Says once, on standard error, that the context was full."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._said = False

    def __call__(self, index: int) -> None:
        if not self._said:
            self._said = True
            print(
                f"\n[generate] the context of {self._length} tokens is full: from here on the "
                "model sees the newest half of it, and what follows",
                file=sys.stderr,
            )


def _prompts(prompt: Sequence[str], prompt_file: str | None) -> list[str]:
    if prompt and prompt_file is not None:
        raise ArgumentError(
            "[generate] expected --prompt or --prompt-file, got both; leave one out"
        )
    if prompt_file is None:
        return list(prompt) or ["\n"]
    try:
        data = sys.stdin.buffer.read() if prompt_file == "-" else Path(prompt_file).read_bytes()
        return [data.decode("utf-8")]
    except OSError as error:
        raise DataError(
            f"[generate] expected a readable --prompt-file, got {error.strerror}: {prompt_file}"
        ) from None
    except UnicodeDecodeError:
        raise DataError(
            f"[generate] expected UTF-8 text in --prompt-file, got other bytes: {prompt_file}"
        ) from None


def _encode(tokenizer: Tokenizer, text: str) -> Ids:
    ids = tokenizer.encode(text)
    _check(len(ids) > 0, "a prompt of at least one token", "an empty one", "leave it out")
    return ids


def _check(fits: bool, expected: str, got: Any, hint: str) -> None:
    if not fits:
        raise ArgumentError(f"[generate] expected {expected}, got {got}; {hint}")


def _document(
    found: model.Trained,
    sampling: Sampling,
    texts: Sequence[str],
    n: int,
    chosen: Sequence[Sequence[Token]],
    streams: Sequence[TextStream],
) -> str:
    completions = [
        {
            "prompt": texts[index // n],
            "text": stream.text,
            "tokens": [token.id for token in tokens],
            "logprobs": [token.logprob for token in tokens],
            "finish_reason": "stop" if stream.stopped else "length",
        }
        for index, (tokens, stream) in enumerate(zip(chosen, streams, strict=True))
    ]
    settings = vars(sampling)
    document = {"model": str(found.path), "sampling": settings, "completions": completions}
    return json.dumps(document, indent=1)
