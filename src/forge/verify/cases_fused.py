"""Rows of the ops that do several things at once, and of those that end a step.

B samples, T positions, H heads of width D, C channels, V classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forge.backends.registry import kernels
from forge.dtypes import to_numpy
from forge.ops.token import BLOCK, CACHES
from forge.tensor import Shape, empty, tensor
from forge.verify import composites
from forge.verify.case import Array, Case, Draw, Rng, given, ids, normal, positive

KEY = given([1337, 5])
DROPOUT = {"p": 0.2, "key": KEY, "site": 2, "first_sample": 3}


def fused() -> list[Case]:
    """All rows of this file."""
    return [
        *_norm(),
        *_attention(),
        *_heads(),
        *_cache(),
        *_token(),
        *_embedding(),
        *_loss(),
        *_update(),
    ]


def _norm() -> list[Case]:
    exactness: dict[str, Any] = {"tolerance": 4, "terms": 130}
    rows: list[Case] = []
    for x, masters in (
        ((7, 33), ()),
        ((130, 80), ("gamma", "beta", "mean", "rstd")),
        ((2, 3, 129), ("mean", "rstd")),
        ((5,), ()),
        ((0, 5), ()),
    ):
        common = {"masters": masters, **exactness}
        affine = {"gamma": x[-1:], "beta": x[-1:]}
        rows += [
            Case("layernorm", {"x": x, **affine}, composite=composites.layernorm, **common),
            Case(
                "layernorm_backward",
                {"x": x, "gamma": x[-1:], "dy": x},
                derive=lambda inputs: _statistics(inputs["x"]),
                **common,
            ),
            *(
                Case(
                    "add_layernorm",
                    {"x": x, "branch": x, "bias": bias, **affine},
                    composite=composites.add_layernorm,
                    **common,
                )
                for bias in (x[-1:], None)
            ),
            *(
                Case(
                    "add_layernorm_backward",
                    {"dsum": dsum, "dy": dy, "sum": x, "gamma": x[-1:]},
                    {"wants_bias": dsum is not None},
                    derive=lambda inputs: _statistics(inputs["sum"]),
                    **common,
                )
                for dsum, dy in ((x, x), (x, None), (None, x))
            ),
        ]
    # Far from zero the mean loses digits: the error grows with mean / std.
    shifted = {"x": normal(7, 33, mean=10.0), "gamma": (33,), "beta": (33,)}
    return [*rows, Case("layernorm", shifted, {"eps": 1e-3}, tolerance=44)]


def _statistics(x: Array) -> dict[str, Array]:
    """Layernorm's mean and rstd of the rows of x."""
    rows = x.reshape(-1, x.shape[-1])
    return {"mean": rows.mean(-1), "rstd": 1.0 / np.sqrt(rows.var(-1) + 1e-5)}


