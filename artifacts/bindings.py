"""How logical parameters stand in stored objects (ART-01, ART-08).

One rule covers every layout: a parameter is an ordered list of parts, a part is a range of rows
(axis 0) of one object, and the parts' elements, one after the other, fill the parameter's shape in
C order. A fused tensor is one part; per-expert tensors are many; a projection grouped by head is a
few rows of the same object again and again; a split projection takes its rows from two parents of
different formats.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from pydantic import ConfigDict

from artifacts.errors import ArtifactError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Rows `start <= row < stop` along axis 0 of one stored object."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    object: str
    start: int
    stop: int


@dataclass(frozen=True)
class Binding:
    """A logical parameter: its shape, and the parts that fill it in C order."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    shape: Shape
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Run:
    """A piece of a flat read: `count` elements from `source` of an object to `target`."""

    object: str
    source: int
    target: int
    count: int


def row_size(shape: Shape) -> int:
    """Elements of one row (axis 0) of an object."""
    return math.prod(shape[1:])


class FlatView:
    """One binding seen as a flat array of elements.

    `shapes` gives the shape of every object that the binding names.
    """

    def __init__(self, binding: Binding, shapes: Mapping[str, Shape]) -> None:
        self.parts = binding.parts
        self._rows = [row_size(shapes[part.object]) for part in binding.parts]
        counts = [(p.stop - p.start) * row for p, row in zip(self.parts, self._rows, strict=True)]
        self._ends = list(accumulate(counts))

    @property
    def size(self) -> int:
        """Elements in all parts together."""
        return self._ends[-1] if self._ends else 0

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """The pieces of elements `start <= e < stop`, in order; adjoining ones are joined."""
        pending: Run | None = None
        index = bisect_right(self._ends, start)
        at = start
        while at < stop:
            part, row, end = self.parts[index], self._rows[index], self._ends[index]
            begin = end - (part.stop - part.start) * row
            count = min(stop, end) - at
            source = part.start * row + (at - begin)
            if (
                pending
                and pending.object == part.object
                and pending.source + pending.count == source
            ):
                pending = Run(part.object, pending.source, pending.target, pending.count + count)
            else:
                if pending:
                    yield pending
                pending = Run(part.object, source, at - start, count)
            at += count
            index += 1
        if pending:
            yield pending


def check_bindings(
    bindings: Mapping[str, Binding], objects: Mapping[str, Shape], where: str
) -> None:
    """Parts exist and lie in their objects, fill their parameter, and cover every object row
    exactly once.

    Raises ArtifactError naming `where` and the parameter or object.
    """
    ranges: dict[str, list[tuple[int, int, str]]] = {name: [] for name in objects}
    for name, binding in bindings.items():
        if not binding.parts:
            raise ArtifactError(f"{where}: parameter {name} is bound to nothing")
        for part in binding.parts:
            if part.object not in objects:
                raise ArtifactError(
                    f"{where}: parameter {name} is bound to a missing object {part.object}"
                )
            rows = objects[part.object][0]
            if not 0 <= part.start < part.stop <= rows:
                raise ArtifactError(
                    f"{where}: parameter {name} takes rows {part.start}:{part.stop} "
                    f"of {part.object}, which has {rows}"
                )
            ranges[part.object].append((part.start, part.stop, name))
        size = FlatView(binding, objects).size
        if size != math.prod(binding.shape):
            raise ArtifactError(
                f"{where}: parameter {name} of shape {list(binding.shape)} "
                f"is bound to {size} elements"
            )
    for name, taken in ranges.items():
        at = 0
        for start, stop, parameter in sorted(taken):
            if start < at:
                raise ArtifactError(
                    f"{where}: rows {start}:{min(stop, at)} of object {name} "
                    f"are bound twice ({parameter})"
                )
            if start > at:
                break
            at = stop
        if at < objects[name][0]:
            raise ArtifactError(f"{where}: row {at} of object {name} is bound to no parameter")
