"""`@op`: what makes a plain function on Tensors an op that a tape can record.

This is the one piece of magic in Forge. Called with Tensors only, the function simply runs. Given a
Var, its arguments are unwrapped, the tape runs it and appends a node, and Vars come back. Nothing
is bound or inspected at call time: names are looked up once, when the op is defined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from forge.autograd.node import NodeView, Primitive, Remake, Var
from forge.autograd.tape import Tape
from forge.errors import ArgumentError, DtypeError, no_single_name
from forge.tensor import Tensor

__all__ = ["Op", "Record", "op"]


@dataclass(slots=True)
class Record:
    """Where an op's body leaves its extras while it is being recorded."""

    inputs: dict[str, int]
    extras: dict[str, Tensor]

    def wants(self, name: str) -> bool:
        """Whether a gradient of this input will be asked for."""
        return name in self.inputs

    def keep(self, **extras: Tensor) -> None:
        """Keep values that are neither inputs nor outputs, by their declared names."""
        self.extras.update(extras)


class Op(Protocol):
    """A public function of `forge.ops` that is a primitive."""

    __name__: str
    primitive: Primitive

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run the op."""

    def rule(self, function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Decorator: the op's gradient rule."""

    def remake(
        self, output: str, needs: tuple[str, ...], exact: Callable[[Tensor], bool] | None = None
    ) -> Callable[..., Any]:
        """Decorator: how a dropped output or extra is made again from other values of the node.

        `exact(output)` is False where that would give other bits: there the op is rerun.
        """


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
    input's storage; `name` is the function's own unless given. Keywords that begin with `into` are
    buffers to add to: rules pass them, and recording refuses them. Raises `ArgumentError` for names
    that clash or that nothing makes.
    """

    def decorate(body: Callable[..., Any]) -> Op:
        for names in (saves, outputs):
            no_single_name(name or body.__name__, names, ArgumentError)
        parameters = inspect.signature(body).parameters
        public = inspect.signature(body).replace(
            parameters=[p for p in parameters.values() if p.name != "record"]
        )
        bind, by_name = _binding(body, public)
        has_record = "record" in parameters

        def run(inputs: dict[str, int], arguments: dict[str, Any]) -> dict[str, Tensor]:
            made: dict[str, Tensor] = {}
            if has_record:
                arguments["record"] = Record(inputs, made)
            result = by_name(**arguments)
            if result.__class__ is Tensor:
                made[outputs[0]] = result
            elif result.__class__ is tuple:
                made.update(zip(outputs, result, strict=True))
            else:
                raise DtypeError(
                    f"[{primitive.name}] expected its body to return a Tensor, got "
                    f"{type(result).__name__}; fill one of forge.extend.empty_like(x)"
                )
            return made

        known = {*public.parameters, *outputs}
        primitive = Primitive(
            name or body.__name__,
            run,
            saves,
            outputs,
            made=outputs + tuple(name for name in saves if name not in known),
            differentiable=differentiable,
            view=view,
            buffers=tuple(name for name in public.parameters if name.startswith("into")),
        )
        _check_names(primitive, public, has_record)
        Tape.primitives[primitive.name] = primitive

        def call(*args: Any, **keywords: Any) -> Any:
            for arg in args:
                if arg.__class__ is Var:
                    return arg.tape.apply(primitive, bind(*args, **keywords))
            for arg in keywords.values():
                if arg.__class__ is Var:
                    return arg.tape.apply(primitive, bind(*args, **keywords))
            return body(*args, **keywords)

        def rule(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
            primitive.rule = function
            return function

        def remake(
            output: str, needs: tuple[str, ...], exact: Callable[[Tensor], bool] | None = None
        ) -> Callable[..., Any]:
            if output not in primitive.made:
                raise ArgumentError(
                    f"[{primitive.name}] expected to remake one of {list(primitive.made)}, "
                    f"got {output!r}"
                )

            def declare(function: Callable[..., Any]) -> Callable[..., Any]:
                primitive.remake = Remake(output, needs, function, exact)
                return function

            return declare

        function = cast(Any, call)
        function.__name__ = function.__qualname__ = body.__name__
        function.__doc__ = body.__doc__
        function.__module__ = body.__module__
        function.__signature__ = public
        function.primitive = primitive
        function.rule = rule
        function.remake = remake
        return cast(Op, function)

    return decorate


def _binding(
    body: Callable[..., Any], public: inspect.Signature
) -> tuple[Callable[..., dict[str, Any]], Callable[..., Any]]:
    """Functions from body's arguments to a dict by name, and from all arguments by name to body's.

    The first is compiled from the signature, so that Python itself binds the arguments and words
    the errors: 0.4 µs, where `Signature.bind` takes 5. The `*xs` of a variadic op are named xs0, ….
    """
    bare = public.replace(
        parameters=[
            p.replace(annotation=p.empty, default=p.default if p.default is p.empty else None)
            for p in public.parameters.values()
        ],
        return_annotation=public.empty,
    )
    scope: dict[str, Any] = {}
    exec(f"def bind{bare}: return locals()", scope)
    bind: Callable[..., Any] = scope["bind"]
    bind.__name__ = bind.__qualname__ = body.__name__
    given = [p for p in public.parameters.values() if p.default is not p.empty]
    bind.__defaults__ = tuple(p.default for p in given if p.kind is p.POSITIONAL_OR_KEYWORD)
    bind.__kwdefaults__ = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    variadic = [p.name for p in public.parameters.values() if p.kind is p.VAR_POSITIONAL]
    if not variadic:
        return bind, body
    (prefix,) = variadic

    def bind_variadic(*args: Any, **keywords: Any) -> dict[str, Any]:
        arguments = bind(*args, **keywords)
        xs = arguments.pop(prefix)
        return {**{f"{prefix}{i}": x for i, x in enumerate(xs)}, **arguments}

    def by_name(**arguments: Any) -> Any:
        names = [name for name in arguments if name.removeprefix(prefix).isdecimal()]
        xs = [arguments.pop(f"{prefix}{i}") for i in range(len(names))]
        return body(*xs, **arguments)

    return bind_variadic, by_name


def _check_names(primitive: Primitive, public: inspect.Signature, has_record: bool) -> None:
    """Raise `ArgumentError` for a definition whose names the tape could not tell apart."""
    name, parameters = primitive.name, public.parameters.keys()
    if primitive.differentiable not in ("twice", "once", "no"):
        raise ArgumentError(
            f'[{name}] expected differentiable="twice", "once" or "no", '
            f"got {primitive.differentiable!r}"
        )
    taken = set(primitive.outputs) | {*dir(NodeView)} - {*primitive.buffers}
    if parameters & taken and primitive.differentiable != "no":
        raise ArgumentError(
            f"[{name}] expected parameters named unlike outputs and methods of a rule's node, got "
            f"{sorted(parameters & taken)}; a rule could not tell which it reads"
        )
    extras = set(primitive.made) - set(primitive.outputs)
    if extras and not has_record:
        raise ArgumentError(
            f"[{name}] expected to save parameters and outputs, got {sorted(extras)}; "
            "extras need a last keyword record=None"
        )
