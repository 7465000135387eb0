"""JAX's side of the training benchmark: GPT-2 under jit, attention by cuDNN where it can.

python benchmarks/jax_side.py train DEVICE MODEL PRECISION B T
"""

import functools
import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import optax
from sides import MODELS, Side, report, windows

side = Side.of(sys.argv[1:])
sizes = MODELS[side.model]
L, H, C = sizes["n_layer"], sizes["n_head"], sizes["n_embd"]
V = -(-sizes["vocab_size"] // 64) * 64
low = side.precision == "bf16"
kind = jnp.bfloat16 if low else jnp.float32
attention = "cudnn" if side.device == "cuda" and low else None


def init(key):
    keys = iter(jax.random.split(key, 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32) * 0.02

    return {
        "wte": normal(V, C),
        "wpe": normal(side.T, C),
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
    qkv = linear(norm(x, p["ln_1"]), p["attn"]).reshape(side.B, side.T, 3, H, C // H)
    q, k, v = (qkv[:, :, i] for i in range(3))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    x = x + linear(y.reshape(side.B, side.T, C), p["proj"])
    return x + linear(jax.nn.gelu(linear(norm(x, p["ln_2"]), p["fc"])), p["out"])


def loss_of(params, ids, targets):
    h = params["wte"].astype(kind)[ids] + params["wpe"].astype(kind)
    for i in range(L):
        h = block(h, jax.tree.map(lambda a, i=i: a[i], params["blocks"]))
    logits = norm(h, params["ln_f"]) @ params["wte"].astype(kind).T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return losses.mean()


optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(6e-4, b1=0.9, b2=0.95, weight_decay=0.1)
)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def update(params, state, ids, targets):
    loss, grads = jax.value_and_grad(loss_of)(params, ids, targets)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


start = time.perf_counter()
params = init(jax.random.PRNGKey(0))
state = optimizer.init(params)
key = jax.random.PRNGKey(1)
ids, targets = jax.random.randint(key, (2, side.B, side.T), 0, sizes["vocab_size"])
loss = None


def step():
    global params, state, loss
    params, state, loss = update(params, state, ids, targets)


step()
first = float(loss)
warm = time.perf_counter() - start
seconds = windows(step, lambda: loss.block_until_ready(), side.device)
statistics = jax.local_devices()[0].memory_stats() or {}
step()
report(
    seconds=seconds,
    memory=statistics.get("peak_bytes_in_use", 0),
    first_step=warm,
    losses=[first, float(loss)],
)
