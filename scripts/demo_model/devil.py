"""The Devil's Dictionary, a document an entry."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

from scripts.demo_model import clean, debian
from scripts.demo_model.document import Document

FOLDER = "usr/share/dictd"
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def documents(cache: Path) -> Iterator[Document]:
    """The entries in the dictionary's order.

    Raises:
        PackageError: the package cannot be had.
    """
    deb = debian.fetch(debian.DEVIL, cache)
    text = gzip.decompress(debian.read(deb, f"{FOLDER}/devil.dict.dz"))
    index = debian.read(deb, f"{FOLDER}/devil.index").decode("utf-8")
    seen: dict[str, int] = {}
    for headword, entry in entries(text, index):
        if clean.SLURS.search(entry):
            continue
        seen[headword] = seen.get(headword, 0) + 1
        name = headword if seen[headword] == 1 else f"{headword} ({seen[headword]})"
        body = clean.unwrap(clean.tidy(entry).split("\n"))
        yield Document("devil", name, clean.tidy(clean.unmark(body)))


def entries(text: bytes, index: str) -> Iterator[tuple[str, str]]:
    """Headwords and entries of a dictd dictionary in the order of its text, without the ones that
    say where it is from. Several headwords of one entry give it once.

    Args:
        text: the unpacked dictionary.
        index: lines of a headword and, in base 64, the entry's offset and length in bytes.
    """
    places: dict[tuple[int, int], str] = {}
    for line in index.splitlines():
        headword, *place = line.split("\t")
        if not headword.startswith("00"):
            places.setdefault((number(place[0]), number(place[1])), headword)
    for (offset, length), headword in sorted(places.items()):
        yield headword, text[offset : offset + length].decode("utf-8")


def number(digits: str) -> int:
    """A number in dictd's base 64, high digits first. Raises ValueError for another character."""
    value = 0
    for digit in digits:
        value = 64 * value + DIGITS.index(digit)
    return value
