"""Products by cuBLASLt: one call each, by one of the library's algorithms.

All is row-major here. The library is column-major, where a row-major matrix is its transpose: so
out = op(a) op(b) is asked for as out^T = op(b)^T op(a)^T, with the operands swapped. An algorithm
is written as the library's 64 bytes in hexadecimal.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from nvmath.bindings import cublasLt

from forge.backends.cuda import device
from forge.backends.cuda.algorithms import Kernel, RefusedError
from forge.errors import DeviceLostError
from forge.tensor import Device

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
    "gelu backward": cublasLt.Epilogue.DGELU,
}
# More than this made no candidate faster on an H200; the largest one used 19 MB.
WORKSPACE = 32 << 20
CANDIDATES = 8
# cublasStatus_t: INVALID_VALUE, ARCH_MISMATCH and NOT_SUPPORTED. But for ALLOC_FAILED all others
# mean a GPU at fault.
REFUSALS = {7, 8, 15}
ALLOC_FAILED = 3


class Product(NamedTuple):
    """out [m, n] (+)= alpha op(a) op(b), with k terms each; `ld`s are elements between rows.

    a is [m, k], or [k, m] with trans_a; b is [k, n], or [n, k] with trans_b; `batch` such products
    lie `step`s of elements apart. The epilogue adds a bias [n], applies gelu (tanh), and stores the
    sum before it as `pre`, shaped as out; or multiplies by gelu's derivative at a given `pre`.
    `tf32` rounds float32 operands.
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


class Matmul:
    """The library's description of a product, of operands at least so aligned (bytes)."""

    def __init__(self, product: Product, alignment: int) -> None:
        p = self._product = product
        self._alignment = alignment
        # alpha and beta; the addresses of bias and pre.
        self._scalars = np.array([1.0, float(p.accumulate)], np.float32)
        self._addresses = np.zeros(2, np.int64)
        kind, out_kind = TYPES[p.dtype], TYPES[p.out_dtype]
        desc = self._desc = cublasLt.matmul_desc_create(p.compute_type, TYPES["float32"])
        attribute = cublasLt.MatmulDescAttribute
        _set_desc(desc, attribute.TRANSA, int(p.trans_b))
        _set_desc(desc, attribute.TRANSB, int(p.trans_a))
        _set_desc(desc, attribute.EPILOGUE, int(EPILOGUES[p.epilogue]))
        if "bias" in p.epilogue:
            _set_desc(desc, attribute.BIAS_DATA_TYPE, out_kind)
        if p.epilogue in ("bias gelu pre", "gelu backward"):
            _set_desc(desc, attribute.EPILOGUE_AUX_LD, p.ldc)
        rows_b, columns_b = (p.k, p.n) if p.trans_b else (p.n, p.k)
        rows_a, columns_a = (p.m, p.k) if p.trans_a else (p.k, p.m)
        self._b = _layout(kind, rows_b, columns_b, p.ldb, p.batch, p.step_b)
        self._a = _layout(kind, rows_a, columns_a, p.lda, p.batch, p.step_a)
        self._out = _layout(out_kind, p.n, p.m, p.ldc, p.batch, p.step_c)

    def __call__(
        self, algorithm: np.ndarray, a: int, b: int, out: int, alpha: float, bias: int, pre: int
    ) -> None:
        """Compute; raises `RefusedError` where the library does not take the algorithm."""
        if bias or pre:
            self._point(bias, pre)
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
                algorithm.ctypes.data,
                _workspace().address,
                WORKSPACE,
                device.stream(),
            )
        except cublasLt.cuBLASLtError as error:
            if error.status in REFUSALS:
                raise RefusedError from error
            if error.status == ALLOC_FAILED:
                raise device.out_of_memory("GPU memory for a product") from error
            raise DeviceLostError(
                f"[matmul] expected cuBLASLt to compute {self._product}, got {error}; the GPU's "
                "state is lost after such an error: start again from the last checkpoint"
            ) from error

    def _point(self, bias: int, pre: int) -> None:
        """Tell the description where the epilogue's operands are."""
        attribute = cublasLt.MatmulDescAttribute
        self._addresses[:] = bias, pre
        for i, name in enumerate((attribute.BIAS_POINTER, attribute.EPILOGUE_AUX_POINTER)):
            if self._addresses[i]:
                cell = self._addresses[i:].ctypes.data
                cublasLt.matmul_desc_set_attribute(self._desc, int(name), cell, 8)

    def kernel(self, algorithm: str) -> Kernel:
        """This product by an algorithm."""
        return partial(self, np.frombuffer(bytes.fromhex(algorithm), np.uint8).copy())

    def candidates(self) -> list[str]:
        """The algorithms that the library holds for best; none where it has no kernel."""
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
            # How the library says that it has no kernel for this.
            count[0] = 0
        cublasLt.matmul_preference_destroy(preference)
        size = cublasLt.matmul_algo_dtype.itemsize
        return [result.tobytes()[:size].hex() for result in found[: count[0]]]


@cache
def _handle() -> int:
    device.stream()
    handle: int = cublasLt.create()
    return handle


@cache
def _workspace() -> Any:
    return Device("cuda").memory.allocate(WORKSPACE)


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
