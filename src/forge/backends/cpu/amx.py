"""The microkernel of `pairs` for processors with AMX, Intel's tile registers.

A tile register holds 16 rows of 64 bytes: 16 x 16 float32 sums, 16 rows of A by 32 of K, or 32 of K
by 16 columns of B, whose pairs lie as `low_product` packs them. The instruction adds the products
of 32 of K to a sum, in an order of its own that is always the same.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from forge.errors import DeviceError

ROWS = 32
WIDTH = 32
STEP = 16

_SIDE = 16
_BYTE = ir.IntType(8)
_POINTER = _BYTE.as_pointer()
_INDEX = ir.IntType(64)
_NOTHING = ir.VoidType()
# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA). From the kernel's documentation of x86 xstate.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


def prepare() -> None:
    """Ask the system, once in a process, for the tile registers; raises `DeviceError`."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA):
        raise DeviceError(
            "[cpu] expected the system to grant AMX's tile registers, which this processor has, "
            f"got error {ctypes.get_errno()}; allow arch_prctl, or set NUMBA_CPU_NAME and "
            "NUMBA_CPU_FEATURES without amx-bf16"
        )


def _call(builder: ir.IRBuilder, name: str, *args: Any) -> None:
    """Call an LLVM intrinsic that returns nothing; numbers are tile registers."""
    values = [ir.Constant(_BYTE, x) if isinstance(x, int) else x for x in args]
    name = f"llvm.x86.{name}"
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(_NOTHING, [value.type for value in values])
        function = ir.Function(builder.module, kind, name)
    builder.call(function, values)


@intrinsic
def begin(typing: Any) -> Any:
    """Make all tile registers 16 rows of 64 bytes, for this thread until `end`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Palette 1; from byte 16 on the bytes of a row, two for each register; from 48 on the rows.
        layout = [0] * 64
        layout[0] = 1
        for register in range(8):
            layout[16 + 2 * register] = 64
            layout[48 + register] = _SIDE
        kind = ir.ArrayType(_BYTE, 64)
        place = cgutils.alloca_once(builder, kind)
        builder.store(ir.Constant(kind, layout), place)
        _call(builder, "ldtilecfg", builder.bitcast(place, _POINTER))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def end(typing: Any) -> Any:
    """Release the tile registers, so that the system need not save them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


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
    """As `pairs.pair_tile`: a_step is 4, depth a multiple of STEP, and all ROWS rows exist."""
    signature = types.void(*[types.int64] * 8, types.boolean)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit(builder, *args)
        return context.get_dummy_value()

    return signature, generate


def _emit(
    builder: ir.IRBuilder,
    a: Any,
    a_row: Any,
    _a_step: Any,
    b: Any,
    c: Any,
    c_row: Any,
    _rows: Any,
    depth: Any,
    fresh: Any,
) -> None:
    """Registers 0 to 3 hold the sums of two by two squares, 4 and 5 rows of A, 6 and 7 B's."""

    def index(value: int) -> Any:
        return ir.Constant(_INDEX, value)

    def pointer(address: Any) -> Any:
        return builder.inttoptr(address, _POINTER)

    def load(register: int, address: Any, stride: Any) -> None:
        _call(builder, "tileloadd64", register, pointer(address), stride)

    c_step = builder.shl(c_row, index(2))
    lower = builder.add(c, builder.mul(c_step, index(_SIDE)))
    squares = [
        builder.add(corner, index(4 * column)) for corner in (c, lower) for column in (0, _SIDE)
    ]
    with builder.if_else(fresh) as (first, later):
        with first:
            for register in range(4):
                _call(builder, "tilezero", register)
        with later:
            for register, square in enumerate(squares):
                load(register, square, c_step)
    half = builder.mul(a_row, index(_SIDE))
    before = builder.block
    loop = builder.append_basic_block("tiles")
    after = builder.append_basic_block("tiles.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    k, left, right = (builder.phi(_INDEX) for _ in range(3))
    b_row = index(4 * WIDTH)
    load(4, left, a_row)
    load(5, builder.add(left, half), a_row)
    load(6, right, b_row)
    load(7, builder.add(right, index(4 * _SIDE)), b_row)
    for register in range(4):
        _call(builder, "tdpbf16ps", register, 4 + register // 2, 6 + register % 2)
    steps = [
        builder.add(k, index(STEP)),
        builder.add(left, index(4 * STEP)),
        builder.add(right, index(4 * WIDTH * STEP)),
    ]
    for phi, start, step in zip((k, left, right), (index(0), a, b), steps, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(step, loop)
    builder.cbranch(builder.icmp_signed("<", steps[0], depth), loop, after)
    builder.position_at_end(after)
    for register, square in enumerate(squares):
        _call(builder, "tilestored64", register, pointer(square), c_step)
