"""Var, Primitive, Node, and what a gradient rule sees of a node.

A Node says everything about one recorded call as data: the op, the value ids of its inputs and
outputs, its arguments, and the values its rule declared by name. Nothing is captured by a closure,
so the tape can count, free and remake what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from forge.errors import GradientError, TapeError
from forge.tensor import Device, Shape, Tensor

if TYPE_CHECKING:
    from forge.autograd.tape import Tape


class Var:
    """A Tensor on a tape: `(tape, id, value)`."""

    __slots__ = ("id", "tape", "value")

    def __init__(self, tape: Tape, identity: int, value: Tensor) -> None:
        self.tape = tape
        self.id = identity
        self.value = value

    @property
    def shape(self) -> Shape:
        """Shape of the value."""
        return self.value.shape

    @property
    def dtype(self) -> str:
        """Dtype of the value."""
        return self.value.dtype

    @property
    def device(self) -> Device:
        """Device of the value."""
        return self.value.device

    def __repr__(self) -> str:
        return f"Var({self.id}, {self.value!r})"


class Spec(NamedTuple):
    """Shape, dtype and device of a value that may be gone."""

    shape: Shape
    dtype: str
    device: Device


class Saved(NamedTuple):
    """A value kept for a rule, and the version its storage had then."""

    value: Tensor
    version: int


# What a node keeps of a value: the value itself; the id of one that was dropped and can be made
# again; None for a dropped extra, which rerunning the node brings back.
Entry = Saved | int | None


class Remake(NamedTuple):
    """How a node makes one of its outputs again from other values, cheaper than by rerunning."""

    output: str
    needs: tuple[str, ...]
    function: Callable[[NodeView], Tensor]


@dataclass(slots=True, eq=False)
class Primitive:
    """An op with a kernel, as the tape knows it.

    `differentiable` is "twice" (its rule is made of ops that have rules), "once" or "no"; a `view`
    shares its input's storage; `variadic` names the `*xs` of an op whose inputs are xs0, xs1, ….
    """

    name: str
    body: Callable[..., Any]
    saves: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiable: str
    view: bool
    has_record: bool
    variadic: str | None
    rule: Callable[..., dict[str, Any]] | None = None
    remake: Remake | None = None

    def run(self, arguments: dict[str, Any], record: Record) -> tuple[Tensor, ...]:
        """Call the body with its arguments by name; the outputs always come as a tuple."""
        if self.has_record:
            result = self.body(**arguments, record=record)
        elif self.variadic is None:
            result = self.body(**arguments)
        else:
            rest = dict(arguments)
            xs = [rest.pop(name) for name in arguments if name.startswith(self.variadic)]
            result = self.body(*xs, **rest)
        return result if result.__class__ is tuple else (result,)

    def rule_for(self, *, twice: bool) -> Callable[..., dict[str, Any]]:
        """The rule; raises `GradientError` where there is none, or none for a second sweep."""
        if self.rule is None or (twice and self.differentiable != "twice"):
            raise GradientError(
                f"[{self.name}] expected an op that is differentiable "
                f"{'twice' if twice else 'once'}, got one that is not "
                f"(differentiable: {self.differentiable}); compose it of smaller ops"
            )
        return self.rule


@dataclass(slots=True)
class Record:
    """Where an op's body leaves its extras while it is being recorded."""

    inputs: dict[str, int]
    extras: dict[str, Tensor] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        """Whether a gradient of this input will be asked for."""
        return name in self.inputs

    def keep(self, **extras: Tensor) -> None:
        """Keep values that are neither inputs nor outputs, by their declared names."""
        self.extras.update(extras)


@dataclass(slots=True, eq=False)
class Node:
    """One recorded op.

    `inputs` maps the names of tracked inputs to value ids, `arguments` every argument to its value
    (a Tensor to its `Spec`); the outputs are the ids from `first` on. `again` is what rerunning the
    op needs, where an output was dropped and no `Remake` serves; `region` is its recompute block.
    """

    op: Primitive
    inputs: dict[str, int]
    first: int
    region: int
    arguments: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, Entry] = field(default_factory=dict)
    again: dict[str, Entry] | None = None

    def id_of(self, name: str) -> int | None:
        """Value id of a tracked input or an output; None for anything else."""
        if name in self.op.outputs:
            return self.first + self.op.outputs.index(name)
        return self.inputs.get(name)


class NodeView:
    """What a rule sees: saves and attributes by name, specs, and what is wanted of it."""

    __slots__ = ("_node", "_tape", "tracked")

    def __init__(self, tape: Tape, node: Node, *, tracked: bool = False) -> None:
        self._tape = tape
        self._node = node
        # Whether the sweep itself is recorded: saved inputs and outputs then come as Vars.
        self.tracked = tracked

    def __getattr__(self, name: str) -> Any:
        node = self._node
        if name in node.saved:
            return self._tape.fetch(node, name, tracked=self.tracked)
        value = node.arguments.get(name, self)
        if value is self or isinstance(value, Spec):
            raise TapeError(
                f"[{node.op.name}] expected its rule to read saves and attributes, got {name!r}; "
                f"it saves {', '.join(node.op.saves) or 'nothing'}"
            )
        return value

    def names(self) -> list[str]:
        """Names of the Tensor arguments, in order."""
        return [name for name, x in self._node.arguments.items() if isinstance(x, Spec)]

    def spec(self, name: str) -> Spec:
        """Shape, dtype and device of an input or output, saved or not."""
        return self._tape.spec(self._node, name)

    def wants(self, name: str) -> bool:
        """Whether anyone needs this input's gradient."""
        return name in self._node.inputs

    def into(self, name: str) -> Tensor | None:
        """The buffer that this input's gradient is to be added to, or None."""
        return self._tape.buffers.get(self._node.inputs.get(name, -1))
