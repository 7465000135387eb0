"""Rows at the real shapes of a model: what its training step and its decoding call."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from forge.verify.case import Case, given, ids, int8, normal, scales
from forge.verify.cases_fused import KEY, adamw, targets


class Shapes(Protocol):
    """What a configuration says of a GPT-2's shapes."""

    @property
    def vocab_size(self) -> int | None:
        """V, classes."""

    @property
    def block_size(self) -> int:
        """T, positions."""

    @property
    def n_embd(self) -> int:
        """C, channels."""

    @property
    def n_head(self) -> int:
        """H, heads."""


def model_cases(config: Shapes) -> list[Case]:
    """The ops of a GPT-2 at its own shapes, for one sample; accuracy only."""
    t, c, h = config.block_size, config.n_embd, config.n_head
    v = config.vocab_size or 256
    padded = math.ceil(v / 128) * 128
    x, affine = (1, t, c), {"gamma": (c,), "beta": (c,)}
    cache, pos = (2, h, t, c // h), given([t - 1, t // 2])
    caches = {"k_cache": cache, "v_cache": cache}
    wte = normal(padded, c, std=c**-0.5)
    tiles = [(i, min(i + 16384, c * c), 0) for i in range(0, c * c, 16384)]
    real: dict[str, Any] = {"tolerance": 4, "thorough": False}

    def linear(rows: tuple[int, ...], k: int, m: int, gelu: str | None = None) -> Case:
        inputs = {"x": (*rows, k), "w": normal(k, m, std=k**-0.5), "bias": (m,)}
        return Case("linear", inputs, {"gelu": gelu}, terms=max(k, m, t), **real)

    def quantized(rows: int, k: int, m: int, gelu: str | None = None) -> Case:
        inputs = {"x": (rows, k), "w": int8(m, k), "scale": scales(m)}
        frozen: dict[str, Any] = {"constant": ("scale",), "masters": ("scale",)}
        return Case("quantized_linear", inputs, {"gelu": gelu}, terms=max(k, m), **frozen, **real)

    return [
        Case(
            "embedding",
            {"ids": ids(v, 1, t), "wte": wte, "wpe": (t, c)},
            {"rows": v},
            derive=lambda inputs: {"order": np.argsort(inputs["ids"].reshape(-1), kind="stable")},
            terms=t,
            **real,
        ),
        Case("dropout", {"x": x}, {"p": 0.1, "key": KEY, "site": 1}, **real),
        Case("layernorm", {"x": x, **affine}, terms=max(c, t), **real),
        linear((1, t), c, 3 * c),
        *(
            Case("attention", {"qkv": (1, t, 3 * c)}, {"n_head": h, **p}, terms=t, **real)
            for p in ({}, {"p": 0.1, "key": KEY, "site": 2})
        ),
        linear((1, t), c, c),
        Case(
            "add_layernorm",
            {"x": x, "branch": x, "bias": (c,), **affine},
            terms=max(c, t),
            **real,
        ),
        Case(
            "mlp",
            {
                "x": x,
                "w": normal(c, 4 * c, std=c**-0.5),
                "bias": (4 * c,),
                "w_out": normal(4 * c, c, std=(4 * c) ** -0.5),
            },
            terms=max(4 * c, t),
            **real,
        ),
        Case(
            "linear_cross_entropy",
            {"x": x, "wte": wte, "targets": targets(v, 1, t, ignored=0.1)},
            {"rows": v},
            terms=v,
            **real,
        ),
        Case(
            "kv_append_",
            {**caches, "qkv": (2, 1, 3 * c), "pos": pos},
            tolerance=0,
            mutates=tuple(caches),
            thorough=False,
        ),
        Case("cached_attention", {"q": (2, 1, c), **caches, "pos": pos}, terms=t, **real),
        linear((2, 1), c, 3 * c),
        Case(
            "matmul",
            {"a": (2, c), "b": wte},
            {"trans_b": True, "b_rows": v},
            constant=("a", "b"),
            terms=c,
            **real,
        ),
        quantized(2, c, v),
        quantized(2, 4 * c, c),
        quantized(t, c, 4 * c, gelu="tanh"),
        Case("global_norm", {"x": (4 * c * c,)}, **real),
        replace(adamw(c * c, tiles, max_norm=1.0), thorough=False),
    ]
