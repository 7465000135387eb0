"""The tape: a list of nodes in order of creation, swept in reverse.

The order of recording is a topological order, so there is nothing to sort. Values are numbered as
they are made; an edge always points to a smaller number. The tape imports no ops: what it needs of
them (adding and summing gradients, looking for non-finite values) is put in `Tape.arithmetic`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from forge.autograd.hooks import Anomaly, Hook
from forge.autograd.node import Entry, Node, NodeView, Primitive, Record, Saved, Spec, Var
from forge.errors import DeviceError, GradientError, ShapeError, TapeError
from forge.tensor import Tensor, full

# Where a dropped value is not kept: by the nodes of recompute block 1, 2, …, or by none at all.
NOWHERE, EVERYWHERE = 0, -1


class Gradients:
    """Gradients of the leaves: `grads[w]` is a Tensor, or None where the root does not depend on w.

    With `create_graph` they are Vars. Raises `TapeError` for anything but a leaf without `into`.
    """

    def __init__(self, tape: Tape, by_id: dict[int, Any]) -> None:
        self._tape_id = id(tape)
        self._by_id = {leaf: by_id.get(leaf) for leaf in tape.leaves - tape.buffers.keys()}

    def __getitem__(self, leaf: Var) -> Any:
        if id(leaf.tape) != self._tape_id or leaf.id not in self._by_id:
            raise TapeError(
                f"[backward] expected a leaf of the swept tape without `into`, got {leaf!r}; "
                "register what needs a gradient with tape.leaf"
            )
        return self._by_id[leaf.id]


class Tape:
    """Records ops on Vars and sweeps them backward.

    `recompute` names outputs ("add_layernorm.y") that are dropped and made again when a rule asks;
    `anomaly` stops at the first value or gradient that is not finite; `hooks` see every node.
    Raises `TapeError` for an unknown name in `recompute`.
    """

    # add(a, b) -> a + b; add_(a, b): a += b, a as wide or wider; sum_to(x, shape): over what
    # broadcasting added; finite(x) -> bool; describe(x) -> str. On Vars where a sweep is recorded.
    arithmetic: ClassVar[Any]
    primitives: ClassVar[dict[str, Primitive]] = {}

    def __init__(
        self, *, recompute: Collection[str] = (), anomaly: bool = False, hooks: Sequence[Hook] = ()
    ) -> None:
        for name in recompute:
            op, _, output = name.partition(".")
            if op not in self.primitives or output not in self.primitives[op].outputs:
                raise TapeError(
                    f'[recompute] expected "op.output" of a known op, got {name!r}; '
                    'for example "add_layernorm.y" or "linear.out"'
                )
        self.nodes: list[Node | None] = []
        self.leaves: set[int] = set()
        self.buffers: dict[int, Tensor] = {}
        self._recompute = frozenset(recompute)
        self._hooks = list(hooks)
        if anomaly:
            self._hooks.append(Anomaly(self.arithmetic.finite, self.arithmetic.describe))
        self._specs: list[Spec] = []
        self._producers: list[int] = []
        self._dropped: dict[int, int] = {}
        self._remade: dict[int, Tensor] = {}
        self._region = self._regions = NOWHERE
        self._swept = False

    # Recording

    def leaf(self, value: Tensor, *, into: Tensor | None = None) -> Var:
        """A Var for a parameter or input, whose gradient `backward` reports.

        With `into` the gradient is added to that Tensor instead: same shape and device, the value's
        dtype or a wider one. Raises `TapeError`, `ShapeError` or `DeviceError`.
        """
        if not isinstance(value, Tensor):
            raise TapeError(
                f"[leaf] expected a Tensor, got {type(value).__name__}; make one with forge.tensor"
            )
        var = self._number(value, -1)
        self.leaves.add(var.id)
        if into is not None:
            if into.shape != value.shape:
                raise ShapeError(f"[leaf] expected `into` of shape {value.shape}, got {into.shape}")
            if into.device is not value.device:
                raise DeviceError(f"[leaf] expected `into` on {value.device}, got {into.device}")
            self.buffers[var.id] = into
        return var

    def apply(self, op: Primitive, inputs: dict[str, int], arguments: dict[str, Any]) -> Any:
        """Run an op on its arguments (Tensors, by name) and append its node; returns Vars."""
        if self._swept:
            raise TapeError(
                f"[{op.name}] expected a tape that records, got one that backward consumed; "
                "make a new Tape, or sweep with retain=True"
            )
        index = len(self.nodes)
        record = Record(inputs)
        for hook in self._hooks:
            hook.before("forward", op.name, index)
        outputs = op.run(arguments, record)
        if self._hooks:
            values = {k: x for k, x in arguments.items() if x.__class__ is Tensor}
            for hook in self._hooks:
                results = dict(zip(op.outputs, outputs, strict=True))
                hook.after("forward", op.name, index, values, results)
        node = Node(op, inputs, len(self._specs), self._region)
        variables = tuple([self._number(value, index) for value in outputs])
        self._save(node, arguments, outputs, record.extras)
        self.nodes.append(node)
        return variables if len(variables) > 1 else variables[0]

    def _number(self, value: Tensor, producer: int) -> Var:
        var = Var(self, len(self._specs), value)
        self._specs.append(Spec(value.shape, value.dtype, value.device))
        self._producers.append(producer)
        return var

    def _save(
        self,
        node: Node,
        arguments: dict[str, Any],
        outputs: tuple[Tensor, ...],
        extras: dict[str, Tensor],
    ) -> None:
        """Keep what the rule declared, and what making dropped outputs again takes."""
        op = node.op
        dropped = self._drop(node) if self._recompute or self._dropped or node.region else ()
        values = {**arguments, **dict(zip(op.outputs, outputs, strict=True)), **extras}
        for name in op.saves:
            if values.get(name).__class__ is Tensor:
                node.saved[name] = self._entry(node, name, values[name])
                if name in extras and node.region:
                    node.saved[name] = None
        if dropped:
            keep, names = node.saved, self._remake_needs(node, dropped, values)
            if names is None:
                keep = node.again = {}
                names = [name for name, x in arguments.items() if x.__class__ is Tensor]
            for name in names:
                keep[name] = self._entry(node, name, values[name])
        for name, value in arguments.items():
            if value.__class__ is Tensor:
                value = Spec(value.shape, value.dtype, value.device)
            node.arguments[name] = value

    # Recomputation

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Keep only what this block takes from outside; rerun its ops when a rule asks."""
        outer = self._region
        self._region = self._regions = self._regions + 1
        try:
            yield
        finally:
            self._region = outer

    def _drop(self, node: Node) -> list[str]:
        """Mark and name the outputs that are not kept; a view goes with its base."""
        op = node.op
        where = node.region
        if op.view and EVERYWHERE in [self._dropped.get(i) for i in node.inputs.values()]:
            where = EVERYWHERE
        dropped = []
        for identity, name in enumerate(op.outputs, start=node.first):
            place = EVERYWHERE if f"{op.name}.{name}" in self._recompute else where
            if place != NOWHERE:
                self._dropped[identity] = place
                dropped.append(name)
        return dropped

    def _entry(self, node: Node, name: str, value: Tensor) -> Entry:
        identity = node.id_of(name)
        if identity is not None:
            place = self._dropped.get(identity, NOWHERE)
            if place == EVERYWHERE or place == node.region != NOWHERE:
                return identity
        return Saved(value, value.storage.version)

    @staticmethod
    def _remake_needs(
        node: Node, dropped: list[str], values: dict[str, Any]
    ) -> tuple[str, ...] | None:
        """What the op's `Remake` reads, if it makes all that was dropped here."""
        remake = node.op.remake
        if remake is None or node.region or dropped != [remake.output]:
            return None
        return remake.needs if all(name in values for name in remake.needs) else None

    def _remake(self, identity: int) -> None:
        """Run again, in their order, the nodes that a dropped value comes from."""
        needed: dict[int, Node] = {}
        pending = [identity]
        while pending:
            index = self._producers[pending.pop()]
            node = self.nodes[index]
            if node is not None and index not in needed:
                needed[index] = node
                entries = (node.saved if node.again is None else node.again).values()
                pending += [i for i in entries if isinstance(i, int) and i not in self._remade]
        for index in sorted(needed):
            self._rerun(needed[index])

    def _rerun(self, node: Node) -> None:
        op = node.op
        if node.again is None and op.remake is not None:
            identity = node.first + op.outputs.index(op.remake.output)
            self._remade[identity] = op.remake.function(NodeView(self, node))
            return
        record = Record(node.inputs)
        again = {name: self._value(node, name, e) for name, e in (node.again or {}).items()}
        for identity, value in enumerate(op.run({**node.arguments, **again}, record), node.first):
            if identity in self._dropped:
                self._remade[identity] = value
        for name in record.extras.keys() & node.saved.keys():
            value = record.extras[name]
            node.saved[name] = Saved(value, value.storage.version)

    def fetch(self, node: Node, name: str, *, tracked: bool) -> Any:
        """A saved value for a rule: made again if it was dropped; as a Var if `tracked`."""
        if node.saved[name] is None:
            self._remake(node.first)
        value = self._value(node, name, node.saved[name])
        identity = node.id_of(name) if tracked else None
        return value if identity is None else Var(self, identity, value)

    def _value(self, node: Node, name: str, entry: Entry) -> Tensor:
        if not isinstance(entry, Saved):
            assert entry is not None
            if entry not in self._remade:
                self._remake(entry)
            return self._remade[entry]
        if entry.value.storage.version != entry.version:
            raise TapeError(
                f"[{node.op.name}] expected the saved {name!r} of node "
                f"{self._producers[node.first]} unchanged, got it changed in place since (version "
                f"{entry.version}, now {entry.value.storage.version}); change it after backward"
            )
        return entry.value

    def spec(self, node: Node, name: str) -> Spec:
        """Shape, dtype and device of a node's input or output."""
        identity = node.id_of(name)
        spec = node.arguments.get(name) if identity is None else self._specs[identity]
        if not isinstance(spec, Spec):
            raise TapeError(f"[{node.op.name}] expected an input or output, got {name!r}")
        return spec

    # The sweep

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
        that the gradients are Vars. Raises `TapeError`, `ShapeError`, `GradientError`.
        """
        grads: dict[int, Any] = {}
        owned: set[int] | None = None if create_graph else set()
        self._add(grads, owned, root.id, self._seed(root, seed))
        if create_graph and self.buffers:
            raise TapeError("[backward] expected leaves without `into` for create_graph, got some")
        last = self._producers[root.id]
        self._swept = not (retain or create_graph)
        if self._swept:
            del self.nodes[last + 1 :]
        for index in range(last, -1, -1):
            node = self.nodes[index]
            assert node is not None
            ids = range(node.first, node.first + len(node.op.outputs))
            douts = [grads.pop(identity, None) for identity in ids]
            if any(dout is not None for dout in douts):
                for name, gradient in self._run_rule(node, index, douts, create_graph).items():
                    self._add(grads, owned, node.inputs[name], gradient)
            if self._swept:
                self.nodes[index] = None
            for identity in ids:
                self._remade.pop(identity, None)
        return Gradients(self, grads)

    def _seed(self, root: Var, seed: Tensor | None) -> Tensor:
        if not isinstance(root, Var) or root.tape is not self:
            raise TapeError(f"[backward] expected a root on this tape, got {root!r}")
        if self._swept:
            raise TapeError(
                "[backward] expected a tape that was not swept yet, got a second backward; "
                "pass retain=True to the first"
            )
        spec = self._specs[root.id]
        if seed is None:
            if root.value.size != 1:
                raise ShapeError(
                    f"[backward] expected a seed for a root of shape {spec.shape}, got none; "
                    "pass dL/droot, or reduce the root to a scalar"
                )
            return full(spec.shape, 1.0, spec.dtype, spec.device)
        if Spec(seed.shape, seed.dtype, seed.device) != spec:
            raise ShapeError(f"[backward] expected a seed like the root, {spec}, got {seed!r}")
        return seed

    def _run_rule(
        self, node: Node, index: int, douts: list[Any], create_graph: bool
    ) -> dict[str, Any]:
        """The gradients of the tracked inputs, checked and summed to their shapes."""
        op = node.op
        rule = op.rule_for(twice=create_graph)
        for hook in self._hooks:
            hook.before("backward", op.name, index)
        result = rule(NodeView(self, node, tracked=create_graph), *douts)
        gradients = {}
        for name, identity in node.inputs.items():
            if name not in result:
                raise GradientError(
                    f"[{op.name}] expected its rule to return a gradient of {name!r}, "
                    f"got {', '.join(result) or 'none'}"
                )
            if result[name] is not None:
                gradients[name] = self._fit(op, name, identity, result[name])
        if self._hooks:
            inputs = {f"d{n}": d for n, d in zip(op.outputs, douts, strict=True) if d is not None}
            for hook in self._hooks:
                outputs = {f"d{name}": gradient for name, gradient in gradients.items()}
                hook.after("backward", op.name, index, inputs, outputs)
        return gradients

    def _fit(self, op: Primitive, name: str, identity: int, gradient: Any) -> Any:
        spec = self._specs[identity]
        buffer = self.buffers.get(identity)
        if gradient is buffer:
            return gradient
        if gradient.shape != spec.shape:
            gradient = self.arithmetic.sum_to(gradient, spec.shape)
        allowed = (spec.dtype, spec.dtype if buffer is None else buffer.dtype)
        if gradient.device is not spec.device or gradient.dtype not in allowed:
            raise GradientError(
                f"[{op.name}] expected d{name} as {spec.dtype} on {spec.device}, "
                f"got {gradient.dtype} on {gradient.device}"
            )
        return gradient

    def _add(
        self, grads: dict[int, Any], owned: set[int] | None, identity: int, gradient: Any
    ) -> None:
        """Add to what other uses of the value gave; in place only into sums made here."""
        buffer = self.buffers.get(identity)
        if buffer is not None:
            if gradient is not buffer:
                self.arithmetic.add_(buffer, gradient)
        elif identity not in grads:
            grads[identity] = gradient
        elif owned is not None and identity in owned:
            self.arithmetic.add_(grads[identity], gradient)
        else:
            grads[identity] = self.arithmetic.add(grads[identity], gradient)
            if owned is not None:
                owned.add(identity)

    def summary(self) -> str:
        """A table of the nodes: op, output shapes, bytes saved, per node and in all.

        A storage that several nodes keep is counted at the first of them.
        """
        seen: set[int] = set()
        rows = [f"{'node':>5} {'op':24} {'bytes saved':>14} outputs"]
        total = 0
        for index, node in enumerate(self.nodes):
            if node is not None:
                entries = [*node.saved.values(), *(node.again or {}).values()]
                kept = {id(e.value.storage): e.value for e in entries if isinstance(e, Saved)}
                saved = sum(value.nbytes for key, value in kept.items() if key not in seen)
                seen.update(kept)
                specs = self._specs[node.first : node.first + len(node.op.outputs)]
                shapes = ", ".join(f"{list(spec.shape)} {spec.dtype}" for spec in specs)
                rows.append(f"{index:5} {node.op.name:24} {saved:14,} {shapes}")
                total += saved
        return "\n".join([*rows, f"{'':5} {'total':24} {total:14,}"])
