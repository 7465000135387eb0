"""Attention's kernels over all heads of all samples; one thread computes a head.

Heads of float32 are computed where they lie in the packed projection; those of bfloat16 are widened
to scratch first, which takes 2 to 4 % of their products' time at T = 64, and less beyond.
"""

from typing import Any

from numba import prange

from forge.backends.cpu.bfloat16 import narrow, wide
from forge.backends.cpu.head import SHORT, attend, attend_backward, pack
from forge.backends.cpu.jit import device, kernel, routine


@device
def _places(head: Any, n_head: Any, T: Any, D: Any, where: Any) -> Any:
    """Where a head's queries, keys and values begin; `where` as in `attention`."""
    b = head // n_head
    h = head % n_head
    row = b * where[0] + h * where[1]
    column = h * where[2]
    return (b * T, h * D), (row, where[3] + column), (row, where[4] + column)


@device
def _soon(T: Any) -> Any:
    """Rows of the next head to fetch beside one of T rows: of a long one none would be kept."""
    return T if T <= SHORT else 0


@kernel(
    "void(float32[:,::1], float32[:,::1], float32[:,::1], int64[::1], int64[::1], float32[:,::1],"
    " float32[:,::1], float32[:,:,:,::1], float32[:,:,::1], int64[::1], float32)",
    cost=1.5,
)
def attention(
    q: Any,
    k: Any,
    v: Any,
    where: Any,
    pos: Any,
    out: Any,
    lse: Any,
    keys: Any,
    s: Any,
    dropout: Any,
    factor: Any,
) -> None:
    """The head (b, h) of k begins in row b where[0] + h where[1] and column where[3] + h where[2].

    That of v has where[4] instead of where[3]; queries have theirs in out's rows and columns.
    """
    heads, T = lse.shape
    D = keys.shape[2]
    n_head = heads // pos.size
    workers = s.shape[0]
    for worker in prange(workers):
        for head in range(worker, heads, workers):
            b = head // n_head
            h = head % n_head
            q_at, k_at, v_at = _places(head, n_head, T, D, where)
            pack(k, k_at, pos[b] + T, keys[worker])
            attend(
                q,
                keys[worker],
                v,
                v_at,
                out,
                q_at,
                lse[head],
                s[worker],
                pos[b],
                (b, h * T * T),
                (dropout[0], dropout[1], dropout[2], dropout[3], dropout[4]),
                factor,
                (q, k, v),
                _places(min(head + workers, heads - 1), n_head, T, D, where),
                _soon(T),
            )


