"""The operands of a product of bfloat16 as the microkernel takes them: in pairs next in K."""

from __future__ import annotations

from typing import Any

import numpy as np

from forge.backends.cpu.jit import device, routine
from forge.backends.cpu.micro import BY_ROW, ROW, STEP, WIDTH
from forge.backends.cpu.tiles import LANES, address
from forge.backends.cpu.weaving import interleave, transpose, weave

u32 = np.uint32


@routine
def pack_columns(
    b: Any, j0: Any, j1: Any, k0: Any, k1: Any, start: Any, trans_b: Any, panels: Any
) -> None:
    """panels[p, start + k, j] = the pair of op(b)[k0 + 2 k, j0 + p WIDTH + j] and the one below.

    Past the ends it is 0. Where a panel's rows begin, `start` counts pairs.
    """
    whole = (k1 - k0) // 2
    for p in range(panels.shape[0]):
        left = j0 + p * WIDTH
        _pack_edge(b, left, min(j1, left + WIDTH), k0, k1, trans_b, panels[p, start:])
    full = min(panels.shape[0], (j1 - j0) // WIDTH)
    if trans_b:
        for p in range(full):
            out = address(panels, p, start)
            for j in range(0, WIDTH, LANES):
                x = address(b, j0 + p * WIDTH + j, k0)
                for k in range(0, whole // LANES * LANES, LANES):
                    place = out + 4 * (k * WIDTH + j)
                    transpose(x + 4 * k, 2 * b.shape[1], place, 4 * WIDTH)
    else:
        out = address(panels, 0, start)
        step = 4 * panels.shape[1]
        for k in range(whole):
            low = address(b, k0 + 2 * k, j0)
            for p in range(full):
                for j in range(0, WIDTH, LANES):
                    x = low + 2 * (p * WIDTH + j)
                    interleave(x, x + 2 * b.shape[1], out + p * step + 4 * (k * WIDTH + j))


@routine
def _pack_edge(b: Any, j0: Any, j1: Any, k0: Any, k1: Any, trans_b: Any, out: Any) -> None:
    """What `pack_columns` leaves out of a panel: all of a narrow one, the last rows of another."""
    whole = (k1 - k0) // 2
    begin = 0
    if j1 - j0 == WIDTH:
        begin = whole // LANES * LANES if trans_b else whole
    for k in range(begin, padded_pairs(k1 - k0)):
        row = out[k * WIDTH : (k + 1) * WIDTH]
        here = k0 + 2 * k
        for j in range(WIDTH):
            pair = u32(0)
            if j0 + j < j1 and here < k1:
                pair = u32(b[j0 + j, here] if trans_b else b[here, j0 + j])
                if here + 1 < k1:
                    high = u32(b[j0 + j, here + 1] if trans_b else b[here + 1, j0 + j])
                    pair |= high << u32(16)
            row[j] = pair


@device
def padded_pairs(count: Any) -> Any:
    """Pairs that `count` elements of K fill, as many as the microkernel takes at a time."""
    return (count + 2 * STEP - 1) // (2 * STEP) * STEP


@routine
def pack_rows(a: Any, i0: Any, i1: Any, k0: Any, k1: Any, trans_a: Any, out: Any) -> None:
    """Pairs of op(a)[i0 …, k0 …], 0 past the ends: by row where BY_ROW, else by k."""
    height = i1 - i0
    whole = (k1 - k0) // 2
    row_step = ROW if BY_ROW else 1
    step = 1 if BY_ROW else height
    place = np.int64(out.ctypes.data)
    # What is done by vectors: so many rows, and pairs of each.
    rows = 0
    count = 0
    if trans_a and BY_ROW:
        rows = height // LANES * LANES
        count = whole // LANES * LANES
        for i in range(0, rows, LANES):
            for k in range(0, count, LANES):
                x = address(a, k0 + 2 * k, i0 + i)
                weave(x, 2 * a.shape[1], place + 4 * (i * ROW + k), 4 * ROW)
    elif trans_a:
        rows = height // LANES * LANES
        count = whole
        for k in range(count):
            x = address(a, k0 + 2 * k, i0)
            for i in range(0, rows, LANES):
                here = x + 2 * i
                interleave(here, here + 2 * a.shape[1], place + 4 * (k * height + i))
    elif BY_ROW:
        rows = height
        count = whole
        for i in range(height):
            row = a[i0 + i, k0:k1]
            target = out[i * ROW : i * ROW + whole]
            for k in range(np.uint64(whole)):
                first = np.uint64(2) * k
                target[k] = u32(row[first]) | (u32(row[first + np.uint64(1)]) << u32(16))
    for i in range(height):
        for k in range(count if i < rows else 0, padded_pairs(k1 - k0)):
            pair = u32(0)
            here = k0 + 2 * k
            if here < k1:
                pair = u32(a[here, i0 + i] if trans_a else a[i0 + i, here])
                if here + 1 < k1:
                    high = u32(a[here + 1, i0 + i] if trans_a else a[i0 + i, here + 1])
                    pair |= high << u32(16)
            out[i * row_step + k * step] = pair
