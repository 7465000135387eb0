"""The loops behind `ceilings`: multiply-adds in registers, and arrays read and copied by threads.

They are kernels like those of the CPU backend, cached with them, but compiled when they are first
asked for: training does not need them.
"""

from typing import Any

from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from forge.backends.cpu.jit import kernel
from forge.backends.cpu.tiles import LANES, ROWS

# Chains of multiply-adds that run side by side, each a vector wide: as many as hide their latency
# and fit the registers, which is what the microkernel of small products found too. Operations of
# one multiply-add in each.
CHAINS = ROWS
FLOPS = 2 * LANES * CHAINS
# Elements that are read as four streams side by side.
_BLOCK = 1 << 16

_COUNT = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


@intrinsic
def _chains(typing: Any, turns: Any, factor: Any) -> Any:
    """The sum of CHAINS vectors after `turns` times v = v * factor + 1: all that is in the loop."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        turns, factor = args
        word = ir.IntType(32)
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        first = builder.insert_element(undefined, factor, ir.Constant(word, 0))
        everywhere = ir.Constant(ir.VectorType(word, LANES), [0] * LANES)
        factors = builder.shuffle_vector(first, undefined, everywhere)
        ones = ir.Constant(_VECTOR, [1.0] * LANES)
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        name = f"llvm.fma.v{LANES}f32"
        fma = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        before = builder.block
        loop = builder.append_basic_block("chains")
        after = builder.append_basic_block("chains.end")
        builder.branch(loop)
        builder.position_at_end(loop)
        turn = builder.phi(_COUNT)
        values = [builder.phi(_VECTOR) for _ in range(CHAINS)]
        following = [builder.call(fma, [value, factors, ones]) for value in values]
        turned = builder.add(turn, ir.Constant(_COUNT, 1))
        turn.add_incoming(ir.Constant(_COUNT, 0), before)
        turn.add_incoming(turned, loop)
        for chain, (value, result) in enumerate(zip(values, following, strict=True)):
            # Each starts elsewhere: equal chains would be computed once.
            value.add_incoming(ir.Constant(_VECTOR, [float(chain)] * LANES), before)
            value.add_incoming(result, loop)
        builder.cbranch(builder.icmp_signed("<", turned, turns), loop, after)
        builder.position_at_end(after)
        total = following[0]
        for result in following[1:]:
            total = builder.fadd(total, result)
        return builder.extract_element(total, ir.Constant(word, 0))

    return types.float32(types.int64, types.float32), generate


@kernel("void(float32[::1], int64, float32)")
def multiply_add(sums: Any, turns: int, factor: float) -> None:
    """CHAINS * LANES * turns multiply-adds for every element of sums."""
    for i in prange(sums.size):
        sums[i] = _chains(turns, factor)


@kernel("void(float32[::1], float32[::1])")
def read(x: Any, sums: Any) -> None:
    """Add up x, an equal piece for every element of sums.

    In blocks of four streams, which an EPYC reads 1.3 times as fast as one stream.
    """
    size = x.size // sums.size
    blocks = (size + _BLOCK - 1) // _BLOCK
    stream = size // blocks // 4
    for i in prange(sums.size):
        total = x[i * size]
        for block in range(blocks):
            start = i * size + 4 * stream * block
            a, b = x[start : start + stream], x[start + stream : start + 2 * stream]
            c = x[start + 2 * stream : start + 3 * stream]
            d = x[start + 3 * stream : start + 4 * stream]
            for k in range(stream):
                total += (a[k] + b[k]) + (c[k] + d[k])
        sums[i] = total


@kernel("void(float32[::1], float32[::1], int64)")
def copy(x: Any, out: Any, pieces: int) -> None:
    """out = 1.5 x, in pieces: as STREAM's scale, which no library's copy stands in for."""
    size = x.size // pieces
    for i in prange(pieces):
        source = x[i * size : (i + 1) * size]
        target = out[i * size : (i + 1) * size]
        for k in range(source.size):
            target[k] = source[k] * 1.5
