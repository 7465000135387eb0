"""Generation: from token ids to token ids, with a cache of keys and values.

Every prompt goes through the model alone, into its own rows of the cache; then all grow together,
a token at a time. A random number is a function of (seed, stream, position) alone, so what is
sampled does not depend on what else is in the batch, nor on how often it was called before.

Shapes: B prompts, T positions, V vocabulary, N context length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forge.errors import ArgumentError
from forge.graph import Captured
from forge.models.gpt2 import GPT2, Cache
from forge.philox import uniform
from forge.tensor import Tensor, tensor

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The filters apply in this order, each on what the last one left.

    `repetition_penalty` r divides positive logits of tokens that have occurred by r and multiplies
    negative ones (Keskar et al., 2019); `temperature` divides the logits, and at 0 the largest is
    taken; `top_k` keeps the k most probable tokens (0: all); `top_p` the fewest most probable ones
    that together have at least p (Holtzman et al., 2019); `min_p` those at least p times as
    probable as the first (Nguyen et al., 2024). Raises `ArgumentError` out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fits, range_, hint in (
            ("temperature", 0 <= self.temperature < math.inf, "of at least 0", "0 is greedy"),
            ("top_k", self.top_k >= 0, "of at least 0", "0 keeps every token"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]", "1 keeps every token"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]", "0 keeps every token"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < math.inf,
                "above 0",
                "1 is no penalty",
            ),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 4294967295", "it is 32 bits"),
        ):
            if not fits:
                flag = f"--{name.replace('_', '-')}"
                raise ArgumentError(
                    f"[generate] expected {flag} {range_}, got {getattr(self, name)}; {hint}"
                )


@dataclass(frozen=True)
class Token:
    """A token that prompt number `index` of the batch grew by.

    `logprob` is its log-probability in nats under the model itself, before any filter.
    """

    index: int
    id: int
    logprob: float


def distribution(logits: Floats, history: Ids, sampling: Sampling) -> Floats:
    """Probabilities [V] that a token is drawn with, from logits [V] and the tokens so far."""
    logits = logits.astype(np.float64)
    if sampling.repetition_penalty != 1:
        seen = np.unique(history)
        r = sampling.repetition_penalty
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / r, logits[seen] * r)
    if sampling.temperature == 0:
        greedy: Floats = (np.arange(len(logits)) == np.argmax(logits)).astype(np.float64)
        return greedy
    probabilities: Floats = np.exp((logits - logits.max()) / sampling.temperature)
    # Most probable first; of equals, the lower id.
    order = np.argsort(-logits, kind="stable")
    if 0 < sampling.top_k < len(order):
        probabilities[order[sampling.top_k :]] = 0
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= sampling.top_p]] = 0
        probabilities /= probabilities.sum()
    if sampling.min_p > 0:
        probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
        probabilities /= probabilities.sum()
    return probabilities


def draw(probabilities: Floats, u: float) -> int:
    """The token whose interval of the cumulative distribution holds u, from [0, 1)."""
    upper = np.cumsum(probabilities)
    chosen = int(np.searchsorted(upper, u * upper[-1], side="right"))
    # Rounding can lift u times the total to the total itself: then it is the last possible token.
    return min(chosen, int(np.flatnonzero(probabilities)[-1]))


def generate(
    model: GPT2,
    params: Mapping[str, Tensor],
    prompts: Sequence[Ids],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    vocab_size: int | None = None,
    streams: Sequence[int] | None = None,
    done: Callable[[Token], bool] = lambda token: False,
    slid: Callable[[int], None] = lambda index: None,
) -> Iterator[Token]:
    """Grow every prompt (int64 [T], of any lengths) by `max_new_tokens`, token by token.

    Ids from `vocab_size` on are never chosen: a model may have room for more than its tokenizer
    knows. `streams` (by default all 0) tell samples of one prompt apart. `done(token)` ends its
    prompt. When the context is full, its older half is dropped, and `slid(index)` says so. Raises
    `ArgumentError` for a prompt that is empty, longer than the context, or not of this vocabulary.
    """
    texts = [_checked(model, prompt) for prompt in prompts]
    streams = streams or [0] * len(prompts)
    return _grow(model, params, texts, max_new_tokens, sampling, vocab_size, streams, done, slid)


def _grow(
    model: GPT2,
    params: Mapping[str, Tensor],
    texts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    vocab_size: int | None,
    streams: Sequence[int],
    done: Callable[[Token], bool],
    slid: Callable[[int], None],
) -> Iterator[Token]:
    B, N = len(texts), model.config.block_size
    ends = [len(text) + max_new_tokens for text in texts]
    device = next(iter(params.values())).device
    longest = max((len(text) for text in texts), default=0)
    dtype = params["wpe.weight"].dtype
    cache = model.cache(B, min(N, longest + max_new_tokens), device, dtype)
    step = Captured(model.decode, device, varying=("ids", "pos"))

    def fill(b: int, ids: list[int]) -> int:
        """Take in all but the last token, which the next step does; returns its position."""
        if len(ids) > 1:
            model.decode(params, tensor([ids[:-1]], "int64", device), _row(cache, b), 0)
        return len(ids) - 1

    active = list(range(B)) if max_new_tokens > 0 else []
    pos = [fill(b, text) for b, text in enumerate(texts)] if active else []
    while active:
        last = [[text[-1]] for text in texts]
        logits = step(
            params, tensor(last, "int64", device), cache, tensor(pos, "int64", device)
        ).numpy()[:, :vocab_size]
        for b in list(active):
            history = np.array(texts[b])
            key = (sampling.seed, len(history))
            u = float(uniform(1, key, stream=streams[b])[0])
            chosen = draw(distribution(logits[b], history, sampling), u)
            token = Token(b, chosen, _logprob(logits[b], chosen))
            if done(token) or len(history) + 1 == ends[b]:
                # Its row repeats its last step from now on, which changes nothing.
                active.remove(b)
            else:
                texts[b].append(chosen)
                pos[b] += 1
                if pos[b] == N:
                    slid(b)
                    pos[b] = fill(b, texts[b][-max(1, N // 2) :])
            yield token


def _checked(model: GPT2, prompt: Ids) -> list[int]:
    V, N = model.config.vocab_size, model.config.block_size
    if not 0 < len(prompt) <= N:
        raise ArgumentError(
            f"[generate] expected a prompt of 1 to {N} tokens, the model's context, got "
            f"{len(prompt)}; " + ("shorten it" if len(prompt) else "give at least one")
        )
    if not 0 <= min(prompt) <= max(prompt) < V:
        raise ArgumentError(
            f"[generate] expected ids from 0 to {V - 1}, the model's vocabulary, got "
            f"{min(prompt)} to {max(prompt)}; the prompt needs this model's tokenizer"
        )
    return [int(token) for token in prompt]


def _row(cache: Cache, b: int) -> Cache:
    """The cache of prompt b alone: a view."""

    def row(x: Tensor) -> Tensor:
        shape = (1, *x.shape[1:])
        return x.view(shape, b * math.prod(shape))

    return Cache(tuple(map(row, cache.keys)), tuple(map(row, cache.values)))


def _logprob(logits: npt.NDArray[np.float32], token: int) -> float:
    x = logits.astype(np.float64)
    x -= x.max()
    return float(x[token] - np.log(np.exp(x).sum()))
