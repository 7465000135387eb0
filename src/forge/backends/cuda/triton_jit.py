"""Triton as a compiler: the source of a kernel becomes a cubin, and `launch` runs it.

Triton's own launcher is left alone, since it looks for PyTorch and, at run time, for a C compiler.
What is compiled depends on the kinds of the arguments, as in Triton: their types, and whether
pointers and integers are multiples of 16, which is what makes 128-bit loads possible. Cubins live
in `$XDG_CACHE_HOME/forge/cubins`, under a hash of the source, the kinds, Triton and the card.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forge import cache
from forge.tensor import Tensor

# A kind that ends so is known to be a multiple of 16.
_ALIGNED = ":16"
# By whether the address is a multiple of 16.
_POINTER = {
    dtype: (kind, kind + _ALIGNED)
    for dtype, kind in {
        "float32": "*fp32",
        "float64": "*fp64",
        "bfloat16": "*bf16",
        "int64": "*i64",
        "int8": "*i8",
        "bool": "*i1",
    }.items()
}
_CELL = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}
# A kind that begins so is a struct of so many pointers.
_TABLE = "table of "
# Triton adds two pointers to each kernel's parameters, for scratch memory that none here uses.
_HIDDEN = 2
# Dynamic shared memory that a kernel gets without asking.
_SHARED = 48 << 10

Kinds = tuple[Any, ...]
Values = list[Any]
# Launches a kernel on a grid.
Runner = Callable[[tuple[int, ...], Values], None]


class Variant(NamedTuple):
    """A kernel for arguments of these kinds: what is compiled once."""

    kernel: Any
    kinds: Kinds
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    fuse: bool


class Binary(NamedTuple):
    """A compiled kernel: its name, dynamic shared memory in bytes, and threads in a block."""

    name: str
    shared: int
    threads: int
    cubin: bytes


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    fuse: bool = True,
    **constants: Any,
) -> None:
    """Run `kernel` once for every index of `grid`, on the device's stream.

    `args` are its parameters in order: Tensors, ints, floats (float32), tuples of ints, or None
    where the kernel asks `if x is None`. `constants` are the `tl.constexpr` ones, by name. Without
    `fuse` no product and sum are rounded as one, so that all variants give the same bits. Compiled
    at the first call for these kinds of arguments.
    """
    if 0 in grid:
        return
    kinds, values = describe(args)
    key = (id(kernel), kinds, num_warps, num_stages, fuse, *constants.items())
    function = _functions.get(key)
    if function is None:
        wanted = Variant(kernel, kinds, tuple(constants.items()), num_warps, num_stages, fuse)
        function = _functions[key] = load(_binary(wanted), kinds, hidden=_HIDDEN)
    function(grid, values)


_functions: dict[tuple[Any, ...], Runner] = {}


def describe(args: tuple[Any, ...]) -> tuple[Kinds, Values]:
    """The kind of each argument, None for None, and the values of a kernel's parameters."""
    kinds: list[Any] = []
    values: Values = []
    for value in args:
        if value.__class__ is Tensor:
            # A plan's Tensors are nowhere; a pool's start at multiples of 256.
            address = 0 if value.device.plan else value.pointer
            kinds.append(_POINTER[value.dtype][address % 16 == 0])
            values.append(address)
        elif value is None:
            kinds.append(None)
        elif isinstance(value, int):
            # 0 is no size, and a position of 0 should not be compiled apart from the others.
            aligned = value % 16 == 0 and value > 0
            kinds.append(_integer(value) + _ALIGNED if aligned else _integer(value))
            values.append(value)
        elif isinstance(value, float):
            kinds.append("fp32")
            values.append(value)
        elif value and value[0].__class__ is Tensor:
            kinds.append(f"{_TABLE}{len(value)}")
            values += [x.pointer for x in value]
        else:
            kinds.append(tuple(map(_integer, value)))
            values += value
    return tuple(kinds), values


def _integer(value: int) -> str:
    """32 bits where a count's last block, which may reach beyond it, fits them too."""
    return "i32" if abs(value) <= 2**31 - 2**16 else "i64"


