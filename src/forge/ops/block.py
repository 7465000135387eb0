"""A whole block of a GPT-2 for one new position, where launching its ops would cost the most."""

from __future__ import annotations

from forge.backends import registry
from forge.backends.registry import kernels
from forge.errors import ShapeError
from forge.ops import check
from forge.ops.define import op
from forge.tensor import Tensor, empty_like

# From this many samples on, a block's ops keep a GPU as busy as one kernel of all would.
FEW = 4


@op(differentiable="no")
def decode_block_(
    h: Tensor,
    gamma_1: Tensor,
    beta_1: Tensor,
    w_attn: Tensor,
    b_attn: Tensor,
    w_proj: Tensor,
    b_proj: Tensor,
    gamma_2: Tensor,
    beta_2: Tensor,
    w_fc: Tensor,
    b_fc: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pos: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """One new position of every sample through a block: h [B, C] -> [B, C].

    With y = layernorm(h), its keys and values go into the caches [B, H, N, D] at `pos` int64 [B],
    and its queries see all up to there; g = h + attention w_proj + b_proj; the result is
    g + gelu(layernorm(g) w_fc + b_fc) w_out + b_out. Weights are [in, out], the MLP is 4 C wide.
    The same as layernorm, linear, kv_append_, cached_attention, add_layernorm. In place in the
    caches. Floating. Not differentiable. Raises ShapeError, DtypeError, ArgumentError where the
    cache is full. Accuracy as cached_attention's.
    """
    C = h.shape[-1]
    norms = {"gamma_1": gamma_1, "beta_1": beta_1, "gamma_2": gamma_2, "beta_2": beta_2}
    check.weights("decode_block_", h, **norms)
    check.rank("decode_block_", "h", h, 2)
    check.rank("decode_block_", "k_cache", k_cache, 4)
    rows, heads, room, width = k_cache.shape
    if (rows, heads * width) != h.shape:
        raise ShapeError(
            f"[decode_block_] expected caches [B, H, N, D] for h [B, H D], "
            f"got {check.describe({'h': h, 'k_cache': k_cache})}"
        )
    for name, x, shape in (
        ("k_cache", k_cache, k_cache.shape),
        ("v_cache", v_cache, k_cache.shape),
        ("w_attn", w_attn, (C, 3 * C)),
        ("b_attn", b_attn, (3 * C,)),
        ("w_proj", w_proj, (C, C)),
        ("b_proj", b_proj, (C,)),
        ("w_fc", w_fc, (C, 4 * C)),
        ("b_fc", b_fc, (4 * C,)),
        ("w_out", w_out, (4 * C, C)),
        ("b_out", b_out, (C,)),
        *((name, x, (C,)) for name, x in norms.items()),
    ):
        check.floating("decode_block_", h=h, **({name: x} if name not in norms else {}))
        check.shape("decode_block_", name, x.shape, shape)
    check.position("decode_block_", h, pos, rows, 1, room)
    out = empty_like(h)
    kernels(h).decode_block(
        h,
        gamma_1,
        beta_1,
        w_attn,
        b_attn,
        w_proj,
        b_proj,
        gamma_2,
        beta_2,
        w_fc,
        b_fc,
        w_out,
        b_out,
        pos,
        k_cache=k_cache,
        v_cache=v_cache,
        out=out,
        eps=eps,
    )
    k_cache.storage.version += 1
    v_cache.storage.version += 1
    return out


def decodes_by_block(h: Tensor, n_head: int) -> bool:
    """Whether decode_block_ is the fast way for these new positions [B, T, C]."""
    batch, length, width = h.shape
    kind = h.device.kind
    if length > 1 or batch > FEW or registry.implementation("decode_block", kind, h.dtype) != kind:
        return False
    return kind == "cuda" and width % 16 == 0 and width // n_head in (8, 16, 32, 64, 128, 256)
