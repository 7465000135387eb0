"""OpenBLAS's sgemm, from its own wheel, called from inside Numba's loops.

This instance runs single-threaded: Numba's loops bring the threads. NumPy's OpenBLAS is another
instance and keeps its own.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forge.errors import DeviceError

# Kernels refer to sgemm by this name, so that a cached one links to wherever the library is loaded.
_SYMBOL = "forge_cblas_sgemm"
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        import scipy_openblas32
    except ImportError as error:
        raise DeviceError(
            f"[cpu] expected the package scipy-openblas32, got {error}; "
            "pip install scipy-openblas32"
        ) from error
    folder = Path(scipy_openblas32.get_lib_dir())
    names = ("libscipy_openblas.so", "libscipy_openblas.dylib", "libscipy_openblas.dll")
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise DeviceError(
            f"[cpu] expected libscipy_openblas in {folder}, got none; "
            "pip install --force-reinstall scipy-openblas32"
        )
    library = ctypes.CDLL(str(found[0]))
    library.scipy_openblas_set_num_threads(1)
    return library


def link() -> None:
    """Load the library and make sgemm known to the kernels that call it: their `setup`."""
    address = ctypes.cast(_library().scipy_cblas_sgemm, ctypes.c_void_p).value
    llvmlite.binding.add_symbol(_SYMBOL, address)


@functools.cache
def core() -> str:
    """OpenBLAS's name of the processor family whose kernels it runs, such as Haswell."""
    function = _library().scipy_openblas_get_corename
    function.restype = ctypes.c_char_p
    name: bytes = function()
    return name.decode()


@intrinsic
def sgemm(
    typing: Any,
    trans_a: Any,
    trans_b: Any,
    M: Any,
    N: Any,
    K: Any,
    alpha: Any,
    a: Any,
    lda: Any,
    b: Any,
    ldb: Any,
    beta: Any,
    c: Any,
    ldc: Any,
) -> Any:
    """c [M, N] = alpha op(a) [M, K] op(b) [K, N] + beta c, row-major.

    `a`, `b`, `c` are addresses (`array.ctypes.data`), the leading dimensions count elements, and
    `trans_*` are booleans. Addresses hide from Numba that the arrays are in use: the caller keeps
    them alive.
    """
    size = types.int64
    number = types.float32
    flag = types.boolean
    signature = types.void(
        flag, flag, size, size, size, number, size, size, size, size, number, size, size
    )

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        int32, pointer, single = ir.IntType(32), ir.IntType(8).as_pointer(), ir.FloatType()
        kinds = [int32] * 6 + [single, pointer, int32, pointer, int32, single, pointer, int32]
        function_type = ir.FunctionType(ir.VoidType(), kinds)
        function = builder.module.globals.get(_SYMBOL)
        if function is None:
            function = ir.Function(builder.module, function_type, _SYMBOL)
        trans_a, trans_b, M, N, K, alpha, a, lda, b, ldb, beta, c, ldc = args

        def order(flag: Any) -> Any:
            chosen = builder.trunc(flag, ir.IntType(1)) if flag.type.width > 1 else flag
            return builder.select(
                chosen, ir.Constant(int32, _TRANSPOSED), ir.Constant(int32, _PLAIN)
            )

        def narrow(value: Any) -> Any:
            return builder.trunc(value, int32)

        def address(value: Any) -> Any:
            return builder.inttoptr(value, pointer)

        builder.call(
            function,
            [
                ir.Constant(int32, _ROW_MAJOR),
                order(trans_a),
                order(trans_b),
                narrow(M),
                narrow(N),
                narrow(K),
                alpha,
                address(a),
                narrow(lda),
                address(b),
                narrow(ldb),
                beta,
                address(c),
                narrow(ldc),
            ],
        )
        return context.get_dummy_value()

    return signature, generate
