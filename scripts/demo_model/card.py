"""The data card: what the demo model learned from, and on what terms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.demo_model import corpus, debian
from scripts.demo_model.document import Document

CLEANING = {
    "novels": "a document a chapter; lines unwrapped, verse kept; without the edition's title pages,"
    " volume marks, afterword and emphasis marks",
    "bible": "a document a chapter; a verse a line behind its number",
    "devil": "a document an entry; lines unwrapped, verse kept; without the preface, emphasis marks"
    " and entries with slurs",
    "jargon": "the lexicon, a document ten entries, and the essays; lines unwrapped, pictures and"
    " code kept; without tables, lists of contents, history, bibliography, link braces and entries"
    " with slurs",
    "wordnet": "a line a sense, with its words, part of speech, gloss and examples, forty a document"
    " in alphabetical order; without Latin names of animals and plants and what is offensive",
    "python": "a document a page of the tutorial, references, library, how-tos and FAQs as"
    " plain text in the manner of Markdown; without navigation, indices, What's New, changelog"
    " and licences",
}
PSF = re.compile(
    r"^PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2.*?(?=^BEOPEN\.COM LICENSE)", re.S | re.M
)
NOTICES: dict[str, re.Pattern[str]] = {
    "novels": re.compile(r"^Files: \*.*?(?=^Files: debian)|^License: MIT\n .*", re.S | re.M),
    "wordnet": re.compile(r"^Files: \*.*?(?=^Files: debian)", re.S | re.M),
    "python": PSF,
}
"""The part of a package's copyright file that must go wherever the text goes."""


@dataclass(frozen=True)
class SourceNumbers:
    """How much of one source there is."""

    documents: int
    text_bytes: int
    held_out_documents: int
    held_out_bytes: int
    held_out_tokens: int

    @property
    def bytes_per_token(self) -> float:
        """On the held-out text; NaN if none is."""
        return self.held_out_bytes / self.held_out_tokens if self.held_out_tokens else float("nan")


def count(
    documents: Iterable[Document], held_out_tokens: Mapping[str, int]
) -> dict[str, SourceNumbers]:
    """The numbers of each source, given the tokens of its held-out documents."""
    sizes: dict[str, list[tuple[int, bool]]] = {}
    for document in documents:
        size = len(document.text.encode())
        sizes.setdefault(document.source, []).append((size, document.held_out))
    return {
        source: SourceNumbers(
            documents=len(found),
            text_bytes=sum(size for size, _ in found),
            held_out_documents=sum(held for _, held in found),
            held_out_bytes=sum(size for size, held in found if held),
            held_out_tokens=held_out_tokens.get(source, 0),
        )
        for source, found in sizes.items()
    }


def notices(cache: Path) -> dict[str, str]:
    """The notices that licences ask to keep, by source, from the packages themselves.

    Raises:
        PackageError: a package cannot be had.
    """
    found = {}
    for source, pattern in NOTICES.items():
        package = corpus.SOURCES[source]
        name = f"usr/share/doc/{package.name}/copyright"
        text = debian.read(debian.fetch(package, cache), name).decode("utf-8")
        found[source] = "\n".join(match[0].strip() for match in pattern.finditer(text))
    return found


def write_card(
    path: Path,
    sources: Mapping[str, SourceNumbers],
    dialogues: Mapping[str, tuple[int, int]],
    notices: Mapping[str, str],
    xz_bits_per_byte: float,
) -> None:
    """Writes the data card.

    Args:
        path: of the Markdown file.
        sources: numbers by source.
        dialogues: dialogues and tokens by task.
        notices: texts to keep, by source.
        xz_bits_per_byte: of the held-out text.
    """
    held, whole = (
        sum(getattr(numbers, name) for numbers in sources.values())
        for name in ("held_out_bytes", "text_bytes")
    )
    lines = [
        "# Data of the demo model",
        "",
        "Text out of Debian packages whose licences allow any use, and dialogues written by a"
        " program.",
        "",
        "## Text",
        "",
        *table(
            ["source", "package", "version", "licence", "upstream", "documents", "bytes",
             "held out", "bytes a token"],
            [_source_row(source, numbers) for source, numbers in sources.items()],
        ),
        "",
        f"In all {whole:,} bytes. One document in fifty, by a hash of its name, is held out:"
        f" {held:,} bytes, for which `xz -9` needs {xz_bits_per_byte:.3f} bits a byte."
        " Bytes a token are the tokenizer's on the held-out text.",
        "",
        "Cleaning, for all: plain quotes, dashes and spaces, NFC, no control characters. For each:",
        "",
        *(f"- {source}: {CLEANING[source]}." for source in sources),
        "",
        "## Dialogues",
        "",
        *_dialogue_lines(dialogues),
        "",
        "## Notices",
        "",
    ]  # fmt: skip
    for source, notice in notices.items():
        lines += [f"### {corpus.SOURCES[source].name}", "", "```", notice, "```", ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def _source_row(source: str, numbers: SourceNumbers) -> list[str]:
    package = corpus.SOURCES[source]
    share = numbers.held_out_bytes / max(numbers.text_bytes, 1)
    held = f"{numbers.held_out_documents} ({share:.1%} of bytes)"
    counts = [f"{numbers.documents:,}", f"{numbers.text_bytes:,}", held]
    about = [package.name, package.version, package.licence, package.upstream]
    return [source, *about, *counts, f"{numbers.bytes_per_token:.2f}"]


def _dialogue_lines(dialogues: Mapping[str, tuple[int, int]]) -> list[str]:
    if not dialogues:
        return ["None."]
    rows = [[task, f"{n:,}", f"{tokens:,}"] for task, (n, tokens) in sorted(dialogues.items())]
    total = [f"{sum(column):,}" for column in zip(*dialogues.values(), strict=True)]
    return [
        "Written by a program from templates, facts it computes, passages of the training documents"
        " and glosses.",
        "",
        *table(["task", "dialogues", "tokens"], [*rows, ["all", *total]]),
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
