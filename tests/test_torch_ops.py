"""Every op against PyTorch: outputs and gradients of the table's rows, in float64 and float32.

PyTorch computes in float64 on the same numbers; the reference must agree in float64 to rounding,
the CPU in float32 within the row's bound.
"""

import math

import numpy as np
import pytest

import forge
from forge.dtypes import to_numpy
from forge.tensor import Tensor
from forge.verify import CASES
from forge.verify.trial import gradients, outputs, tensors

pytestmark = pytest.mark.torch

# Masks of dropout are Forge's own (tests/test_ops.py).
ROWS = [case for case in CASES if not case.attributes.get("p")]


def swapped(x, yes):
    return x.transpose(-1, -2) if yes else x


def window(start, shape, step=None):
    step = step or (1,) * len(start)
    return tuple(slice(a, a + n * s, s) for a, n, s in zip(start, shape, step, strict=True))


def axes(x, axis):
    return tuple(range(x.ndim)) if axis is None else axis


def by_autograd(function, *inputs, dy):
    """The gradients of function's output for dy, themselves differentiable."""
    import torch

    inputs = [x if x.requires_grad else x.detach().requires_grad_() for x in inputs]
    grads = torch.autograd.grad(function(*inputs), inputs, dy, create_graph=True)
    return grads if len(grads) > 1 else grads[0]