def _attention() -> list[Case]:
    rows = [
        Case("softmax", {"x": x}, {"causal": causal, "pos": pos}, tolerance=4, composite=other)
        for x in ((7, 33), (130, 80), (2, 3, 129), (1, 1))
        for causal, pos, other in (
            (False, 0, composites.softmax),
            (True, 0, composites.softmax),
            (True, 5, composites.softmax),
        )
    ]
    rows += [Case("softmax", {"x": x}, tolerance=4) for x in ((5,), (0, 5), (3, 1))]
    rows += [
        Case("softmax_backward", {"y": x, "dy": x}, tolerance=4, terms=x[-1])
        for x in ((7, 33), (130, 80), (2, 3, 129), (5,), (1, 1), (0, 5))
    ]
    for x, n_head in (
        ((1, 1, 3), 1),
        ((2, 7, 45), 3),
        ((1, 130, 96), 2),
        ((3, 33, 240), 4),
        ((2, 5, 240), 1),
        ((7, 30), 2),
        ((0, 5, 24), 2),
    ):
        for dropout in ({}, DROPOUT):
            attributes = {"n_head": n_head, **dropout}
            exactness: dict[str, Any] = {"tolerance": 4, "terms": max(x)}
            rows += [
                Case(
                    "attention",
                    {"qkv": x},
                    attributes,
                    composite=composites.attention,
                    **exactness,
                ),
                Case(
                    "attention_backward",
                    {"qkv": x, "dout": (*x[:-1], x[-1] // 3)},
                    attributes,
                    derive=_attention_outputs,
                    masters=("lse",),
                    **exactness,
                ),
            ]
    return rows


def _attention_outputs(inputs: dict[str, Any]) -> dict[str, Array]:
    """`out` and the log-sum-exps of attention, as its backward takes them: by the reference."""
    qkv = tensor(inputs["qkv"], "float64", "reference")
    *batch, length, packed = qkv.shape
    samples, n_head = (*batch, 1)[0], inputs["n_head"]
    key = tensor(inputs["key"], "int64", qkv.device) if "key" in inputs else None
    out = empty((samples, length, packed // 3), "float64", qkv.device)
    lse = empty((samples, n_head, length), "float64", qkv.device)
    dropout = {name: inputs.get(name, 0) for name in ("p", "site", "first_sample")}
    kernels(qkv).attention(
        qkv.view((samples, length, packed)), key, out=out, lse=lse, n_head=n_head, **dropout
    )
    return {"out": out.numpy().reshape(*batch, length, packed // 3), "lse": lse.numpy()}


def _heads() -> list[Case]:
    exact: dict[str, Any] = {"tolerance": 0}
    rows = [
        Case("split_heads", {"qkv": (7, 30)}, {"n_head": 2}, **exact),
        Case("unsplit_heads", {"dq": None, "dk": (4, 7, 5), "dv": None}, {"n_head": 2}, **exact),
        Case("merge_heads", {"x": (4, 7, 5)}, composite=composites.merge_heads, **exact),
        Case("unmerge_heads", {"dy": (7, 30)}, {"n_head": 2}, **exact),
    ]
    for b, t, h, d in ((1, 1, 1, 1), (2, 7, 3, 5), (1, 130, 2, 33), (0, 5, 2, 4)):
        part, heads = (b * h, t, d), {"n_head": h}
        composite = composites.split_heads if b else None
        rows += [
            Case("split_heads", {"qkv": (b, t, 3 * h * d)}, heads, composite=composite, **exact),
            Case("unsplit_heads", {"dq": part, "dk": part, "dv": part}, heads, **exact),
            Case("merge_heads", {"x": part}, heads, composite=composites.merge_heads, **exact),
            Case("unmerge_heads", {"dy": (b, t, h * d)}, heads, **exact),
        ]
    return rows


def token(
    layers: int, v: int, padded: int, h: int, n: int, d: int, pos: list[int], **more: Any
) -> Case:
    """A row of decode_token_: a GPT-2 of so many layers, classes, padded rows and heads."""
    c, b = h * d, len(pos)
    drawn: dict[str, Any] = {f"{name}_{k}": (c,) for name in ("gamma", "beta") for k in (1, 2)}
    masters = [f"blocks{i}" for i, name in enumerate(BLOCK * layers) if name in drawn]
    for name, k, m in (("attn", c, 3 * c), ("proj", c, c), ("fc", c, 4 * c), ("out", 4 * c, c)):
        drawn |= {f"w_{name}": normal(k, m, std=k**-0.5), f"b_{name}": (m,)}
    drawn |= dict.fromkeys(CACHES, (b, h, n, d))
    tables = {"wte": normal(padded, c, std=c**-0.5), "wpe": (n, c), "gamma": (c,), "beta": (c,)}
    return Case(
        "decode_token_",
        {
            **{f"blocks{i}": drawn[name] for i, name in enumerate(BLOCK * layers)},
            **tables,
            "ids": ids(v, b),
            "pos": given(pos),
        },
        {"rows": v},
        masters=(*masters, "gamma", "beta"),
        mutates=tuple(f"blocks{i}" for i, name in enumerate(BLOCK * layers) if name in CACHES),
        **more,
    )


def _token() -> list[Case]:
    return [
        token(
            layers,
            61,
            64,
            h,
            n,
            d,
            pos,
            tolerance=8,
            terms=16 * h * d + n,
            composite=composites.decode_token,
        )
        for layers, h, n, d, pos in (
            (2, 2, 130, 16, [129, 0]),
            (1, 3, 200, 64, [97]),
            (1, 1, 5, 32, [0, 4, 2]),
        )
    ]


def _cache() -> list[Case]:
    rows: list[Case] = []
    for b, t, h, n, d, pos in (
        (1, 1, 1, 1, 1, 0),
        (2, 7, 3, 10, 5, 3),
        (3, 1, 2, 130, 16, given([129, 0, 64])),
        (2, 33, 2, 140, 20, given([0, 107])),
    ):
        cache = (b, h, n, d)
        caches = {"k_cache": cache, "v_cache": cache}
        rows += [
            Case(
                "cached_attention",
                {"q": (b, t, h * d), **caches, "pos": pos},
                tolerance=4,
                terms=n,
                composite=composites.cached_attention,
            ),
            Case(
                "kv_append_",
                {**caches, "qkv": (b, t, 3 * h * d), "pos": pos},
                tolerance=0,
                mutates=("k_cache", "v_cache"),
            ),
        ]
    return rows


def _sorted(inputs: dict[str, Array]) -> dict[str, Array]:
    """The stable order that sorts the ids."""
    return {"order": np.argsort(inputs["ids"].reshape(-1), kind="stable")}


def _embedding() -> list[Case]:
    other: dict[str, Any] = {"terms": 400, "composite": composites.embedding}
    return [
        Case("embedding", {"ids": ids(7, 5), "wte": (7, 33), "wpe": (5, 33)}, **other),
        Case("embedding", {"ids": ids(7, 2, 130), "wte": (7, 80), "wpe": None}, **other),
        Case(
            "embedding",
            {"ids": ids(130, 2, 33), "wte": (256, 129), "wpe": (40, 129), "pos": 7},
            {"rows": 130},
            derive=_sorted,
            **other,
        ),
        Case(
            "embedding",
            {"ids": ids(9, 3, 5), "wte": (9, 7), "wpe": (20, 7), "pos": given([0, 15, 2])},
            **other,
        ),
        Case("embedding", {"ids": ids(1, 1, 1), "wte": (1, 1), "wpe": (1, 1)}, **other),
        Case("embedding", {"ids": ids(3, 0, 5), "wte": (3, 4), "wpe": (5, 4)}),
        *(
            Case(
                "scatter_add_rows_",
                {"out": (v, c), "ids": ids(v, *n), "x": (int(np.prod(n)), c)},
                derive=derive,
                terms=400,
                mutates=("out",),
            )
            for v, n, c in ((7, (5,), 33), (7, (2, 130), 80), (130, (400,), 5), (3, (0,), 5))
            for derive in (None, _sorted)
        ),
        *(
            Case(
                "add_positions_",
                {"out": (n, c), "x": (b, t, c), "pos": pos},
                terms=b,
                mutates=("out",),
            )
            for n, b, t, c, pos in (
                (7, 1, 7, 33, 0),
                (140, 3, 130, 5, 3),
                (20, 3, 5, 80, given([0, 15, 2])),
                (1, 1, 1, 1, 0),
                (3, 0, 2, 5, 1),
            )
        ),
        *(
            Case("scatter_rows", {"x": (n, c), "ids": ids(v, n)}, {"rows": v}, terms=n)
            for v, n, c in ((7, 5, 33), (7, 260, 80), (1, 1, 1), (3, 0, 5))
        ),
    ]


def targets(classes: int, *shape: int, ignored: float = 0.3) -> Draw:
    """Targets of which about the share `ignored` is -100."""

    def draw(rng: Rng, s: Shape) -> Array:
        return np.where(rng.random(s) < ignored, -100, rng.integers(0, classes, s))

    return Draw(shape, draw, floating=False)


def _loss() -> list[Case]:
    rows: list[Case] = []
    for n, v, weight, labels in (
        ((7,), 33, None, targets(33, 7)),
        ((2, 65), 129, positive(), targets(129, 2, 65)),
        ((130,), 80, None, targets(80, 130, ignored=0.0)),
        ((5,), 7, None, targets(7, 5, ignored=1.0)),
        ((1,), 1, None, targets(1, 1, ignored=0.0)),
        ((0,), 5, positive(), targets(5, 0)),
    ):
        common: dict[str, Any] = {"tolerance": 4, "terms": 200, "constant": ("weight",)}
        logits = {"logits": (*n, v), "targets": labels}
        rows += [
            Case(
                "cross_entropy",
                {**logits, "weight": weight},
                composite=composites.cross_entropy,
                **common,
            ),
            Case(
                "cross_entropy_backward",
                {**logits, "weight": positive(), "dloss": ()},
                derive=lambda inputs: {"lse": np.log(np.exp(inputs["logits"]).sum(-1)).reshape(-1)},
                **common,
            ),
            *(
                Case(
                    "linear_cross_entropy",
                    {"x": (*n, c), "wte": normal(v + pad, c, std=c**-0.5), **linear},
                    {"rows": v} if pad else {},
                    composite=composites.linear_cross_entropy,
                    **common,
                )
                for linear in ({"targets": labels, "weight": weight},)
                for c, pad in ((16, 0), (33, 7))
            ),
        ]
    other = {"logits": (7, 33), "targets": given([1, 2, 3, 3, 0, 32, 3])}
    return [*rows, Case("cross_entropy", other, {"ignore_index": 3}, tolerance=4, terms=200)]


def adamw(
    n: int, tiles: list[tuple[int, int, int]], *, working: bool = False, **attributes: Any
) -> Case:
    """A row of `adamw_` on n elements in segments 0, 1 and 2."""
    scalars = {
        "rates": given([(1.0, 0.1), (0.5, 0.0), (1.0, 0.0)], np.float64),
        "lr": given(1e-2, np.float64),
        "step": given(3),
        "norm": given(2.5, np.float64),
        "finite": given(1),
    }
    return Case(
        "adamw_",
        {"param": (n,), "grad": (n,), "m": (n,), "v": positive(n), "tiles": given(tiles)},
        {**scalars, **attributes},
        tolerance=4,
        derive=_working if working else None,
        mutates=("param", "m", "v", "step", *(("working",) if working else ())),
        dtypes=("float64", "float32"),
    )


def _working(inputs: dict[str, Array]) -> dict[str, Array]:
    """The bfloat16 copy of the parameters, by way of float32: the same for a float32 run."""
    return {"working": inputs["param"].astype(np.float32).astype(to_numpy("bfloat16"))}


def _update() -> list[Case]:
    spread = [(0, 130, 0), (256, 300, 1), (130, 200, 0), (512, 1000, 2)]
    return [
        *(
            Case("global_norm", {"x": x}, tolerance=4)
            for x in ((), (1,), (7, 33), (100003,), (0, 5))
        ),
        Case("all_finite", {"values0": ()}),
        *(
            Case("all_finite", {"values0": (), "values1": given(x, np.float64), "values2": ()})
            for x in (np.nan, np.inf, -np.inf)
        ),
        adamw(7, [(0, 7, 0)]),
        adamw(1000, spread, max_norm=1.0, working=True),
        adamw(1000, spread, max_norm=4.0, beta1=0.8, beta2=0.9, eps=1e-3),
        adamw(1000, spread, finite=given(0)),
    ]
