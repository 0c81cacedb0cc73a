"""The six novels of Jane Austen, a document a chapter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from scripts.demo_model import clean, debian, rdata
from scripts.demo_model.document import Document

FOLDER = "usr/lib/R/site-library/janeaustenr/data"
TITLES = {
    "sensesensibility": "Sense and Sensibility",
    "prideprejudice": "Pride and Prejudice",
    "mansfieldpark": "Mansfield Park",
    "emma": "Emma",
    "northangerabbey": "Northanger Abbey",
    "persuasion": "Persuasion",
}
CHAPTER = re.compile(r"chapter ([ivxl]+|\d+)\.?", re.IGNORECASE)
NOT_THE_NOVEL = re.compile(
    r"volume [iv]+|finis|the end|[* ]+|\[?end of (the )?\w+ volume.*|\[end volume.*|printed by t\..*"
    r"|edinburgh university press|.*to her majesty\]?",
    re.IGNORECASE,
)
"""Lines of the edition rather than the author."""
AFTERWORD = re.compile(r"A NOTE ON THE TEXT|Northanger Abbey was written in 1797")


def documents(cache: Path) -> Iterator[Document]:
    """The chapters, numbered through each novel (editions in volumes begin again in each).

    Raises:
        PackageError: the package cannot be had.
    """
    deb = debian.fetch(debian.JANE_AUSTEN, cache)
    index, database = (debian.read(deb, f"{FOLDER}/Rdata.{end}") for end in ("rdx", "rdb"))
    novels = rdata.read_variables(index, database)
    for key, title in TITLES.items():
        for number, text in enumerate(chapters(novels[key].values), start=1):
            yield Document(
                "novels", f"{title}, chapter {number}", f"{title}, chapter {number}\n\n{text}"
            )


def chapters(lines: list[str]) -> Iterator[str]:
    """The texts of the chapters, without their headings and what stands before the first."""
    chapter: list[str] | None = None
    for line in lines:
        if AFTERWORD.match(line):
            break
        if CHAPTER.fullmatch(line.strip()):
            if chapter is not None:
                yield clean.tidy(clean.unmark(clean.unwrap(chapter)))
            chapter = []
        elif chapter is not None:
            chapter.append("" if NOT_THE_NOVEL.fullmatch(line.strip()) else line)
    if chapter is not None:
        yield clean.tidy(clean.unmark(clean.unwrap(chapter)))
