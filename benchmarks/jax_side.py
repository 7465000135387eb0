"""JAX's side of the training benchmark: GPT-2 under jit, attention by cuDNN where it can.

python benchmarks/jax_side.py train|first DEVICE MODEL PRECISION B T THREADS

One jitted function is the whole step, its parameters and moments donated: gradient, clipping,
AdamW. fp32 masters and moments; in bf16 the weights are rounded where they are used and the
residual stream is bf16. Attention in bf16 on a GPU is cuDNN's; elsewhere XLA makes it of products.
"""

import functools
import itertools
import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from sides import Side, refuse, report, windows

side = Side.of(sys.argv[1:])
if not side.batch:
    refuse("JAX's side finds no largest batch by itself: name one with --batch")
B, T, sizes = side.batch, side.length, side.sizes
L, H, C = sizes["n_layer"], sizes["n_head"], sizes["n_embd"]
V = -(-sizes["vocab_size"] // 64) * 64
low = side.precision == "bf16"
kind = jnp.bfloat16 if low else jnp.float32
attention = "cudnn" if side.device == "cuda" and low else None
if not low:
    # Elsewhere than on GPUs this is the default; there fp32 products would be rounded to TF32.
    jax.config.update("jax_default_matmul_precision", "highest")


def init(key):
    keys = iter(jax.random.split(key, 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32) * 0.02

    return {
        "wte": normal(V, C),
        "wpe": normal(sizes["block_size"], C),
        "ln_f": (jnp.ones(C), jnp.zeros(C)),
        "blocks": {
            "ln_1": (jnp.ones((L, C)), jnp.zeros((L, C))),
            "attn": (normal(L, C, 3 * C), jnp.zeros((L, 3 * C))),
            "proj": (normal(L, C, C), jnp.zeros((L, C))),
            "ln_2": (jnp.ones((L, C)), jnp.zeros((L, C))),
            "fc": (normal(L, C, 4 * C), jnp.zeros((L, 4 * C))),
            "out": (normal(L, 4 * C, C), jnp.zeros((L, C))),
        },
    }


def norm(x, weights):
    gamma, beta = weights
    x = x.astype(jnp.float32)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return ((x - mean) * jax.lax.rsqrt(variance + 1e-5) * gamma + beta).astype(kind)


def linear(x, weights):
    w, bias = weights
    return x @ w.astype(kind) + bias.astype(kind)


def block(x, p):
    qkv = linear(norm(x, p["ln_1"]), p["attn"]).reshape(B, T, 3, H, C // H)
    q, k, v = (qkv[:, :, i] for i in range(3))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    x = x + linear(y.reshape(B, T, C), p["proj"])
    return x + linear(jax.nn.gelu(linear(norm(x, p["ln_2"]), p["fc"])), p["out"])


def loss_of(params, ids, targets):
    h = params["wte"].astype(kind)[ids] + params["wpe"][:T].astype(kind)
    for i in range(L):
        h = block(h, jax.tree.map(lambda a, i=i: a[i], params["blocks"]))
    logits = (norm(h, params["ln_f"]) @ params["wte"].astype(kind).T).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def update(params, state, ids, targets):
    """AdamW of matrices and embeddings (biases and norms: without decay), clipped to norm 1."""
    loss, grads = jax.value_and_grad(loss_of)(params, ids, targets)
    length = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    clip = jnp.minimum(1.0, 1.0 / (length + 1e-6))
    count = state[2] + 1
    bias1, bias2 = 1 - 0.9**count, 1 - 0.95**count

    def one(path, p, g, m, v):
        # Biases and norms come in pairs with a matrix or another: tuples of (weight, bias).
        decayed = (
            path[-1].key in ("wte", "wpe")
            if len(path) == 1
            else (path[-1].idx == 0 and not path[-2].key.startswith("ln"))
        )
        g = g * clip
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        step = (m / bias1) / (jnp.sqrt(v / bias2) + 1e-8)
        return p - 6e-4 * (step + (0.1 * p if decayed else 0.0)), m, v

    both = jax.tree_util.tree_map_with_path(one, params, grads, *state[:2])
    params, m, v = jax.tree.transpose(jax.tree.structure(params), None, both)
    return params, (m, v, count), loss


def memory():
    """Bytes of the GPU in use, as for the other sides; 0 on a CPU."""
    if side.device != "cuda":
        return 0
    from cuda.bindings import runtime

    error, free, total = runtime.cudaMemGetInfo()
    if int(error):
        raise RuntimeError(f"cudaMemGetInfo: {error}")
    return total - free


if (jax.default_backend() == "gpu") != (side.device == "cuda"):
    refuse(f"JAX here computes on {jax.default_backend()}, not on {side.device}")
jnp.zeros(1).block_until_ready()
used = memory()
start = time.perf_counter()
params = init(jax.random.PRNGKey(0))
state = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
keys = map(jax.random.PRNGKey, itertools.count(1))
loss = None


def step():
    """A step on new tokens, as in torch_side.py."""
    global params, state, loss
    ids, targets = jax.random.randint(next(keys), (2, B, T), 0, sizes["vocab_size"])
    params, state, loss = update(params, state, ids, targets)


step()
first = float(loss)
warm = time.perf_counter() - start
if side.work == "first":
    report(loss=first)
    sys.exit()
measured = windows(step, lambda: loss.block_until_ready(), side.device)
statistics = jax.local_devices()[0].memory_stats() or {}
step()
report(
    **measured,
    batch=B,
    memory=memory() - used,
    allocated=statistics.get("peak_bytes_in_use", 0),
    first_step=warm,
    losses=[first, float(loss)],
)
