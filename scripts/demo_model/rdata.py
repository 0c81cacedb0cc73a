"""A reader of R's lazy-load databases, as far as vectors and lists of them go.

`name.rdx`, a compressed serialisation, says where in `name.rdb` each variable is; there each is a
serialisation again, compressed on its own. Serialisation is R's binary XDR: big-endian words, each
item led by a word of flags whose low byte is its type.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

NULL = 0
SYMBOL = 1
PAIRS = 2
CHARACTERS = 9
LOGICALS = 10
INTEGERS = 13
REALS = 14
STRINGS = 16
VECTOR = 19
NULL_VALUE = 254
REFERENCE = 255
HAS_ATTRIBUTES = 0x200
HAS_TAG = 0x400


@dataclass(frozen=True)
class Vector:
    """A vector or list of R."""

    values: list[Any]
    """Strings (None where R has NA), numbers, or vectors."""
    attributes: dict[str, Any] = field(default_factory=dict)

    def named(self) -> dict[str, Any]:
        """The values by name. Raises KeyError if they have no names."""
        return dict(zip(self.attributes["names"].values, self.values, strict=True))


def read_variables(index: bytes, database: bytes) -> dict[str, Any]:
    """The variables of a lazy-load database, given its two files.

    Raises:
        ValueError: a type or a compression that this reader does not know.
    """
    table = loads(gzip.decompress(index)).named()
    if table["compressed"].values != [1]:
        raise ValueError(f"compression {table['compressed'].values} is not zlib")
    variables = {}
    for name, place in table["variables"].named().items():
        offset, length = place.values
        variables[name] = loads(zlib.decompress(database[offset + 4 : offset + length]))
    return variables


def loads(data: bytes) -> Any:
    """The value of a serialisation in XDR of version 2 or 3: a Vector, or None for R's NULL.

    Raises:
        ValueError: another format, or a type that this reader does not know.
    """
    if data[:2] != b"X\n":
        raise ValueError("not R's serialisation in XDR")
    reader = _Reader(data)
    version, _, _ = reader.word(), reader.word(), reader.word()
    if version == 3:
        reader.take(reader.word())  # the writer's encoding; what we read says its own
    elif version != 2:
        raise ValueError(f"R serialisation of version {version}")
    return reader.item()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 2
        self._symbols: list[str] = []

    def take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def word(self) -> int:
        return int.from_bytes(self.take(4), "big", signed=True)

    def item(self) -> Any:
        flags = self.word()
        kind = flags & 0xFF
        if kind in (NULL, NULL_VALUE):
            return None
        if kind == SYMBOL:
            self._symbols.append(self.item())
            return self._symbols[-1]
        if kind == REFERENCE:
            return self._symbols[(flags >> 8 or self.word()) - 1]
        if kind == CHARACTERS:
            size = self.word()
            return None if size < 0 else self.take(size).decode("utf-8")
        if kind == PAIRS:
            return self._pairs(flags)
        values = self._values(kind)
        return Vector(values, self.item() if flags & HAS_ATTRIBUTES else {})

    def _values(self, kind: int) -> list[Any]:
        count = self.word()
        if kind in (LOGICALS, INTEGERS):
            return list(struct.unpack(f">{count}i", self.take(4 * count)))
        if kind == REALS:
            return list(struct.unpack(f">{count}d", self.take(8 * count)))
        if kind in (STRINGS, VECTOR):
            return [self.item() for _ in range(count)]
        raise ValueError(f"R type {kind} is not one that this reader knows")

    def _pairs(self, flags: int) -> dict[str, Any]:
        """A pair list with tags, which is how attributes are written."""
        pairs = {}
        while flags & 0xFF == PAIRS:
            if flags & HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & HAS_TAG else ""
            pairs[tag] = self.item()
            flags = self.word()
        return pairs
