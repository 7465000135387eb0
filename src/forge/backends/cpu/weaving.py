"""Rearranging bfloat16 into pairs that lie next to each other in K, 16 at a time, in LLVM's IR.

Plain loops store one pair after the other, far from each other: they took 8 to 20 times as long,
a fifth of a product's time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forge.backends.cpu.tiles import LANES

_WORD = ir.IntType(32)
_INDEX = ir.IntType(64)
_WORDS = ir.VectorType(_WORD, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


@intrinsic
def interleave(typing: Any, low: Any, high: Any, out: Any) -> Any:
    """LANES pairs at the address `out`, of as many bfloat16 at the addresses `low` and `high`."""
    signature = types.void(*[types.int64] * 3)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, _woven(builder, args[0], args[1]), args[2])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def transpose(typing: Any, x: Any, x_step: Any, out: Any, out_step: Any) -> Any:
    """out[c, r] = x[r, c] for LANES rows of as many pairs, at addresses `step` bytes apart."""
    signature = types.void(*[types.int64] * 4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_step, out, out_step = args
        rows = [_load(builder, _at(builder, x, x_step, r), _WORDS) for r in range(LANES)]
        for r, row in enumerate(transposed(builder, rows)):
            _store(builder, row, _at(builder, out, out_step, r))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def weave(typing: Any, x: Any, x_step: Any, out: Any, out_step: Any) -> Any:
    """out[c, r] = the pair (x[2 r, c], x[2 r + 1, c]): of 2 LANES rows of LANES bfloat16."""
    signature = types.void(*[types.int64] * 4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_step, out, out_step = args
        where = [_at(builder, x, x_step, r) for r in range(2 * LANES)]
        rows = [_woven(builder, where[2 * r], where[2 * r + 1]) for r in range(LANES)]
        for r, row in enumerate(transposed(builder, rows)):
            _store(builder, row, _at(builder, out, out_step, r))
        return context.get_dummy_value()

    return signature, generate


def _at(builder: ir.IRBuilder, start: Any, step: Any, count: int) -> Any:
    return builder.add(start, builder.mul(step, ir.Constant(_INDEX, count)))


def _load(builder: ir.IRBuilder, address: Any, kind: ir.VectorType) -> Any:
    # Rows of an odd length begin between two words.
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def _store(builder: ir.IRBuilder, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, _WORDS.as_pointer()), align=4)


def _woven(builder: ir.IRBuilder, low: Any, high: Any) -> Any:
    first, second = (
        builder.zext(_load(builder, address, _SHORTS), _WORDS) for address in (low, high)
    )
    return builder.or_(first, builder.shl(second, ir.Constant(_WORDS, [16] * LANES)))


def transposed(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """As many vectors of words as each has lanes, a power of two, transposed.

    Each step swaps a bit of the row's number with that of the lane's.
    """
    rows = list(rows)
    side = len(rows)
    kind = ir.VectorType(_WORD, side)
    bit = 1
    while bit < side:
        upper = [lane if not lane & bit else side + lane - bit for lane in range(side)]
        lower = [lane + bit if not lane & bit else side + lane for lane in range(side)]
        for r in range(side):
            if not r & bit:
                a, b = rows[r], rows[r + bit]
                rows[r] = builder.shuffle_vector(a, b, ir.Constant(kind, upper))
                rows[r + bit] = builder.shuffle_vector(a, b, ir.Constant(kind, lower))
        bit *= 2
    return rows
