"""CUDA C++ by NVRTC, for what Triton cannot say: compiled at the first call, and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

from cuda.bindings import nvrtc

from forge.backends.cuda import device
from forge.backends.cuda.triton_jit import Binary, Kinds, Runner, cached, describe, load
from forge.errors import DeviceError


def kernel(
    file: str,
    name: str,
    defines: dict[str, int],
    shared: int = 0,
    *,
    together: bool = False,
) -> Callable[..., None]:
    """The kernel `name` of a source beside this one, as a function of (blocks, threads, *args).

    `defines` are macros of the source, `shared` is its dynamic shared memory in bytes, `together`
    says that its thread blocks wait for each other. Arguments
    are Tensors, ints (int32, from 2^31 on int64), floats (float32), and tuples of Tensors, which
    are a struct of pointers.
    """
    macros = tuple(defines.items())

    def run(blocks: int, threads: int, *args: Any) -> None:
        if blocks > 0:
            kinds, values = describe(args)
            _loaded(file, name, macros, shared, threads, kinds, together)((blocks,), values)

    return run


@cache
def _loaded(
    file: str,
    name: str,
    macros: tuple[tuple[str, int], ...],
    shared: int,
    threads: int,
    kinds: Kinds,
    together: bool,
) -> Runner:
    arch = device.arch()

    def make() -> Binary:
        return Binary(name, shared, threads, compile_file(file, arch, dict(macros)))

    version = _ask(nvrtc.nvrtcVersion())
    origin = (_source(file), _headers(), name, macros, shared, threads, version, arch)
    return load(cached(origin, make), kinds, hidden=0, together=together)


@cache
def _source(file: str) -> bytes:
    return resources.files(__package__).joinpath(file).read_bytes()


@cache
def _headers() -> dict[str, bytes]:
    """All headers beside this file, which any source may include."""
    names = sorted(entry.name for entry in resources.files(__package__).iterdir())
    return {name: _source(name) for name in names if name.endswith(".cuh")}


def compile_file(file: str, arch: int, defines: dict[str, int]) -> bytes:
    """The cubin of a source for compute capability `arch`, such as 90; needs no GPU."""
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17"]
    options += [f"-D{macro}={value}" for macro, value in defines.items()]
    given = [option.encode() for option in options]
    names, headers = [name.encode() for name in _headers()], list(_headers().values())
    program = _ask(
        nvrtc.nvrtcCreateProgram(_source(file), file.encode(), len(headers), headers, names)
    )
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
    if int(failed):
        log = b" " * int(_ask(nvrtc.nvrtcGetProgramLogSize(program)))
        _ask(nvrtc.nvrtcGetProgramLog(program, log))
        raise DeviceError(f"[{file}] expected the source to compile, got {log.decode()}")
    cubin = b" " * int(_ask(nvrtc.nvrtcGetCUBINSize(program)))
    _ask(nvrtc.nvrtcGetCUBIN(program, cubin))
    _ask(nvrtc.nvrtcDestroyProgram(program))
    return cubin


def _ask(result: tuple[Any, ...]) -> Any:
    """NVRTC's answer to a call; raises `DeviceError` where it failed."""
    error, *values = result
    if int(error):
        raise DeviceError(
            f"[cuda] expected NVRTC to compile, got {error.name}; install nvidia-cuda-nvrtc anew"
        )
    return values[0] if len(values) == 1 else tuple(values)
