"""What nodes keep for their rules; and recomputation: what they drop, and make again when asked.

A rule finds a saved value by name. The node holds it with the version its storage had, or, where
recomputation dropped it, only a value id. An output ("add_layernorm.y") or an extra is dropped by
name, or with all that is made in a `with tape.recompute():` block, a region; what crosses the
region's border is kept, whatever its name. A node that drops something keeps, as if saved, what
makes it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from forge.autograd.node import Node, Remake
from forge.errors import TapeError
from forge.tensor import Tensor

# Whose saves a dropped value is missing from: no one's, everyone's, or those of region 1, 2, ….
NOWHERE, EVERYWHERE = 0, -1


class Saves:
    """Keeps what the nodes of one tape save, and drops and remakes what its policy says."""

    def __init__(self, policy: Collection[str], nodes: list[Node], producers: list[int]) -> None:
        self._policy = frozenset(policy)
        self._nodes = nodes
        self._producers = producers
        self._region = self._regions = NOWHERE
        # By value id. An extra has none: it goes by node and name, its node's first leads to it.
        self._dropped: dict[int | tuple[int, str], int] = {}
        # By node that dropped something: what makes it again, where that is not the op itself, and
        # the names of what that reads.
        self._plans: dict[int, tuple[Remake | None, tuple[str, ...]]] = {}
        # Values made again, by node and name, until the sweep has passed the node that made them.
        self.remade: dict[int, dict[str, Tensor]] = {}

    @contextmanager
    def region(self) -> Iterator[None]:
        """A block whose values are dropped."""
        outer = self._region
        self._region = self._regions = self._regions + 1
        try:
            yield
        finally:
            self._region = outer

    def save(self, node: Node, arguments: dict[str, Any], made: dict[str, Tensor]) -> None:
        """Keep what the rule declared, of the arguments and of the outputs and extras `made`."""
        names, region = node.op.saves, self._region
        recomputing = region != NOWHERE or self._policy
        if recomputing:
            names += self._drop(node, made)
        saved = node.saved
        for name in names:
            value = arguments[name] if name in arguments else made.get(name)
            if value.__class__ is Tensor:
                saved[name] = value, value.storage.version
        for name in node.saved if recomputing else ():
            identity = node.id_of(name)
            place = self._dropped.get((node.index, name) if identity is None else identity, NOWHERE)
            if place == EVERYWHERE or place == region != NOWHERE:
                node.saved[name] = node.first if identity is None else identity

    def value(self, node: Node, name: str) -> Tensor:
        """A saved value, made again if it was dropped; raises `TapeError` if it was changed."""
        entry = node.saved[name]
        if isinstance(entry, int):
            index = self._producers[entry]
            if index not in self.remade:
                self._remake(index)
            maker = self._nodes[index]
            if maker is not node:
                name = maker.op.outputs[entry - maker.first]
            return self.remade[index][name]
        value, version = entry
        if value.storage.version != version:
            raise TapeError(
                f"[{node.op.name}] expected the saved {name!r} of node {node.index} unchanged, got "
                f"it changed in place since (version {version}, now {value.storage.version}); "
                "change it after backward"
            )
        return value

    def _drop(self, node: Node, made: dict[str, Tensor]) -> tuple[str, ...]:
        """Mark what is not kept of what is `made`; the names of what is kept to make it again."""
        op = node.op
        rebased = op.view and EVERYWHERE in map(self._dropped.get, node.inputs.values())
        dropped = []
        for name in made:
            place = self._region
            if place == NOWHERE and (rebased or f"{op.name}.{name}" in self._policy):
                place = EVERYWHERE
            if place != NOWHERE:
                identity = node.id_of(name)
                self._dropped[(node.index, name) if identity is None else identity] = place
                dropped.append(name)
        if not dropped:
            return ()
        reads, cheaper = (*node.inputs, *node.constants), False
        remake = op.remake
        if remake is not None and self._region == NOWHERE and dropped == [remake.output]:
            exact = remake.exact is None or remake.exact(made[remake.output])
            cheaper = exact and {*remake.needs} <= {*reads, *made, *node.attributes}
            reads = tuple(n for n in remake.needs if n not in node.attributes) if cheaper else reads
        self._plans[node.index] = remake if cheaper else None, reads
        return reads

    def _remake(self, index: int) -> None:
        """Run again, in their order, the nodes that the dropped values of a node come from."""
        needed: set[int] = set()
        pending = {index}
        while pending:
            index = pending.pop()
            needed.add(index)
            entries = [self._nodes[index].saved[name] for name in self._plans[index][1]]
            sources = {self._producers[entry] for entry in entries if isinstance(entry, int)}
            pending |= sources - needed - self.remade.keys()
        for index in sorted(needed):
            node, (remake, reads) = self._nodes[index], self._plans[index]
            values = {**node.attributes, **{name: self.value(node, name) for name in reads}}
            if remake is None:
                self.remade[index] = node.op.run(node.inputs, values)
            else:
                self.remade[index] = {remake.output: remake.function(SimpleNamespace(**values))}
