"""Kernels compiled by Numba: the decorators, and how a kernel comes to be callable.

A kernel has one explicit signature. It is loaded at its first call, from the disk if it has been
compiled on this machine before, so importing Forge compiles nothing.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

from forge import cache
from forge.backends import notice
from forge.backends.cpu import compiler, loops, store, threads

Function = TypeVar("Function", bound=Callable[..., Any])
# Dtypes that the letters of a signature stand for.
Form = tuple[str, ...]

_ELEMENT = {"float32": "float32", "bfloat16": "uint16"}
_FORMS: tuple[Form, ...] = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
)

# Held while a kernel is loaded: each is so only once, and Numba compiles in one thread at a time.
_loading = threading.RLock()


class Kernel:
    """A compiled function with one signature: made by `kernel`, called like a function."""

    __slots__ = ("cost", "form", "function", "parallel", "run", "setup", "signature")

    def __init__(
        self,
        function: Callable[..., Any],
        signature: str,
        parallel: bool,
        cost: float,
        setup: Callable[[], None] | None,
        form: Form = (),
    ) -> None:
        self.function = function
        self.form = form
        self.setup = setup
        self.signature = signature
        self.parallel = parallel
        self.cost = cost
        self.run: Callable[..., Any] = self._first

    @property
    def name(self) -> str:
        """Where it is defined, as module:function or, of several forms, module:function:dtypes."""
        name = f"{self.function.__module__}:{self.function.__name__}"
        return f"{name}:{','.join(self.form)}" if self.form else name

    @property
    def file(self) -> Path:
        """Where its machine code is stored once it is compiled."""
        source = Path(self.function.__code__.co_filename)
        return store.file(source, self.function.__name__, self.signature)

    def __call__(self, *args: Any) -> Any:
        """Run it on arrays and numbers of exactly the signature's types."""
        if threads.applied.count != threads.count:
            threads.apply()
        return self.run(*args)

    def _first(self, *args: Any) -> Any:
        with _loading:
            if self.run == self._first:
                self.load()
        return self.run(*args)

    def load(self, stored: bool = True) -> None:
        """Make it callable: from its file, else compiled, and stored unless told otherwise."""
        self._set_up()
        data = cache.read(self.file) if stored else None
        if data is not None:
            result = compiler.unpacked(data)
        else:
            if stored:
                notice.say_once(
                    "compiling CPU kernels for this machine, once, each at its first use…"
                )
            result = self._compiled()
            if stored:
                self._save(compiler.packed(result))
        self.run = compiler.callable_of(self.function, result)

    def compile(self) -> None:
        """Compile and store it, without loading it; on a full disk that is for nothing."""
        self._set_up()
        self._save(compiler.packed(self._compiled()))

    def _set_up(self) -> None:
        """Make the functions known that the code refers to."""
        threads.start()
        if self.setup is not None:
            self.setup()

    def _compiled(self) -> Any:
        function = self.function
        if self.parallel:
            function = loops.outlined(function, compiler.part)
        return compiler.compiled(function, self.signature)

    def _save(self, data: bytes) -> None:
        try:
            store.write(self.file, data)
        except OSError as error:
            say_unwritable(error)


class Forms(dict[str | Form, Kernel]):
    """One function compiled for several dtypes: `kernel[dtype]` is its `Kernel` for them."""


def kernel(
    signature: str,
    *,
    parallel: bool = True,
    cost: float = 0.3,
    setup: Callable[[], None] | None = None,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator of a kernel of one Numba `signature`, such as "void(float32[::1], int64)".

    `parallel` runs its `prange` loops, each a statement of the kernel itself, on the thread pool.
    `cost` is about how many seconds it takes to compile: where several are, the slowest are started
    first. `setup` runs before it is loaded, such as `blas.link` for one that calls sgemm.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        return Kernel(function, signature, parallel, cost, setup)

    return decorate


def forms(signature: str, *dtypes: Form, **settings: Any) -> Callable[[Callable[..., Any]], Forms]:
    """Decorator of a kernel for arrays of several dtypes, `T` and `U` in its signature.

    `dtypes` are what they stand for, by default float32, and bfloat16 with U the same or float32.
    `settings` are `kernel`'s.
    """
    if not dtypes:
        dtypes = (("float32",), ("bfloat16",)) if "U" not in signature else _FORMS

    def decorate(function: Callable[..., Any]) -> Forms:
        every = Forms()
        for form in dtypes:
            text = signature
            for letter, dtype in zip("TU", form, strict=False):
                text = text.replace(f"{letter}[", f"{_ELEMENT[dtype]}[")
            made = kernel(text, **settings)(function)
            made.form = form
            every[form[0] if len(form) == 1 else form] = made
        return every

    return decorate


def device(function: Function) -> Function:
    """Decorator of a short function that becomes part of the kernels that call it.

    Numba pastes its code into the caller's, which compiles in a tenth of the time that a function
    of its own takes, and it computes under the caller's fast-math flags.
    """
    decorated: Function = numba.njit(inline="always", **compiler.OPTIONS)(function)
    return decorated


def routine(function: Function) -> Function:
    """Decorator of a function that kernels call as it is: a call costs some 5 ns, never inlined."""
    decorated: Function = compiler.part(function)
    return decorated


def say_unwritable(error: OSError) -> None:
    """Tell the user, once, that what is compiled can't be kept."""
    notice.say_once(
        f"cannot write the kernel cache {store.root()} ({error.strerror}): kernels are compiled in "
        "memory, on every start; set XDG_CACHE_HOME to a writable folder"
    )
