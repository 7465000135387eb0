"""A matrix-product microkernel in LLVM's IR, for products too small or too ragged for BLAS.

`tile` keeps ROWS x LANES sums in vector registers. Plain Numba loops keep them in memory and run
at a third of its speed; OpenBLAS, called per tile, at two thirds. Every sum is one chain of fused
multiply-adds in the order of `depth`, so its bits depend neither on the tile's size, nor on where
in the tile it lies, nor on the width of the machine's vectors.
"""

from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def supports(feature: str) -> bool:
    """Whether compiled code may use a feature of the processor, such as avx512bf16.

    NUMBA_CPU_FEATURES limits it, as it limits what Numba compiles for.
    """
    named = numba.config.CPU_FEATURES
    if named is not None:
        return f"+{feature}" in named.split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature))


LANES = 16
# 12 of the 16 registers of AVX2 (two of 8 floats make 16 lanes), 12 of the 32 of AVX-512: enough
# independent sums to hide the latency of a multiply-add.
ROWS = 12 if supports("avx512f") else 6

_WORD = ir.IntType(32)
_INDEX = ir.IntType(64)
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INDICES = ir.VectorType(_INDEX, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


@intrinsic
def address(typing: Any, x: Any, row: Any, column: Any) -> Any:
    """The address of x[row, column], x C-contiguous of rank 2."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        width = builder.extract_value(array.shape, 1)
        element = builder.add(builder.mul(args[1], width), args[2])
        return builder.ptrtoint(builder.gep(array.data, [element]), _INDEX)

    return types.int64(x, types.int64, types.int64), generate


@intrinsic
def tile(
    typing: Any,
    a: Any,
    a_row: Any,
    a_step: Any,
    b: Any,
    b_step: Any,
    c: Any,
    c_row: Any,
    rows: Any,
    lanes: Any,
    depth: Any,
    scale: Any,
    accumulate: Any,
) -> Any:
    """c[r, l] = scale * (sum over k < depth of a[r, k] b[k, l], plus c[r, l] if `accumulate`).

    For r < min(rows, ROWS) and l < min(lanes, LANES), depth >= 1. a, b, c are addresses; a[r, k] is
    at r * a_row + k * a_step floats, b[k, l] at k * b_step + l, c[r, l] at r * c_row + l.
    """
    signature = types.void(*[types.int64] * 10, types.float32, types.boolean)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = args[8]
        full = builder.icmp_signed(">=", lanes, _index(LANES))
        with builder.if_else(full) as (whole, partial):
            with whole:
                _Tile(builder, args, None).emit()
            with partial:
                iota = ir.Constant(_INDICES, list(range(LANES)))
                mask = builder.icmp_signed("<", iota, _splat(builder, lanes, _INDICES))
                _Tile(builder, args, mask).emit()
        return context.get_dummy_value()

    return signature, generate


def _index(value: int) -> ir.Constant:
    return ir.Constant(_INDEX, value)


def _splat(builder: ir.IRBuilder, value: Any, kind: ir.VectorType) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_WORD, 0))
    order = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, order)


class _Tile:
    """Writes the instructions of one tile; with a mask, of its lanes that exist."""

    def __init__(self, builder: ir.IRBuilder, args: Any, mask: Any) -> None:
        self.builder = builder
        self.mask = mask
        self.a, a_row, a_step, self.b, b_step, c, c_row, rows, _, self.depth, *rest = args
        self.scale, self.accumulate = rest
        self.a_step = self._bytes(a_step)
        self.b_step = self._bytes(b_step)
        last = builder.sub(rows, _index(1))
        # Rows past the end repeat the last one: they load, compute and store the same again.
        row = [_index(0)]
        for r in range(1, ROWS):
            row.append(builder.select(builder.icmp_signed("<", last, _index(r)), last, _index(r)))
        self.a_rows = [self._bytes(builder.mul(r, a_row)) for r in row]
        self.c_rows = [builder.add(c, self._bytes(builder.mul(r, c_row))) for r in row]

    def emit(self) -> None:
        builder = self.builder
        start = [
            builder.select(self.accumulate, self._load(address), _ZERO) for address in self.c_rows
        ]
        before = builder.block
        loop = builder.append_basic_block("tile")
        after = builder.append_basic_block("tile.end")
        builder.branch(loop)
        builder.position_at_end(loop)
        k, a, b = builder.phi(_INDEX), builder.phi(_INDEX), builder.phi(_INDEX)
        sums = [builder.phi(_VECTOR) for _ in range(ROWS)]
        values = self._load(b)
        added = [
            self._multiply_add(self._scalar(builder.add(a, offset)), values, total)
            for offset, total in zip(self.a_rows, sums, strict=True)
        ]
        step = [
            builder.add(k, _index(1)),
            builder.add(a, self.a_step),
            builder.add(b, self.b_step),
        ]
        initial = [_index(0), self.a, self.b, *start]
        for phi, first, following in zip([k, a, b, *sums], initial, step + added, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", step[0], self.depth), loop, after)
        builder.position_at_end(after)
        scale = _splat(builder, self.scale, _VECTOR)
        for total, address in zip(added, self.c_rows, strict=True):
            self._store(builder.fmul(total, scale), address)

    def _bytes(self, elements: Any) -> Any:
        return self.builder.shl(elements, _index(2))

    def _scalar(self, address: Any) -> Any:
        pointer = self.builder.inttoptr(address, _FLOAT.as_pointer())
        return _splat(self.builder, self.builder.load(pointer), _VECTOR)

    def _multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        return self.builder.call(self._intrinsic("llvm.fma.v16f32", kind), [a, b, c])

    def _load(self, address: Any) -> Any:
        pointer = self.builder.inttoptr(address, _VECTOR.as_pointer())
        if self.mask is None:
            return self.builder.load(pointer, align=4)
        kind = ir.FunctionType(_VECTOR, [pointer.type, _WORD, _MASK, _VECTOR])
        load = self._intrinsic("llvm.masked.load.v16f32.p0", kind)
        return self.builder.call(load, [pointer, ir.Constant(_WORD, 4), self.mask, _ZERO])

    def _store(self, value: Any, address: Any) -> None:
        pointer = self.builder.inttoptr(address, _VECTOR.as_pointer())
        if self.mask is None:
            self.builder.store(value, pointer, align=4)
            return
        kind = ir.FunctionType(ir.VoidType(), [_VECTOR, pointer.type, _WORD, _MASK])
        store = self._intrinsic("llvm.masked.store.v16f32.p0", kind)
        self.builder.call(store, [value, pointer, ir.Constant(_WORD, 4), self.mask])

    def _intrinsic(self, name: str, kind: ir.FunctionType) -> Any:
        known = self.builder.module.globals.get(name)
        return known if known is not None else ir.Function(self.builder.module, kind, name)
