"""Text in, tokens out: files and folders, the default text, and the split that does not leak.

Files are read as bytes and never altered. A folder is read recursively in the order of its paths
(`/` between the parts, compared byte by byte): every file that ends in one of `SUFFIXES` and lies
under no name that starts with a dot. Files are joined by a newline where one does not end in one.

Without validation data, whole blocks of `BLOCK` bytes are held out, every tenth by default. The
blocks that stay are joined, as are the held-out ones. A training window may therefore lie across a
seam, where the text jumps, as it does between two files: one in 288 windows at T = 128. No held-out
byte is ever trained on; that is what the blocks are for.
"""

import hashlib
import math
import os
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

import numpy as np

from forge.data.tokenizer import Tokenizer, Tokens
from forge.errors import DataError

SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
BLOCK = 4096


@dataclass(frozen=True)
class Text:
    """Raw text: its bytes, where it is from, and how many files were read and passed over."""

    data: bytes
    name: str
    files: int = 1
    skipped: int = 0


@dataclass(frozen=True)
class Dataset:
    """Tokens to train on and, unless nothing is held out, tokens to validate on.

    `sha256` is of the training tokens, `val_sha256` of the others ("" without them): a resumed run
    compares these, so files may move, and a changed file, split or tokenizer is noticed.
    """

    train: Tokens
    val: Tokens | None
    name: str
    files: int
    skipped: int
    sha256: str
    val_sha256: str


def load_dataset(
    data: str | Path | None,
    tokenizer: Tokenizer,
    *,
    val_data: str | Path | None = None,
    val_fraction: float = 0.1,
) -> Dataset:
    """Read, split and tokenize; `data=None` is the default text.

    `val_data` is validated on as it is, and then all of `data` is trained on; else `val_fraction`
    of `data` is held out in blocks (0: nothing). Raises `DataError` for data that is missing,
    empty, binary, unreadable or too short to split.
    """
    text = default_text() if data is None else read_text(data)
    if val_data is not None:
        train, held_out = text.data, read_text(val_data).data
    else:
        train, held_out = split(text.data, val_fraction)
    val = tokenizer.tokens(held_out) if held_out else None
    if (val is None and val_fraction > 0) or (val is not None and len(val) < 2):
        raise DataError(
            f"[data] expected at least 2 tokens to validate on, got {len(held_out)} bytes; "
            "give a longer text, or --val-fraction 0 to train without validation"
        )
    tokens = tokenizer.tokens(train)
    return Dataset(
        train=tokens,
        val=val,
        name=text.name,
        files=text.files,
        skipped=text.skipped,
        sha256=digest(tokens),
        val_sha256="" if val is None else digest(val),
    )


def read_text(path: str | Path) -> Text:
    """Bytes of a text file, or of all text files in a folder; raises `DataError`."""
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    data = _read_file(path)
    if not data:
        raise DataError(f"[data] expected text, got the empty file {path}; give a file with text")
    return Text(data, str(path))


def default_text() -> Text:
    """The language reference that comes with Python, repeated paragraphs dropped.

    39 % of `pydoc_data.topics` is paragraphs that other topics hold too; left in, they would stand
    in both halves of the split. The order is that of the topics' names.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "[data] expected Python's own pydoc_data as the default text, got a Python without "
            "it; name a text of your own with --data"
        ) from None
    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        paragraphs.update((part.strip("\n"), None) for part in topics[name].split("\n\n"))
    paragraphs.pop("", None)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = "\n\n".join(paragraphs).encode()
    return Text(text, f"the language reference of Python {version}")


def split(data: bytes, fraction: float) -> tuple[bytes, bytes]:
    """Training and held-out bytes: block b is held out when b·fraction steps over an integer.

    At 0.1 these are blocks 9, 19, 29, …. A text of fewer than 1 / fraction blocks uses smaller
    ones, so that the last `fraction` of it is held out.
    """
    # As a fraction of integers: in floats, 3 · 0.1 is not 0.3.
    share = Fraction(str(fraction))
    if not 0 <= share < 1:
        raise DataError(f"[data] expected --val-fraction in [0, 1), got {fraction}; try 0.1")
    block = min(BLOCK, math.floor(len(data) * share))
    if block == 0:
        return data, b""
    ordinal = np.arange(-(-len(data) // block), dtype=np.int64)
    steps = (ordinal + 1) * share.numerator // share.denominator
    held_out = np.repeat(np.diff(steps, prepend=0) > 0, block)[: len(data)]
    values = np.frombuffer(data, np.uint8)
    return values[~held_out].tobytes(), values[held_out].tobytes()


def digest(tokens: Tokens) -> str:
    """SHA-256 of tokens as hexadecimal, the same for every integer dtype that holds them."""
    sha = hashlib.sha256()
    # In pieces: a widened copy of the whole would be eight times the text.
    for first in range(0, len(tokens), 1 << 20):
        sha.update(tokens[first : first + (1 << 20)].astype("<u4").tobytes())
    return sha.hexdigest()


def bits_per_byte(loss: float, tokens: int, size: int) -> float:
    """Bits per byte of a text of `size` bytes, from its mean loss in nats over `tokens` tokens.

    Unlike the loss it compares models with different tokenizers; for bytes it is loss / ln 2.
    """
    return loss * tokens / (math.log(2) * size)


def _read_folder(folder: Path) -> Text:
    paths, skipped = [], 0
    for root, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = [name for name in files if not name.startswith(".")]
        wanted = [Path(root, name) for name in visible if name.lower().endswith(SUFFIXES)]
        paths += wanted
        skipped += len(visible) - len(wanted)
    paths.sort(key=lambda path: os.fsencode(path.relative_to(folder).as_posix()))
    pieces = []
    for path in paths:
        piece = _read_file(path)
        pieces.append(piece if piece.endswith(b"\n") or not piece else piece + b"\n")
    data = b"".join(pieces)
    if not data:
        found = f"{len(paths)} empty ones" if paths else f"{skipped} other files"
        raise DataError(
            f"[data] expected text files ({' '.join(SUFFIXES)}) in {folder}, got {found}; "
            "rename them, or name one file"
        )
    return Text(data, str(folder), len(paths), skipped)


def _read_file(path: Path) -> bytes:
    if not path.is_file():
        got = "something that is not a file" if path.exists() else "a path that does not exist"
        raise DataError(
            f"[data] expected a text file or folder, got {got}: {path}; paths begin at {Path.cwd()}"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        _refuse(error)
    if b"\0" in data:
        raise DataError(
            f"[data] expected text, got NUL bytes in {path}; convert UTF-16 to UTF-8, and "
            "give token files (.bin) to forge.data.loader.Loader, in Python"
        )
    return data


def _refuse(error: OSError) -> NoReturn:
    raise DataError(
        f"[data] expected readable text, got {error.strerror} for {error.filename}; "
        "check its permissions"
    ) from error
