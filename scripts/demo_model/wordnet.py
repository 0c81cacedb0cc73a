"""WordNet's glosses: a line a sense, a document forty lines in alphabetical order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.demo_model import clean, debian
from scripts.demo_model.document import Document

FOLDER = "usr/share/wordnet"
PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
LINES_A_DOCUMENT = 40
ANIMAL, PLANT = 5, 20
"""The lexicographer files of animals and of plants."""
RANK = r"\b((sub|super)?(genus|family|order|class|phylum|tribe|division|kingdom)|genera)\b"
TAXON = re.compile(RANK)
TAXON_NAME = re.compile(RANK + " [A-Z]")
OFFENSIVE = re.compile(
    r"slur\b|offensive|disparag|derogatory|obscen|vulgar|sexual|nigger|racist|prostitut|whore|"
    r"genital|\bpenis|vagina|\banus\b|masturbat|fuck",
    re.IGNORECASE,
)
"""What a small demo should not learn to say."""
LEAST_USES = 5
"""Times a word must be tagged in WordNet's corpora to count as common."""
LONGEST_GLOSS = 80


@dataclass(frozen=True)
class Sense:
    """A set of words that share a meaning."""

    part: str
    """Part of speech, such as "noun"."""
    offset: int
    """Where WordNet's data file of that part of speech has it: its key."""
    words: tuple[str, ...]
    gloss: str
    """The meaning, then examples in double quotes, with semicolons between."""

    @property
    def line(self) -> str:
        """Such as `dog, hound (noun): a mammal; "the dog barked"`."""
        return f"{', '.join(self.words)} ({PARTS[self.part]}): {self.gloss}"

    @property
    def meaning(self) -> str:
        """The gloss without examples."""
        return re.split(r'[;,:]? "', self.gloss)[0]


def documents(cache: Path) -> Iterator[Document]:
    """The glosses in the alphabetical order of their first words.

    Raises:
        PackageError: the package cannot be had.
    """
    for name, group in grouped(read_senses(debian.fetch(debian.WORDNET, cache))):
        yield document(name, group)


def document(name: str, senses: list[Sense]) -> Document:
    """The document of a group of senses."""
    return Document("wordnet", name, "\n".join(sense.line for sense in senses))


def glosses(cache: Path, *, held_out: bool) -> list[tuple[str, str]]:
    """Common single words with the meaning of their commonest sense, in alphabetical order, from the
    training documents or the held-out ones.

    Raises:
        PackageError: the package cannot be had.
    """
    deb = debian.fetch(debian.WORDNET, cache)
    common = read_common(deb)
    found = []
    for name, group in grouped(read_senses(deb)):
        if document(name, group).held_out == held_out:
            for sense in group:
                if len(sense.meaning) <= LONGEST_GLOSS:
                    here = (sense.part, sense.offset)
                    found += [(w, sense.meaning) for w in sense.words if common.get(w) == here]
    return sorted(found)


def read_senses(deb: Path) -> list[Sense]:
    """All senses worth learning, in alphabetical order: without Latin names and slurs."""
    senses = []
    for part in PARTS:
        text = debian.read(deb, f"{FOLDER}/data.{part}").decode("latin-1")
        senses += [s for line in text.splitlines() if (s := parse_sense(line, part)) is not None]
    return sorted(senses, key=lambda s: (s.words[0].lower(), s.words, s.part, s.offset))


def parse_sense(line: str, part: str) -> Sense | None:
    """A line of a data file; None for the licence's lines, Latin names, and offensive glosses."""
    if line.startswith(" "):
        return None
    data, _, gloss = line.partition(" | ")
    fields = data.split(" ")
    lexicographer, count = int(fields[1]), int(fields[3], 16)
    names = fields[4 : 4 + 2 * count : 2]
    words = tuple(re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in names)
    gloss = clean.join([re.sub(r"`([^`'\"]*)'", r"'\1'", clean.tidy(gloss))])
    gloss = re.sub(r"\s+([;,)])", r"\1", gloss).rstrip("; ")
    text = f"{' '.join(words)} {gloss}"
    living = part == "noun" and lexicographer in (ANIMAL, PLANT)
    latin = living and (TAXON.search(gloss) or any(map(TAXON_NAME.match, words)))
    if latin or not gloss or OFFENSIVE.search(text) or clean.SLURS.search(text):
        return None
    return Sense(part, int(fields[0]), words, gloss)


def grouped(senses: list[Sense]) -> Iterator[tuple[str, list[Sense]]]:
    """Names of documents and what is in each."""
    for number, start in enumerate(range(0, len(senses), LINES_A_DOCUMENT), start=1):
        group = senses[start : start + LINES_A_DOCUMENT]
        yield f"{number:04d} {group[0].words[0]} to {group[-1].words[0]}", group


def read_common(deb: Path) -> dict[str, tuple[str, int]]:
    """The commonest sense of common single words: part of speech and offset."""
    uses: dict[tuple[str, str], int] = {}
    types = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
    for line in debian.read(deb, f"{FOLDER}/cntlist.rev").decode("ascii").splitlines():
        key, _, tagged = line.split(" ")
        word, _, rest = key.partition("%")
        use = word, types[rest[0]]
        uses[use] = uses.get(use, 0) + int(tagged)
    best: dict[str, tuple[int, str, int]] = {}
    for part in PARTS:
        for line in debian.read(deb, f"{FOLDER}/index.{part}").decode("ascii").splitlines():
            word, *fields = line.split()
            count = uses.get((word, part), 0)
            if line.startswith(" ") or count < LEAST_USES or not re.fullmatch("[a-z]{3,12}", word):
                continue
            senses = int(fields[1])
            offset = int(fields[-senses])
            found = (count, part, offset)
            best[word] = max(best.get(word, found), found)
    return {word: (part, offset) for word, (_, part, offset) in best.items()}
