"""Batches of token windows, in an order that is a pure function of the seed.

Sample i of a run lies in epoch e = i // W, W windows to an epoch, and is window
`permute(i mod W)` of it. All windows of an epoch start at one offset, drawn anew for each epoch, so
that a text is not always cut at the same places. A batch is the next B samples and may cross into
the next epoch. The state of a run is therefore one integer, the number of samples taken: resuming
costs nothing, is exact, and works with another batch or micro-batch size.

Arrays are NumPy's: `inputs` and `targets` are `[B, T]`, and `targets[b, t]` follows `inputs[b, t]`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forge.data.permutation import hash_words, permute
from forge.data.tokenizer import Ids, Tokens
from forge.errors import DataError, attribute_hints

# The target that no loss counts, as in PyTorch.
IGNORE_INDEX = -100

_ORDER, _OFFSET = 0, 1


@dataclass(frozen=True, eq=False)
class HostMicro:
    """A slice of a batch, small enough for one forward and backward.

    `inputs` and `targets` int64 `[b, T]`; `order` int64 `[b·T]`, the stable sorted order of the
    input ids, which the embedding's gradient sums in; `first_sample`: this slice's place in its
    batch, which dropout counts samples by.
    """

    inputs: Ids
    targets: Ids
    order: Ids
    first_sample: int


@dataclass(frozen=True, eq=False)
class HostBatch:
    """The samples of one step, on the host: `training.to_device` copies them to a device.

    `target_count` is the number of targets that are not ignored, `tokens` that of inputs; `index`
    is the first sample's number in the run and `next_index` that of the batch after it.
    """

    micros: list[HostMicro]
    target_count: int
    tokens: int
    index: int
    next_index: int

    __getattr__ = attribute_hints({"weight": "training.to_device(batch, device), which has it"})


class Loader:
    """Shuffled training windows of `block_size` tokens, `batch_size` to a batch.

    `tokens` is any 1-D integer array, also a memory map. Raises `DataError` when it is shorter than
    one window and its last target.
    """

    def __init__(self, tokens: Tokens, block_size: int, batch_size: int, seed: int = 0) -> None:
        tokens = np.asarray(tokens)
        if len(tokens) <= block_size:
            raise DataError(
                f"[data] expected at least {block_size + 1} tokens to train on "
                f"(--block-size {block_size} and one), got {len(tokens)}; "
                "give a longer text or a smaller --block-size"
            )
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or batch_size < 1:
            raise DataError(
                "[data] expected a 1-D array of integer tokens and batch_size >= 1, got "
                f"{tokens.dtype} {list(tokens.shape)} and {batch_size}"
            )
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        # One window fewer than would fit leaves room for every offset below T. A text of less than
        # two windows has one, which moves as far as it can.
        self.windows = max(1, len(tokens) // block_size - 1)
        self._offsets = min(block_size, len(tokens) - self.windows * block_size)
        self._ahead = (0, np.empty(0, np.int64))

    def starts(self, first: int, count: int) -> Ids:
        """Where in the tokens samples `first … first + count` of the run begin, int64 `[count]`."""
        epoch, sample = np.divmod(np.arange(first, first + count, dtype=np.int64), self.windows)
        window = permute(sample, self.windows, hash_words(self.seed, epoch, _ORDER))
        offset = hash_words(self.seed, epoch, _OFFSET) % np.uint64(self._offsets)
        return window * self.block_size + offset.astype(np.int64)

    def batch(self, *, first_sample: int, micro_batch: int | None = None) -> HostBatch:
        """The batch that begins at a sample of the run, in slices of `micro_batch` samples.

        Samples are counted, not batches, so that a run may go on with another `batch_size`: that of
        step k is at k · `batch_size`, or at `next_index` of the batch before. A `micro_batch` of
        None is one slice; the last is smaller where the sizes do not divide.
        """
        B, index = self.batch_size, first_sample
        begin, ahead = self._ahead
        if not begin <= index <= begin + len(ahead) - B:
            # Many batches at once: for one, the shuffle's arithmetic is all overhead (0.2 ms).
            begin, ahead = self._ahead = index, self.starts(index, 64 * B)
        starts = ahead[index - begin :][:B]
        windows = self.tokens[starts[:, None] + np.arange(self.block_size + 1)]
        step = micro_batch or B
        micros = [
            _micro(windows[first : first + step, :-1], windows[first : first + step, 1:], first)
            for first in range(0, B, step)
        ]
        return _batch(micros, index)


class Validation:
    """Held-out windows in file order, side by side, `batch_size` to a batch; the last has fewer.

    The last window is padded with ignored targets, so every token but the first is a target exactly
    once. Raises `DataError` when there is no target at all.
    """

    def __init__(self, tokens: Tokens, block_size: int, batch_size: int) -> None:
        if len(tokens) < 2:
            raise DataError(
                f"[data] expected at least 2 tokens to validate on, got {len(tokens)}; "
                "give a longer text"
            )
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = batch_size
        self.windows = -(-(len(tokens) - 1) // block_size)

    def __len__(self) -> int:
        return -(-self.windows // self.batch_size)

    def __iter__(self) -> Iterator[HostBatch]:
        return (self.batch(k) for k in range(len(self)))

    def batch(self, k: int, micro_batch: int | None = None) -> HostBatch:
        """Batch number k of `len(self)`, in slices as `Loader.batch`; `index` counts windows."""
        first = k * self.batch_size
        count = min(self.batch_size, self.windows - first)
        T = self.block_size
        piece = self.tokens[first * T : (first + count) * T + 1]
        inputs = np.zeros((count, T), np.int64)
        targets = np.full((count, T), IGNORE_INDEX, np.int64)
        inputs.reshape(-1)[: len(piece) - 1] = piece[:-1]
        targets.reshape(-1)[: len(piece) - 1] = piece[1:]
        step = micro_batch or count
        micros = [
            _micro(inputs[begin : begin + step], targets[begin : begin + step], begin)
            for begin in range(0, count, step)
        ]
        return _batch(micros, first)


def _micro(inputs: Tokens, targets: Tokens, first_sample: int) -> HostMicro:
    # Sorted before widening: NumPy's stable sort of one- and two-byte integers is a radix sort.
    order = np.argsort(inputs.reshape(-1), kind="stable")
    return HostMicro(
        inputs=np.ascontiguousarray(inputs, np.int64),
        targets=np.ascontiguousarray(targets, np.int64),
        order=order.astype(np.int64, copy=False),
        first_sample=first_sample,
    )


def _batch(micros: list[HostMicro], index: int) -> HostBatch:
    return HostBatch(
        micros=micros,
        target_count=sum(int(np.count_nonzero(m.targets != IGNORE_INDEX)) for m in micros),
        tokens=sum(m.inputs.size for m in micros),
        index=index,
        next_index=index + sum(len(m.inputs) for m in micros),
    )
