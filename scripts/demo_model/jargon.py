"""The Jargon File: its essays, a document a section, and its lexicon, a document ten entries."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path

from scripts.demo_model import clean, debian
from scripts.demo_model.document import Document

FILE = "usr/share/doc/jargon-text/jargon.txt.gz"
ENTRY = re.compile(r" {3}:(\S.*?):(?: +(.*))?")
ENTRIES_A_DOCUMENT = 10
WIDE = 52
"""Characters above which the lines of a block are text that was wrapped."""
MARGIN = 3
LEAST_ESSAY = 400
"""Characters below which a section is only a list of its parts."""
NOT_ESSAYS = re.compile(
    r"Revision History|Bibliography|Part I.*|Sexual Habits|The Jargon File|Chapter 3.*"
)


def documents(cache: Path) -> Iterator[Document]:
    """The essays before the lexicon, the lexicon, the essays after.

    Raises:
        PackageError: the package cannot be had.
    """
    data = debian.read(debian.fetch(debian.JARGON, cache), FILE)
    lines = clean.tidy(gzip.decompress(data).decode("utf-8")).split("\n")
    lexicon = lines.index("Glossary")
    appendices = next(i for i, line in enumerate(lines) if line.strip() == "Part III. Appendices")
    yield from essays(lines[:lexicon])
    found = lexicon_entries(lines[lexicon:appendices])
    while group := list(islice(found, ENTRIES_A_DOCUMENT)):
        name = f"{group[0][0]} to {group[-1][0]}"
        yield Document("jargon", name, "\n\n".join(text for _, text in group))
    yield from essays(lines[appendices:])


def essays(lines: Sequence[str]) -> Iterator[Document]:
    """The sections of a part of the book, each under a heading at the margin."""
    starts = [i for i, line in enumerate(lines) if line[:1].strip() and line[0].isalnum()]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        heading = re.sub(r"^(Chapter|Appendix) \w+\. ", "", lines[start])
        body = list(clean.blocks(lines[start + 1 : end]))
        text = "\n\n".join(shown for b in body if not _is_contents(b) and (shown := block(b)))
        if len(text) >= LEAST_ESSAY and not NOT_ESSAYS.match(lines[start]):
            yield Document("jargon", f"essay: {heading}", f"{heading}\n\n{text}")


def _is_contents(lines: Sequence[str]) -> bool:
    """Whether a block is a line of a table of contents: one line that does not end as prose."""
    return len(lines) == 1 and clean.indent(lines[0]) == MARGIN and lines[0][-1] not in ".:!?\"')"


def lexicon_entries(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Headwords and entries. What stands before the first headword is the list of them."""
    starts = [i for i, line in enumerate(lines) if ENTRY.fullmatch(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        match = ENTRY.fullmatch(lines[start])
        assert match is not None
        body = list(clean.blocks(lines[start + 1 : end]))
        entry = takewhile(lambda lines: not _is_letter(lines), body)
        text = "\n\n".join(shown for b in entry if (shown := block(b)))
        title = f"{match[1]}: {match[2] or ''}".rstrip(" :")
        if text and not clean.SLURS.search(title + text):
            yield match[1], f"{links(title)}\n\n{text}"


def _is_letter(lines: Sequence[str]) -> bool:
    """Whether a block is the heading of a letter of the alphabet. A list of headwords follows it."""
    return len(lines) == 1 and clean.indent(lines[0]) < MARGIN and len(lines[0].strip()) <= 4


def block(lines: Sequence[str]) -> str:
    """A block as it should read: prose unwrapped, code and pictures as they are, tables dropped."""
    left = min(map(clean.indent, lines))
    dedented = [line[left:] for line in lines]
    if any(c in "│─═┌├└┐┘" for line in dedented for c in line):
        return ""
    wide = max(map(len, dedented[:-1]), default=WIDE) >= WIDE
    spaced = any("   " in line for line in dedented)
    if (wide and not spaced) or (left == MARGIN and len(lines) == 1):
        return links(clean.join(dedented))
    return "\n".join(dedented)


def links(text: str) -> str:
    """Text without the braces around the names of other entries."""
    return re.sub(r"\{([^{}\n]+)\}", r"\1", text)
