"""The King James Bible, a document a chapter."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

from scripts.demo_model import debian, lzw
from scripts.demo_model.document import Document

FILE = "usr/lib/bible.data"
MAGIC = b"EC02Compressed Data File"
HEADER = 84
"""Bytes before the window size, the number of windows and where each begins."""
VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)")
BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy",
    "Josh": "Joshua", "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel",
    "1Ki": "1 Kings", "2Ki": "2 Kings", "1Chr": "1 Chronicles", "2Chr": "2 Chronicles",
    "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther", "Job": "Job", "Psa": "Psalms",
    "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah",
    "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea",
    "Joel": "Joel", "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah",
    "Nahum": "Nahum", "Hab": "Habakkuk", "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah",
    "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John",
    "Acts": "Acts", "Rom": "Romans", "1Cor": "1 Corinthians", "2Cor": "2 Corinthians",
    "Gal": "Galatians", "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians",
    "1Th": "1 Thessalonians", "2Th": "2 Thessalonians", "1Tim": "1 Timothy", "2Tim": "2 Timothy",
    "Titus": "Titus", "Phmn": "Philemon", "Heb": "Hebrews", "Jas": "James", "1Pet": "1 Peter",
    "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John", "3Jn": "3 John", "Jude": "Jude",
    "Rev": "Revelation",
}  # fmt: skip


def documents(cache: Path) -> Iterator[Document]:
    """The chapters in the order of the books, verses on lines of their own behind their numbers.

    Raises:
        PackageError: the package cannot be had.
    """
    text = decompress(debian.read(debian.fetch(debian.BIBLE, cache), FILE))
    verses = (match for line in text.splitlines() if (match := VERSE.fullmatch(line)))
    for (book, chapter), found in groupby(verses, key=lambda verse: (verse[1], verse[2])):
        name = f"{BOOKS[book]}, chapter {chapter}"
        body = "\n".join(f"{verse[3]} {verse[4]}" for verse in found)
        yield Document("bible", name, f"{name}\n\n{body}")


def decompress(data: bytes) -> str:
    """The text of a file of the Bible Retrieval System: windows of one size, each a stream of
    `compress` (block mode, up to 16 bits) without its magic.

    Raises:
        ValueError: no such file.
    """
    if not data.startswith(MAGIC):
        raise ValueError("not a compressed file of the Bible Retrieval System")
    size, count = struct.unpack_from(">2I", data, HEADER)
    edges = struct.unpack_from(f">{count + 1}I", data, HEADER + 8)
    windows = (lzw.decompress(data[start:end], size) for start, end in pairwise(edges))
    return b"".join(windows).decode("ascii")
