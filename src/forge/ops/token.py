"""A whole GPT-2 for one new position, where launching its ops would cost the most."""

from __future__ import annotations

from forge.backends import registry
from forge.backends.registry import kernels
from forge.errors import ShapeError
from forge.ops import check
from forge.ops.define import op
from forge.tensor import Shape, Tensor, empty

# From this many samples on, the ops of a GPT-2 keep a GPU as busy as one kernel of all would.
FEW = 4
# Tensors of a block: its weights and biases, and its caches.
WEIGHTS = (
    "gamma_1",
    "beta_1",
    "w_attn",
    "b_attn",
    "w_proj",
    "b_proj",
    "gamma_2",
    "beta_2",
    "w_fc",
    "b_fc",
    "w_out",
    "b_out",
)
CACHES = ("k_cache", "v_cache")
BLOCK = WEIGHTS + CACHES


@op(differentiable="no")
def decode_token_(
    *blocks: Tensor,
    ids: Tensor,
    wte: Tensor,
    wpe: Tensor,
    gamma: Tensor,
    beta: Tensor,
    pos: Tensor,
    rows: int | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """One new position of every sample through a GPT-2: ids int64 [B] -> logits [B, V].

    `blocks` are, block after block, the 14 Tensors named in `BLOCK`: weights [in, out], the MLP
    4 C wide, and caches [B, H, N, D], written in place at `pos` int64 [B]. A block makes
    g = h + attention(layernorm(h)) w_proj + b_proj of h, where queries see all up to `pos`, and
    g + gelu(layernorm(g) w_fc + b_fc) w_out + b_out of that; the first h is
    wte[ids] + wpe[pos], and the logits are layernorm(h) wte^T, of the first `rows` rows of wte.
    The same as embedding, layernorm, linear, kv_append_, cached_attention, add_layernorm and
    matmul. A sample's bits do not depend on the others. Floating. Not differentiable. Raises
    ShapeError, DtypeError, and ArgumentError for ids without a row and where the cache is full.
    Accuracy as cached_attention's.
    """
    name = "decode_token_"
    check.that(
        bool(blocks) and len(blocks) % len(BLOCK) == 0,
        name,
        f"{len(BLOCK)} Tensors for each block",
        len(blocks),
        f"they are {', '.join(BLOCK)}",
    )
    check.floating(name, wte=wte, wpe=wpe)
    check.rank(name, "wte", wte, 2)
    V, C = wte.shape[0] if rows is None else rows, wte.shape[1]
    check.that(0 <= V <= wte.shape[0], name, f"rows in [0, {wte.shape[0]}]", V)
    check.integers(name, ids=ids, pos=pos)
    check.rank(name, "ids", ids, 1)
    check.ids(name, "ids", ids, V, hint=check.VOCABULARY)
    named = [
        dict(zip(BLOCK, blocks[i : i + len(BLOCK)], strict=True))
        for i in range(0, len(blocks), len(BLOCK))
    ]
    k_cache = named[0]["k_cache"]
    check.rank(name, "k_cache", k_cache, 4)
    B, H, N, D = k_cache.shape
    if (ids.shape[0], C) != (B, H * D):
        raise ShapeError(
            f"[{name}] expected caches [B, H, N, D] for ids [B] and wte [V, H D], "
            f"got {check.describe({'ids': ids, 'wte': wte, 'k_cache': k_cache})}"
        )
    check.shape(name, "wpe", wpe.shape[1:], (C,))
    _check_norm(name, wte, gamma=gamma, beta=beta)
    shapes: dict[str, Shape] = {
        "w_attn": (C, 3 * C),
        "b_attn": (3 * C,),
        "w_proj": (C, C),
        "b_proj": (C,),
        "w_fc": (C, 4 * C),
        "b_fc": (4 * C,),
        "w_out": (4 * C, C),
        "b_out": (C,),
        "k_cache": k_cache.shape,
        "v_cache": k_cache.shape,
    }
    for block in named:
        _check_norm(name, wte, **{n: x for n, x in block.items() if n not in shapes})
        check.floating(name, wte=wte, **{n: block[n] for n in shapes})
        for each, shape in shapes.items():
            check.shape(name, each, block[each].shape, shape)
    check.position(name, wte, pos, B, 1, min(N, wpe.shape[0]))
    out = empty((B, V), wte.dtype, wte.device)
    kernels(wte).decode_token(
        ids,
        pos,
        wte,
        wpe,
        gamma,
        beta,
        tuple(tuple(block[n] for n in WEIGHTS) for block in named),
        k_caches=tuple(block["k_cache"] for block in named),
        v_caches=tuple(block["v_cache"] for block in named),
        out=out,
        eps=eps,
    )
    for block in named:
        for each in CACHES:
            block[each].storage.version += 1
    return out


def _check_norm(name: str, x: Tensor, **parameters: Tensor) -> None:
    check.weights(name, x, **parameters)
    for each, value in parameters.items():
        check.shape(name, each, value.shape, x.shape[1:])


def decodes_by_token(ids: Tensor, wte: Tensor, n_head: int) -> bool:
    """Whether decode_token_ is the fast way for these new tokens [B, T]."""
    (batch, length), width, kind = ids.shape, wte.shape[1], wte.device.kind
    served = registry.implementation("decode_token", kind, wte.dtype) == kind
    if length > 1 or batch > FEW or not served:
        return False
    return kind == "cuda" and width % 32 == 0 and width // n_head in (8, 16, 32, 64, 128, 256)
