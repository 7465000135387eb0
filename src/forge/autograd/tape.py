"""The tape: a list of nodes in order of creation, swept in reverse.

The order of recording is a topological order, so there is nothing to sort. Values are numbered as
they are made; an edge always points to a smaller number. The tape imports no ops: what it needs of
them (adding and summing gradients, looking for non-finite values) is put in `Tape.arithmetic`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from forge.autograd.hooks import Event, Hook, stop_at_non_finite
from forge.autograd.node import Node, NodeView, Primitive, Var
from forge.autograd.saves import Saves
from forge.dtypes import FLOATING
from forge.errors import DtypeError, GradientError, ShapeError, TapeError, nearest, no_single_name
from forge.tensor import Shape, Spec, Tensor, full


class Gradients:
    """Gradients of the leaves: `grads[w]` is a Tensor, or None where the root does not depend on w.

    With `create_graph` they are Vars. Raises `TapeError` for anything but a leaf without `into`.
    """

    def __init__(self, leaves: set[int], buffered: Collection[int], by_id: dict[int, Any]) -> None:
        self._leaves = leaves  # The tape's own set, which tells its leaves from another tape's.
        self._buffered = frozenset(buffered)
        self._by_id = by_id

    def __getitem__(self, leaf: Var) -> Any:
        known = leaf.__class__ is Var and leaf.tape.leaves is self._leaves
        if not known or leaf.id not in self._leaves or leaf.id in self._buffered:
            raise TapeError(
                f"[backward] expected a leaf of the swept tape without `into`, got {leaf!r}; "
                "register what needs a gradient with tape.leaf"
            )
        return self._by_id.get(leaf.id)


class Tape:
    """Records ops on Vars and sweeps them backward.

    `recompute` names outputs and extras ("mlp.hidden") that are dropped and made again when a rule
    asks; `anomaly` stops at the first value or gradient that is not finite; `hooks` see every node.
    Raises `TapeError` for an unknown name in `recompute`, `DeviceError` for hooks in a capture.
    """

    # add(a, b); add_(a, b): a as wide or wider; sum_to(x, shape); finite(x) -> bool; describe(x) ->
    # str: on Vars where a sweep is recorded. eager(what): raises where a replay would leave it out.
    arithmetic: ClassVar[Any]
    primitives: ClassVar[dict[str, Primitive]] = {}

    def __init__(
        self, *, recompute: Collection[str] = (), anomaly: bool = False, hooks: Sequence[Hook] = ()
    ) -> None:
        no_single_name("recompute", recompute, TapeError)
        for name in recompute:
            op = self.primitives.get(name.rpartition(".")[0])
            if op is None or name.rpartition(".")[2] not in op.made:
                made = [f"{p.name}.{v}" for p in self.primitives.values() for v in p.made]
                one = f"one of {op.name}'s {', '.join(op.made)}" if op else '"op.value" of an op'
                raise TapeError(f"[recompute] expected {one}, got {name!r}; {nearest(name, made)}")
        self.nodes: list[Node] = []
        self.leaves: set[int] = set()
        self.buffers: dict[int, Tensor] = {}
        # Of every value, by id: its spec, and the node that made it (-1 for a leaf).
        self.specs: list[Spec] = []
        self.producers: list[int] = []
        self.saves = Saves(recompute, self.nodes, self.producers)
        self._hooks = list(hooks)
        if anomaly:
            self._hooks.append(stop_at_non_finite(self.arithmetic.finite, self.arithmetic.describe))
        if self._hooks:
            self.arithmetic.eager("hook on a tape")
        self._swept = False

    def leaf(self, value: Tensor, *, into: Tensor | None = None) -> Var:
        """A Var for a parameter or input, whose gradient `backward` reports.

        With `into` the gradient is added to that Tensor instead: same shape and device, the value's
        dtype or a wider one. Raises `TapeError`, `ShapeError`, `DtypeError` or `DeviceError`.
        """
        self._check_recording("leaf")
        if value.__class__ is not Tensor or value.dtype not in FLOATING:
            raise DtypeError(
                f"[leaf] expected a floating Tensor, got {value!r}; ids and masks are passed as "
                "they are, other arrays go through forge.tensor"
            )
        var: Var = self._number(value, -1)
        if into is not None:
            self.specs[var.id].require("leaf", "`into`", into, wider=True)
            self.buffers[var.id] = into
        self.leaves.add(var.id)
        return var

    def recompute(self) -> AbstractContextManager[None]:
        """Keep only what this block takes from outside; rerun its ops when a rule asks."""
        return self.saves.region()

    def apply(self, op: Primitive, arguments: dict[str, Any]) -> Any:
        """Run an op on its arguments by name, Vars among them; append its node and return Vars."""
        if self._swept:
            self._check_recording(op.name)
        if op.rule is None:
            raise GradientError(
                f"[{op.name}] expected Tensors, got a Var: the op is not differentiable; pass its "
                f"value, compose the op of smaller ones, or give it a rule with @{op.name}.rule"
            )
        inputs, constants, attributes = {}, {}, {}
        for name, x in arguments.items():
            kind = x.__class__
            if kind is Var:
                if x.tape is not self:
                    raise TapeError(
                        f"[{op.name}] expected Vars of one tape, got {name!r} from another; "
                        "finish with one tape before the next, or pass its value"
                    )
                inputs[name] = x.id
                arguments[name] = x.value
            elif kind is Tensor:
                constants[name] = Spec(x.shape, x.dtype, x.device)
            else:
                attributes[name] = x
        for name in op.buffers:
            if attributes.pop(name, self) is not None:
                raise TapeError(
                    f"[{op.name}] expected no {name!r} while recording, got one; it is for rules: "
                    "give the buffer to tape.leaf"
                )
        index = len(self.nodes)
        if self._hooks:
            values = {name: arguments[name] for name in (*inputs, *constants)}
            self._tell("forward", op.name, index, values)
        made = op.run(inputs, arguments)
        if self._hooks:
            self._tell("forward", op.name, index, values, {n: made[n] for n in op.outputs})
        node = Node(op, index, len(self.specs), inputs, constants, attributes, {})
        self.saves.save(node, arguments, made)
        self.nodes.append(node)
        if len(op.outputs) == 1:
            return self._number(made[op.outputs[0]], index)
        return tuple([self._number(made[name], index) for name in op.outputs])

    def backward(
        self,
        root: Var,
        seed: Tensor | None = None,
        *,
        retain: bool = False,
        create_graph: bool = False,
    ) -> Gradients:
        """Gradients of the leaves, given `seed` = dL/droot (1 for a root of one element).

        Each node's saved values and output gradients are freed as soon as its rule has run.
        `retain` keeps the tape for another sweep; `create_graph` also records the sweep itself, so
        that the gradients are Vars. Raises `TapeError`, `GradientError`, and `ShapeError`,
        `DtypeError` or `DeviceError` for the seed.
        """
        seed = self._seed(root, seed, create_graph)
        last = self.producers[root.id]
        self._swept = not (retain or create_graph)
        if self._swept:
            del self.nodes[last + 1 :]
        sums: set[int] = set()
        grads: dict[int, Any] = {root.id: seed}
        if root.id in self.buffers:
            self.arithmetic.add_(self.buffers[root.id], grads.pop(root.id))
        for index in range(last, -1, -1):
            self._sweep(self.nodes[index], grads, sums, create_graph)
            self.saves.remade.pop(index, None)
            if self._swept:
                self.nodes.pop()
        # What is left are the leaves'. Recorded, one that depends on no leaf is a Var all the same.
        for leaf, gradient in grads.items() if create_graph else ():
            if isinstance(gradient, Tensor):
                grads[leaf] = self._number(gradient, -1)
        return Gradients(self.leaves, self.buffers.keys(), grads)

    def _check_recording(self, op: str) -> None:
        if self._swept:
            raise TapeError(
                f"[{op}] expected a tape that records, got one that backward consumed; "
                "make a new Tape, or sweep with retain=True"
            )

    def _number(self, value: Tensor, producer: int) -> Any:
        var = Var(self, len(self.specs), value)
        self.specs.append(Spec(value.shape, value.dtype, value.device))
        self.producers.append(producer)
        # No gradient flows through integers: they leave the tape.
        return var if value.dtype in FLOATING else value

    def _tell(self, *event: Any) -> None:
        for hook in self._hooks:
            hook(Event(*event))

    def _seed(self, root: Any, seed: Any, create_graph: bool) -> Any:
        if not isinstance(root, Var) or root.tape is not self:
            raise TapeError(f"[backward] expected a root on this tape, got {root!r}")
        self._check_recording("backward")
        if create_graph and self.buffers:
            raise TapeError("[backward] expected leaves without `into` for create_graph, got some")
        spec = self.specs[root.id]
        if seed is not None:
            spec.require("backward", "the seed", seed)
        elif math.prod(spec.shape) != 1:
            raise ShapeError(
                f"[backward] expected a seed for a root of shape {list(spec.shape)}, got none; "
                "pass dL/droot, or reduce the root to a scalar"
            )
        return full(spec.shape, 1.0, spec.dtype, spec.device) if seed is None else seed

    def _sweep(self, node: Node, grads: dict[int, Any], sums: set[int], create_graph: bool) -> None:
        """Turn the gradients of a node's outputs into gradients of its inputs."""
        op = node.op
        douts, wanted = [], False
        for identity in range(node.first, node.first + len(op.outputs)):
            dout = grads.pop(identity, None)
            wanted = wanted or dout is not None
            douts.append(dout)
        if not wanted:
            return
        assert op.rule is not None
        if create_graph and op.differentiable != "twice":
            raise GradientError(
                f"[{op.name}] expected an op that is differentiable twice, got one that is so "
                f"{op.differentiable}; compose it of smaller ops"
            )
        if self._hooks:
            taken = {f"d{n}": d for n, d in zip(op.outputs, douts, strict=True) if d is not None}
            self._tell("backward", op.name, node.index, taken)
        result: Any = op.rule(NodeView(self, node, create_graph), *douts)
        given = {}
        for name, identity in node.inputs.items():
            if result.__class__ is not dict or name not in result:
                raise GradientError(
                    f"[{op.name}] expected its rule to return a gradient of {name!r}, or None, "
                    f"got {list(result) if isinstance(result, dict) else result}"
                )
            dx, spec, buffer = result[name], self.specs[identity], self.buffers.get(identity)
            if dx is not None and dx is not buffer:
                # Most fit as they are, and need no call.
                same = dx.__class__ is Tensor and dx.shape == spec.shape
                same = same and dx.dtype == spec.dtype and dx.device is spec.device
                if buffer is not None or not same:
                    dx = self._fitted(op, name, spec, buffer, dx)
                before = grads.get(identity) if buffer is None else buffer
                tensors = before.__class__ is dx.__class__ is Tensor
                if before is None:
                    grads[identity] = dx
                elif before is buffer or (identity in sums and tensors):
                    self.arithmetic.add_(before, dx)
                else:
                    # In place only into the sums that are made here.
                    grads[identity] = self.arithmetic.add(before, dx)
                    sums.add(identity)
            if self._hooks and dx is not None:
                given[f"d{name}"] = dx
        if self._hooks:
            self._tell("backward", op.name, node.index, taken, given)

    def _fitted(self, op: Primitive, name: str, spec: Spec, buffer: Tensor | None, dx: Any) -> Any:
        """dx summed over what broadcasting added; raises `GradientError` if it does not fit."""
        fits = dx.__class__ is Tensor or dx.__class__ is Var
        if fits and dx.shape != spec.shape and _broadcasts(spec.shape, dx.shape):
            dx = self.arithmetic.sum_to(dx, spec.shape)
        if (
            not fits
            or dx.shape != spec.shape
            or dx.device is not spec.device
            or (dx.dtype != spec.dtype and (buffer is None or dx.dtype != buffer.dtype))
            or (buffer is not None and dx.storage is buffer.storage)
        ):
            raise GradientError(
                f"[{op.name}] expected its rule to return d{name} as {spec}, or its buffer "
                f"once added to, got {dx!r}"
            )
        return dx

    def summary(self) -> str:
        """A table of the nodes: op, outputs, bytes saved, per node and in all.

        A storage counts at the first node that keeps it. What is the caller's, leaves and plain
        Tensors, does not count.
        """
        rows = [f"{'node':>5} {'op':24} {'bytes saved':>14} outputs"]
        seen: set[int] = set()
        total = 0
        for node in self.nodes:
            kept = {}
            for name, entry in node.saved.items():
                leaf = name in node.inputs and self.producers[node.inputs[name]] < 0
                if isinstance(entry, tuple) and not leaf and name not in node.constants:
                    kept[id(entry[0].storage)] = entry[0].nbytes
            saved = sum(nbytes for storage, nbytes in kept.items() if storage not in seen)
            seen |= kept.keys()
            total += saved
            specs = self.specs[node.first : node.first + len(node.op.outputs)]
            outputs = ", ".join(f"{list(spec.shape)} {spec.dtype}" for spec in specs)
            rows.append(f"{node.index:5} {node.op.name:24} {saved:14,} {outputs}")
        return "\n".join([*rows, f"{'':5} {'total':24} {total:14,}"])


def _broadcasts(shape: Shape, to: Shape) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(m in (1, n) for m, n in pairs)
