"""Var, Primitive, Node, and what a gradient rule sees of a node.

A Node says everything about one recorded call as data: the op, the value ids of its inputs and
outputs, its arguments, and the values its rule declared by name. Nothing is captured by a closure,
so the tape can count, free and remake what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from forge.dtypes import accumulator
from forge.errors import TapeError, no_attribute
from forge.tensor import Spec, Tensor

if TYPE_CHECKING:
    from forge.autograd.tape import Tape


class Var:
    """A Tensor on a tape: `(tape, id, value)`, with the value's shape, dtype and device."""

    __slots__ = ("id", "tape", "value")

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: self.value.device)
    __getattr__ = no_attribute

    def __init__(self, tape: Tape, identity: int, value: Tensor) -> None:
        self.tape, self.id = tape, identity
        self.value = value

    def __bool__(self) -> bool:
        raise TapeError("[bool] expected a Tensor, got a Var; take its value: bool(x.value)")

    def __array__(self, *args: Any, **keywords: Any) -> Any:
        raise TapeError("[numpy] expected a Tensor, got a Var; take its value: x.value.numpy()")

    def __repr__(self) -> str:
        return f"Var({self.id}, {self.value!r})"


class Remake(NamedTuple):
    """How an output or extra is made again from other values, cheaper than by rerunning the op.

    `function` takes an object with the values that it `needs` and the attributes; `exact` says of
    one as it was made whether that gives its bits, by default always.
    """

    output: str
    needs: tuple[str, ...]
    function: Callable[[Any], Tensor]
    exact: Callable[[Tensor], bool] | None


@dataclass(slots=True, eq=False)
class Primitive:
    """An op with a kernel, as the tape knows it.

    `run(inputs, arguments)` takes the ids of tracked inputs and all arguments by name, and returns
    what is `made`, outputs and extras. `differentiable` is "twice" (its rule is made of ops that
    have rules), "once" or "no"; a `view` shares its input's storage; `buffers` are keywords that
    only rules pass.
    """

    name: str
    run: Callable[[dict[str, int], dict[str, Any]], dict[str, Tensor]]
    saves: tuple[str, ...]
    outputs: tuple[str, ...]
    made: tuple[str, ...]
    differentiable: str
    view: bool
    buffers: tuple[str, ...]
    rule: Callable[..., dict[str, Any]] | None = None
    remake: Remake | None = None


@dataclass(slots=True, eq=False)
class Node:
    """One recorded op, the entry `index` of its tape; its outputs are the ids from `first` on.

    `inputs` maps the names of tracked inputs to value ids, `constants` those of plain Tensors to
    what they were like, `attributes` those of the other arguments to their values. `saved` holds a
    Tensor with the version of its storage, or the id of a value that was dropped.
    """

    op: Primitive
    index: int
    first: int
    inputs: dict[str, int]
    constants: dict[str, Spec]
    attributes: dict[str, Any]
    saved: dict[str, tuple[Tensor, int] | int]

    def id_of(self, name: str) -> int | None:
        """Value id of a tracked input or an output; None for anything else."""
        if name in self.op.outputs:
            return self.first + self.op.outputs.index(name)
        return self.inputs.get(name)


class NodeView:
    """What a rule sees: saves and attributes by name, specs, and what is wanted of it.

    `tracked` says that the sweep itself is recorded: saved inputs and outputs then come as Vars.
    """

    __slots__ = ("__dict__", "_node", "_tape", "tracked")

    def __init__(self, tape: Tape, node: Node, tracked: bool) -> None:
        self._tape = tape
        self._node = node
        self.tracked = tracked
        known = self.__dict__
        known.update(node.attributes)
        if not tracked:
            for name, entry in node.saved.items():
                if entry.__class__ is tuple and entry[0].storage.version == entry[1]:
                    known[name] = entry[0]

    def __getattr__(self, name: str) -> Any:
        """What is no plain attribute: dropped, to be wrapped, changed since, or never saved."""
        node = self._node
        if name not in node.saved:
            raise TapeError(
                f"[{node.op.name}] expected its rule to read saves and attributes, got {name!r}; "
                f"it saves {', '.join(node.op.saves) or 'nothing'}"
            )
        value = self._tape.saves.value(node, name)
        identity = node.id_of(name) if self.tracked else None
        return value if identity is None else Var(self._tape, identity, value)

    def names(self) -> list[str]:
        """Names of the Tensor arguments, tracked ones first."""
        return [*self._node.inputs, *self._node.constants]

    def spec(self, name: str) -> Spec:
        """Shape, dtype and device of an input or output, saved or not."""
        node = self._node
        identity = node.id_of(name)
        if identity is None and name not in node.constants:
            raise TapeError(f"[{node.op.name}] expected an input or output, got {name!r}")
        return node.constants[name] if identity is None else self._tape.specs[identity]

    def wants(self, name: str) -> bool:
        """Whether anyone needs this input's gradient."""
        return name in self._node.inputs

    def into(self, name: str) -> Tensor | None:
        """The buffer that this input's gradient is to be added to, or None.

        None too where the buffer is wider than kernels sum: then the tape adds.
        """
        identity = self._node.inputs.get(name, -1)
        buffer = self._tape.buffers.get(identity)
        if buffer is None:
            return None
        dtype = self._tape.specs[identity].dtype
        return buffer if buffer.dtype in (dtype, accumulator(dtype)) else None
