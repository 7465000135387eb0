"""Products by cuBLASLt: one call each, by an algorithm chosen by timing.

A `Product` says everything about a product but its addresses. Its first call asks the library for
candidates, times them on the operands at hand, and keeps the fastest in a table (`algorithms`) of
this card, driver and library: the same machine always chooses the same, and so does a resumed run,
so the bits do not depend on a measurement made anew.

All is row-major here. The library is column-major, where a row-major matrix is its transpose: so
out = op(a) op(b) is asked for as out^T = op(b)^T op(a)^T, with the operands swapped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from nvmath.bindings import cublasLt

from forge import dtypes
from forge.backends.cuda import device
from forge.backends.cuda.algorithms import Table
from forge.cache import folder
from forge.errors import DeviceError, DeviceLostError
from forge.tensor import Device, empty

# cudaDataType_t and cublasComputeType_t: all products add in float32; the second rounds float32
# operands to TF32 before.
TYPES = {"float32": 0, "bfloat16": 14}
COMPUTE_32F = 68
COMPUTE_32F_FAST_TF32 = 77
EPILOGUES = {
    "": cublasLt.Epilogue.DEFAULT,
    "bias": cublasLt.Epilogue.BIAS,
    "bias gelu": cublasLt.Epilogue.GELU_BIAS,
    "bias gelu pre": cublasLt.Epilogue.GELU_AUX_BIAS,
}
# More than this made no candidate faster on an H200; the largest one used 19 MB.
WORKSPACE = 32 << 20
# Below this many multiply-adds a product is over before a difference between candidates shows.
WORTH_TIMING = 1 << 22
CANDIDATES = 8
# cublasStatus_t: INVALID_VALUE, ARCH_MISMATCH and NOT_SUPPORTED. But for ALLOC_FAILED all others
# mean a GPU at fault.
REFUSALS = {7, 8, 15}
ALLOC_FAILED = 3
ROUNDS = 3
REPEATS = 5


class Product(NamedTuple):
    """out [m, n] (+)= alpha op(a) op(b), with k terms each; `ld`s are elements between rows.

    a is [m, k], or [k, m] with trans_a; b is [k, n], or [n, k] with trans_b; `batch` such products
    lie `step`s of elements apart. The epilogue adds a bias [n], applies gelu (tanh), and stores the
    sum before it as `pre`, shaped as out. `tf32` rounds float32 operands.
    """

    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int
    trans_a: bool = False
    trans_b: bool = False
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    accumulate: bool = False
    epilogue: str = ""
    batch: int = 1
    step_a: int = 0
    step_b: int = 0
    step_c: int = 0
    tf32: bool = False

    @property
    def compute_type(self) -> int:
        """What the library calls the arithmetic."""
        return COMPUTE_32F_FAST_TF32 if self.tf32 else COMPUTE_32F


def run(
    product: Product,
    a: int,
    b: int,
    out: int,
    *,
    alpha: float = 1.0,
    bias: int = 0,
    pre: int = 0,
) -> bool:
    """Compute a product of matrices at these addresses; False where the library has no kernel."""
    alignment = (a | b | out | bias | pre) & -(a | b | out | bias | pre)
    plan = _plan(product, min(alignment, 256))
    if plan.algorithm is None:
        if plan.recall(a, b, out, alpha, bias, pre):
            return True
        plan.choose(a, b, bias, pre)
    if plan.algorithm.size == 0:
        return False
    try:
        plan(a, b, out, alpha, bias, pre)
    except _RefusedError as error:
        raise missing(product) from error
    return True


@cache
def chosen_for() -> str:
    """The card, driver and library that an algorithm is chosen for."""
    card = device.card()
    return f"{card.name}, driver {card.driver}, cuBLASLt {cublasLt.get_version()}"


def begin_run(algorithms: Mapping[str, str]) -> None:
    """From here on a run's algorithms, by product, go before the machine's."""
    _table().begin_run(algorithms)
    _plan.cache_clear()


def used() -> dict[str, str]:
    """The algorithms, by product, of all products since the run began."""
    return dict(_table().used)


def missing(product: Product) -> DeviceError:
    """The error for a product that the library has no kernel for."""
    return DeviceError(
        f"[matmul] expected a kernel of cuBLASLt, got none for {product}; "
        "pad the sizes to multiples of 8"
    )


class _RefusedError(Exception):
    """The library does not take an algorithm for a product; it says so before it computes."""


class _Plan:
    """The library's description of a product, and the algorithm for it: none yet, or empty."""

    def __init__(self, product: Product, alignment: int) -> None:
        p = product
        self._product = p
        self._alignment = alignment
        self._key = " ".join(map(str, (*p, alignment)))
        self.algorithm: Any = None
        # alpha and beta; the addresses of bias and pre.
        self._scalars = np.array([1.0, float(p.accumulate)], np.float32)
        self._addresses = np.zeros(2, np.int64)
        kind, out_kind = TYPES[p.dtype], TYPES[p.out_dtype]
        desc = self._desc = cublasLt.matmul_desc_create(p.compute_type, TYPES["float32"])
        attribute = cublasLt.MatmulDescAttribute
        _set_desc(desc, attribute.TRANSA, int(p.trans_b))
        _set_desc(desc, attribute.TRANSB, int(p.trans_a))
        _set_desc(desc, attribute.EPILOGUE, int(EPILOGUES[p.epilogue]))
        if p.epilogue:
            _set_desc(desc, attribute.BIAS_DATA_TYPE, out_kind)
        if p.epilogue.endswith("pre"):
            _set_desc(desc, attribute.EPILOGUE_AUX_LD, p.ldc)
        rows_b, columns_b = (p.k, p.n) if p.trans_b else (p.n, p.k)
        rows_a, columns_a = (p.m, p.k) if p.trans_a else (p.k, p.m)
        self._b = _layout(kind, rows_b, columns_b, p.ldb, p.batch, p.step_b)
        self._a = _layout(kind, rows_a, columns_a, p.lda, p.batch, p.step_a)
        self._out = _layout(out_kind, p.n, p.m, p.ldc, p.batch, p.step_c)

    def __call__(self, a: int, b: int, out: int, alpha: float, bias: int, pre: int) -> None:
        if bias:
            self._addresses[:] = bias, pre
            attribute, cell = cublasLt.MatmulDescAttribute, self._addresses.ctypes.data
            cublasLt.matmul_desc_set_attribute(self._desc, int(attribute.BIAS_POINTER), cell, 8)
            if pre:
                pointer = int(attribute.EPILOGUE_AUX_POINTER)
                cublasLt.matmul_desc_set_attribute(self._desc, pointer, cell + 8, 8)
        self._scalars[0] = alpha
        scalars = self._scalars.ctypes.data
        try:
            cublasLt.matmul(
                _handle(),
                self._desc,
                scalars,
                b,
                self._b,
                a,
                self._a,
                scalars + 4,
                out,
                self._out,
                out,
                self._out,
                self.algorithm.ctypes.data,
                _workspace().address,
                WORKSPACE,
                device.stream(),
            )
        except cublasLt.cuBLASLtError as error:
            if error.status in REFUSALS:
                raise _RefusedError from error
            if error.status == ALLOC_FAILED:
                raise device.out_of_memory("GPU memory for a product") from error
            raise DeviceLostError(
                f"[matmul] expected cuBLASLt to compute {self._product}, got {error}; the GPU's "
                "state is lost after such an error: start again from the last checkpoint"
            ) from error

    def recall(self, a: int, b: int, out: int, alpha: float, bias: int, pre: int) -> bool:
        """Compute by the table's algorithm; False where it has none that the library takes."""
        self.algorithm = _table().find(self._key)
        if self.algorithm is None:
            return False
        try:
            self(a, b, out, alpha, bias, pre)
        except _RefusedError:
            self.algorithm = None
            _table().refuse(self._key)
            return False
        _table().use(self._key, self.algorithm, tuned=False)
        return True

    def choose(self, a: int, b: int, bias: int, pre: int) -> None:
        """Time the candidates and note the fastest in the table."""
        device.eager("new product")
        candidates = self._candidates()
        p = self._product
        if len(candidates) > 1 and p.batch * p.m * p.n * p.k >= WORTH_TIMING:
            candidates = [self._fastest(candidates, a, b, bias, pre)]
        self.algorithm = candidates[0] if candidates else np.empty(0, np.uint8)
        if candidates:
            _table().use(self._key, self.algorithm, tuned=True)

    def _candidates(self) -> list[np.ndarray]:
        preference = cublasLt.matmul_preference_create()
        attribute = cublasLt.MatmulPreferenceAttribute
        _set_preference(preference, attribute.MAX_WORKSPACE_BYTES, WORKSPACE)
        for operand in "ABCD":
            name = getattr(attribute, f"MIN_ALIGNMENT_{operand}_BYTES")
            _set_preference(preference, name, self._alignment)
        found = np.zeros(CANDIDATES, cublasLt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        try:
            cublasLt.matmul_algo_get_heuristic(
                _handle(),
                self._desc,
                self._b,
                self._a,
                self._out,
                self._out,
                preference,
                CANDIDATES,
                found.ctypes.data,
                count.ctypes.data,
            )
        except cublasLt.cuBLASLtError:
            # How the library says that it has no kernel for this; `run` passes it on.
            count[0] = 0
        cublasLt.matmul_preference_destroy(preference)
        size = cublasLt.matmul_algo_dtype.itemsize
        return [
            np.frombuffer(result.tobytes()[:size], np.uint8).copy() for result in found[: count[0]]
        ]

    def _fastest(
        self, candidates: list[np.ndarray], a: int, b: int, bias: int, pre: int
    ) -> np.ndarray:
        """The candidate of least time, the best of several rounds; out is a stand-in."""
        p = self._product
        room = ((p.batch - 1) * p.step_c + p.m * p.ldc) * dtypes.ITEMSIZE[p.out_dtype]
        stand_in = empty((room,), "bool", Device("cuda"))
        times = []
        for self.algorithm in candidates:
            try:
                self(a, b, stand_in.pointer, 1.0, bias, pre)
                device.synchronize()
            except _RefusedError:
                times.append(float("inf"))
                continue
            times.append(min(self._time(a, b, stand_in.pointer, bias, pre) for _ in range(ROUNDS)))
        best = int(np.argmin(times))
        if times[best] == float("inf"):
            self.algorithm = None
            raise missing(p)
        return candidates[best]

    def _time(self, a: int, b: int, out: int, bias: int, pre: int) -> float:
        start = device.Event(timing=True).record()
        for _ in range(REPEATS):
            self(a, b, out, 1.0, bias, pre)
        return device.Event(timing=True).record().since(start)


@cache
def _plan(product: Product, alignment: int) -> _Plan:
    return _Plan(product, alignment)


@cache
def _handle() -> int:
    device.stream()
    handle: int = cublasLt.create()
    return handle


@cache
def _workspace() -> Any:
    return Device("cuda").memory.allocate(WORKSPACE)


@cache
def _table() -> Table:
    name = hashlib.sha256(chosen_for().encode()).hexdigest()[:16]
    return Table(folder() / f"cublaslt-{name}.json")


def _layout(kind: int, rows: int, columns: int, ld: int, batch: int, step: int) -> int:
    layout: int = cublasLt.matrix_layout_create(kind, rows, columns, ld)
    if batch > 1:
        attribute = cublasLt.MatrixLayoutAttribute
        for name, value in ((attribute.BATCH_COUNT, batch), (attribute.STRIDED_BATCH_OFFSET, step)):
            cell = np.array([value], cublasLt.get_matrix_layout_attribute_dtype(int(name)))
            cublasLt.matrix_layout_set_attribute(layout, int(name), cell.ctypes.data, cell.nbytes)
    return layout


def _set_desc(desc: int, name: Any, value: int) -> None:
    cell = np.array([value], cublasLt.get_matmul_desc_attribute_dtype(int(name)))
    cublasLt.matmul_desc_set_attribute(desc, int(name), cell.ctypes.data, cell.nbytes)


def _set_preference(preference: int, name: Any, value: int) -> None:
    cell = np.array([value], cublasLt.get_matmul_preference_attribute_dtype(int(name)))
    cublasLt.matmul_preference_set_attribute(preference, int(name), cell.ctypes.data, cell.nbytes)
