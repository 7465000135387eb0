"""How well a model predicts a text: every token once, each with much context or little.

Window k holds tokens kS … kS + T, T the context length and S the stride. Its loss counts the
targets that no earlier window had: all of the first window's, the last S of every other. So a
target has at least T - S tokens of context, but for the first ones. At S = T windows lie side by
side, as in validation while training; a smaller S costs T / S times as much and says more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forge.data.loader import IGNORE_INDEX
from forge.data.tokenizer import Tokens
from forge.errors import ArgumentError, DataError
from forge.models.gpt2 import GPT2
from forge.params import Int8Params, Params
from forge.run import choices
from forge.tensor import tensor

# Tokens that go through the model at once.
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Score:
    """Loss in nats per token, over so many predicted tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is too large a number."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, size: int) -> float:
        """Bits per byte of a text whose predicted part has `size` bytes."""
        return self.loss * self.tokens / size / math.log(2)


def score(
    model: GPT2,
    params: Params | Int8Params,
    tokens: Tokens,
    stride: int | None = None,
    progress: Callable[[int, int], None] = lambda done, windows: None,
) -> Score:
    """Score a text (1-D ids); `progress` is told how many of all windows are done.

    First the kernels for it are compiled, unless this machine has them.
    Raises `ArgumentError` for a stride outside 1 to T, `DataError` for less than two tokens.
    """
    T = model.config.block_size
    stride = T if stride is None else stride
    if not 1 <= stride <= T:
        raise ArgumentError(
            f"[eval] expected --stride from 1 to {T}, the model's context, got {stride}; "
            "leave it out for windows side by side"
        )
    if len(tokens) < 2:
        raise DataError(f"[eval] expected at least 2 tokens, got {len(tokens)}; give a longer text")
    windows = 1 + max(0, -(-(len(tokens) - 1 - T) // stride))
    device = next(iter(params.values())).device
    choices.prepare(device, "eval", precision=params.precision)
    one = tensor(1.0, device=device)
    size = max(1, _BATCH_TOKENS // T)
    total, count = 0.0, 0
    for first in range(0, windows, size):
        batch = range(first, min(first + size, windows))
        inputs, targets = _windows(tokens, batch, T, stride)
        x, y = (tensor(each, device=device) for each in (inputs, targets))
        loss = model.loss(params.compute, x, y, weight=one)
        total += loss.item()
        count += int(np.count_nonzero(targets != IGNORE_INDEX))
        progress(batch.stop, windows)
    return Score(total / count, count)


def _windows(tokens: Tokens, batch: range, T: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets int64 [B, T] of some windows."""
    inputs = np.zeros((len(batch), T), np.int64)
    targets = np.full((len(batch), T), IGNORE_INDEX, np.int64)
    for row, k in enumerate(batch):
        piece = tokens[k * stride : k * stride + T + 1]
        length = len(piece) - 1
        scored = 0 if k == 0 else T - stride
        inputs[row, :length] = piece[:-1]
        targets[row, scored:length] = piece[1 + scored :]
    return inputs, targets
