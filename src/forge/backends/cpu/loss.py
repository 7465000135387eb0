"""Cross-entropy over the classes of each row, in nats, and its fusion with the linear head.

N rows, V classes, C width. The rows' losses are summed in float64, in their order. The fused head
works on chunks of rows whose logits fit LOGITS_BYTES, so [N, V] never exists.
"""

from typing import Any

import numpy as np
from numba import prange

from forge.backends.cpu.bfloat16 import bits, f32_of, narrow, wide
from forge.backends.cpu.jit import forms, kernel, routine
from forge.backends.cpu.linear import matmul, product_workspace
from forge.backends.cpu.mathlib import exp, maximum
from forge.backends.cpu.wide_product import GROUP
from forge.dtypes import ITEMSIZE
from forge.pool import rounded
from forge.tensor import Tensor, empty

f32 = np.float32

# Of the logits that exist at one time. Each chunk reads and writes all of dwte once more: at 50k
# classes a chunk is at most 240 rows, and that traffic costs 5 % of its products' time; at 120, 10.
LOGITS_BYTES = 48 << 20
MOST_ROWS = 1024
# Exponentials that are added up while they are in the first-level cache.
PIECE = 1024


@routine
def _sum(x: Any) -> Any:
    """The sum of x: apart, so that losses with and without gradients add in the same order."""
    total = f32(0.0)
    for v in range(x.size):
        total += x[v]
    return total


@routine
def _log_sum(x: Any) -> Any:
    """log(sum of e^x)."""
    top = f32(-np.inf)
    for v in range(x.size):
        top = maximum(top, wide(x[v]))
    powers = np.empty(min(x.size, PIECE), f32)
    total = f32(0.0)
    for start in range(0, x.size, PIECE):
        part = x[start : start + PIECE]
        for v in range(part.size):
            powers[v] = exp(wide(part[v]) - top)
        total += _sum(powers[: part.size])
    return top + np.log(total)


@routine
def _chosen(logits: Any, target: Any) -> Any:
    """The target's logit; NaN for a target that is no class, which would lie outside the row."""
    return wide(logits[target]) if 0 <= target < logits.size else f32(np.nan)


@forms("void(T[:,::1], int64[::1], int64, float32[::1], float32[::1])")
def _losses(logits: Any, targets: Any, ignore_index: Any, lse: Any, losses: Any) -> None:
    for n in prange(targets.size):
        lse[n] = _log_sum(logits[n])
        if targets[n] == ignore_index:
            losses[n] = f32(0.0)
        else:
            losses[n] = lse[n] - _chosen(logits[n], targets[n])


@routine
def _gradient(logits: Any, target: Any, lse: Any, scale: Any, out: Any) -> None:
    """out = scale (softmax - one-hot of the target)."""
    for v in range(logits.size):
        out[v] = narrow(out, exp(wide(logits[v]) - lse) * scale)
    if 0 <= target < out.size:
        # Not out - scale: in bfloat16 that would be rounded twice.
        out[target] = narrow(out, (exp(wide(logits[target]) - lse) - f32(1.0)) * scale)


@routine
def _zero(out: Any) -> None:
    for v in range(out.size):
        out[v] = narrow(out, f32(0.0))


@forms("void(T[:,::1], int64[::1], int64, float32[::1], float32[::1], float32[::1], T[:,::1])")
def _gradients(
    logits: Any, targets: Any, ignore_index: Any, lse: Any, weight: Any, dloss: Any, dlogits: Any
) -> None:
    scale = weight[0] * dloss[0]
    for n in prange(targets.size):
        if targets[n] == ignore_index:
            _zero(dlogits[n])
        else:
            _gradient(logits[n], targets[n], lse[n], scale, dlogits[n])


@routine
def _log_sum_and_gradient(logits: Any, target: Any, scale: Any) -> Any:
    """log(sum of e^x) of a row, whose logits become their gradients: one exponential for both."""
    top = f32(-np.inf)
    for v in range(logits.size):
        top = maximum(top, logits[v])
    total = f32(0.0)
    for start in range(0, logits.size, PIECE):
        part = logits[start : start + PIECE]
        for v in range(part.size):
            part[v] = exp(part[v] - top)
        total += _sum(part)
    factor = scale / total
    for v in range(logits.size):
        logits[v] *= factor
    if 0 <= target < logits.size:
        logits[target] -= scale
    return top + np.log(total)


@kernel("void(float32[:,::1], int64[::1], int64, float32[::1], float32[::1])")
def _losses_and_gradients(
    logits: Any, targets: Any, ignore_index: Any, weight: Any, losses: Any
) -> None:
    for n in prange(targets.size):
        if targets[n] == ignore_index:
            losses[n] = f32(0.0)
            _zero(logits[n])
        else:
            # In this order, as `_losses` has it: within one function LLVM might choose another.
            chosen = _chosen(logits[n], targets[n])
            losses[n] = _log_sum_and_gradient(logits[n], targets[n], weight[0]) - chosen


@kernel("void(uint16[:,::1], int64[::1], int64, float32[::1], float32[::1])")
def _low_losses_and_gradients(
    logits: Any, targets: Any, ignore_index: Any, weight: Any, losses: Any
) -> None:
    """The same in bfloat16, where exponentials are made twice: kept, they would be rounded."""
    for n in prange(targets.size):
        if targets[n] == ignore_index:
            losses[n] = f32(0.0)
            _zero(logits[n])
        else:
            lse = _log_sum(logits[n])
            losses[n] = lse - _chosen(logits[n], targets[n])
            _in_place_gradient(logits[n], targets[n], lse, weight[0])


