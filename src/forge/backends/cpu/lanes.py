"""Passes over rows of probabilities in LLVM's IR, LANES at a time, and the transposing of keys.

Rows are given by their address and begin whole vectors. LLVM vectorises such loops of Numba's too,
but takes 32 elements at a time and the rest one by one, which for rows of 16 to 64 is most of them.
The sums' order is that of LANES lanes, whatever the width of the machine's vectors.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forge.backends.cpu.mathlib import FLAGS, Exp
from forge.backends.cpu.tiles import LANES
from forge.backends.cpu.weaving import transposed

# Rows and columns of what is transposed at a time: 8 registers of AVX2.
SIDE = 8

_INDEX = ir.IntType(64)
_WORD = ir.IntType(32)
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)


@intrinsic
def clear(typing: Any, x: Any) -> Any:
    """x[i] = 0 for 0 <= i < LANES, x an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(_constant(0.0), builder.inttoptr(args[0], _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def prefetch(typing: Any, x: Any) -> Any:
    """Ask for the cache line at the address x, which need not be valid, to be read soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _WORD, _WORD, _WORD])
        known = builder.module.globals.get("llvm.prefetch.p0")
        function = known or ir.Function(builder.module, kind, "llvm.prefetch.p0")
        # To be read, into the second-level cache, as data.
        builder.call(function, [pointer, *(ir.Constant(_WORD, value) for value in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def greatest(typing: Any, x: Any, count: Any) -> Any:
    """The greatest of `count` > 0 floats at the address x; NaN is passed over."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, count = args
        row = _Row(builder, count)

        def larger(offset: Any, kept: Any, tops: list[Any]) -> list[Any]:
            return [_larger(builder, row.load(x, offset, kept, float("-inf")), tops[0])]

        (tops,) = row.each([_constant(float("-inf"))], larger)
        return _reduced(builder, tops, _larger)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def softmax(typing: Any, x: Any, count: Any, top: Any) -> Any:
    """x = e^(x - top) / their sum, which it returns, for `count` > 0 floats at the address x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, count, top = args
        row = _Row(builder, count)
        exp = Exp(builder, _VECTOR)
        top = _splat(builder, top)

        def exponential(offset: Any, kept: Any, sums: list[Any]) -> list[Any]:
            value = row.load(x, offset, kept, float("-inf"))
            e = exp.emit(builder.fsub(value, top, flags=FLAGS))
            row.store(e, x, offset)
            return [builder.fadd(sums[0], e, flags=FLAGS)]

        (sums,) = row.each([_constant(0.0)], exponential)
        total = _reduced(builder, sums, _sum)
        inverse = _splat(builder, builder.fdiv(ir.Constant(_FLOAT, 1.0), total, flags=FLAGS))

        def divide(offset: Any, kept: Any, _: list[Any]) -> list[Any]:
            row.store(builder.fmul(row.load(x, offset), inverse, flags=FLAGS), x, offset)
            return []

        row.each([], divide)
        return total

    return types.float32(types.int64, types.int64, types.float32), generate


@intrinsic
def score_gradient(
    typing: Any, p: Any, dp: Any, count: Any, lse: Any, delta: Any, scale: Any
) -> Any:
    """Makes scores p probabilities e^(p - lse), and their gradients dp those of q k^T.

    That is p (dp - delta) scale; p and dp are addresses of `count` > 0 floats.
    """
    signature = types.void(*[types.int64] * 3, *[types.float32] * 3)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        p, dp, count = args[:3]
        lse, delta, scale = (_splat(builder, value) for value in args[3:])
        row = _Row(builder, count)
        exp = Exp(builder, _VECTOR)

        def both(offset: Any, kept: Any, _: list[Any]) -> list[Any]:
            score = row.load(p, offset, kept, float("-inf"))
            e = exp.emit(builder.fsub(score, lse, flags=FLAGS))
            row.store(e, p, offset)
            # Of finite numbers: what follows a row's end need not be.
            centred = builder.fsub(row.load(dp, offset, kept, 0.0), delta, flags=FLAGS)
            product = builder.fmul(e, centred, flags=FLAGS)
            row.store(builder.fmul(product, scale, flags=FLAGS), dp, offset)
            return []

        row.each([], both)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def transpose_block(typing: Any, x: Any, row: Any, column: Any, out: Any) -> Any:
    """out[c, r] = x[row + r, column + c], widened, for SIDE rows and columns.

    x is C-contiguous of rank 2, `out` the address of rows LANES floats apart.
    """
    word = ir.IntType(x.dtype.bitwidth)
    words = ir.VectorType(_WORD, SIDE)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        width = builder.extract_value(array.shape, 1)
        place = builder.add(builder.mul(args[1], width), args[2])
        rows = []
        for _ in range(SIDE):
            start = builder.gep(array.data, [place])
            pointer = builder.bitcast(start, ir.VectorType(word, SIDE).as_pointer())
            value = builder.load(pointer, align=word.width // 8)
            if word != _WORD:
                shift = ir.Constant(words, [16] * SIDE)
                value = builder.shl(builder.zext(value, words), shift)
            rows.append(value)
            place = builder.add(place, width)
        for c, value in enumerate(transposed(builder, rows)):
            address = builder.add(args[3], ir.Constant(_INDEX, 4 * LANES * c))
            builder.store(value, builder.inttoptr(address, words.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, types.int64), generate


class _Row:
    """Writes loops over the vectors of a row of `count` floats; of the last some lanes may count.

    Those after the end are replaced as they are read. To replace them in memory first took 5 % of
    attention: LLVM makes that a masked store, which up to Zen 3 is tens of micro-operations.
    """

    def __init__(self, builder: Any, count: Any) -> None:
        self.builder = builder
        before = builder.sub(count, ir.Constant(_INDEX, 1))
        first = builder.and_(before, ir.Constant(_INDEX, -LANES))
        self.last = builder.shl(first, ir.Constant(_INDEX, 2))
        words = ir.VectorType(_WORD, LANES)
        left = _splat(builder, builder.trunc(builder.sub(count, first), _WORD), words)
        self.kept = builder.icmp_signed("<", ir.Constant(words, list(range(LANES))), left)

    def each(
        self, initial: list[Any], body: Callable[[Any, Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """`body` of each vector's offset in bytes, the lanes that count, and what it returned."""
        builder = self.builder
        before = builder.block
        test = builder.append_basic_block("lanes.test")
        loop = builder.append_basic_block("lanes")
        after = builder.append_basic_block("lanes.end")
        builder.branch(test)
        builder.position_at_end(test)
        offset = builder.phi(_INDEX)
        carried = [builder.phi(value.type) for value in initial]
        builder.cbranch(builder.icmp_signed("<", offset, self.last), loop, after)
        builder.position_at_end(loop)
        results = body(offset, None, carried)
        following = builder.add(offset, ir.Constant(_INDEX, 4 * LANES))
        builder.branch(test)
        starts = [ir.Constant(_INDEX, 0), *initial]
        for phi, start, later in zip(
            [offset, *carried], starts, [following, *results], strict=True
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(later, loop)
        builder.position_at_end(after)
        return body(self.last, self.kept, carried)

    def load(self, address: Any, offset: Any, kept: Any = None, other: float = 0.0) -> Any:
        """A vector; where lanes are not `kept`, they are `other`."""
        value = self.builder.load(self._pointer(address, offset), align=4)
        return value if kept is None else self.builder.select(kept, value, _constant(other))

    def store(self, value: Any, address: Any, offset: Any) -> None:
        """Write a vector."""
        self.builder.store(value, self._pointer(address, offset), align=4)

    def _pointer(self, address: Any, offset: Any) -> Any:
        return self.builder.inttoptr(self.builder.add(address, offset), _VECTOR.as_pointer())


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [value] * LANES)


def _splat(builder: Any, value: Any, kind: ir.VectorType = _VECTOR) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_WORD, 0))
    order = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, order)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=FLAGS)


def _reduced(builder: Any, x: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """All lanes of x combined: the upper half of those left with the lower, until one is left."""
    left = LANES
    while left > 1:
        left //= 2
        order = ir.Constant(ir.VectorType(_WORD, LANES), [(i + left) % LANES for i in range(LANES)])
        x = combine(builder, x, builder.shuffle_vector(x, x, order))
    return builder.extract_element(x, ir.Constant(_WORD, 0))
