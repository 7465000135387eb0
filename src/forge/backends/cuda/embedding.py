"""Token and position embedding: ids [B, T], rows of width C.

The gradient adds rows of equal ids in a fixed order without knowing on the host where they are:
the sorted ids are cut into pieces, each added up by a program of its own, and a run of equal ids
that crosses pieces is put together, in order, by the program of the piece in which it starts.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from forge.backends.cuda.reduce import add_to
from forge.backends.cuda.shape import blocks
from forge.backends.cuda.triton_jit import launch
from forge.tensor import Tensor, empty

# Columns of a program: of a row of 768, three programs with a warp each draw 512 bytes at a time.
COLUMNS = 256
# Sorted ids in a piece: GPT-2's batch of 65,536 then keeps 6,000 programs busy.
PIECE = 32
# Pieces, or samples, whose rows are loaded together.
TOGETHER = 16


@triton.jit
def position(pos, start, b):
    """The first position of sample b: `start`, or pos[b] where positions are on the device."""
    return start if pos is None else tl.load(pos + b)


@triton.jit
def _embedding(ids, wte, wpe, out, pos, start, T, C, COLUMNS: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < C
    value = tl.load(wte + tl.load(ids + n) * C + columns, mask=inside).to(tl.float32)
    if wpe is not None:
        at = position(pos, start, n // T) + n % T
        value += tl.load(wpe + at * C + columns, mask=inside).to(tl.float32)
    tl.store(out + n * C + columns, value, mask=inside)


@triton.jit
def _add_pieces(ids, x, order, out, heads, tails, N, C, PIECE: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the runs within a piece to out; its shares of longer runs go to `heads` and `tails`.

    `heads` gets what continues an earlier piece's run, `tails` what begins a run that goes on.
    """
    piece = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < C
    first, stop = piece * PIECE, tl.minimum((piece + 1) * PIECE, N)
    row = tl.load(order + first)
    token = tl.load(ids + row)
    earlier = tl.load(ids + tl.load(order + tl.maximum(first - 1, 0)))
    # Where the run of this token began; of one that began in an earlier piece, `first - 1`.
    begin = tl.where((first > 0) & (earlier == token), first - 1, first)
    total = tl.full([COLUMNS], 0.0, tl.float32)
    for i in range(first, stop):
        total += tl.load(x + row * C + columns, mask=inside, other=0.0).to(tl.float32)
        next_row = tl.load(order + tl.minimum(i + 1, N - 1))
        next_token = tl.load(ids + next_row)
        goes_on = (i + 1 < N) & (next_token == token)
        if (i + 1 == stop) | (next_token != token):
            if begin >= first:
                if goes_on:
                    tl.store(tails + piece.to(tl.int64) * C + columns, total, mask=inside)
                else:
                    add_to(out, token * C + columns, total, inside)
            else:
                tl.store(heads + piece.to(tl.int64) * C + columns, total, mask=inside)
            begin = i + 1
            total = tl.full([COLUMNS], 0.0, tl.float32)
        row, token = next_row, next_token


@triton.jit
def _join_pieces(
    ids,
    order,
    out,
    heads,
    tails,
    N,
    C,
    PIECE: tl.constexpr,
    TOGETHER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Put together the run that starts in this piece and goes on in the next ones."""
    piece = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < C
    end = (piece + 1) * PIECE
    if end < N:
        token = tl.load(ids + tl.load(order + end - 1))
        # It starts here unless the last row before this piece has the same token.
        earlier = tl.load(ids + tl.load(order + tl.maximum(end - PIECE - 1, 0)))
        begun_here = (piece == 0) | (earlier != token)
        goes_on = tl.load(ids + tl.load(order + end)) == token
        if begun_here & goes_on:
            total = tl.load(tails + piece.to(tl.int64) * C + columns, mask=inside, other=0.0)
            following = piece + 1
            while goes_on:
                pieces = following + tl.arange(0, TOGETHER)
                exists = pieces * PIECE < N
                at = tl.load(order + pieces * PIECE, mask=exists, other=0)
                same = exists & (tl.load(ids + at) == token)
                places = pieces.to(tl.int64)[:, None] * C + columns[None, :]
                rows = tl.load(heads + places, mask=same[:, None] & inside[None, :], other=0.0)
                total += tl.sum(rows, 0)
                following += TOGETHER
                goes_on = tl.sum(same.to(tl.int32), 0) == TOGETHER
            add_to(out, token * C + columns, total, inside)


@triton.jit
def _position_backward(
    dy, out, pos, start, first_row, B, T, C, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr
):
    """A program adds to one row of out."""
    row = first_row + tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < C
    total = tl.full([COLUMNS], 0.0, tl.float32)
    for first in range(0, B, TOGETHER):
        b = first + tl.arange(0, TOGETHER)
        if pos is None:
            t = row - start + b * 0
        else:
            t = row - tl.load(pos + b, mask=b < B, other=0)
        present = (b < B) & (t >= 0) & (t < T)
        places = (b.to(tl.int64) * T + t)[:, None] * C + columns[None, :]
        rows = tl.load(dy + places, mask=present[:, None] & inside[None, :], other=0.0)
        total += tl.sum(rows.to(tl.float32), 0)
    add_to(out, row.to(tl.int64) * C + columns, total, inside)


def embedding(
    ids: Tensor, wte: Tensor, wpe: Tensor | None, *, out: Tensor, pos: int | Tensor
) -> None:
    """out[b, t] = wte[ids[b, t]] + wpe[pos[b] + t]."""
    T, C = ids.shape[1], wte.shape[1]
    grid = (ids.size, blocks(C, COLUMNS))
    launch(_embedding, grid, ids, wte, wpe, out, *split(pos), T, C, COLUMNS=COLUMNS, num_warps=1)


def split(pos: int | Tensor) -> tuple[Tensor | None, int]:
    """`pos` as kernels take it: a Tensor or None, and a number that counts without a Tensor."""
    return (None, pos) if isinstance(pos, int) else (pos, 0)


def scatter_add_rows(ids: Tensor, x: Tensor, order: Tensor, *, out: Tensor) -> None:
    """out[ids[n]] += x[n], for every row in increasing n; `order` sorts the ids, stably."""
    N, C = x.shape
    pieces = blocks(N, PIECE)
    heads, tails = (empty((pieces, C), "float32", x.device) for _ in range(2))
    grid = (pieces, blocks(C, COLUMNS))
    constants: dict[str, Any] = {"PIECE": PIECE, "COLUMNS": COLUMNS, "num_warps": 1}
    launch(_add_pieces, grid, ids, x, order, out, heads, tails, N, C, **constants)
    launch(_join_pieces, grid, ids, order, out, heads, tails, N, C, TOGETHER=TOGETHER, **constants)


def position_backward(dy: Tensor, *, out: Tensor, pos: int | Tensor) -> None:
    """out[pos[b] + t] += dy[b, t], in the order of b."""
    B, T, C = dy.shape
    # Positions on the device may touch any row of out.
    first_row, rows = (pos, T) if isinstance(pos, int) else (0, out.shape[0])
    launch(
        _position_backward,
        (rows, blocks(C, COLUMNS)),
        dy,
        out,
        *split(pos),
        first_row,
        B,
        T,
        C,
        TOGETHER=TOGETHER,
        COLUMNS=COLUMNS,
        num_warps=2,
    )
