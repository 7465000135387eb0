"""How Numba compiles a kernel here: every function is optimised once, and only kernels become code.

Numba by itself links a function into each of its callers, optimises it there again, and makes
machine code of it each time. Here a routine is optimised when it is compiled, its callers are while
they only know its name, and what they link is left as it is. All of a kernel is one object file.
"""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding
import numba
from numba.core import compiler, registry, serialize
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import lookup_environment
from numba.core.runtime import rtsys

# Not nnan, ninf: a NaN must reach the loss. Not arcp, afn: LLVM then replaces a vector's division
# by an estimate, which turns 1/inf into NaN and gives a loop's tail other bits than its body.
FASTMATH = {"contract", "reassoc", "nsz"}
_MAKERS = {"empty", "zeros", "ones", "full"}
OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False, "no_cfunc_wrapper": True}


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """The code of one function, which becomes machine code only when its address is asked for."""

    def finalize(self) -> None:
        """Optimise the function, then link what it calls."""
        self._raise_if_finalized()
        linked = list(dict.fromkeys(self._linking_libraries))
        for library in linked:
            self._reload_init.update(library._reload_init)
        # Numba's own helpers, such as that of `min`, are to be inlined.
        own = [library for library in linked if isinstance(library, _Library)]
        self._link([library for library in linked if library not in own])
        self._optimize_final_module()
        self._link(own)
        self._final_module.verify()
        self._finalized = True
        self._emitted = False

    def _link(self, libraries: list[Any]) -> None:
        for library in libraries:
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)

    def get_pointer_to_function(self, name: str) -> int:
        """Address of a function, or 0 if it is not defined here."""
        self._ensure_finalized()
        defined = {function.name for function in self.get_defined_functions()}
        if name not in defined:
            return 0
        if not self._emitted:
            self._emitted = True
            self._finalize_final_module()
            for variable in self._final_module.global_variables:
                environment = lookup_environment(variable.name)
                if environment is not None:
                    self._codegen.set_env(variable.name, environment)
        address: int = super().get_pointer_to_function(name)
        return address

    @property
    def codegen(self) -> "_Library":
        """What Numba tells a function's environment, which only machine code has a place for."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Nothing yet: `get_pointer_to_function` does it."""


class Compiler(compiler.Compiler):  # type: ignore[misc]
    """Numba's compiler, whose result is a `_Library`."""

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        if library is None:
            library = _Library(target.codegen(), "forge")
            library.enable_object_caching()
        super().__init__(typing, target, library, *rest)


def part(function: Callable[..., Any]) -> Any:
    """`function` as one that others call, compiled for the types they call it with."""
    return numba.njit(
        fastmath=FASTMATH,
        no_cpython_wrapper=True,
        pipeline_class=Compiler,
        _nrt=_allocates(function),
        **OPTIONS,
    )(function)


def _allocates(function: Callable[..., Any]) -> bool:
    """Whether it makes arrays by one of _MAKERS, and so has to free them: it counts references.

    Other functions need not count: a kernel's arguments outlive it, and what it makes outlives what
    it calls. Each count is an atomic operation on a word that all threads share; a few for each row
    of 128 elements took up to half of a kernel's time. Numba refuses to compile a function that
    does not count and makes an array by other means, or returns one.
    """
    return not _MAKERS.isdisjoint(function.__code__.co_names)


def compiled(function: Callable[..., Any], signature: str) -> Any:
    """The result of compiling `function` for a signature such as "void(float32[::1], int64)"."""
    dispatcher = numba.njit(
        fastmath=FASTMATH, pipeline_class=Compiler, _nrt=_allocates(function), **OPTIONS
    )(function)
    with global_compiler_lock, _optimised_at(2):
        dispatcher.compile(signature)
    (result,) = dispatcher.overloads.values()
    return result


def callable_of(function: Callable[..., Any], result: Any) -> Callable[..., Any]:
    """What checks the types of arguments and runs the compiled function."""
    dispatcher = numba.njit(**OPTIONS)(function)
    dispatcher.add_overload(result)
    dispatcher.disable_compile()
    checked: Callable[..., Any] = dispatcher
    return checked


def packed(result: Any) -> bytes:
    """A compilation's result as bytes."""
    (library, kind, (code, _)), *rest = result._reduce()
    # Numba stores the code as LLVM's, too, for functions to inline, and reads the names it defines
    # from that: 2 ms a kernel at every start, and nothing inlines a kernel.
    stub = f'define void @"{result.fndesc.llvm_cpython_wrapper_name}"() {{ ret void }}'
    names = llvmlite.binding.parse_assembly(stub).as_bitcode()
    data: bytes = serialize.dumps(((library, kind, (code, names)), *rest))
    return data


def unpacked(data: bytes) -> Any:
    """The result that `packed` made bytes of."""
    target = registry.cpu_target.target_context
    rtsys.initialize(target)  # Numba's memory, which the code refers to
    return compiler.CompileResult._rebuild(target, *pickle.loads(data))


@contextlib.contextmanager
def _optimised_at(level: int) -> Iterator[None]:
    """Level 3, Numba's own, takes a third longer to compile, and no kernel here gains by it."""
    before = numba.config.OPT
    numba.config.OPT = type(before)(level)
    try:
        yield
    finally:
        numba.config.OPT = before
