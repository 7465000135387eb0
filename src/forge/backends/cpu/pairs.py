"""A microkernel in LLVM's IR for products of bfloat16: pairs of them, next to each other in K.

Where the processor has AVX512-BF16 an instruction multiplies 16 pairs by 16 and adds both products
to float32 sums; elsewhere pairs are widened and added by two multiply-adds, in the same order.
Every sum is one chain in the order of K, wherever blocks of K begin and tiles lie.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forge.backends.cpu.jit import device
from forge.backends.cpu.tiles import LANES, supports

# A tile has ROWS x WIDTH sums: 24 of AVX-512's 32 registers, and 12 of AVX2's 16, where 16 lanes
# are two registers.
NATIVE = supports("avx512bf16")
ROWS = 6
WIDTH = (4 if NATIVE else 1) * LANES
# Pairs of K that a tile takes at a time.
STEP = 1

_WORD = ir.IntType(32)
_INDEX = ir.IntType(64)
_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_WORD, LANES)
_ZERO = ir.Constant(_FLOATS, [0.0] * LANES)


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


@intrinsic
def pair_tile(
    typing: Any,
    a: Any,
    a_row: Any,
    a_step: Any,
    b: Any,
    c: Any,
    c_row: Any,
    rows: Any,
    depth: Any,
    fresh: Any,
) -> Any:
    """c[r, j] = (c[r, j] unless `fresh`) + the sum over k < depth of both products of a pair.

    For r < min(rows, ROWS) and j < WIDTH, depth >= 1. a, b, c are addresses; the pair a[r, k] is at
    r * a_row + k * a_step bytes, b[k, j] at k * WIDTH + j pairs, c[r, j] at r * c_row + j floats.
    """
    signature = types.void(*[types.int64] * 8, types.boolean)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Tile(builder, args).emit()
        return context.get_dummy_value()

    return signature, generate


@device
def begin() -> None:
    """What has to be done before the first tile: nothing."""


@device
def end() -> None:
    """What has to be done after the last tile: nothing."""


def prepare() -> None:
    """What has to be done once in a process: nothing."""


class _Tile:
    """Writes the instructions of one tile."""

    def __init__(self, builder: ir.IRBuilder, args: Any) -> None:
        self.builder = builder
        self.a, a_row, self.a_step, self.b, c, c_row, rows, self.depth, self.fresh = args
        last = builder.sub(rows, _index(1))
        # Rows past the end repeat the last one: they load, compute and store the same again.
        row = [_index(0)]
        for r in range(1, ROWS):
            row.append(builder.select(builder.icmp_signed("<", last, _index(r)), last, _index(r)))
        self.a_rows = [builder.mul(r, a_row) for r in row]
        step = builder.shl(c_row, _index(2))
        self.c_rows = [builder.add(c, builder.mul(r, step)) for r in row]

    def emit(self) -> None:
        builder = self.builder
        where = [
            builder.add(row, _index(4 * j)) for row in self.c_rows for j in range(0, WIDTH, LANES)
        ]
        # The sums so far are loaded, and dropped where they are no sums yet: a select of vectors
        # costs less than a second copy of the loop.
        start = [
            builder.select(self.fresh, _ZERO, self._load(address, _FLOATS)) for address in where
        ]
        before = builder.block
        loop = builder.append_basic_block("pairs")
        after = builder.append_basic_block("pairs.end")
        builder.branch(loop)
        builder.position_at_end(loop)
        k, a, b = builder.phi(_INDEX), builder.phi(_INDEX), builder.phi(_INDEX)
        sums = [builder.phi(_FLOATS) for _ in where]
        columns = [
            self._operand(self._load(builder.add(b, _index(4 * j)), _WORDS))
            for j in range(0, WIDTH, LANES)
        ]
        added = []
        for r, offset in enumerate(self.a_rows):
            row = self._operand(self._splat(builder.add(a, offset)))
            for n, column in enumerate(columns):
                added.append(self._multiply_add(row, column, sums[r * len(columns) + n]))
        step = [
            builder.add(k, _index(1)),
            builder.add(a, self.a_step),
            builder.add(b, _index(4 * WIDTH)),
        ]
        initial = [_index(0), self.a, self.b, *start]
        for phi, first, following in zip([k, a, b, *sums], initial, step + added, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", step[0], self.depth), loop, after)
        builder.position_at_end(after)
        for total, address in zip(added, where, strict=True):
            pointer = builder.inttoptr(address, _FLOATS.as_pointer())
            builder.store(total, pointer, align=4)

    def _load(self, address: Any, kind: ir.VectorType) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def _splat(self, address: Any) -> Any:
        # Rows of an odd length begin between two words.
        pointer = self.builder.inttoptr(address, _WORD.as_pointer())
        pair = self.builder.load(pointer, align=2)
        undefined = ir.Constant(_WORDS, ir.Undefined)
        first = self.builder.insert_element(undefined, pair, ir.Constant(_WORD, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * LANES))

    def _operand(self, pairs: Any) -> Any:
        """Pairs as the multiply-add takes them: as they are, or both halves widened."""
        builder = self.builder
        if NATIVE:
            return builder.bitcast(pairs, _BFLOATS)
        low = builder.shl(pairs, ir.Constant(_WORDS, [16] * LANES))
        high = builder.and_(pairs, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
        return builder.bitcast(low, _FLOATS), builder.bitcast(high, _FLOATS)

    def _multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        if NATIVE:
            kind = ir.FunctionType(_FLOATS, [_FLOATS, _BFLOATS, _BFLOATS])
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return self.builder.call(self._intrinsic(name, kind), [c, a, b])
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fma = self._intrinsic("llvm.fma.v16f32", kind)
        # The second of a pair first, as the instruction has it.
        c = self.builder.call(fma, [a[1], b[1], c])
        return self.builder.call(fma, [a[0], b[0], c])

    def _intrinsic(self, name: str, kind: ir.FunctionType) -> Any:
        known = self.builder.module.globals.get(name)
        return known if known is not None else ir.Function(self.builder.module, kind, name)


def _index(value: int) -> ir.Constant:
    return ir.Constant(_INDEX, value)
