"""The text that the demo model learns from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from scripts.demo_model import bible, debian, devil, jargon, novels, python_docs, wordnet
from scripts.demo_model.debian import Package
from scripts.demo_model.document import Document

__all__ = ["READERS", "SOURCES", "Document", "documents", "glosses", "passages"]

SOURCES: dict[str, Package] = {
    "novels": debian.JANE_AUSTEN,
    "bible": debian.BIBLE,
    "devil": debian.DEVIL,
    "jargon": debian.JARGON,
    "wordnet": debian.WORDNET,
    "python": debian.PYTHON_DOCS,
}
READERS = {
    "novels": novels.documents,
    "bible": bible.documents,
    "devil": devil.documents,
    "jargon": jargon.documents,
    "wordnet": wordnet.documents,
    "python": python_docs.documents,
}

PASSAGE_SOURCES = frozenset({"novels", "bible", "python"})
SHORTEST_PASSAGE, LONGEST_PASSAGE = 300, 700
"""Characters."""


def documents(cache: Path) -> Iterator[Document]:
    """Every document, always in the same order. Packages not in the cache are fetched into it.

    Raises:
        PackageError: a package cannot be had.
    """
    for read in READERS.values():
        yield from read(cache)


def passages(documents: Iterable[Document], *, held_out: bool = False) -> list[str]:
    """Short paragraphs of the novels, the Bible and Python's documentation to ask questions about,
    from the training documents or from the held-out ones. A passage of the Bible is a run of verses
    without their numbers."""
    found = []
    for document in documents:
        if document.source in PASSAGE_SOURCES and document.held_out == held_out:
            found += [p for p in _paragraphs(document) if _is_passage(p)]
    return found


def _paragraphs(document: Document) -> Iterator[str]:
    if document.source != "bible":
        yield from document.text.split("\n\n")
        return
    run = ""
    for line in document.text.split("\n")[2:]:
        run = f"{run} {line.partition(' ')[2]}".strip()
        if len(run) >= SHORTEST_PASSAGE:
            yield run
            run = ""


def _is_passage(text: str) -> bool:
    """Whether it is prose of the right length: no code, heading, item, verse or table."""
    fits = SHORTEST_PASSAGE <= len(text) <= LONGEST_PASSAGE
    return fits and "\n" not in text and not re.match(r"[`#|-]|\d+\. ", text) and " | " not in text


def glosses(cache: Path, *, held_out: bool = False) -> list[tuple[str, str]]:
    """Common single words and short meanings, of WordNet's training documents or the held-out ones.

    Raises:
        PackageError: the package cannot be had.
    """
    return wordnet.glosses(cache, held_out=held_out)
