"""The microkernel that multiplies bfloat16 on this processor, and the sizes that follow from it."""

from __future__ import annotations

from typing import Any

from forge.backends.cpu import amx, pairs
from forge.backends.cpu.tiles import LANES, supports

_chosen: Any = amx if supports("amx-bf16") else pairs
# Whether products of bfloat16 are faster than float32's.
FAST = pairs.NATIVE
# Its tiles have ROWS x WIDTH sums and take STEP pairs of K at a time.
ROWS, WIDTH, STEP = _chosen.ROWS, _chosen.WIDTH, _chosen.STEP
# Whether it wants A packed by rows.
BY_ROW = _chosen is amx
prepare, begin, pair_tile, end = _chosen.prepare, _chosen.begin, _chosen.pair_tile, _chosen.end

# Of K at a time: a panel's part then takes 64 KiB (16 on AVX2), and stays near the core while a
# block's rows pass.
DEPTH = 512
# Pairs from one row of a packed part of A to the next: a power of two apart they would share sets.
ROW = DEPTH // 2 + LANES