@routine
def _in_place_gradient(logits: Any, target: Any, lse: Any, scale: Any) -> None:
    """`_gradient` in place: with two names for one array LLVM's check for overlap would fail."""
    inside = 0 <= target < logits.size
    chosen = wide(logits[target]) if inside else f32(0.0)
    for v in range(logits.size):
        logits[v] = narrow(logits, exp(wide(logits[v]) - lse) * scale)
    if inside:
        logits[target] = narrow(logits, (exp(chosen - lse) - f32(1.0)) * scale)


@kernel("void(float32[::1], float32[::1], float32[::1])", parallel=False)
def _weighted_sum(losses: Any, weight: Any, out: Any) -> None:
    total = np.float64(0.0)
    for n in range(losses.size):
        total += np.float64(losses[n])
    out[0] = f32(np.float64(weight[0]) * total)


def target_weight(targets: Tensor, *, out: Tensor, ignore_index: int) -> None:
    """out = 1 / the number of targets that count, 0 where none does."""
    count = int(np.count_nonzero(targets.array != ignore_index))
    out.array[...] = 1.0 / count if count else 0.0


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
    losses = empty(targets.shape, "float32", logits.device)
    lse = empty(targets.shape, "float32", logits.device) if lse is None else lse
    _losses[logits.dtype](bits(logits), targets.array, ignore_index, lse.array, losses.array)
    _weighted_sum(losses.array, _scalar(weight), out.array.reshape(1))


def cross_entropy_workspace(
    logits: Tensor, targets: Tensor, weight: Tensor, *, lse: Tensor | None, **_: Any
) -> tuple[int, ...]:
    """Bytes of the losses, and of an lse that nobody asked for."""
    return (4 * targets.size,) * (1 if lse is not None else 2)


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
    _gradients[logits.dtype](
        bits(logits),
        targets.array,
        ignore_index,
        f32_of(lse),
        _scalar(weight),
        _scalar(dloss),
        bits(dlogits),
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
    """Cross-entropy of the logits x wte^T over wte's first `rows`, and its gradients."""
    N, C = x.shape
    losses = empty((N,), "float32", x.device)
    chunk = chunk_rows(N, rows, x.dtype)
    logits = empty((min(N, chunk), rows), x.dtype, x.device)
    for start in range(0, N, chunk):
        count = min(chunk, N - start)
        part = x.view((count, C), start * C)
        block = logits.view((count, rows))
        counted = targets.array[start : start + count]
        its_losses = losses.array[start : start + count]
        matmul(part, wte, out=block, trans_b=True, b_rows=rows)
        if dx is None and dwte is None:
            lse = empty((count,), "float32", x.device)
            _losses[x.dtype](bits(block), counted, ignore_index, lse.array, its_losses)
            continue
        run = _losses_and_gradients if x.dtype == "float32" else _low_losses_and_gradients
        run(bits(block), counted, ignore_index, _scalar(weight), its_losses)
        if dx is not None:
            matmul(block, wte, out=dx.view((count, C), start * C), b_rows=rows)
        if dwte is not None:
            whole = dwte.view((rows, C))
            matmul(block, part, out=whole, trans_a=True, accumulate=start > 0)
    if dwte is not None:
        # Without a chunk nothing has written the rest.
        dwte.array[rows if N else 0 :] = 0
    _weighted_sum(losses.array, _scalar(weight), out.array.reshape(1))


def _scalar(x: Tensor) -> np.ndarray:
    """A weight as the kernels take it; it need not be of the logits' dtype."""
    array: np.ndarray = x.array.astype(f32)
    return array.reshape(1)


def linear_cross_entropy_workspace(
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
) -> tuple[int, ...]:
    """Bytes of the losses, of a chunk of logits, and of what its products or the lse take."""
    N, C = x.shape
    if N == 0:
        return 0, 0
    count = min(N, chunk_rows(N, rows, x.dtype))
    last = N - (N - 1) // count * count
    beside = []
    for n in (count, last):
        beside += [product_workspace(x.dtype, x.dtype, (n, rows), C)]
        if dx is not None:
            beside += [product_workspace(x.dtype, x.dtype, (n, C), rows)]
        if dwte is not None:
            beside += [product_workspace(x.dtype, dwte.dtype, (rows, C), n, trans_a=True)]
    if dx is None and dwte is None:
        beside += [(4 * count,)]
    return (
        4 * N,
        ITEMSIZE[x.dtype] * count * rows,
        *max(beside, key=lambda sizes: sum(map(rounded, sizes))),
    )


def chunk_rows(N: int, rows: int, dtype: str) -> int:
    """Rows of x [N, C] in one chunk, for `rows` classes: about as many in each.

    They are whole groups of sgemm's, so that only the last chunk's products pad theirs.
    """
    fitting = min(MOST_ROWS, LOGITS_BYTES // (ITEMSIZE[dtype] * max(1, rows)))
    if fitting < GROUP:
        return max(1, fitting)
    chunks = max(1, -(-N // (fitting // GROUP * GROUP)))
    return max(1, -(-N // (chunks * GROUP))) * GROUP
