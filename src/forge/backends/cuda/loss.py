"""Cross-entropy over the classes of each row, in nats: logits [N, V], targets [N].

A row is read twice: for its maximum and sum, kept apart in every lane until the end, then for its
gradient, which may replace it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forge.backends.cuda.linear import matmul
from forge.backends.cuda.pointwise import cast
from forge.backends.cuda.shape import blocks
from forge.backends.cuda.triton_jit import launch
from forge.dtypes import ITEMSIZE
from forge.tensor import Tensor, empty

# Logits that a program looks at together, each lane at this many of them.
BLOCK = 8192
LANE = 16
# Threads of the twin in cross_entropy.cu, which serves rows from this many logits on, by the bytes
# of shared memory that a block may have on cards with a bulk copy engine.
THREADS = 640
LONG = 8192
SHARED = {90: 226 << 10, 100: 226 << 10, 103: 226 << 10}
# Elements of a tile of plain passes.
TILE = 2048
# Logits that exist at a time: 8,192 rows of GPT-2's padded vocabulary in bfloat16. Half or twice as
# many cost 1 % of a step's time.
CHUNK_BYTES = 8192 * 50304 * 2


@triton.jit
def _count(targets, out, N, ignore_index, BLOCK: tl.constexpr):
    """out = 1 / the number of targets that count, or 0."""
    total = tl.full([BLOCK], 0, tl.int32)
    for first in range(0, N, BLOCK):
        n = first + tl.arange(0, BLOCK)
        target = tl.load(targets + n, mask=n < N, other=ignore_index)
        total += (target != ignore_index).to(tl.int32)
    count = tl.sum(total, 0)
    tl.store(out, tl.where(count > 0, 1.0 / tl.maximum(count, 1).to(tl.float32), 0.0))


@triton.jit
def _rows(
    logits,
    targets,
    weight,
    losses,
    lse,
    dlogits,
    V,
    stride,
    ignore_index,
    BLOCK: tl.constexpr,
    LANE: tl.constexpr,
):
    """The loss of a row; its lse and weight (softmax - one-hot) where they are asked for.

    `stride` elements lie between rows, of which the first V are classes; the rest count as -inf.
    `dlogits` may be `logits`.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    target = tl.load(targets + row)
    counts = target != ignore_index
    lanes = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    top = tl.full([BLOCK // LANE], -1e30, tl.float32)
    total = tl.full([BLOCK // LANE], 0.0, tl.float32)
    for first in range(0, stride, BLOCK):
        c = first + lanes
        # Masked where the row ends, not the classes: a multiple of 16 keeps loads of 128 bits.
        value = tl.load(x + c, mask=c < stride, other=0.0, eviction_policy="evict_last")
        value = tl.where(c < V, value.to(tl.float32), -float("inf"))
        higher = tl.maximum(top, tl.max(value, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher[:, None]), 1)
        top = higher
    highest = tl.max(top, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    chosen = tl.load(x + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, log_sum - chosen, 0.0))
    if lse is not None:
        tl.store(lse + row, log_sum)
    if dlogits is not None:
        factor = tl.where(counts, tl.load(weight).to(tl.float32), 0.0)
        # All have read `chosen` before any overwrites it.
        tl.debug_barrier()
        for first in range(0, stride, BLOCK):
            c = first + lanes
            value = tl.load(x + c, mask=c < stride, other=0.0, eviction_policy="evict_first")
            power = tl.exp(value.to(tl.float32) - log_sum)
            d = (power - tl.where(c == target, 1.0, 0.0)) * factor
            tl.store(dlogits + row * stride + c, tl.where(c < V, d, 0.0), mask=c < stride)


@triton.jit
def _backward(logits, targets, lse, weight, dloss, dlogits, V, ignore_index, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    factor = tl.load(weight).to(tl.float32) * tl.load(dloss).to(tl.float32)
    factor = tl.where(target != ignore_index, factor, 0.0)
    value = tl.load(logits + row * V + c, mask=c < V, other=0.0).to(tl.float32)
    power = tl.exp(value - tl.load(lse + row).to(tl.float32))
    d = (power - tl.where(c == target, 1.0, 0.0)) * factor
    tl.store(dlogits + row * V + c, d, mask=c < V)


@triton.jit
def _weighted_sum(losses, weight, out, N, BLOCK: tl.constexpr):
    total = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, N, BLOCK):
        n = first + tl.arange(0, BLOCK)
        total += tl.load(losses + n, mask=n < N, other=0.0)
    tl.store(out, tl.sum(total, 0) * tl.load(weight).to(tl.float32))


def target_weight(targets: Tensor, *, out: Tensor, ignore_index: int) -> None:
    """out = 1 / the number of targets that count, 0 where none does."""
    launch(_count, (1,), targets, out, targets.size, ignore_index, BLOCK=8192, num_warps=16)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    lse: Tensor | None,
    ignore_index: int,
) -> None:
    """out = weight sum over the targets that count of (lse - logits[target])."""
    N, V = logits.shape
    losses = empty((N,), "float32", logits.device)
    _each_row(logits, targets, weight, losses, lse, None, V, ignore_index)
    _sum(losses, weight, out)


def cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    weight: Tensor,
    dloss: Tensor,
    *,
    dlogits: Tensor,
    ignore_index: int,
) -> None:
    """dlogits = dloss weight (softmax - one-hot), 0 for ignored rows."""
    N, V = logits.shape
    launch(
        _backward,
        (N, blocks(V, TILE)),
        logits,
        targets,
        lse,
        weight,
        dloss,
        dlogits,
        V,
        ignore_index,
        BLOCK=TILE,
    )


def linear_cross_entropy(
    x: Tensor,
    wte: Tensor,
    targets: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    dx: Tensor | None,
    dwte: Tensor | None,
    rows: int,
    ignore_index: int,
) -> None:
    """Cross-entropy of the logits x wte^T over wte's first `rows`, and its gradients.

    A chunk's logits are overwritten by their gradient, which the two products then read. Those of
    padded rows are zero, and so are the padded rows of dwte.
    """
    (N, C), padded = x.shape, wte.shape[0]
    chunk = max(1, min(N, CHUNK_BYTES // (padded * ITEMSIZE[x.dtype])))
    scratch = empty((chunk, padded), x.dtype, x.device)
    losses = empty((N,), "float32", x.device)
    total = dwte
    if dwte is not None and dwte.dtype != "float32":
        total = empty(dwte.shape, "float32", x.device)
    for first in range(0, max(N, 1), chunk):
        n = min(chunk, N - first)
        logits = scratch.view((n, padded))
        part = x.view((n, C), first * C)
        matmul(part, wte, out=logits, trans_b=True)
        _each_row(
            logits,
            targets.view((n,), first),
            weight,
            losses.view((n,), first),
            None,
            None if dx is None and dwte is None else logits,
            rows,
            ignore_index,
        )
        if dx is not None:
            matmul(logits, wte, out=dx.view((n, C), first * C))
        if total is not None:
            matmul(logits, part, out=total, trans_a=True, accumulate=first > 0)
    if dwte is not None and total is not None and total is not dwte:
        cast(total, out=dwte)
    _sum(losses, weight, out)


def _each_row(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor,
    losses: Tensor,
    lse: Tensor | None,
    dlogits: Tensor | None,
    classes: int,
    ignore_index: int,
) -> None:
    N, stride = logits.shape
    if lse is None and dlogits is logits and _fits_shared_memory(logits):
        from forge.backends.cuda import device, nvrtc

        vectors = {"THREADS": THREADS, "VECTORS": blocks(stride, 8 * THREADS)}
        # The row at hand and the next.
        run = nvrtc.kernel("cross_entropy.cu", "cross_entropy", vectors, shared=4 * stride)
        programs = min(N, device.processors())
        scalars = (N, classes, stride, ignore_index)
        run(programs, THREADS, logits, targets, weight, losses, *scalars)
        return
    launch(
        _rows,
        (N,),
        logits,
        targets,
        weight,
        losses,
        lse,
        dlogits,
        classes,
        stride,
        ignore_index,
        BLOCK=min(BLOCK, max(LANE, triton.next_power_of_2(stride))),
        LANE=LANE,
        num_warps=8 if stride > 1024 else 4,
    )


def _fits_shared_memory(logits: Tensor) -> bool:
    """Whether the CUDA C++ twin serves: where rows are long, and two fit on the processor."""
    if logits.device.kind != "cuda" or logits.dtype != "bfloat16" or logits.size == 0:
        return False
    from forge.backends.cuda import device

    stride = logits.shape[1]
    room = SHARED.get(device.arch(), 0)
    return stride % 8 == 0 and stride >= LONG and 4 * stride <= room


def _sum(losses: Tensor, weight: Tensor, out: Tensor) -> None:
    block = 8192
    launch(_weighted_sum, (1,), losses, weight, out, losses.size, BLOCK=block, num_warps=16)
