"""GPT-2 (Radford et al., 2019): a frozen description and pure functions of named parameters.

Names and shapes are Hugging Face's, so files need no conversion; weights are [in, out]. With Vars
as parameters the functions record; with Tensors they only compute.

Shapes: B samples, T positions, C width, H heads of width D = C / H, L blocks, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge import ops
from forge.errors import ConfigError, attribute_hints
from forge.ops.token import decodes_by_token
from forge.params import Int8Params, Params
from forge.tensor import Device, Shape, Tensor, tensor, zeros

# A GPU's products take four times as long with rows of 50257 logits as with rows of 50304.
VOCABULARY_MULTIPLE = 128
# The parameters of a block, in the order they are used.
BLOCK = (
    "ln_1.weight",
    "ln_1.bias",
    "attn.c_attn.weight",
    "attn.c_attn.bias",
    "attn.c_proj.weight",
    "attn.c_proj.bias",
    "ln_2.weight",
    "ln_2.bias",
    "mlp.c_fc.weight",
    "mlp.c_fc.bias",
    "mlp.c_proj.weight",
    "mlp.c_proj.bias",
)


@dataclass(frozen=True)
class GPT2Config:
    """The size of a GPT-2. Raises `ConfigError` out of range, as where heads do not fit.

    `init_std` is the spread of the initial weights, by default sqrt(2 / (5 C)): 0.056 for C = 128
    and 0.023 for C = 768, where Hugging Face has 0.02 for all. Dropout is three probabilities below
    1, by Hugging Face's names: `embd_pdrop` of embeddings, `resid_pdrop` of what each branch adds,
    `attn_pdrop` of attention. It is applied where the model's functions are given `rng`.
    """

    vocab_size: int = 50257
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    embd_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    layer_norm_epsilon: float = 1e-5
    init_std: float | None = None

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.block_size, self.n_layer, self.n_head, self.n_embd)
        if min(sizes) < 1 or self.n_embd % self.n_head:
            raise ConfigError(
                "[gpt2] expected sizes of at least 1 and n_embd divisible by n_head, got "
                f"vocab_size={self.vocab_size} block_size={self.block_size} "
                f"n_layer={self.n_layer} n_head={self.n_head} n_embd={self.n_embd}"
            )
        for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop"):
            p = getattr(self, name)
            if not 0.0 <= p < 1.0:
                raise ConfigError(f"[gpt2] expected a probability 0 <= {name} < 1, got {p}")


@dataclass(frozen=True)
class Rng:
    """Where dropout's numbers come from: (seed, step), and this micro-batch's first sample."""

    key: Tensor
    first_sample: int = 0


@dataclass(frozen=True)
class Cache:
    """Keys and values of the positions so far: per block two Tensors [B, H, N, D]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class GPT2:
    """The functions of a GPT-2 of one size; it holds no state, so all take the parameters."""

    config: GPT2Config

    __getattr__ = attribute_hints(
        {
            "eval": "model.loss(params, ids, targets) without rng, which alone turns dropout on",
            "forward": "model.logits(params, ids), or model.loss(params, ids, targets)",
            "generate": "forge.generate.generate(model, params.compute, prompts, 200, sampling)",
            "load_state_dict": "params.load_(arrays), with params from model.zeros(device)",
            "named_parameters": "model.shapes(), or params.items() with params from model.zeros",
            "parameters": "params = model.zeros(device); params.load_(model.init(seed))",
            "state_dict": "params.numpy(), with params from model.zeros(device)",
            "to": "model.zeros(device), whose parameters are on it",
            "train": "model.loss(params, ids, targets, rng=…), which turns dropout on",
        }
    )

    def shapes(self) -> dict[str, Shape]:
        """Name and shape of every parameter, in model order."""
        c = self.config
        C = c.n_embd
        attention = ((C,), (C,), (C, 3 * C), (3 * C,), (C, C), (C,))
        mlp = ((C,), (C,), (C, 4 * C), (4 * C,), (4 * C, C), (C,))
        block = dict(zip(BLOCK, attention + mlp, strict=True))
        shapes: dict[str, Shape] = {
            "wte.weight": (c.vocab_size, C),
            "wpe.weight": (c.block_size, C),
        }
        for layer in range(c.n_layer):
            shapes |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
        return shapes | {"ln_f.weight": (C,), "ln_f.bias": (C,)}

    def zeros(self, device: Device, precision: str = "fp32") -> Params:
        """Zeros for all parameters, to load `init` or a file into.

        With precision "bf16" the model computes in bfloat16: then all but the norms' weights, which
        are few and steer everything, have a rounded copy. Raises `ConfigError` for another one.
        """
        if precision not in ("fp32", "bf16"):
            raise ConfigError(f"[gpt2] expected the precision fp32 or bf16, got {precision!r}")
        shapes = self.shapes()
        rounded = []
        if precision == "bf16":
            norms = ("ln_1", "ln_2", "ln_f")
            rounded = [name for name in shapes if name.split(".")[-2] not in norms]
        padded = {}
        if device.kind == "cuda":
            V = self.config.vocab_size
            padded["wte.weight"] = -(-V // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        return Params(shapes, device, rounded=rounded, padded=padded)

    def quantized(self, arrays: Mapping[str, np.ndarray], device: Device) -> Int8Params:
        """These parameters with all matrices but the positions' in int8: for inference alone.

        Raises `ShapeError` where names or shapes are not the model's.
        """
        matrices = [name for name, shape in self.shapes().items() if len(shape) == 2]
        matrices.remove("wpe.weight")  # a token reads one row of it
        # All but wte are [in, out].
        turned = [name for name in matrices if name != "wte.weight"]
        return Int8Params(self.shapes(), arrays, device, matrices, turned)

    def init(self, seed: int) -> dict[str, np.ndarray]:
        """Initial parameters, float32: a pure function of the seed.

        Norms are ones and zeros, biases zero, all else normal with `init_std`, which for the two
        projections that end in the residual stream is divided by sqrt(2 L), the number of branches
        added to it. Each parameter has a stream of its own.
        """
        c = self.config
        std = math.sqrt(2.0 / (5.0 * c.n_embd)) if c.init_std is None else c.init_std
        arrays = {}
        for stream, (name, shape) in enumerate(self.shapes().items()):
            if len(shape) == 1:
                norm_scale = name.split(".")[-2].startswith("ln_") and name.endswith("weight")
                arrays[name] = np.full(shape, float(norm_scale), np.float32)
                continue
            generator = np.random.Generator(np.random.Philox(key=[seed, stream]))
            scale = std / math.sqrt(2 * c.n_layer) if "c_proj" in name else std
            arrays[name] = generator.standard_normal(shape, np.float32) * np.float32(scale)
        return arrays

    def hidden(
        self,
        params: Mapping[str, Any],
        ids: Tensor,
        *,
        rng: Rng | None = None,
        order: Tensor | None = None,
        cache: Cache | None = None,
        pos: int | Tensor = 0,
    ) -> Any:
        """The last layer's normalised output, [B, T, C], for ids int64 [B, T].

        `rng` turns dropout on; `order` sorts the ids (see ops.embedding). With a `cache` the
        positions from `pos` on (an int or int64 [B]) are appended to it, and see what it holds.
        Raises `ArgumentError` where the context is full.
        """
        c = self.config
        wte, wpe = params["wte.weight"], params["wpe.weight"]
        if "wte.scale" in params:
            h = ops.quantized_embedding(ids, wte, params["wte.scale"], wpe, pos)
        else:
            h = ops.embedding(ids, wte, wpe, pos, order, rows=c.vocab_size)
        h = self._dropout(h, c.embd_pdrop, rng, 0)
        y = ops.layernorm(
            h, params["h.0.ln_1.weight"], params["h.0.ln_1.bias"], c.layer_norm_epsilon
        )
        biased = self._drops_branches(rng)
        for layer in range(c.n_layer):
            p = f"h.{layer}."
            qkv = self._linear(params, p + "attn.c_attn", y)
            mixed = self._attention(qkv, layer, rng, cache, pos)
            branch = self._linear(params, p + "attn.c_proj", mixed, biased=biased)
            h, y = self._add(params, h, branch, p + "attn.c_proj", p + "ln_2", rng, 3 * layer + 2)
            branch = self._mlp(params, p + "mlp.", y, biased=biased)
            norm = f"h.{layer + 1}.ln_1" if layer + 1 < c.n_layer else "ln_f"
            h, y = self._add(params, h, branch, p + "mlp.c_proj", norm, rng, 3 * layer + 3)
        return y

    def logits(self, params: Mapping[str, Any], ids: Tensor, **keywords: Any) -> Any:
        """Logits [B, T, V] for ids [B, T]; keywords as `hidden`'s."""
        y = self.hidden(params, ids, **keywords)
        logits = self._head(params, ops.reshape(y, (-1, self.config.n_embd)))
        return ops.reshape(logits, (*ids.shape, self.config.vocab_size))

    def loss(
        self,
        params: Mapping[str, Any],
        ids: Tensor,
        targets: Tensor,
        *,
        weight: Tensor | None = None,
        rng: Rng | None = None,
        order: Tensor | None = None,
    ) -> Any:
        """Cross-entropy in nats of the targets int64 [B, T], -100 ignored: a scalar.

        `weight` is the factor of their sum, by default 1 / their number.
        """
        y = self.hidden(params, ids, rng=rng, order=order)
        wte, rows = params["wte.weight"], self.config.vocab_size
        if "wte.scale" in params:
            wte = ops.dequantize(wte, params["wte.scale"])
        return ops.linear_cross_entropy(y, wte, targets, weight, rows=rows)

    def cache(self, batch: int, length: int, device: Device, dtype: str = "float32") -> Cache:
        """Room for `length` positions of `batch` samples."""
        c = self.config
        shape = (batch, c.n_head, length, c.n_embd // c.n_head)
        keys = tuple(zeros(shape, dtype, device) for _ in range(c.n_layer))
        values = tuple(zeros(shape, dtype, device) for _ in range(c.n_layer))
        return Cache(keys, values)

    def decode(
        self, params: Mapping[str, Tensor], ids: Tensor, cache: Cache, pos: int | Tensor
    ) -> Tensor:
        """Logits [B, V] that follow the last of ids [B, T], which are appended to the cache."""
        batch, length = ids.shape
        n_head = self.config.n_head
        if isinstance(pos, Tensor) and decodes_by_token(ids, params["wte.weight"], n_head):
            return self._token(params, ids, cache, pos)
        y = ops.reshape(self.hidden(params, ids, cache=cache, pos=pos), (-1, self.config.n_embd))
        if length > 1:
            last = tensor(np.arange(1, batch + 1) * length - 1, "int64", ids.device)
            y = ops.take(y, last)
        if "wte.scale" in params:
            logits: Tensor = self._head(params, y)
        else:
            logits = ops.matmul(
                y, params["wte.weight"], trans_b=True, b_rows=self.config.vocab_size
            )
        return logits

    def _token(
        self, params: Mapping[str, Tensor], ids: Tensor, cache: Cache, pos: Tensor
    ) -> Tensor:
        """`decode` for one new position of a few samples, in one kernel."""
        c = self.config
        blocks: list[Tensor] = []
        for layer, caches in enumerate(zip(cache.keys, cache.values, strict=True)):
            blocks += [*(params[f"h.{layer}.{name}"] for name in BLOCK), *caches]
        logits: Tensor = ops.decode_token_(
            *blocks,
            ids=ids.view((ids.shape[0],)),
            wte=params["wte.weight"],
            wpe=params["wpe.weight"],
            gamma=params["ln_f.weight"],
            beta=params["ln_f.bias"],
            pos=pos,
            rows=c.vocab_size,
            eps=c.layer_norm_epsilon,
        )
        return logits

    def _head(self, params: Mapping[str, Any], y: Any) -> Any:
        """Logits [N, V] of y [N, C]: those of padded rows are dropped."""
        wte, V = params["wte.weight"], self.config.vocab_size
        if "wte.scale" in params:
            return ops.quantized_linear(y, wte, params["wte.scale"])
        logits = ops.matmul(y, wte, trans_b=True)
        return logits if logits.shape[1] == V else ops.slice(logits, (0, 0), (y.shape[0], V))

    def _attention(
        self, qkv: Any, layer: int, rng: Rng | None, cache: Cache | None, pos: int | Tensor
    ) -> Any:
        c = self.config
        if cache is not None:
            keys, values = cache.keys[layer], cache.values[layer]
            return ops.cached_attention(ops.kv_append_(keys, values, qkv, pos), keys, values, pos)
        if rng is None or c.attn_pdrop == 0.0:
            return ops.attention(qkv, c.n_head)
        return ops.attention(
            qkv,
            c.n_head,
            c.attn_pdrop,
            rng.key,
            site=3 * layer + 1,
            first_sample=rng.first_sample,
        )

    def _mlp(self, params: Mapping[str, Any], p: str, x: Any, *, biased: bool) -> Any:
        """The feed-forward of a block: one op, or two linear layers where weights are in int8."""
        if p + "c_fc.scale" in params:
            hidden = self._linear(params, p + "c_fc", x, gelu="tanh")
            return self._linear(params, p + "c_proj", hidden, biased=biased)
        w, bias = params[p + "c_fc.weight"], params[p + "c_fc.bias"]
        w_out, bias_out = params[p + "c_proj.weight"], params[p + "c_proj.bias"]
        return ops.mlp(x, w, bias, w_out, bias_out if biased else None, gelu="tanh")

    def _add(
        self,
        params: Mapping[str, Any],
        h: Any,
        branch: Any,
        projection: str,
        norm: str,
        rng: Rng | None,
        site: int,
    ) -> Any:
        """Add what a branch's projection gave to the residual stream h, and normalise that."""
        c = self.config
        bias = params[projection + ".bias"]
        gamma, beta = params[norm + ".weight"], params[norm + ".bias"]
        if self._drops_branches(rng):
            branch, bias = self._dropout(branch, c.resid_pdrop, rng, site), None
        return ops.add_layernorm(h, branch, bias, gamma, beta, c.layer_norm_epsilon)

    def _drops_branches(self, rng: Rng | None) -> bool:
        """Whether dropout falls on branches: on their bias too, which else waits for `_add`."""
        return rng is not None and self.config.resid_pdrop > 0.0

    @staticmethod
    def _linear(
        params: Mapping[str, Any],
        name: str,
        x: Any,
        *,
        biased: bool = True,
        gelu: str | None = None,
    ) -> Any:
        """A linear layer of x, whose weights are in int8 where they have a scale."""
        w, bias = params[name + ".weight"], params[name + ".bias"] if biased else None
        if name + ".scale" in params:
            return ops.quantized_linear(x, w, params[name + ".scale"], bias, gelu=gelu)
        return ops.linear(x, w, bias, gelu=gelu)

    @staticmethod
    def _dropout(x: Any, p: float, rng: Rng | None, site: int) -> Any:
        if rng is None or p == 0.0:
            return x
        return ops.dropout(
            x, p, rng.key, site=site, first_sample=rng.first_sample, samples=x.shape[0]
        )
