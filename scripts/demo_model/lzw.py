"""The decoder of `compress`, the LZW of 1984 that some old archives still use."""

from __future__ import annotations

CLEAR = 256
FIRST_WIDTH = 9


def decompress(data: bytes, size: int, max_width: int = 16) -> bytes:
    """The first `size` bytes of a stream of `compress`, fewer if it ends before.

    Args:
        data: codes, low bits first, without the three bytes of magic; in block mode, where code
            256 clears the table.
        size: bytes wanted; what follows in the stream is not looked at.
        max_width: bits of the widest code.

    Raises:
        ValueError: a code that no table so far can have.
    """
    codes = _Codes(data, max_width)
    out = bytearray()
    table = _fresh_table()
    previous = b""
    while len(out) < size and (code := codes.next(len(table))) is not None:
        if code == CLEAR:
            table, previous = _fresh_table(), b""
            codes.reset()
            continue
        if code < len(table):
            entry = table[code]
        elif code == len(table) and previous:
            entry = previous + previous[:1]
        else:
            raise ValueError(f"LZW code {code} with a table of {len(table)}")
        out += entry
        if previous and len(table) < 1 << max_width:
            table.append(previous + entry[:1])
        previous = entry
    return bytes(out[:size])


def _fresh_table() -> list[bytes]:
    return [bytes([byte]) for byte in range(256)] + [b""]


class _Codes:
    """Reads codes. They are written in groups of eight, and a change of width drops what is left
    of a group."""

    def __init__(self, data: bytes, max_width: int) -> None:
        self._data = data
        self._max_width = max_width
        self._width = FIRST_WIDTH
        self._bit = 0
        self._group = 0

    def next(self, entries: int) -> int | None:
        """The next code, for a decoder whose table has that many entries; None at the end."""
        if entries >= 1 << self._width and self._width < self._max_width:
            self._set_width(self._width + 1)
        first, shift = divmod(self._bit, 8)
        if self._bit + self._width > 8 * len(self._data):
            return None
        chunk = int.from_bytes(self._data[first : first + 4], "little")
        self._bit += self._width
        return chunk >> shift & (1 << self._width) - 1

    def reset(self) -> None:
        """After a clear code: back to the first width."""
        self._set_width(FIRST_WIDTH)

    def _set_width(self, width: int) -> None:
        group = 8 * self._width
        self._bit = self._group + -(-(self._bit - self._group) // group) * group
        self._group = self._bit
        self._width = width
