"""From tokens to text, piece by piece: whole characters, and no further than a stop string."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from forge.data.tokenizer import Ids, Tokenizer
from forge.generate import Sampling, generate
from forge.models.gpt2 import GPT2
from forge.tensor import Tensor


class TextStream:
    """Text of tokens as they come; what may be the start of a stop string is held back.

    `text` is all that was given out, `stopped` whether a stop string ended it; the string itself is
    left out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._decoder = tokenizer.stream()
        self._stop = [word for word in stop if word]
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that can be shown now."""
        return "" if self.stopped else self._advance(self._decoder.push(token), end=False)

    def flush(self) -> str:
        """Text that was held back, when no more tokens come."""
        return "" if self.stopped else self._advance(self._decoder.flush(), end=True)

    def _advance(self, piece: str, *, end: bool) -> str:
        self._held += piece
        found = [place for word in self._stop if (place := self._held.find(word)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
        else:
            keep = 0 if end else self._open()
            cut = len(self._held) - keep
            shown, self._held = self._held[:cut], self._held[cut:]
        self.text += shown
        return shown

    def _open(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max((len(word) for word in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(word.startswith(self._held[-length:]) for word in self._stop):
                return length
        return 0


def printable(text: str) -> str:
    """The text without control characters, which could do anything to a terminal."""
    return "".join(c if c in "\n\t" or (ord(c) >= 32 and c != "\x7f") else "\ufffd" for c in text)


def sample(
    model: GPT2,
    params: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    prompt: Ids,
    tokens: int,
    sampling: Sampling,
) -> Iterator[str]:
    """The text that one prompt is continued with, in pieces."""
    stream = TextStream(tokenizer)
    for token in generate(
        model, params, [prompt], tokens, sampling, vocab_size=tokenizer.vocab_size
    ):
        yield stream.push(token.id)
    yield stream.flush()
