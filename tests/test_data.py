"""Tokenizers, reading and splitting text, the sample order, and validation windows."""

import itertools
import math
import os
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import loader, text, tokenizer
from forge.data.loader import IGNORE_INDEX, Loader, Validation
from forge.data.permutation import hash_words, permute
from forge.data.tokenizer import ByteTokenizer
from forge.errors import DataError

BYTES = ByteTokenizer()


# ---- tokenizer


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_and_ids_are_its_bytes(string):
    ids = BYTES.encode(string)
    assert ids.dtype == np.int64
    assert ids.tolist() == list(string.encode())
    assert BYTES.decode(ids) == string
    assert np.array_equal(BYTES.tokens(string.encode()), ids)


@given(st.binary(max_size=40))
def test_stream_joined_is_decode(data):
    stream = BYTES.stream()
    pieces = [stream.push(token) for token in BYTES.encode(data)]
    assert "".join(pieces) + stream.flush() == BYTES.decode(data)


def test_stream_shows_no_half_character():
    stream = BYTES.stream()
    assert [stream.push(token) for token in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert stream.push(0xC3) == ""
    assert stream.flush() == "\ufffd"


def test_bytes_that_a_shell_passed_through():
    assert BYTES.encode(b"\xff!".decode("utf-8", "surrogateescape")).tolist() == [255, 33]
    with pytest.raises(DataError, match="lone surrogate at character 1"):
        BYTES.encode("a\ud800")


@pytest.mark.parametrize("token", [-1, 256])
def test_ids_out_of_the_vocabulary(token):
    with pytest.raises(DataError, match=f"from 0 to 255, got {token}"):
        BYTES.decode([65, token])
    with pytest.raises(DataError, match=f"from 0 to 255, got {token}"):
        BYTES.stream().push(token)


def test_tokenizer_travels_as_a_dict():
    assert isinstance(tokenizer.from_dict(BYTES.to_dict()), ByteTokenizer)
    with pytest.raises(DataError, match="'wordpiece'"):
        tokenizer.from_dict({"kind": "wordpiece"})


# ---- reading


def test_folder_is_read_in_order_of_paths(tmp_path):
    files = {
        "b.txt": "B",
        "a/z.md": "AZ\n",
        "a.txt": "A\n",
        "C.TXT": "C",
        "empty.txt": "",
        ".hidden.txt": "no",
        ".git/x.txt": "no",
        "pic.png": "no",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    read = text.read_text(tmp_path)
    assert read.data == b"C\nA\nAZ\nB\n"
    assert (read.files, read.skipped) == (5, 1)


def test_file_is_not_altered(tmp_path):
    path = tmp_path / "any.name"
    path.write_bytes(b"\xef\xbb\xbfa\r\n\xff")
    assert text.read_text(path).data == b"\xef\xbb\xbfa\r\n\xff"


def refused(path):
    with pytest.raises(DataError) as caught:
        text.load_dataset(path, BYTES)
    message = str(caught.value)
    assert message.startswith("[data] expected ")
    assert "\n" not in message
    return message


def test_refusals(tmp_path):
    assert "does not exist" in refused(tmp_path / "absent.txt")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert "empty file" in refused(tmp_path / "empty.txt")
    (tmp_path / "binary").write_bytes(b"ab\0c")
    assert "NUL bytes" in refused(tmp_path / "binary")
    (tmp_path / "short").write_bytes(b"abcde")
    assert "--val-fraction 0" in refused(tmp_path / "short")
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refused(tmp_path / "pipe")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x.png").write_bytes(b"x")
    assert "got 1 other files" in refused(folder)
    (folder / "x.txt").write_bytes(b"")
    assert "got 1 empty ones" in refused(folder)


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_unreadable(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_bytes(b"text")

    def read_bytes(self):
        raise PermissionError(13, "Permission denied", str(self))

    # Not by chmod: root reads everything.
    monkeypatch.setattr("pathlib.Path.read_bytes", read_bytes)
    assert f"Permission denied for {path}" in refused(path)


def test_default_text_repeats_no_paragraph():
    data = text.default_text().data
    paragraphs = data.split(b"\n\n")
    assert len(set(paragraphs)) == len(paragraphs)
    assert len(data) > 200_000
    assert data == text.default_text().data


def test_default_split_shares_no_long_line():
    train, val = text.split(text.default_text().data, 0.1)
    assert 0.08 < len(val) / (len(train) + len(val)) < 0.12
    lines = [line for line in val.split(b"\n") if len(line) > 60]
    shared = sum(line in train for line in lines)
    # Before paragraphs are dropped it is above 0.3.
    assert shared / len(lines) < 0.05


# ---- split


@settings(max_examples=30)
@given(st.integers(1, 60_000), st.sampled_from([0.05, 0.1, 0.25, 0.3, 0.5]))
def test_split_is_a_partition_into_blocks(size, fraction):
    # Each element is its own position, so a byte that moved or was lost shows.
    positions = np.arange(size, dtype=np.uint32)
    halves = positions & 255, positions >> 8
    low, high = (text.split(half.astype(np.uint8).tobytes(), fraction) for half in halves)
    train, val = (
        np.frombuffer(a, np.uint8).astype(int) + 256 * np.frombuffer(b, np.uint8).astype(int)
        for a, b in zip(low, high, strict=True)
    )
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(size))
    assert np.all(np.diff(train) > 0)
    assert np.all(np.diff(val) > 0)
    block = min(4096, int(size * Fraction(str(fraction))))
    if block:
        assert abs(len(val) - size * fraction) <= block
        blocks = np.unique(val // block)
        assert not np.isin(train // block, blocks).any()


def test_every_tenth_block():
    data = b"".join(bytes([65 + b]) * 4096 for b in range(23)) + b"tail"
    train, val = text.split(data, 0.1)
    assert val == b"J" * 4096 + b"T" * 4096
    assert train == b"".join(bytes([65 + b]) * 4096 for b in range(23) if b not in (9, 19)) + (
        b"tail"
    )


def test_a_short_text_holds_out_its_end():
    data = bytes(range(100))
    assert text.split(data, 0.1) == (data[:90], data[90:])
    assert text.split(data, 0.0) == (data, b"")
    with pytest.raises(DataError, match=r"--val-fraction in \[0, 1\), got 1.0"):
        text.split(data, 1.0)


def test_dataset(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    (tmp_path / "b.txt").write_bytes(b"y" * 50)
    held_out = text.load_dataset(tmp_path / "a.txt", BYTES)
    assert (len(held_out.train), len(held_out.val)) == (90, 10)
    given_val = text.load_dataset(tmp_path / "a.txt", BYTES, val_data=tmp_path / "b.txt")
    assert (len(given_val.train), bytes(given_val.val)) == (100, b"y" * 50)
    alone = text.load_dataset(tmp_path / "a.txt", BYTES, val_fraction=0)
    assert alone.val is None
    assert alone.val_sha256 == ""
    assert alone.sha256 == given_val.sha256 != held_out.sha256


def test_digest_does_not_depend_on_the_dtype():
    tokens = np.arange(200)
    assert text.digest(tokens.astype(np.uint8)) == text.digest(tokens.astype(np.int64))
    assert text.digest(tokens) != text.digest(tokens[:-1])


def test_bits_per_byte():
    assert text.bits_per_byte(math.log(2) * 3, tokens=10, size=10) == pytest.approx(3)
    assert text.bits_per_byte(math.log(2) * 3, tokens=10, size=40) == pytest.approx(0.75)


# ---- order


def order(n, seed, epoch=0):
    keys = hash_words(seed, np.full(n, epoch), 0)
    return permute(np.arange(n), n, keys)


def test_permutation_of_every_length():
    for n in [*range(1, 200), 1000, 4096, 4097]:
        assert np.array_equal(np.sort(order(n, seed=n)), np.arange(n)), n


def test_permutation_of_a_huge_length():
    n = (1 << 40) + 7
    index = np.arange(n - 1000, n)
    found = permute(index, n, hash_words(5, np.zeros(1000, np.int64), 0))
    assert len(np.unique(found)) == 1000
    assert 0 <= found.min() < found.max() < n
    assert abs(found.mean() / n - 0.5) < 0.05


def test_all_orders_of_five_are_equally_likely():
    count = 24_000
    epochs = np.repeat(np.arange(count), 5)
    found = permute(np.tile(np.arange(5), count), 5, hash_words(1, epochs, 0)).reshape(count, 5)
    _, seen = np.unique(found @ (5 ** np.arange(5)), return_counts=True)
    assert len(seen) == 120
    # Chi-square with 119 degrees of freedom: mean 119, deviation 15.4.
    chi_square = ((seen - 200) ** 2 / 200).sum()
    assert chi_square < 119 + 5 * 15.4


def test_place_of_an_index_is_uniform_and_neighbours_part():
    n, count = 97, 20_000
    keys = hash_words(3, np.arange(count), 0)
    first = permute(np.zeros(count, np.int64), n, keys)
    second = permute(np.ones(count, np.int64), n, keys)
    for values, cells in ((first, n), ((second - first) % n, n)):
        seen = np.bincount(values, minlength=cells)
        seen = seen[seen > 0]
        expected = count / len(seen)
        chi_square = ((seen - expected) ** 2 / expected).sum()
        assert chi_square < len(seen) + 5 * math.sqrt(2 * len(seen))


def test_order_does_not_change_between_versions():
    # A checkpoint stores only a sample number: other values here would break resuming.
    assert order(10, seed=1337).tolist() == ORDER_1337
    assert hash_words(1337, np.arange(2), 1).tolist() == HASH_1337


ORDER_1337 = [0, 6, 2, 5, 7, 4, 3, 1, 9, 8]
HASH_1337 = [18354914220215909048, 16176838337088213442]


# ---- loader


@given(st.integers(1, 9), st.integers(0, 80), st.integers(0, 5))
def test_an_epoch_takes_every_window_once(block, extra, seed):
    made = Loader(np.arange(block + 1 + extra), block, batch_size=1, seed=seed)
    W = made.windows
    for epoch in range(3):
        starts = made.starts(epoch * W, W)
        offset = starts.min()
        assert np.array_equal(np.sort(starts), offset + block * np.arange(W))
        assert 0 <= offset <= starts.max() <= len(made.tokens) - block - 1


def test_offset_moves_with_the_epoch_and_reaches_all():
    made = Loader(np.arange(100), 8, batch_size=1)
    offsets = {int(made.starts(e * made.windows, made.windows).min()) for e in range(200)}
    assert offsets == set(range(8))


@pytest.mark.parametrize(("size", "windows"), [(9, 1), (15, 1), (16, 1), (24, 2), (25, 2)])
def test_short_texts(size, windows):
    made = Loader(np.arange(size), 8, batch_size=3)
    assert made.windows == windows
    assert made.batch(first_sample=0).micros[0].targets.max() <= size - 1


def test_batches_cross_epochs_and_do_not_depend_on_their_size():
    tokens = np.arange(1000)
    one = Loader(tokens, 16, batch_size=1, seed=7)
    many = Loader(tokens, 16, batch_size=25, seed=7)
    expected = [one.batch(first_sample=i).micros[0].inputs[0] for i in range(200)]
    index, found = 0, []
    while index < 200:
        batch = many.batch(first_sample=index)
        assert batch.index == index
        found += list(batch.micros[0].inputs)
        index = batch.next_index
    assert index == 200
    assert np.array_equal(found, expected)


def test_resuming_anywhere_is_the_same_run():
    first = Loader(np.arange(5000) % 256, 32, batch_size=6, seed=1)
    second = Loader(np.arange(5000) % 256, 32, batch_size=6, seed=1)
    for index in (0, 6, 600, 6 * 10**9):
        a, b = first.batch(first_sample=index).micros[0], second.batch(first_sample=index).micros[0]
        assert np.array_equal(a.inputs, b.inputs)
        assert np.array_equal(a.targets, b.targets)


def test_seeds_and_epochs_differ():
    a = Loader(np.arange(5000), 8, batch_size=64, seed=0)
    b = Loader(np.arange(5000), 8, batch_size=64, seed=1)
    assert not np.array_equal(a.starts(0, 64), b.starts(0, 64))
    assert not np.array_equal(a.starts(0, 64), a.starts(a.windows, 64))


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 8, None])
def test_micro_batches_are_slices(micro_batch):
    made = Loader(np.arange(500, dtype=np.uint16), 10, batch_size=8)
    whole = made.batch(first_sample=40).micros[0]
    batch = made.batch(first_sample=40, micro_batch=micro_batch)
    sizes = [len(micro.inputs) for micro in batch.micros]
    assert [m.first_sample for m in batch.micros] == [0, *itertools.accumulate(sizes)][:-1]
    assert np.array_equal(np.concatenate([m.inputs for m in batch.micros]), whole.inputs)
    assert np.array_equal(np.concatenate([m.targets for m in batch.micros]), whole.targets)
    assert batch.target_count == batch.tokens == 80
    assert batch.next_index == 48


@given(st.lists(st.integers(0, 255), min_size=5, max_size=60))
def test_micro_is_what_the_model_needs(values):
    micro = Loader(np.array(values, np.uint8), 4, batch_size=3).batch(first_sample=0).micros[0]
    for array in (micro.inputs, micro.targets, micro.order):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    assert np.array_equal(micro.inputs[:, 1:], micro.targets[:, :-1])
    ids = micro.inputs.reshape(-1).tolist()
    assert micro.order.tolist() == sorted(range(len(ids)), key=lambda i: (ids[i], i))


@pytest.mark.parametrize(
    ("tokens", "batch_size"),
    [(np.arange(99.0), 4), (np.arange(99).reshape(3, 33), 4), (np.arange(99), 0)],
)
def test_what_is_no_row_of_tokens_is_refused(tokens, batch_size):
    with pytest.raises(DataError, match=r"\[data\] expected"):
        Loader(tokens, 2, batch_size)


def test_text_shorter_than_a_window():
    with pytest.raises(DataError, match=r"at least 9 tokens to train on .*got 8"):
        Loader(np.arange(8), 8, batch_size=1)


def test_memory_map(tmp_path):
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "t.bin")
    mapped = np.memmap(tmp_path / "t.bin", np.uint16, "r")
    inputs = Loader(mapped, 7, batch_size=4).batch(first_sample=0).micros[0].inputs
    assert np.array_equal(
        inputs, Loader(np.arange(300), 7, 4).batch(first_sample=0).micros[0].inputs
    )
    assert type(inputs) is np.ndarray


# ---- validation


@given(st.integers(2, 90), st.integers(1, 9), st.integers(1, 4))
def test_every_held_out_token_but_the_first_is_a_target_once(size, block, batch_size):
    tokens = np.arange(1000, 1000 + size)
    made = Validation(tokens, block, batch_size)
    batches = list(made)
    assert len(batches) == len(made)
    inputs = np.concatenate([b.micros[0].inputs for b in batches])
    targets = np.concatenate([b.micros[0].targets for b in batches])
    counted = targets != IGNORE_INDEX
    assert np.array_equal(targets[counted], tokens[1:])
    assert np.array_equal(inputs[counted], tokens[:-1])
    assert sum(b.target_count for b in batches) == size - 1
    assert all(b.micros[0].inputs.shape == (len(b.micros[0].inputs), block) for b in batches)
    assert not inputs[~counted].any()
    assert [b.index for b in batches] == list(range(0, made.windows, batch_size))
    for k, whole in enumerate(batches):
        sliced = made.batch(k, 2)
        assert max(len(micro.inputs) for micro in sliced.micros) <= 2
        assert np.array_equal(
            np.concatenate([micro.targets for micro in sliced.micros]), whole.micros[0].targets
        )
        assert sliced.target_count == whole.target_count


def test_nothing_to_validate():
    with pytest.raises(DataError, match="at least 2 tokens to validate on, got 1"):
        Validation(np.arange(1), 4, 1)


def test_ignored_targets_are_as_in_pytorch():
    assert loader.IGNORE_INDEX == -100
