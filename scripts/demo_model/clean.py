"""Cleaning of text, the same for all sources."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise

PLAIN = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛′", "'"),
        **dict.fromkeys("“”„‟″", '"'),
        **dict.fromkeys("‐‑‒–−", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u200a\u202f", " "),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff", None),
        "—": "--",
        "…": "...",
        "\r": None,
    }
)
"""What typesetting distinguishes and a keyboard does not. A small vocabulary has better uses."""

UNPRINTABLE = frozenset({"Cc", "Cs", "Co"})
"""Categories of control characters, lone surrogates and private ones."""
SLURS = re.compile(
    r"\b(nigger|negro(es)?|darkey|darkies|kike|faggot|retard|tranny|cunt|fuck)", re.IGNORECASE
)
"""What keeps an entry of a dictionary out of a small demo's training."""
VERSE_SHARE = 0.7
ATTRIBUTION_INDENT = 40


def tidy(text: str) -> str:
    """Plain quotes, dashes and spaces, NFC, no control characters, no spaces at the ends of lines,
    no two blank lines together, none at either end."""
    text = unicodedata.normalize("NFC", text.translate(PLAIN)).expandtabs(4)
    if not text.replace("\n", "").isprintable():
        kept = (c for c in text if c == "\n" or unicodedata.category(c) not in UNPRINTABLE)
        text = "".join(kept)
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """The runs of lines between blank lines."""
    block: list[str] = []
    for line in lines:
        if line.strip():
            block.append(line.rstrip())
        elif block:
            yield block
            block = []
    if block:
        yield block


def join(lines: Sequence[str]) -> str:
    """Lines of prose as one line. No space comes behind a hyphen, or a dash set without spaces, that
    ends a line."""
    text = re.sub(r"(?<=\w-)\n\s*(?=\w)|(?<=\w--)\n\s*(?=\S)", "", "\n".join(lines))
    return re.sub(r"\s+", " ", text).strip()


def unwrap(lines: Sequence[str]) -> str:
    """Hard-wrapped lines as paragraphs with a blank line between; verse keeps its lines."""
    return "\n\n".join(verse(b) if is_verse(b) else prose(b) for b in blocks(lines))


def is_verse(block: Sequence[str]) -> bool:
    """Whether a block is indented throughout and most of its lines begin as lines of verse do.

    A quoted letter is indented too, but its lines break anywhere.
    """
    body = [line for line in block if indent(line) < ATTRIBUTION_INDENT]
    if len(body) < 2:
        return len(body) < len(block)
    starts = [line.strip().lstrip("\"'([_-") for line in body]
    capital = sum(start[:1].isupper() for start in starts)
    return all(indent(line) for line in body) and capital >= VERSE_SHARE * len(body)


def verse(block: Sequence[str]) -> str:
    """A block of verse against the margin. A last line far to the right is its author."""
    body = [line for line in block if indent(line) < ATTRIBUTION_INDENT]
    left = min(map(indent, body), default=0)
    authors = [f"-- {line.strip()}" for line in block if indent(line) >= ATTRIBUTION_INDENT]
    return "\n".join([line[left:] for line in body] + authors)


def prose(block: Sequence[str]) -> str:
    """A block of prose. A line indented among lines that are not begins a new paragraph."""
    first = indent(block[0])
    base = min(map(indent, block))
    starts = [i for i, line in enumerate(block) if i and indent(line) > max(base, first)]
    if base != first:  # the first line is indented as the first line of a paragraph
        starts = [i for i, line in enumerate(block) if i and indent(line) >= first]
    edges = [0, *starts, len(block)]
    return "\n\n".join(join(block[a:b]) for a, b in pairwise(edges))


def indent(line: str) -> int:
    """Spaces before the first character."""
    return len(line) - len(line.lstrip(" "))


def unmark(text: str) -> str:
    """Text without the underscores that mark _emphasis_."""
    return re.sub(r"(?<!\w)_([^_\n]+)_(?!\w)", r"\1", text)
