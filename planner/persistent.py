"""A persistent map from small non-negative integers to values, the container of the stores; and sorted tuples.

A radix tree of 32-wide tuples. `set` copies one path (a few hundred bytes at a million keys) and
shares the rest with the older version, which stays valid. Iteration is in key order, so nothing
depends on hashing. A value is never None.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_BITS = 5
_WIDTH = 1 << _BITS
_MASK = _WIDTH - 1
_EMPTY: tuple[Any, ...] = (None,) * _WIDTH

T = TypeVar("T")
Item = TypeVar("Item", int, tuple[str, bytes, int])


def _set(node: tuple[Any, ...] | None, shift: int, key: int, value: Any) -> tuple[Any, ...]:
    items = list(node or _EMPTY)
    i = (key >> shift) & _MASK
    items[i] = value if shift == 0 else _set(items[i], shift - _BITS, key, value)
    return tuple(items)


def _delete(node: tuple[Any, ...], shift: int, key: int) -> tuple[Any, ...] | None:
    i = (key >> shift) & _MASK
    if node[i] is None:
        raise KeyError(key)
    items = list(node)
    items[i] = None if shift == 0 else _delete(node[i], shift - _BITS, key)
    return tuple(items) if items != list(_EMPTY) else None


def _write(
    node: tuple[Any, ...] | None, shift: int, base: int, lo: int, values: Sequence[Any]
) -> tuple[Any, ...]:
    """Put values at keys lo, lo+1, ... of the node that covers [base, base + 32 << shift)."""
    items = list(node or _EMPTY)
    if shift == 0:
        items[lo - base : lo - base + len(values)] = values
        return tuple(items)
    span = 1 << shift
    done = 0
    while done < len(values):
        key = lo + done
        i = (key - base) >> shift
        start = base + i * span
        take = min(len(values) - done, start + span - key)
        part = values[done : done + take]
        items[i] = _write(items[i], shift - _BITS, start, key, part)
        done += take
    return tuple(items)


def _cut(node: tuple[Any, ...], shift: int, base: int, size: int) -> tuple[Any, ...] | None:
    """Drop every key >= size."""
    span = 1 << shift
    keep = max(0, size - base + span - 1) >> shift
    items = list(node[:keep]) + [None] * (_WIDTH - min(keep, _WIDTH))
    last = keep - 1
    if shift and 0 <= last < _WIDTH and items[last] is not None:
        items[last] = _cut(items[last], shift - _BITS, base + last * span, size)
    return tuple(items) if items != list(_EMPTY) else None


def _pairs(node: tuple[Any, ...], shift: int, base: int, out: list[tuple[int, Any]]) -> None:
    if shift == 0:
        out += [(base + i, value) for i, value in enumerate(node) if value is not None]
        return
    for i, child in enumerate(node):
        if child is not None:
            _pairs(child, shift - _BITS, base + (i << shift), out)


def _values(node: tuple[Any, ...], shift: int, out: list[Any]) -> None:
    if shift == 0:
        out += [value for value in node if value is not None]
        return
    for child in node:
        if child is not None:
            _values(child, shift - _BITS, out)


def _gather(node: tuple[Any, ...], shift: int, base: int, lo: int, hi: int, out: list[Any]) -> None:
    if shift == 0:
        out.extend(node[max(0, lo - base) : hi - base])
        return
    first = max(0, lo - base) >> shift
    last = min(_WIDTH, ((hi - base - 1) >> shift) + 1)
    for i in range(first, last):
        if node[i] is not None:
            _gather(node[i], shift - _BITS, base + (i << shift), lo, hi, out)


@dataclass(frozen=True, slots=True, eq=False)
class IntMap(Generic[T]):
    """Immutable map int -> T. Equality is by content; maps of equal content print alike."""

    root: tuple[Any, ...] | None = None
    shift: int = 0

    def get(self, key: int) -> T | None:
        """The value, or None; never raises."""
        shift = self.shift
        node = self.root
        if node is None or key < 0 or key >> shift >= _WIDTH:
            return None
        while shift:
            node = node[(key >> shift) & _MASK]
            if node is None:
                return None
            shift -= _BITS
        value: T | None = node[key & _MASK]
        return value

    def _grown(self, key: int) -> tuple[tuple[Any, ...] | None, int]:
        root, shift = self.root, self.shift
        while key >> shift >= _WIDTH:
            root = None if root is None else (root, *_EMPTY[1:])
            shift += _BITS
        return root, shift

    def set(self, key: int, value: T) -> IntMap[T]:
        """A map that also holds value at key."""
        root, shift = self._grown(key)
        return IntMap(_set(root, shift, key, value), shift)

    def set_range(self, lo: int, values: Sequence[T]) -> IntMap[T]:
        """A map with values at lo, lo+1, ...; shares leaves, so bulk writes are cheap."""
        if not values:
            return self
        root, shift = self._grown(lo + len(values) - 1)
        return IntMap(_write(root, shift, 0, lo, values), shift)

    def delete(self, key: int) -> IntMap[T]:
        """A map without key; KeyError where it is absent."""
        if self.get(key) is None:
            raise KeyError(key)
        assert self.root is not None
        root = _delete(self.root, self.shift, key)
        return IntMap(root, self.shift if root is not None else 0)

    def cut(self, size: int) -> IntMap[T]:
        """A map without the keys >= size."""
        if self.root is None or size >= _WIDTH << self.shift:
            return self
        root = _cut(self.root, self.shift, 0, size)
        return IntMap(root, self.shift if root is not None else 0)

    def slice(self, lo: int, hi: int) -> list[T]:
        """Values at keys lo..hi-1 in order. Every key of the range must be present."""
        out: list[T] = []
        if self.root is not None and lo < hi:
            _gather(self.root, self.shift, 0, lo, hi, out)
        return out

    def last(self) -> int:
        """The largest key, or -1."""
        node, shift, key = self.root, self.shift, 0
        while node is not None:
            i = max(i for i, child in enumerate(node) if child is not None)
            key += i << shift
            if shift == 0:
                return key
            node, shift = node[i], shift - _BITS
        return -1

    def items(self) -> list[tuple[int, T]]:
        """Pairs in key order."""
        out: list[tuple[int, T]] = []
        if self.root is not None:
            _pairs(self.root, self.shift, 0, out)
        return out

    def values(self) -> list[T]:
        """Values in key order."""
        out: list[T] = []
        if self.root is not None:
            _values(self.root, self.shift, out)
        return out

    def __len__(self) -> int:
        return len(self.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntMap):
            return NotImplemented
        return self.root is other.root or self.items() == other.items()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IntMap({dict(self.items())!r})"


def with_item(items: tuple[Item, ...], item: Item) -> tuple[Item, ...]:
    """A sorted tuple with one more item."""
    more = list(items)
    insort(more, item)
    return tuple(more)


def without_item(items: tuple[Item, ...], item: Item) -> tuple[Item, ...]:
    """A sorted tuple without an item, which may be absent."""
    at = bisect_left(items, item)
    return items[:at] + items[at + 1 :] if items[at : at + 1] == (item,) else items
