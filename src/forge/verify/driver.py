"""Runs the rows of the table on a device and says how far each op is from its definition."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forge.backends import reference, registry
from forge.errors import ArgumentError, nearest
from forge.tensor import Device
from forge.verify.case import Case
from forge.verify.cases import CASES
from forge.verify.cases_model import Shapes, model_cases
from forge.verify.trial import REFERENCE, Trial

# The kernel that does an op's work, where its name is not the op's (without the `_` of in-place).
KERNEL = {
    "add_positions_": "position_backward",
    "mean": "sum_to",
    "mlp": "linear",
    "scatter_rows": "scatter_add_rows",
    "sum": "sum_to",
}


@dataclass(frozen=True)
class Result:
    """The verdict on one row: relative errors in norm, the largest of its tensors, with bounds.

    `gradient_error` is None where the op gives no gradient; `failures` says all that is wrong.
    """

    op: str
    case: str
    device: str
    dtype: str
    implementation: str
    forward_error: float
    tolerance: float
    gradient_error: float | None
    gradient_tolerance: float
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


def as_json(results: Iterable[Result]) -> str:
    """The results as one JSON document, a list of objects; NaN and infinite errors are null."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    rows = [{**asdict(result), "ok": result.ok} for result in results]
    return json.dumps([{key: plain(value) for key, value in row.items()} for row in rows], indent=2)


def run(
    device: Device | str = "cpu",
    ops: Sequence[str] | None = None,
    cases: Sequence[Case] | None = None,
    model: Shapes | None = None,
) -> Iterator[Result]:
    """Check rows of the table, yielding a Result as each is done.

    A row runs on the reference in float64 first, which holds the rules to differences, then on
    `device`: in float32, and in each dtype that it has a kernel of its own for. Rows of an op come
    one after the other. `ops` picks rows by op, `cases` replaces the table, and a `model`'s
    configuration adds rows of its real shapes. Raises `ArgumentError` for an op without a row.
    """
    device = Device(device)
    rows = [*(CASES if cases is None else cases), *(() if model is None else model_cases(model))]
    known = sorted({case.op for case in rows})
    for name in ops or ():
        if name not in known:
            raise ArgumentError(
                f"[verify] expected an op of the table, got {name!r}; {nearest(name, known)}"
            )
    first = {case.op: place for place, case in reversed([*enumerate(rows)])}
    for case in sorted(rows, key=lambda case: first[case.op]):
        if ops is None or case.op in ops:
            if case.thorough:
                yield check(case, REFERENCE, "float64")
            for dtype in case.dtypes:
                served = implementation(case.op, device, dtype) == device.kind
                if (device, dtype) != (REFERENCE, "float64") and (served or dtype == "float32"):
                    yield check(case, device, dtype)


def kernel_of(name: str) -> str | None:
    """The kernel that does an op's work; None for a view, which has none."""
    kernel = KERNEL.get(name, name.removesuffix("_"))
    return kernel if kernel in reference.KERNELS else None


def implementation(name: str, device: Device, dtype: str) -> str:
    """The backend that serves an op."""
    kernel = kernel_of(name)
    return device.kind if kernel is None else registry.implementation(kernel, device.kind, dtype)


def check(case: Case, device: Device | str, dtype: str) -> Result:
    """Run one row on a device in one dtype; whatever goes wrong is a failure of the Result."""
    device = Device(device)
    trial = Trial(case, device, dtype)
    try:
        trial.run()
    except Exception as error:  # noqa: BLE001 - the verdict names whatever a kernel raises
        trial.failures.append(f"{type(error).__name__}: {error}")
    return Result(
        case.op,
        case.name,
        device.name,
        dtype,
        implementation(case.op, device, dtype),
        trial.forward_error,
        case.bound(dtype),
        trial.gradient_error if case.wrt else None,
        case.bound(dtype, gradient=True),
        tuple(trial.failures),
    )