def compile_variant(wanted: Variant, arch: int) -> Binary:
    """The cubin for compute capability `arch`, such as 90; needs no GPU."""
    kernel, kinds, constants, num_warps, num_stages, fuse = wanted
    fixed = dict(constants)
    names = [name for name in kernel.arg_names if name not in fixed]
    assert len(names) == len(kinds), f"{kernel.__name__}: {names} for {kinds}"
    signature: dict[str, Any] = dict.fromkeys(kernel.arg_names, "constexpr")
    attributes: dict[tuple[int, ...], Any] = {}
    for name, each in zip(names, kinds, strict=True):
        if each is None:
            fixed[name] = None
        elif isinstance(each, tuple):
            signature[name] = each
        else:
            signature[name] = each.removesuffix(_ALIGNED)
            if each.endswith(_ALIGNED):
                attributes[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fuse}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    metadata = compiled.metadata
    entry = re.search(r"\.visible \.entry \w+\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    assert entry is not None
    expected = len(_flat(kinds)) + _HIDDEN
    found = entry[1].count(".param")
    assert found == expected, f"{kernel.__name__}: {found} parameters, expected {expected}"
    assert metadata.global_scratch_size == 0
    threads = 32 * metadata.num_warps
    return Binary(metadata.name, metadata.shared, threads, compiled.asm["cubin"])


def _flat(kinds: Kinds) -> list[str]:
    """The kinds of a kernel's parameters: tuples spread out, those of None left out."""
    flat: list[str] = []
    for each in kinds:
        if isinstance(each, tuple):
            flat += each
        elif each is not None:
            flat.append(each)
    return flat


class Arguments:
    """A kernel's parameters in memory, as the driver reads them; filled anew for each launch."""

    def __init__(self, kinds: Kinds, hidden: int) -> None:
        self.cells: list[Any] = []
        addresses = []
        for kind in _flat(kinds):
            name = kind.removesuffix(_ALIGNED)
            if name.startswith(_TABLE):
                count = int(name.removeprefix(_TABLE))
                table = (ctypes.c_uint64 * count)()
                cells: list[Any] = [ctypes.c_uint64.from_buffer(table, 8 * i) for i in range(count)]
            else:
                cells = [ctypes.c_uint64() if name[0] == "*" else _CELL[name]()]
            addresses.append(ctypes.addressof(cells[0]))
            self.cells += cells
        self._hidden = [ctypes.c_uint64() for _ in range(hidden)]
        addresses += [ctypes.addressof(cell) for cell in self._hidden]
        self._table = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self._table)

    def fill(self, values: Values) -> None:
        """Store the values of arguments that are of these kinds."""
        for cell, value in zip(self.cells, values, strict=True):
            cell.value = value


def load(binary: Binary, kinds: Kinds, *, hidden: int, together: bool = False) -> Runner:
    """A function that launches the kernel; `hidden` parameters follow those of these kinds.

    A kernel whose thread blocks wait for each other is launched `together`: where not all of them
    fit on the card at once, the launch fails, and nothing waits for ever.
    """
    from cuda.bindings import driver

    from forge.backends.cuda import device

    name, shared, threads, cubin = binary
    stream, done = driver.CUstream(device.stream()), driver.CUresult.CUDA_SUCCESS
    module = device.check(name, driver.cuModuleLoadData(cubin))
    function = device.check(name, driver.cuModuleGetFunction(module, name.encode()))
    if shared > _SHARED:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device.check(name, driver.cuFuncSetAttribute(function, limit, shared))
    arguments = Arguments(kinds, hidden)
    start = driver.cuLaunchCooperativeKernel if together else driver.cuLaunchKernel
    # The parameters, and for the plain launch what else it is told: nothing.
    rest = (arguments.address,) if together else (arguments.address, 0)

    def run(grid: tuple[int, ...], values: Values) -> None:
        arguments.fill(values)
        x, y, z = (*grid, 1, 1)[:3]
        result = start(function, x, y, z, threads, 1, 1, shared, stream, *rest)
        if result[0] != done:
            device.check(name, result)

    return run


def _binary(wanted: Variant) -> Binary:
    """The variant for this card."""
    from forge.backends.cuda import device

    arch = device.arch()

    def make() -> Binary:
        # Triton keeps every stage of it, which nothing reads again once the binary is stored.
        with triton.knobs.cache.scope(), tempfile.TemporaryDirectory(prefix="forge-") as stages:
            triton.knobs.cache.dir = stages
            return compile_variant(wanted, arch)

    return cached((wanted.kernel.cache_key, *wanted[1:], triton.__version__, arch), make)


def cached(origin: tuple[Any, ...], make: Callable[[], Binary]) -> Binary:
    """The binary that was made from `origin` before, from the disk, or else made and put there."""
    key = hashlib.sha256(repr((origin, Binary._fields)).encode()).hexdigest()[:32]
    path = cache.folder() / "cubins" / key
    stored = cache.read(path)
    if stored is not None:
        head, cubin = stored.split(b"\n", 1)
        return Binary(**json.loads(head), cubin=cubin)
    binary = make()
    fields = binary._asdict()
    fields.pop("cubin")
    try:
        cache.write(path, json.dumps(fields).encode() + b"\n" + binary.cubin)
    except OSError as error:
        # A full or read-only disk costs the next start time, not this run.
        warnings.warn(f"kernels are compiled again next time: {error}", stacklevel=2)
    return binary
