"""Tokenizers: from text to token ids and back.

A tokenizer is anything that satisfies `Tokenizer`; the one built in reads raw bytes. What a
tokenizer is travels with every checkpoint as a small JSON-able dict, from which `from_dict` makes
it again.
"""

import codecs
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from forge.errors import DataError

Ids = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.integer[Any]]


class Stream(Protocol):
    """A decoder fed one token at a time that never shows half a character."""

    def push(self, token: int) -> str:
        """Text that `token` completes; empty while a character is still open."""

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""


class Tokenizer(Protocol):
    """What the data pipeline, generation and checkpoints ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: every token is in `range(vocab_size)`."""

    def encode(self, text: str | bytes) -> Ids:
        """Token ids of a text, int64 `[T]`."""

    def tokens(self, data: bytes) -> Tokens:
        """The same ids in the narrowest unsigned dtype, for texts that fill memory."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""

    def stream(self) -> Stream:
        """An incremental decoder; all it returns, joined, equals `decode` of all tokens."""

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` needs to make this tokenizer again; JSON-able."""


class ByteTokenizer:
    """Every byte is a token: nothing to train, nothing out of vocabulary, exact both ways."""

    vocab_size = 256

    def encode(self, text: str | bytes) -> Ids:
        """Token ids of a text's UTF-8 bytes, int64 `[T]`.

        Bytes that a shell passed through as surrogate escapes come out as they went in. Raises
        `DataError` for other lone surrogates, which have no UTF-8 form.
        """
        if isinstance(text, bytes):
            data = text
        else:
            try:
                data = text.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError as error:
                raise DataError(
                    f"[tokenizer] expected text, got a lone surrogate at character {error.start}; "
                    "remove it, or pass the bytes themselves"
                ) from None
        return self.tokens(data).astype(np.int64)

    def tokens(self, data: bytes) -> npt.NDArray[np.uint8]:
        """The bytes themselves as a read-only uint8 `[T]`, not copied."""
        return np.frombuffer(data, np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of token ids; what is not UTF-8 becomes U+FFFD. Raises `DataError` out of range."""
        return bytes(_byte(token) for token in tokens).decode("utf-8", "replace")

    def stream(self) -> "ByteStream":
        """An incremental decoder for printing while generating."""
        return ByteStream()

    def to_dict(self) -> dict[str, Any]:
        """`{"kind": "bytes"}`."""
        return {"kind": "bytes"}


class ByteStream:
    """Decodes bytes to text one at a time, holding back an unfinished UTF-8 character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that `token` completes; empty while a character is still open."""
        return self._decoder.decode(bytes([_byte(token)]))

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def from_dict(saved: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a checkpoint describes; raises `DataError` for an unknown kind."""
    if saved.get("kind") == "bytes":
        return ByteTokenizer()
    raise DataError(
        f"[tokenizer] expected a tokenizer of kind 'bytes', got {saved.get('kind')!r}; "
        "it may come from a newer version of Forge"
    )


def _byte(token: int) -> int:
    if not 0 <= token < 256:
        raise DataError(
            f"[tokenizer] expected ids from 0 to 255, got {token}; "
            "a vocabulary larger than 256 needs its own tokenizer"
        )
    return int(token)
