"""All parameters of a model as named views of one flat buffer.

Gradients and the optimizer's moments have the same layout, so that clipping and updating are one
pass over contiguous memory, whatever the number of parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from forge import ops
from forge.autograd.node import Var
from forge.autograd.tape import Tape
from forge.errors import ArgumentError, ShapeError, nearest, no_single_name
from forge.tensor import Device, Shape, Tensor, empty, tensor, zeros

# Every parameter starts at a multiple of this many elements, 256 bytes of float32: so a vector load
# never crosses a start, and the gaps stay zero.
ALIGNMENT = 64
# The update works on pieces of at most this many elements: 64 KiB of each buffer, which four of
# them share a core's L2 with, and small enough to balance over threads.
TILE = 16384


@dataclass(frozen=True)
class Segment:
    """A parameter's place in the flat buffer, and how the optimizer treats it."""

    name: str
    shape: Shape
    offset: int
    size: int


class Params(Mapping[str, Tensor]):
    """Named Tensors over one flat Tensor, in model order; a read-only mapping of them.

    All share the flat buffer's storage, and so its version. `shapes` maps names to shapes. The
    parameters named in `rounded` also exist in bfloat16, which is what the model then computes
    with; the optimizer rewrites these copies with each update. `padded` gives a matrix more rows
    in memory, which are zero and stay so. `compute` maps every name to what the model takes: its
    copy and its padded rows, where it has such.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        device: Device,
        dtype: str = "float32",
        *,
        rounded: Collection[str] = (),
        padded: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.segments: list[Segment] = []
        offset = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape, dtype=np.int64))
            self.segments.append(Segment(name, tuple(shape), offset, size))
            rows = padded.get(name)
            stored = size if rows is None else rows * (size // shape[0])
            offset += -(-stored // ALIGNMENT) * ALIGNMENT
        self.flat = zeros((offset,), dtype, device)
        self.working = zeros((offset,), "bfloat16", device) if rounded else None
        self._padded = padded
        self._views = {s.name: self.flat.view(s.shape, s.offset) for s in self.segments}
        self._stored = dict(self._views)
        self.compute: dict[str, Tensor] = {}
        for s in self.segments:
            if s.name in padded:
                shape = (padded[s.name], *s.shape[1:])
                self._stored[s.name] = self.flat.view(shape, s.offset)
            view = self._stored[s.name]
            if self.working is not None and s.name in rounded:
                view = self.working.view(view.shape, s.offset)
            self.compute[s.name] = view

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    @property
    def precision(self) -> str:
        """What a model computes in with these: "bf16", or "fp32" without a rounded copy."""
        return "fp32" if self.working is None else "bf16"

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(segment.size for segment in self.segments)

    def zeros_like(self, dtype: str | None = None) -> Params:
        """Zeros in the same layout: for gradients and moments."""
        shapes = {segment.name: segment.shape for segment in self.segments}
        return Params(shapes, self.flat.device, dtype or self.flat.dtype, padded=self._padded)

    def zero_(self) -> None:
        """Set every element to zero."""
        self.flat.device.memory.fill(self.flat, 0)
        self.flat.storage.version += 1

    def leaves(self, tape: Tape, into: Params | None = None) -> dict[str, Var]:
        """A leaf for every parameter, whose gradient is added to the same name of `into`."""
        return {
            name: tape.leaf(value, into=None if into is None else into._stored[name])
            for name, value in self.compute.items()
        }

    def load_(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy arrays of the same names and shapes in; raises `ShapeError` where they differ."""
        _check({name: view.shape for name, view in self._views.items()}, arrays)
        for name, view in self._views.items():
            view.device.memory.write(view, arrays[name])
        self.flat.storage.version += 1
        if self.working is not None:
            self.working.device.memory.copy(ops.cast(self.flat, "bfloat16"), self.working)
            self.working.storage.version += 1

    def numpy(self) -> dict[str, np.ndarray]:
        """Copies of all parameters on the host, by name."""
        return {name: view.numpy() for name, view in self._views.items()}

    def tiles(self, skip: Iterable[str] = ()) -> Tensor:
        """int64 [m, 3]: rows (start, stop, segment) of at most `TILE` elements, none of `skip`.

        Raises `ArgumentError` for a name in `skip` that is no parameter's.
        """
        no_single_name("params", skip, ArgumentError)
        frozen = set(skip)
        if unknown := sorted(frozen - self.keys()):
            raise ArgumentError(
                f"[params] expected names of parameters, got {_some(unknown)}; "
                + nearest(unknown[0], self)
            )
        rows = [
            (start, min(start + TILE, s.offset + s.size), index)
            for index, s in enumerate(self.segments)
            if s.name not in frozen
            for start in range(s.offset, s.offset + s.size, TILE)
        ]
        device = self.flat.device
        if not rows:
            return empty((0, 3), "int64", device)
        return tensor(np.array(rows, np.int64), device=device)


class Int8Params(Mapping[str, Tensor]):
    """Named Tensors for inference, matrices in int8; a read-only mapping, and its own `compute`.

    A matrix of `matrices`, rows being output channels, is quantized into int8 under its own name
    and the scales of its rows, float32, under the name with `scale` for `weight`; those in `turned`
    are [in, out] and are transposed first. All else is float32. `shapes` and `arrays` map names as
    files have them. Raises `ShapeError` where they differ.
    """

    precision = "int8"

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        arrays: Mapping[str, np.ndarray],
        device: Device,
        matrices: Collection[str],
        turned: Collection[str],
    ) -> None:
        _check(shapes, arrays)
        self.compute: dict[str, Tensor] = {}
        # One buffer, for which the system has huge pages: a matrix alone would be too small, and
        # the processor would look up an address for every 4 KiB that it reads.
        sizes = {name: int(np.prod(shapes[name], dtype=np.int64)) for name in matrices}
        room = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values())
        flat, offset = empty((room,), "int8", device), 0
        for name in shapes:
            array = arrays[name].T if name in turned else arrays[name]
            value = tensor(array, "float32", device)
            if name in matrices:
                q, scale = ops.quantize(value)
                self.compute[name.removesuffix("weight") + "scale"] = scale
                value = flat.view(q.shape, offset)
                device.memory.copy(q, value)
                offset += -(-sizes[name] // ALIGNMENT) * ALIGNMENT
            self.compute[name] = value

    def __getitem__(self, name: str) -> Tensor:
        return self.compute[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.compute)

    def __len__(self) -> int:
        return len(self.compute)


def _check(shapes: Mapping[str, Shape], arrays: Mapping[str, np.ndarray]) -> None:
    missing, extra = shapes.keys() - arrays.keys(), arrays.keys() - shapes.keys()
    if missing or extra:
        raise ShapeError(
            f"[params] expected the model's {len(shapes)} names, got "
            f"{_some(missing)} missing and {_some(extra)} unknown"
        )
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ShapeError(
                f"[params] expected {name} of shape {list(shape)}, got {list(arrays[name].shape)}"
            )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return (", ".join(ordered[:3]) or "none") + more