def counterparts():
    """A PyTorch function for each op, of the same arguments; in-place ops return what changed."""
    import torch
    from torch.nn import functional

    def gelu(x, form):
        return functional.gelu(x, approximate="tanh" if form == "tanh" else "none")

    def matmul(a, b, bias=None, trans_a=False, trans_b=False, alpha=1.0, b_rows=None, into=None):
        out = alpha * (swapped(a, trans_a) @ swapped(b[..., :b_rows, :] if b_rows else b, trans_b))
        out = out if bias is None else out + bias
        return out if into is None else (out + into,) * 2

    def linear(x, w, bias=None, gelu=None):
        y = functional.linear(x, w.T, bias)
        return y if gelu is None else counterparts_["gelu"](y, gelu)

    def mlp(x, w, bias, w_out, bias_out=None, gelu="tanh"):
        return linear(linear(x, w, bias, gelu), w_out, bias_out)

    def matmul_gelu_backward(dy, w, pre, form="tanh", into_bias=None):
        dpre = by_autograd(lambda v: gelu(v, form) @ w, pre, dy=dy)
        return dpre if into_bias is None else (dpre, into_bias + dpre.sum(0))

    def quantize(x):
        scale = (x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])) / 127
        # Of zeros in a row without a scale.
        return (x / scale[..., None]).nan_to_num().round(), scale

    def dequantize(q, scale):
        return q * scale[..., None]

    def layernorm(x, gamma, beta, eps=1e-5):
        return functional.layer_norm(x, gamma.shape, gamma, beta, eps)

    def layernorm_backward(x, gamma, dy, mean, rstd):
        return by_autograd(layernorm, x, gamma, torch.zeros_like(gamma), dy=dy)

    def add_layernorm(x, branch, bias, gamma, beta, eps=1e-5):
        total = x + branch if bias is None else x + branch + bias
        return total, layernorm(total, gamma, beta, eps)

    def add_layernorm_backward(dsum, dy, sum, gamma, mean, rstd, wants_bias):
        zero = torch.zeros_like(gamma)
        dx, dgamma, dbeta = by_autograd(
            layernorm, sum, gamma, zero, dy=torch.zeros_like(sum) if dy is None else dy
        )
        dx = dx if dsum is None else dx + dsum
        return dx, dgamma, dbeta, *([dx.reshape(-1, dx.shape[-1]).sum(0)] if wants_bias else ())

    def softmax(x, causal=False, pos=0):
        if causal:
            hidden = torch.ones(x.shape[-2:], dtype=torch.bool).triu(pos + 1)
            x = x.masked_fill(hidden, -math.inf)
        return torch.softmax(x, -1)

    def split_heads(qkv, n_head):
        qkv = qkv if qkv.ndim == 3 else qkv[None]
        b, t, c = *qkv.shape[:2], qkv.shape[2] // 3
        parts = qkv.split(c, -1) if c else (qkv,) * 3
        heads = (x.reshape(b, t, n_head, c // n_head).transpose(1, 2) for x in parts)
        return tuple(x.reshape(b * n_head, t, c // n_head) for x in heads)

    def merge_heads(x, n_head=None):
        b = 1 if n_head is None else x.shape[0] // n_head
        heads = x.reshape(b, x.shape[0] // max(b, 1) if b else n_head, *x.shape[1:])
        y = heads.transpose(1, 2).flatten(2)
        return y[0] if n_head is None else y

    def unsplit_heads(dq, dk, dv, n_head):
        like = next(x for x in (dq, dk, dv) if x is not None)
        parts = (torch.zeros_like(like) if x is None else x for x in (dq, dk, dv))
        return torch.cat([merge_heads(x, n_head) for x in parts], -1)

    def unmerge_heads(dy, n_head):
        dy = dy if dy.ndim == 3 else dy[None]
        b, t, c = dy.shape
        heads = dy.reshape(b, t, n_head, c // n_head).transpose(1, 2)
        return heads.reshape(b * n_head, t, c // n_head)

    def attention(qkv, n_head):
        q, k, v = split_heads(qkv, n_head)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return merge_heads(y, n_head).reshape(*qkv.shape[:-1], qkv.shape[-1] // 3)

    def attention_backward(qkv, dout, n_head, out, lse):
        return by_autograd(lambda x: attention(x, n_head), qkv, dy=dout)

    def cached_attention(q, k_cache, v_cache, pos):
        (b, t, c), (_, h, n, _) = q.shape, k_cache.shape
        first = torch.as_tensor(pos).expand(b)
        mask = torch.arange(n) <= first[:, None, None] + torch.arange(t)[:, None]
        q = q.reshape(b, t, h, -1).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k_cache, v_cache, attn_mask=mask[:, None])
        return y.transpose(1, 2).reshape(b, t, c)

    def kv_append_(k_cache, v_cache, qkv, pos):
        (b, h, _, d), t = k_cache.shape, qkv.shape[1]
        q, k, v = qkv.split(h * d, -1)
        caches = k_cache.clone(), v_cache.clone()
        for sample, first in enumerate(torch.as_tensor(pos).expand(b)):
            for cache, x in zip(caches, (k, v), strict=True):
                cache[sample, :, first : first + t] = x[sample].reshape(t, h, d).transpose(0, 1)
        return q, *caches

    def decode_token_(*blocks, ids, wte, wpe, gamma, beta, pos, rows):
        h, caches = (wte[ids] + wpe[pos])[:, None], []
        for i in range(0, len(blocks), 14):
            gamma_1, beta_1, w_attn, b_attn, w_proj, b_proj, *mlp, keys, values = blocks[i : i + 14]
            gamma_2, beta_2, w_fc, b_fc, w_out, b_out = mlp
            qkv = linear(layernorm(h, gamma_1, beta_1), w_attn, b_attn)
            q, *both = kv_append_(keys, values, qkv, pos)
            h = h + linear(cached_attention(q, *both, pos), w_proj, b_proj)
            wide = linear(layernorm(h, gamma_2, beta_2), w_fc, b_fc, "tanh")
            h, caches = h + linear(wide, w_out, b_out), caches + both
        return layernorm(h, gamma, beta)[:, 0] @ wte[:rows].T, *caches

    def embedding(ids, wte, wpe=None, pos=0, order=None, rows=None):
        y = functional.embedding(ids, wte)
        if wpe is None:
            return y
        first = torch.as_tensor(pos).reshape(-1, *(1,) * (ids.ndim - 1))
        return y + functional.embedding((first + torch.arange(ids.shape[-1])).expand_as(ids), wpe)

    def add_positions_(out, x, pos):
        rows = torch.as_tensor(pos).reshape(-1, 1) + torch.arange(x.shape[1])
        return (out.index_add(0, rows.expand(x.shape[:2]).flatten(), x.flatten(0, 1)),) * 2

    def cross_entropy(logits, targets, weight=None, ignore_index=-100):
        rows = logits.reshape(-1, logits.shape[-1])
        labels = targets.reshape(-1)
        total = functional.cross_entropy(rows, labels, ignore_index=ignore_index, reduction="sum")
        return total / max((labels != ignore_index).sum(), 1) if weight is None else total * weight

    def linear_cross_entropy(x, wte, targets, weight=None, rows=None):
        return cross_entropy(x @ wte[:rows].T, targets, weight)

    def cross_entropy_backward(logits, targets, weight, dloss, lse):
        return by_autograd(lambda x: cross_entropy(x, targets, weight), logits, dy=dloss)

    def adamw_(
        param, grad, m, v, tiles, rates, lr, step, norm, finite,
        beta1=0.9, beta2=0.95, eps=1e-8, max_norm=None, working=None,
    ):  # fmt: skip
        state = [param.clone(), m.clone(), v.clone(), step.clone()]
        clip = 1.0 if max_norm is None else min(1.0, float(max_norm / (norm + 1e-6)))
        for start, stop, segment in tiles.tolist() if finite else ():
            scale, decay = rates[segment].tolist()
            p, *moments = (x[start:stop].clone() for x in state[:3])
            p.grad = grad[start:stop] * clip
            optimizer = torch.optim.AdamW(
                [p], float(lr) * scale, betas=(beta1, beta2), eps=eps, weight_decay=decay
            )
            names = ("exp_avg", "exp_avg_sq")
            optimizer.state[p] = {"step": step.double(), **dict(zip(names, moments, strict=True))}
            optimizer.step()
            for x, new in zip(state, (p, *moments), strict=False):
                x[start:stop] = new
        state[3] += finite
        return state[0], *state, *([state[0].bfloat16()] if working is not None else ())

    def gelu_backward(x, dy, form="tanh", into_bias=None):
        dx = by_autograd(lambda v: gelu(v, form), x, dy=dy)
        if into_bias is None:
            return dx
        # With no dimension named, PyTorch would sum over all.
        over = tuple(range(dx.ndim - 1))
        return dx, into_bias + (dx.sum(over) if over else dx)

    counterparts_ = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "exp": lambda x: x.exp(),
        "log": lambda x: x.log(),
        "tanh": lambda x: x.tanh(),
        "neg": lambda x: x.neg(),
        "maximum": lambda a, b: torch.maximum(a, b),
        "scale": lambda x, factor, into=None: (
            x * factor if into is None else (x * factor + into,) * 2
        ),
        "where": lambda condition, a, b: torch.where(condition, a, b),
        "cast": lambda x, dtype: x.to(getattr(torch, dtype)),
        "gelu": gelu,
        "gelu_backward": gelu_backward,
        "dropout": lambda x, p, key: functional.dropout(x, p),
        "reshape": lambda x, shape: x.reshape(shape),
        "transpose": lambda x, axes=None: x.permute(axes or tuple(range(x.ndim))[::-1]),
        "slice": lambda x, start, shape, step=None: x[window(start, shape, step)],
        "unslice": lambda dy, start, shape, step=None: by_autograd(
            lambda x: x[window(start, dy.shape, step)], dy.new_zeros(shape), dy=dy
        ),
        "concat": lambda *xs, axis=0: torch.cat(xs, axis),
        "broadcast_to": lambda x, shape: x.expand(shape),
        "take": lambda x, ids: x[ids],
        "matmul": matmul,
        "linear": linear,
        "mlp": mlp,
        "matmul_gelu_backward": matmul_gelu_backward,
        "quantize": quantize,
        "dequantize": dequantize,
        "quantized_linear": lambda x, w, scale, bias=None, gelu=None: linear(
            x, dequantize(w, scale).T, bias, gelu
        ),
        "quantized_embedding": lambda ids, wte, scale, wpe=None, pos=0: embedding(
            ids, dequantize(wte, scale), wpe, pos
        ),
        "sum_rows": lambda x, into=None: (
            x.reshape(-1, x.shape[-1]).sum(0)
            if into is None
            else (into + x.reshape(-1, x.shape[-1]).sum(0),) * 2
        ),
        "sum_to": lambda x, shape: x.sum_to_size(shape),
        "sum": lambda x, axis, keepdims=False: x.sum(axes(x, axis), keepdims),
        "mean": lambda x, axis, keepdims=False: x.mean(axes(x, axis), keepdims),
        "max": lambda x, axis, keepdims=False: x.amax(axes(x, axis), keepdims),
        "argmax": lambda x: x.argmax(-1),
        "layernorm": layernorm,
        "layernorm_backward": layernorm_backward,
        "add_layernorm": add_layernorm,
        "add_layernorm_backward": add_layernorm_backward,
        "softmax": softmax,
        "softmax_backward": lambda y, dy: y * (dy - (y * dy).sum(-1, keepdim=True)),
        "split_heads": split_heads,
        "unsplit_heads": unsplit_heads,
        "merge_heads": merge_heads,
        "unmerge_heads": unmerge_heads,
        "attention": attention,
        "attention_backward": attention_backward,
        "cached_attention": cached_attention,
        "kv_append_": kv_append_,
        "decode_token_": decode_token_,
        "embedding": embedding,
        "add_positions_": add_positions_,
        "scatter_add_rows_": lambda out, ids, x, order=None: (
            (out.index_add(0, ids.flatten(), x),) * 2
        ),
        "scatter_rows": lambda x, ids, rows: x.new_zeros(rows, x.shape[1]).index_add(0, ids, x),
        "cross_entropy": cross_entropy,
        "cross_entropy_backward": cross_entropy_backward,
        "linear_cross_entropy": linear_cross_entropy,
        "global_norm": lambda x: torch.linalg.vector_norm(x),
        "all_finite": lambda *values: torch.stack(values).isfinite().all().long(),
        "adamw_": adamw_,
    }
    return counterparts_


def test_every_op_has_a_counterpart():
    assert counterparts().keys() == {case.op for case in CASES}


def assert_close(name, got, wanted, bound):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, name
    if not np.array_equal(got, wanted, equal_nan=True):
        size = max(np.linalg.norm(wanted), 1e-7 * math.sqrt(wanted.size))
        assert np.linalg.norm(got - wanted) / size <= bound, name


@pytest.mark.parametrize(("device", "dtype"), [("reference", "float64"), ("cpu", "float32")])
@pytest.mark.parametrize("case", ROWS, ids=lambda case: f"{case.op} {case.name}")
def test_op_agrees_with_pytorch(case, device, dtype):
    import torch

    drawn = case.arguments()
    given = tensors(drawn, dtype, forge.Device(device))
    theirs = {name: host(x) for name, x in given.items()}
    for name in case.wrt:
        theirs[name].requires_grad_()
    xs = [theirs.pop(name) for name in drawn if case.variadic and name.startswith(case.variadic)]
    result = counterparts()[case.op](*xs, **theirs)
    wanted = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    own = {name: forge.tensor(x) if isinstance(x, Tensor) else x for name, x in given.items()}
    got = outputs(case, own)
    # Float64 sums in another order; where a row promises exact values, rounding of its gradients.
    exact = dtype == "float64"
    assert len(got) == len(wanted)
    for (name, ours), other in zip(got.items(), wanted, strict=True):
        assert_close(name, ours, values(other), 1e-12 if exact else case.bound(dtype))
    if case.wrt:
        rng = np.random.default_rng(1)
        seeds = [rng.standard_normal(x.shape).astype(to_numpy(x.dtype)) for x in got.values()]
        ours = gradients(case, given, [np.asarray(seed) for seed in seeds])
        leaves = dict(zip(drawn, xs, strict=False)) if case.variadic else theirs
        grads = torch.autograd.grad(
            wanted,
            [leaves[name] for name in case.wrt],
            [host(seed).to(x.dtype) for seed, x in zip(seeds, wanted, strict=True)],
            materialize_grads=True,
        )
        bound = 1e-11 if exact else case.bound(dtype, gradient=True)
        for name, gradient in zip(case.wrt, grads, strict=True):
            assert_close(f"d{name}", ours[name], values(gradient), bound)


def host(x):
    """A PyTorch tensor of a Tensor or array, floating ones in float64; anything else as it is."""
    import torch

    if isinstance(x, Tensor):
        x = x.numpy()
    if not isinstance(x, np.ndarray):
        return x
    return torch.from_numpy(x if x.dtype in (np.int64, np.bool_) else x.astype(np.float64))


def values(x):
    return x.detach().double().numpy()
