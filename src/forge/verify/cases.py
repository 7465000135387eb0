"""The table of ops: at least one row per public op of `forge.ops`, by family.

Shapes are small and odd, of size 1, empty, and larger than a kernel's tile (130 rows; 129 columns).
The fused ops are in `cases_fused`, the shapes of a given GPT-2 in `cases_model`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forge.verify import composites
from forge.verify.case import (
    Case,
    flags,
    given,
    ids,
    int8,
    nonzero,
    normal,
    positive,
    scales,
    steps,
)
from forge.verify.cases_fused import fused

SHAPES = ((7, 33), (130, 80), (2, 3, 129), (1,), (), (0, 5))
PAIRS = (
    ((7, 33), (7, 33)),
    ((130, 80), (80,)),
    ((130, 1), (130, 80)),
    ((2, 1, 129), (3, 1)),
    ((), (5,)),
    ((1,), (4, 1, 5)),
    ((0, 5), (5,)),
)
ROWS = ((7, 33), (130, 80), (2, 3, 129), (1, 1), (3, 1), (0, 5))
KEY = given([1337, 5])


def _pointwise() -> list[Case]:
    return [
        *(Case(op, {"a": a, "b": b}) for op in ("add", "sub", "mul") for a, b in PAIRS),
        *(Case("div", {"a": a, "b": nonzero(*b)}) for a, b in PAIRS),
        *(Case(op, {"x": x}, tolerance=4) for op in ("exp", "tanh") for x in SHAPES),
        *(Case("log", {"x": positive(*x)}, tolerance=4) for x in SHAPES),
        *(Case("neg", {"x": x}, tolerance=0) for x in SHAPES),
        *(Case("maximum", {"a": a, "b": a}, tolerance=0) for a in SHAPES),
        Case("maximum", {"a": steps(7, 33), "b": steps(7, 33)}, tolerance=0, differences=1),
        *(Case("scale", {"x": x}, {"factor": -0.3}) for x in SHAPES),
        Case("scale", {"x": (7, 33), "factor": normal()}, constant=("factor",)),
        Case("scale", {"x": (7, 33)}, {"factor": 2.5, "into": normal(7, 33)}, mutates=("into",)),
        *(Case("where", {"condition": flags(*x), "a": x, "b": x}, tolerance=0) for x in SHAPES),
        Case("cast", {"x": (7, 33)}, {"dtype": "float64"}, tolerance=0, slope=1),
        *(
            Case("cast", {"x": x}, {"dtype": dtype}, tolerance=0, slope=1, differences=0)
            for x in SHAPES
            for dtype in ("float32", "bfloat16")
        ),
        Case("cast", {"x": ids(9, 7, 5)}, {"dtype": "float32"}, tolerance=0),
        Case("cast", {"x": flags(7, 5)}, {"dtype": "int64"}, tolerance=0),
        Case("cast", {"x": int8(7, 5)}, {"dtype": "bfloat16"}, tolerance=0),
        *(
            # Around 1, since at -0.75, where the slope is 0, a scalar has no relative error.
            Case(
                "gelu",
                {"x": normal(*x, mean=1.0)},
                {"form": form},
                tolerance=4,
                composite=composites.gelu if form == "tanh" else None,
            )
            for x in SHAPES
            for form in ("tanh", "erf")
        ),
        *(
            Case("gelu_backward", {"x": normal(*x, mean=1.0), "dy": x}, {"form": form}, tolerance=4)
            for x in SHAPES
            for form in ("tanh", "erf")
        ),
        *(
            Case(
                "gelu_backward",
                {"x": normal(*x, mean=1.0), "dy": x},
                {"into_bias": normal(x[-1])},
                terms=130,
                tolerance=4,
                mutates=("into_bias",),
            )
            for x in (*SHAPES, (3, 0))
            if x
        ),
        Case("dropout", {"x": (7, 33)}, {"p": 0.0, "key": None}, tolerance=0),
        Case("dropout", {"x": (7, 33)}, {"p": 0.5, "key": 3}),
        Case("dropout", {"x": (130, 80)}, {"p": 0.1, "key": KEY, "site": 4}),
        Case(
            "dropout",
            {"x": (3, 5, 129)},
            {"p": 0.2, "key": KEY, "site": 1, "first_sample": 2, "samples": 3},
        ),
        Case("dropout", {"x": (0, 5)}, {"p": 0.2, "key": KEY}),
    ]


def _shape() -> list[Case]:
    exact: dict[str, Any] = {"tolerance": 0}
    summed: dict[str, Any] = {"tolerance": 0, "slope": 1}
    window = {"start": (1, 3), "shape": (4, 10), "step": (1, 3)}
    return [
        Case("reshape", {"x": (7, 33)}, {"shape": (33, -1)}, **exact),
        Case("reshape", {"x": (1,)}, {"shape": ()}, **exact),
        Case("reshape", {"x": (0, 5)}, {"shape": (5, 0, 2)}, **exact),
        Case("reshape", {"x": ids(9, 6)}, {"shape": (2, 3)}, **exact),
        *(Case("transpose", {"x": x}, **exact) for x in SHAPES),
        Case("transpose", {"x": (2, 3, 129)}, {"axes": (0, -1, 1)}, **exact),
        Case("transpose", {"x": flags(7, 33)}, **exact),
        Case("slice", {"x": (7, 33)}, window, **exact),
        Case("slice", {"x": ids(9, 7, 33)}, window, **exact),
        Case("slice", {"x": (130, 80)}, {"start": (129, 0), "shape": (1, 80)}, **exact),
        Case("slice", {"x": (3, 5)}, {"start": (1, 0), "shape": (0, 5)}, **exact),
        Case("slice", {"x": ()}, {"start": (), "shape": ()}, **exact),
        Case("unslice", {"dy": (4, 10)}, {**window, "shape": (7, 33)}, **exact),
        Case("unslice", {"dy": (1, 80)}, {"start": (129, 0), "shape": (130, 80)}, **exact),
        Case("unslice", {"dy": (0, 5)}, {"start": (1, 0), "shape": (3, 5)}, **exact),
        Case("concat", {"xs0": (7, 33), "xs1": (0, 33), "xs2": (130, 33)}, **exact),
        Case("concat", {"xs0": (2, 3, 5), "xs1": (2, 1, 5)}, {"axis": -2}, **exact),
        Case("concat", {"xs0": ids(9, 7), "xs1": ids(9, 1)}, **exact),
        Case("concat", {"xs0": (5,)}, **exact),
        Case("broadcast_to", {"x": (33,)}, {"shape": (130, 33)}, **summed, terms=130),
        Case("broadcast_to", {"x": (2, 1, 5)}, {"shape": (3, 2, 4, 5)}, **summed, terms=12),
        Case("broadcast_to", {"x": ()}, {"shape": (7,)}, **summed, terms=7),
        Case("broadcast_to", {"x": (1, 5)}, {"shape": (0, 5)}, **summed),
        Case("take", {"x": (7, 33), "ids": ids(7, 5, 6)}, **summed, terms=30),
        Case("take", {"x": (130, 2, 4), "ids": ids(130, 200)}, **summed, terms=200),
        Case("take", {"x": (3,), "ids": ids(3)}, **summed),
        Case("take", {"x": (3, 5), "ids": ids(3, 0)}, **summed),
        Case("take", {"x": ids(9, 7), "ids": ids(7, 5)}, **exact),
        Case("take", {"x": int8(7, 33), "ids": ids(7, 5)}, **exact),
    ]


def _products() -> list[Case]:
    def matmul(a: Any, b: Any, terms: int, bias: Any = None, **attributes: Any) -> Case:
        mutates = ("into",) if "into" in attributes else ()
        inputs = {"a": a, "b": b, "bias": bias}
        return Case("matmul", inputs, attributes, terms=terms, mutates=mutates)

    return [
        matmul((7, 33), (33, 5), 33),
        matmul((130, 80), (80, 129), 130, bias=(129,), alpha=0.5),
        matmul((33, 7), (33, 5), 33, trans_a=True),
        matmul((130, 33), (129, 33), 130, trans_b=True, bias=(129,)),
        matmul((33, 7), (5, 33), 33, trans_a=True, trans_b=True, alpha=-2.0),
        matmul((3, 7, 33), (3, 33, 5), 33),
        matmul((2, 130, 16), (2, 130, 16), 130, trans_b=True, alpha=0.25),
        matmul((2, 33, 7), (2, 33, 5), 33, trans_a=True, bias=(5,)),
        matmul((2, 33, 7), (2, 5, 33), 33, trans_a=True, trans_b=True),
        matmul((1, 1), (1, 1), 1),
        matmul((0, 5), (5, 3), 5),
        matmul((3, 0), (0, 5), 1),
        matmul((3, 5), (5, 0), 5),
        Case("matmul", {"a": (2, 7, 33), "b": (33, 5)}, terms=33, constant=("a", "b")),
        Case(
            "matmul",
            {"a": (7, 33), "b": (40, 33)},
            {"trans_b": True, "b_rows": 37},
            terms=33,
            constant=("a", "b"),
        ),
        matmul((7, 33), (33, 5), 33, into=normal(7, 5)),
        matmul((130, 33), (130, 5), 130, trans_a=True, into=normal(33, 5)),
        *(
            Case(
                "linear",
                {"x": x, "w": normal(x[-1], m, std=x[-1] ** -0.5), "bias": (m,) if bias else None},
                {"gelu": gelu},
                tolerance=4 if gelu else 1,
                terms=max(*x, m),
                composite=composites.linear,
            )
            for x, m, bias, gelu in (
                ((7, 33), 5, True, None),
                ((130, 80), 129, True, "tanh"),
                # Widths for which cuBLASLt's own epilogues serve.
                ((130, 80), 96, True, "tanh"),
                ((130, 80), 96, True, None),
                ((2, 3, 16), 33, True, "erf"),
                ((2, 3, 16), 33, False, "tanh"),
                ((7, 33), 1, False, None),
                ((33,), 7, True, None),
                ((1, 1), 1, True, "tanh"),
                ((0, 5), 3, True, "tanh"),
            )
        ),
        *(
            Case(
                "mlp",
                {
                    "x": x,
                    "w": normal(x[-1], m, std=x[-1] ** -0.5),
                    "bias": (m,) if bias else None,
                    "w_out": normal(m, n, std=max(m, 1) ** -0.5),
                    "bias_out": (n,) if bias_out else None,
                },
                {"gelu": gelu},
                tolerance=4,
                terms=2 * max(*x, m, n),
                composite=composites.mlp,
            )
            for x, m, n, bias, bias_out, gelu in (
                ((7, 33), 5, 12, True, True, "tanh"),
                # Widths for which cuBLASLt's own epilogues serve, and one more.
                ((130, 80), 96, 48, True, True, "tanh"),
                ((2, 65, 80), 96, 48, True, False, "tanh"),
                ((130, 80), 96, 129, True, False, "tanh"),
                ((130, 80), 96, 48, True, True, "erf"),
                ((2, 3, 16), 33, 7, False, True, "erf"),
                ((2, 3, 16), 32, 8, False, False, "tanh"),
                ((33,), 7, 5, True, True, "tanh"),
                ((1, 1), 1, 1, True, True, "tanh"),
                ((0, 5), 3, 4, True, True, "tanh"),
            )
        ),
        *(
            Case(
                "matmul_gelu_backward",
                {"dy": (r, n), "w": normal(m, n, std=max(n, 1) ** -0.5), "pre": (r, m)},
                {"form": form, **({"into_bias": normal(m)} if into else {})},
                tolerance=4,
                terms=max(r, n),
                mutates=("into_bias",) if into else (),
            )
            for r, n, m, form, into in (
                (7, 33, 5, "tanh", False),
                (7, 33, 5, "erf", True),
                (130, 80, 96, "tanh", False),
                (130, 80, 96, "tanh", True),
                (130, 80, 96, "erf", True),
                (130, 80, 129, "tanh", True),
                (1, 1, 1, "tanh", True),
                (0, 5, 3, "tanh", True),
                (3, 5, 0, "tanh", True),
                (3, 0, 8, "tanh", True),
            )
        ),
    ]


def _quantized() -> list[Case]:
    masters: dict[str, Any] = {"masters": ("scale",)}
    return [
        *(
            Case("quantize", {"x": x}, tolerance=1)
            for x in ((7, 33), (130, 80), (2, 3, 129), (5,), (1, 1), (0, 5), (3, 0))
        ),
        Case("quantize", {"x": given(np.zeros((3, 5)), np.float64)}, tolerance=0),
        *(
            Case(
                "dequantize",
                {"q": int8(*q), "scale": positive(*q[:-1])},
                composite=composites.dequantize,
                **masters,
            )
            for q in ((7, 33), (130, 80), (2, 3, 129), (5,), (0, 5), (3, 0))
        ),
        *(
            Case(
                "quantized_linear",
                {
                    "x": x,
                    "w": int8(m, x[-1]),
                    "scale": scales(m),
                    "bias": (m,) if bias else None,
                },
                {"gelu": gelu},
                tolerance=4,
                terms=max(*x, m),
                constant=("scale",),
                composite=composites.quantized_linear,
                **masters,
            )
            for x, m, bias, gelu in (
                ((7, 33), 5, True, None),
                ((8, 129), 203, True, "tanh"),
                ((130, 80), 129, True, "tanh"),
                ((9, 33), 130, False, None),
                ((2, 3, 16), 33, True, "erf"),
                ((2, 5, 16), 33, False, "erf"),
                ((33,), 7, False, "tanh"),
                ((1, 1), 1, True, None),
                ((1, 800), 2000, True, "tanh"),
                ((0, 5), 3, True, "tanh"),
                ((3, 0), 5, True, None),
                ((3, 5), 0, False, None),
            )
        ),
        *(
            Case(
                "quantized_embedding",
                {
                    "ids": ids(v, *n),
                    "wte": int8(v, c),
                    "scale": positive(v),
                    "wpe": None if wpe is None else (wpe, c),
                    "pos": pos,
                },
                tolerance=2,
                composite=composites.quantized_embedding,
            )
            for v, n, c, wpe, pos in (
                (7, (5,), 33, 5, 0),
                (130, (2, 33), 129, 40, 7),
                (7, (2, 130), 80, None, 0),
                (9, (3, 5), 7, 20, given([0, 15, 2])),
                (1, (1, 1), 1, 1, 0),
                (3, (0, 5), 4, 5, 0),
            )
        ),
    ]


def _reduce() -> list[Case]:
    axes = (
        ((7, 33), None),
        ((130, 80), 0),
        ((130, 80), -1),
        ((2, 3, 129), (0, 2)),
        ((1,), 0),
        ((), None),
    )
    # Sums of positive numbers: nothing cancels, so a relative error means something.
    return [
        *(Case("sum_rows", {"x": x}, terms=130) for x in (*ROWS, (5,), (600, 7))),
        Case("sum_rows", {"x": (130, 7)}, {"into": normal(7)}, terms=130, mutates=("into",)),
        *(
            Case("sum_to", {"x": positive(*x)}, {"shape": shape}, terms=600)
            for x, shape in (
                ((7, 33), (1, 33)),
                ((130, 80), (80,)),
                ((130, 80), (130, 1)),
                ((2, 3, 129), (3, 1)),
                ((7, 33), ()),
                ((5,), (5,)),
                ((0, 5), (5,)),
                ((), ()),
            )
        ),
        *(
            Case(op, {"x": positive(*x)}, {"axis": axis, "keepdims": keepdims}, terms=600)
            for op in ("sum", "mean")
            for x, axis in axes
            for keepdims in (False, True)
        ),
        Case("sum", {"x": (0, 5)}, {"axis": 0}),
        *(
            Case("max", {"x": x}, {"axis": axis, "keepdims": keepdims}, tolerance=0)
            for x, axis in (*axes, ((0, 5), 1))
            for keepdims in (False, True)
        ),
        Case("max", {"x": steps(7, 33)}, {"axis": None}, tolerance=0, differences=1),
        *(Case("argmax", {"x": steps(*s)}, tolerance=0) for s in ((7, 33), (2, 3, 129), (1,))),
        Case("argmax", {"x": (3, 5000)}, tolerance=0, dtypes=("float64", "float32")),
    ]


CASES = (*_pointwise(), *_shape(), *_products(), *_quantized(), *_reduce(), *fused())
