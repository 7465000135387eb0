"""`@op`: what makes a plain function on Tensors an op that a tape can record.

This is the one piece of magic in Forge. Called with Tensors only, the function simply runs. Given a
Var, its arguments are unwrapped, the tape runs it and appends a node, and Vars come back. Nothing
is bound or inspected at call time: names are looked up once, when the op is defined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, cast

from forge.autograd.node import Primitive, Record, Remake, Var
from forge.autograd.tape import Tape
from forge.errors import TapeError

__all__ = ["Op", "Record", "op"]


class Op(Protocol):
    """A public function of `forge.ops` that is a primitive."""

    __name__: str
    primitive: Primitive

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the op."""

    def rule(self, function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Decorator: the op's gradient rule."""

    def remake(self, output: str, needs: tuple[str, ...]) -> Callable[..., Any]:
        """Decorator: how a dropped output is made again from other values of the node."""


def op(
    *,
    saves: tuple[str, ...] = (),
    outputs: tuple[str, ...] = ("out",),
    differentiable: str = "twice",
    view: bool = False,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Op]:
    """Make a primitive of a function.

    `saves` names what the rule reads: parameters, outputs, and extras that the body leaves with
    `record.keep(name=Tensor)`, where `record` is its last keyword, None when nothing is recorded.
    `outputs` names the results; `differentiable` is "twice", "once" or "no"; a `view` shares its
    input's storage; `name` is the function's own unless given.
    """

    def decorate(body: Callable[..., Any]) -> Op:
        parameters = inspect.signature(body).parameters
        kinds = {name: p.kind for name, p in parameters.items()}
        variadic = next(
            (n for n, k in kinds.items() if k is inspect.Parameter.VAR_POSITIONAL), None
        )
        positional = tuple(
            n for n, k in kinds.items() if k is inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        defaults = {
            name: p.default
            for name, p in parameters.items()
            if p.default is not inspect.Parameter.empty and name != "record"
        }
        primitive = Primitive(
            name or body.__name__,
            body,
            saves=saves,
            outputs=outputs,
            differentiable=differentiable,
            view=view,
            has_record="record" in parameters,
            variadic=variadic,
        )
        Tape.primitives[primitive.name] = primitive

        def call(*args: Any, **keywords: Any) -> Any:
            for arg in args:
                if arg.__class__ is Var:
                    return record(arg.tape, args, keywords)
            for arg in keywords.values():
                if arg.__class__ is Var:
                    return record(arg.tape, args, keywords)
            return body(*args, **keywords)

        def record(tape: Tape, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if differentiable == "no":
                primitive.rule_for(twice=False)
            if variadic is None:
                if len(args) > len(positional):
                    body(*args, **keywords)  # Raises Python's own message.
                names = positional
            else:
                names = tuple(f"{variadic}{i}" for i in range(len(args)))
            arguments = defaults.copy()
            arguments.update(zip(names, args, strict=False))
            arguments.update(keywords)
            inputs = {}
            for name, arg in arguments.items():
                if arg.__class__ is Var:
                    if arg.tape is not tape:
                        raise TapeError(
                            f"[{primitive.name}] expected Vars of one tape, got {name!r} from "
                            "another; finish with one tape before the next, or pass its value"
                        )
                    inputs[name] = arg.id
                    arguments[name] = arg.value
            return tape.apply(primitive, inputs, arguments)

        def rule(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
            primitive.rule = function
            return function

        def remake(output: str, needs: tuple[str, ...]) -> Callable[..., Any]:
            def declare(function: Callable[..., Any]) -> Callable[..., Any]:
                primitive.remake = Remake(output, needs, function)
                return function

            return declare

        public = cast(Any, call)
        public.__name__ = public.__qualname__ = body.__name__
        public.__doc__ = body.__doc__
        public.__module__ = body.__module__
        public.__signature__ = inspect.signature(body).replace(
            parameters=[p for name, p in parameters.items() if name != "record"]
        )
        public.primitive = primitive
        public.rule = rule
        public.remake = remake
        return cast(Op, public)

    return decorate
