"""Layer normalisation over the last dimension, alone and fused with the residual's addition.

N rows, C width. A program keeps whole rows in registers, so all is read and written once. The sums
over rows (dgamma, dbeta, dbias) are made in the same pass: each program adds up the rows it takes
turns for, and `fold` adds the programs' sums in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forge.backends.cuda.pointwise import cast
from forge.backends.cuda.reduce import fold, sum_rows
from forge.backends.cuda.shape import blocks
from forge.backends.cuda.triton_jit import launch
from forge.tensor import Tensor, empty

# Elements that a program of the forward kernel holds: 32 registers of each of its threads.
TILE = 4096
# The backward kernel holds half as much of each of its inputs, and with few warps and many programs
# three rounds of loads are under way: 4.1 TB/s on an H200, 3.0 without.
BACKWARD_TILE = 2048
PROGRAMS = 528
STAGES = 3


@triton.jit
def _layernorm(
    x,
    branch,
    bias,
    gamma,
    beta,
    sum,
    y,
    mean,
    rstd,
    N,
    C,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = layernorm(sum), where sum = x + branch + bias is stored; without a branch it is x."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    across = columns < C
    inside = (rows < N)[:, None] & across[None, :]
    places = rows.to(tl.int64)[:, None] * C + columns[None, :]
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if branch is not None:
        value += tl.load(branch + places, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + columns, mask=across, other=0.0).to(tl.float32)[None, :]
        # As it is stored: a rule that normalises it again sees the same numbers.
        stored = value.to(sum.dtype.element_ty)
        tl.store(sum + places, stored, mask=inside)
        value = stored.to(tl.float32)
    average = tl.sum(value, 1) / C
    centred = tl.where(inside, value - average[:, None], 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / C + eps)
    weight = tl.load(gamma + columns, mask=across, other=0.0).to(tl.float32)
    shift = tl.load(beta + columns, mask=across, other=0.0).to(tl.float32)
    normal = centred * scale[:, None]
    tl.store(y + places, normal * weight[None, :] + shift[None, :], mask=inside)
    if mean is not None:
        tl.store(mean + rows, average, mask=rows < N)
    if rstd is not None:
        tl.store(rstd + rows, scale, mask=rows < N)


@triton.jit
def _layernorm_backward(
    dsum,
    dy,
    x,
    gamma,
    mean,
    rstd,
    dx,
    partial,
    N,
    C,
    rounds,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """partial [programs, 3, C] gets the sums for dgamma, dbeta and dbias."""
    columns = tl.arange(0, COLUMNS)
    across = columns < C
    weight = tl.load(gamma + columns, mask=across, other=0.0).to(tl.float32)
    dgamma = tl.full([COLUMNS], 0.0, tl.float32)
    dbeta = tl.full([COLUMNS], 0.0, tl.float32)
    dbias = tl.full([COLUMNS], 0.0, tl.float32)
    for turn in tl.range(0, rounds, num_stages=STAGES):
        rows = (turn * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        inside = (rows < N)[:, None] & across[None, :]
        places = rows.to(tl.int64)[:, None] * C + columns[None, :]
        value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + places, mask=inside, other=0.0).to(tl.float32)
        average = tl.load(mean + rows, mask=rows < N, other=0.0).to(tl.float32)
        scale = tl.load(rstd + rows, mask=rows < N, other=0.0).to(tl.float32)
        normal = tl.where(inside, (value - average[:, None]) * scale[:, None], 0.0)
        g = d * weight[None, :]
        along = tl.sum(g * normal, 1) / C
        level = tl.sum(g, 1) / C
        result = (g - level[:, None] - normal * along[:, None]) * scale[:, None]
        if dsum is not None:
            result += tl.load(dsum + places, mask=inside, other=0.0).to(tl.float32)
        if dx is not None:
            tl.store(dx + places, result, mask=inside)
        dgamma += tl.sum(d * normal, 0)
        dbeta += tl.sum(d, 0)
        dbias += tl.sum(tl.where(inside, result, 0.0), 0)
    start = partial + tl.program_id(0) * 3 * C + columns
    tl.store(start, dgamma, mask=across)
    tl.store(start + C, dbeta, mask=across)
    tl.store(start + 2 * C, dbias, mask=across)


def layernorm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    out: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> None:
    """out = (x - mean) rstd gamma + beta, with rstd = 1 / sqrt(variance + eps)."""
    _normalise(x, None, None, gamma, beta, None, out, mean, rstd, eps)


def add_layernorm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    *,
    sum: Tensor,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> None:
    """sum = x + branch + bias; y = layernorm(sum)."""
    _normalise(x, branch, bias, gamma, beta, sum, y, mean, rstd, eps)


def _normalise(
    x: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    sum: Tensor | None,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> None:
    N, C = x.shape
    columns = triton.next_power_of_2(C)
    rows = max(1, TILE // columns)
    launch(
        _layernorm,
        (blocks(N, rows),),
        x,
        branch,
        bias,
        gamma,
        beta,
        sum,
        y,
        mean,
        rstd,
        N,
        C,
        eps,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4 if columns <= TILE else 16,
        # y has the same bits whether mean and rstd, and the sum, are asked for or not.
        fuse=False,
    )


def layernorm_backward(
    x: Tensor,
    gamma: Tensor,
    dy: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    dx: Tensor | None,
    dgamma: Tensor | None,
    dbeta: Tensor | None,
) -> None:
    """dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy gamma; dgamma and dbeta are added to."""
    add_layernorm_backward(
        None, dy, x, gamma, mean, rstd, dx=dx, dgamma=dgamma, dbeta=dbeta, dbias=None
    )


def add_layernorm_backward(
    dsum: Tensor | None,
    dy: Tensor | None,
    sum: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    dx: Tensor | None,
    dgamma: Tensor | None,
    dbeta: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """dx = dsum + the gradient through layernorm; dgamma, dbeta and dbias are added to."""
    if dy is None:
        _no_layernorm_backward(dsum, dx, dbias)
        return
    N, C = sum.shape
    columns = triton.next_power_of_2(C)
    rows = max(1, BACKWARD_TILE // columns)
    programs = max(1, min(PROGRAMS, blocks(N, rows)))
    partial = empty((programs, 3, C), "float32", sum.device)
    launch(
        _layernorm_backward,
        (programs,),
        dsum,
        dy,
        sum,
        gamma,
        mean,
        rstd,
        dx,
        partial,
        N,
        C,
        blocks(N, programs * rows),
        ROWS=rows,
        COLUMNS=columns,
        STAGES=STAGES,
        num_warps=2 if columns <= BACKWARD_TILE else 8,
    )
    fold(partial, dgamma, dbeta, dbias)


def _no_layernorm_backward(dsum: Tensor | None, dx: Tensor | None, dbias: Tensor | None) -> None:
    """The gradient where nothing used y, which no model here does."""
    assert dsum is not None
    if dx is not None:
        cast(dsum, out=dx)
    if dbias is not None:
        sum_rows(dsum, out=dbias)
