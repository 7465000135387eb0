"""Triton's interpreter on host Tensors: the CUDA backend's kernels, run without a GPU.

`start()` makes a process interpret them, a process of its own, since Triton decides at import which
it does. Three defects of Triton 3.6 are mended, each in the function that names it; that is why its
version is pinned.
"""

import os

import numpy as np

from forge.tensor import Tensor


class Argument:
    """A host Tensor as the interpreter sees it: in place, so that its copies do nothing."""

    def __init__(self, x):
        self.array = x.array
        self.dtype = x.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def copy_(self, other):
        return self

    def new_empty(self, count, device):
        return self

    def set_(self, storage, offset, size, stride):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return ()


def run(kernel, grid, *args, num_warps=4, num_stages=3, fuse=True, **constants):
    """`forge.backends.cuda.triton_jit.launch`, interpreted."""
    if 0 not in grid:
        wrapped = [Argument(x) if isinstance(x, Tensor) else x for x in args]
        kernel[grid](*wrapped, **constants)


def start():
    """Interpret every Triton kernel of this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    mend_index(interpreter)
    mend_casts(interpreter, tl)
    mend_dot(interpreter, tl)

    from forge.backends.cuda import triton_jit

    triton_jit.launch = run


def mend_index(interpreter):
    """NumPy 2.4 refuses int() of an array of one element, so `range(n)` fails."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, *args):
        result = patch(tensor, *args)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
        return result

    interpreter._patch_lang_tensor = patched


def mend_casts(interpreter, tl):
    """float32 to bfloat16 truncates, where the GPU rounds to nearest even."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast = builder.cast_impl

    def rounded(self, source, target):
        kinds = (source.dtype.scalar, target.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            return handle(to_bits(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return handle(from_bits(source.data), tl.float32)
        return cast(self, source, target)

    builder.cast_impl = rounded


def mend_dot(interpreter, tl):
    """The product of bfloat16 blocks multiplies their bits."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot = builder.create_dot

    def widened(self, a, b, *rest):
        wide = [
            handle(from_bits(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        ]
        return dot(self, *wide, *rest)

    builder.create_dot = widened


def to_bits(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, even).astype(np.uint16).reshape(np.shape(x))


def from_bits(x):
    wide = np.ascontiguousarray(x).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(np.shape(x))
