"""The CUDA kernel of a whole GPT-2 without a GPU: its threads as fibers, in tests/emulator."""

import ctypes
import importlib.util
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from forge.backends.reference.token import decode_token
from forge.dtypes import to_numpy
from forge.tensor import empty, tensor

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("cuda") is None:
    pytest.skip("needs triton: pip install -e '.[cuda]'", allow_module_level=True)
if shutil.which("g++") is None or platform.machine() != "x86_64":
    pytest.skip("needs g++ on x86-64", allow_module_level=True)

from forge.backends.cuda import device, token

EMULATOR = Path(__file__).parent / "emulator"
SHARED = "extern __shared__ uint4 memory[];"
BF16 = to_numpy("bfloat16")


def aligned(x):
    """A copy that starts at a multiple of 256 bytes, as buffers on a GPU do."""
    room = np.empty(x.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 256
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


class Machine:
    """A GPT-2 on an emulated GPU of so many multiprocessors."""

    def __init__(self, folder, monkeypatch, processors, layers, heads, room, width, classes):
        self.folder, self.processors = folder, processors
        monkeypatch.setattr(device, "processors", lambda: processors)
        monkeypatch.setattr(device, "arch", lambda: 90)
        self.layers, self.classes, self.cache = layers, classes, (heads, room, width)
        rng = np.random.default_rng(0)
        C = heads * width

        def drawn(*shape, mean=0.0, std=1.0, dtype=BF16):
            return aligned((mean + std * rng.standard_normal(shape)).astype(dtype))

        def norm():
            return [drawn(C, mean=m, std=0.1, dtype=np.float32) for m in (1.0, 0.0)]

        def linear(k, m):
            return [drawn(k, m, std=k**-0.5), drawn(m, std=0.1)]

        self.tables = [drawn(classes + 3, C, std=0.5), drawn(room, C, std=0.5), *norm()]
        attention, mlp = ((C, 3 * C), (C, C)), ((C, 4 * C), (4 * C, C))
        self.weights = [
            [
                x
                for half in (attention, mlp)
                for x in (*norm(), *linear(*half[0]), *linear(*half[1]))
            ]
            for _ in range(layers)
        ]

    def caches(self, samples, seed=1):
        rng = np.random.default_rng(seed)
        shape = (self.layers, 2, samples, *self.cache)
        values = rng.standard_normal(shape).astype(BF16)
        return [[aligned(x) for x in pair] for pair in values]

    def start(self, samples):
        """Compile for so many samples, with empty mailboxes."""
        heads, room, width = self.cache
        token._sizes.cache_clear()
        sizes = token._sizes(samples, heads, width, room + 17, self.layers, self.classes)
        token._sizes.cache_clear()
        for header in Path(token.__file__).parent.glob("token_*.cuh"):
            shutil.copy(header, self.folder)
        for file in EMULATOR.iterdir():
            shutil.copy(file, self.folder)
        source = Path(token.__file__).with_name("token.cu").read_text()
        assert SHARED in source
        memory = "uint4 *memory = (uint4 *)running->block->memory.data();"
        (self.folder / "token.cu").write_text(source.replace(SHARED, memory))
        library = self.folder / f"{samples}.so"
        macros = [f"-D{name}={value}" for name, value in sizes.items()]
        flags = ["-O1", "-w", "-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing"]
        command = ["g++", *flags, *macros, str(self.folder / "run.cpp"), "-o", str(library)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(library))
        assert sizes["MAILBOX"] == self.library.mailbox()
        self.turns = aligned(np.full(self.processors, -1, np.int32))
        self.mail = aligned(np.full(2 * self.layers * sizes["MAILBOX"] // 4, -1, np.int32))

    def decode(self, ids, pos, caches, seed):
        logits = aligned(np.zeros((len(ids), self.classes), BF16))
        first = [aligned(np.array(x, np.int64)) for x in (ids, pos)]
        blocks = [x for w, pair in zip(self.weights, caches, strict=True) for x in (*w, *pair)]
        given = [*first, *self.tables, logits, self.turns, self.mail, *blocks]
        bounds = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in given]
        pointers = (ctypes.c_void_p * len(given))(*(start for start, _ in bounds))
        regions = (ctypes.c_void_p * (2 * len(given)))(*(x for pair in bounds for x in pair))
        assert self.library.run(pointers, regions, len(given), self.cache[1], seed) == 0
        return logits

    def expected(self, ids, pos, caches):
        """Logits and caches by the definition, in float64."""
        exact = [[tensor(x, "float64", "reference") for x in group] for group in self.weights]
        tables = [tensor(x, "float64", "reference") for x in self.tables]
        keys, values = (
            [tensor(pair[i], "float64", "reference") for pair in caches] for i in (0, 1)
        )
        out = empty((len(ids), self.classes), "float64", tables[0].device)
        ints = [tensor(np.array(x), "int64", "reference") for x in (ids, pos)]
        caches = {"k_caches": tuple(keys), "v_caches": tuple(values)}
        decode_token(*ints, *tables, tuple(map(tuple, exact)), **caches, out=out, eps=1e-5)
        return out.numpy(), [[k.numpy(), v.numpy()] for k, v in zip(keys, values, strict=True)]


def error(got, want):
    return np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize(
    ("processors", "sizes", "positions"),
    [
        (30, (2, 3, 300, 32), [126]),  # the rows of products in parts, and the new key at a border
        (7, (2, 6, 300, 16), [5, 270]),  # several strips and spans to a thread block
        (13, (2, 2, 24, 16), [5, 23, 0, 9]),
        (11, (1, 1, 100, 256), [77]),  # more weights than can be copied ahead
    ],
)
def test_the_kernel_of_a_whole_model(tmp_path, monkeypatch, processors, sizes, positions):
    machine = Machine(tmp_path, monkeypatch, processors, *sizes, classes=61)
    machine.start(len(positions))
    caches = machine.caches(len(positions))
    rng = np.random.default_rng(2)
    for step in range(3):
        pos = [min(p + step, sizes[2] - 1) for p in positions]
        ids = rng.integers(0, 61, len(pos))
        want, after = machine.expected(ids, pos, caches)
        got = machine.decode(ids, pos, caches, seed=step)
        again = machine.decode(ids, pos, caches, seed=step + 100)
        assert got.tobytes() == again.tobytes()
        assert error(got, want) < 1e-2
        for a, b in zip(caches, after, strict=True):
            assert max(error(x, y) for x, y in zip(a, b, strict=True)) < 1e-2


def test_a_sample_has_the_bits_it_has_alone(tmp_path, monkeypatch):
    machine = Machine(tmp_path, monkeypatch, 9, 2, 2, 300, 32, classes=40)
    ids, pos, caches = [3, 17, 39], [0, 299, 140], machine.caches(3)
    alone = [[aligned(x[1:2]) for x in pair] for pair in caches]
    machine.start(3)
    together = machine.decode(ids, pos, caches, seed=1)
    machine.start(1)
    assert machine.decode(ids[1:2], pos[1:2], alone, seed=2).tobytes() == together[1].tobytes()
