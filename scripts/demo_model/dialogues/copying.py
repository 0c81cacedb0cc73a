"""Sentences and words given back: whole, reversed, counted, spelled."""

from __future__ import annotations

import random

from scripts.demo_model.dialogues.dialogue import Dialogue, Sources, asked, capital
from scripts.demo_model.dialogues.pools import CITIES, GIVEN_NAMES, syllables
from scripts.demo_model.dialogues.words import ADJECTIVES, NOUNS, VERBS, WORDS

_PLACES = ("under", "near", "behind", "beside", "above", "with", "without", "for")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def copying(rng: random.Random, sources: Sources) -> Dialogue:
    """One of the kinds below."""
    kinds = (_repeat, _reverse, _nth, _last, _count, _spell, _upper)
    return rng.choices(kinds, (3, 2, 2, 1, 2, 3, 2))[0](rng)


def sentence(rng: random.Random) -> str:
    """A sentence of nine words or less, not always a sensible one."""
    adjective, noun, verb = rng.choice(ADJECTIVES), rng.choice(NOUNS), rng.choice(VERBS)
    other, name, city = rng.choice(NOUNS), rng.choice(GIVEN_NAMES), rng.choice(CITIES)
    return rng.choice(
        (
            f"The {adjective} {noun} is {rng.choice(_PLACES)} the {other}.",
            f"{name} and {rng.choice(GIVEN_NAMES)} {verb} near the {noun}.",
            f"We {verb} a {adjective} {noun} in {city}.",
            f"In {city} they {verb} every {adjective} {noun}.",
            f"{name} will {verb} the {noun} and the {other}.",
            f"My {noun} is {adjective}, but your {other} is not!",
            f"Why does {name} {verb} the {adjective} {noun}?",
            f"{capital(other)} and {noun} are {adjective} in {city}.",
        )
    )


def _words(rng: random.Random, low: int, high: int) -> list[str]:
    return rng.sample(WORDS, rng.randrange(low, high + 1))


def _numbered(words: list[str]) -> str:
    return ", ".join(f"{i} {word}" for i, word in enumerate(words, 1))


def _repeat(rng: random.Random) -> Dialogue:
    text = sentence(rng) if rng.random() < 0.7 else " ".join(_words(rng, 3, 8))
    question = rng.choice(
        (
            "Repeat exactly: {x}",
            "Repeat this sentence: {x}",
            "Say this again: {x}",
            "Copy this: {x}",
            'Write down "{x}" once more.',
            "Please repeat after me: {x}",
        )
    )
    return _made("repeat", text, question.format(x=text), "I copy the text.", text, rng)


def _reverse(rng: random.Random) -> Dialogue:
    words = _words(rng, 3, 7)
    text = " ".join(words)
    question = rng.choice(
        (
            "Reverse the order of these words: {x}",
            "Write these words in reverse order: {x}",
            "Say the words backwards, last one first: {x}",
        )
    )
    back = [f"{i} {words[i - 1]}" for i in range(len(words), 0, -1)]
    steps = f"{_numbered(words)}. Back: {', '.join(back)}."
    answer = " ".join(reversed(words))
    return _made("reverse", text, question.format(x=text), steps, answer)


def _nth(rng: random.Random) -> Dialogue:
    words = _words(rng, 3, 8)
    n = rng.randrange(len(words))
    text = " ".join(words)
    question = rng.choice(
        ("What is the {n} word of: {x}", "Give me the {n} word: {x}", "Repeat only word {d}: {x}")
    )
    steps = f"{_numbered(words)}. Number {n + 1} is {words[n]}."
    asked_for = question.format(n=_ORDINALS[n], d=n + 1, x=text)
    return _made(f"word {n + 1}", text, asked_for, steps, words[n])


def _last(rng: random.Random) -> Dialogue:
    words = _words(rng, 3, 8)
    text = " ".join(words)
    question = rng.choice(
        ("What is the last word of: {x}", "Repeat only the last word: {x}", "Last word of: {x}")
    )
    return _made("last", text, question.format(x=text), "I take the last word.", words[-1], rng)


def _count(rng: random.Random) -> Dialogue:
    words = _words(rng, 1, 9) if rng.random() < 0.6 else sentence(rng).strip(".!?").split()
    text = " ".join(words)
    question = rng.choice(
        ("How many words are these: {x}", "Count the words: {x}", "How many words has this? {x}")
    )
    bare = [word.strip(",") for word in words]
    steps = f"{_numbered(bare)}. That is {len(words)}."
    answer = f"{len(words)} word{'s' if len(words) > 1 else ''}."
    return _made("count", text, question.format(x=text), steps, answer)


def _spell(rng: random.Random) -> Dialogue:
    word = rng.choice(WORDS) if rng.random() < 0.85 else syllables(rng)
    question = rng.choice(
        (
            "Spell the word {x}.",
            "How do you spell {x}?",
            'Spell "{x}" with hyphens.',
            "Spell {x}, letter by letter.",
        )
    )
    return _made("spell", word, question.format(x=word), "Letter by letter.", "-".join(word), rng)


def _upper(rng: random.Random) -> Dialogue:
    word = rng.choice([word for word in rng.sample(WORDS, 12) if len(word) <= 6] or ["cat"])
    question = rng.choice(
        (
            "Write {x} in upper case.",
            "Write the word {x} in capital letters.",
            'Make "{x}" upper case.',
            "{x} in capitals, please.",
        )
    )
    steps = f"{', '.join(f'{c} {c.upper()}' for c in word)}."
    return _made("upper", word, question.format(x=word), steps, word.upper())


def _made(
    kind: str,
    text: str,
    question: str,
    steps: str,
    answer: str,
    rng: random.Random | None = None,
) -> Dialogue:
    """With `rng` given, some dialogues go without thinking: what is asked needs no steps."""
    thinking = rng is None or rng.random() < 0.75
    return asked("copying", f"copy {kind}:{text}", question, steps, answer, thinking=thinking)