@kernel(
    "void(float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1],"
    " float32[:,:,:,:,::1], float32[:,:,:,::1], int64[::1], float32)",
    cost=1.5,
)
def attention_backward(
    qkv: Any,
    out: Any,
    dout: Any,
    lse: Any,
    dqkv: Any,
    packed: Any,
    s: Any,
    dropout: Any,
    factor: Any,
) -> None:
    """The gradient dqkv, for lse [heads, T]; `packed` and `s` hold two matrices for each worker."""
    heads, T = lse.shape
    D = packed.shape[3]
    n_head = out.shape[1] // D
    workers = s.shape[0]
    for worker in prange(workers):
        for head in range(worker, heads, workers):
            b = head // n_head
            h = head % n_head
            then = min(head + workers, heads - 1)
            attend_backward(
                qkv,
                out,
                dout,
                lse[head],
                dqkv,
                packed[worker],
                s[worker],
                (b * T, h * D),
                (b, h * T * T),
                (dropout[0], dropout[1], dropout[2], dropout[3], dropout[4]),
                factor,
                (qkv, out, dout),
                (then // n_head * T, then % n_head * D),
                _soon(T),
            )


@routine
def _widen(x: Any, at: Any, out: Any, column: Any, D: Any) -> None:
    """D columns of out from `column` on = x from the (row, column) `at` on."""
    for t in range(out.shape[0]):
        source = x[at[0] + t, at[1] : at[1] + D]
        target = out[t, column : column + D]
        for d in range(D):
            target[d] = wide(source[d])


@routine
def _round(x: Any, column: Any, out: Any, at: Any, D: Any) -> None:
    """out from the (row, column) `at` on = D columns of x from `column` on."""
    for t in range(x.shape[0]):
        source = x[t, column : column + D]
        target = out[at[0] + t, at[1] : at[1] + D]
        for d in range(D):
            target[d] = narrow(target, source[d])


@kernel(
    "void(uint16[:,::1], uint16[:,::1], uint16[:,::1], int64[::1], int64[::1], uint16[:,::1],"
    " float32[:,::1], float32[:,:,:,::1], float32[:,:,::1], float32[:,:,::1], int64[::1], float32)",
    cost=1.5,
)
def low_attention(
    q: Any,
    k: Any,
    v: Any,
    where: Any,
    pos: Any,
    out: Any,
    lse: Any,
    keys: Any,
    s: Any,
    widened: Any,
    dropout: Any,
    factor: Any,
) -> None:
    """`attention` in bfloat16; `widened` holds a head's queries, then its results, and values."""
    heads, T = lse.shape
    D = keys.shape[2]
    n_head = heads // pos.size
    workers = s.shape[0]
    for worker in prange(workers):
        for head in range(worker, heads, workers):
            b = head // n_head
            h = head % n_head
            q_at, k_at, v_at = _places(head, n_head, T, D, where)
            own = widened[worker, :T]
            values = widened[worker, T : 2 * T + pos[b]]
            _widen(q, q_at, own, 0, D)
            pack(k, k_at, pos[b] + T, keys[worker])
            _widen(v, v_at, values, 0, D)
            # A block's queries have been read when its results are written.
            attend(
                own,
                keys[worker],
                values,
                (0, 0),
                own,
                (0, 0),
                lse[head],
                s[worker],
                pos[b],
                (b, h * T * T),
                (dropout[0], dropout[1], dropout[2], dropout[3], dropout[4]),
                factor,
                (q, k, v),
                _places(min(head + workers, heads - 1), n_head, T, D, where),
                _soon(T),
            )
            _round(own, 0, out, q_at, D)


@kernel(
    "void(uint16[:,::1], uint16[:,::1], uint16[:,::1], float32[:,::1], uint16[:,::1],"
    " float32[:,:,:,:,::1], float32[:,:,:,::1], float32[:,::1], int64[::1], float32)",
    cost=1.5,
)
def low_attention_backward(
    qkv: Any,
    out: Any,
    dout: Any,
    lse: Any,
    dqkv: Any,
    packed: Any,
    s: Any,
    widened: Any,
    dropout: Any,
    factor: Any,
) -> None:
    """`attention_backward` in bfloat16; `widened` holds a head's qkv, dqkv, out and dout."""
    heads, T = lse.shape
    D = packed.shape[3]
    C = out.shape[1]
    n_head = C // D
    area = T * D
    workers = s.shape[0]
    for worker in prange(workers):
        own = widened[worker]
        x = own[: 3 * area].reshape((T, 3 * D))
        dx = own[3 * area : 6 * area].reshape((T, 3 * D))
        y = own[6 * area : 7 * area].reshape((T, D))
        dy = own[7 * area : 8 * area].reshape((T, D))
        for head in range(worker, heads, workers):
            b = head // n_head
            h = head % n_head
            then = min(head + workers, heads - 1)
            at = (b * T, h * D)
            for part in range(3):
                _widen(qkv, (b * T, part * C + h * D), x, part * D, D)
            _widen(out, at, y, 0, D)
            _widen(dout, at, dy, 0, D)
            attend_backward(
                x,
                y,
                dy,
                lse[head],
                dx,
                packed[worker],
                s[worker],
                (0, 0),
                (b, h * T * T),
                (dropout[0], dropout[1], dropout[2], dropout[3], dropout[4]),
                factor,
                (qkv, out, dout),
                (then // n_head * T, then % n_head * D),
                _soon(T),
            )
            for part in range(3):
                _round(dx, part * D, dqkv, (b * T, part * C + h * D), D)
