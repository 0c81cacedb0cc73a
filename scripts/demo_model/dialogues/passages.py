"""Questions about a text: facts of a made-up one, and where words stand in a real one."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from scripts.demo_model.dialogues.dialogue import (
    Dialogue,
    Sources,
    asked,
    capital,
    with_articles,
)
from scripts.demo_model.dialogues.pools import (
    ARTICLES,
    COLORS,
    DAYS,
    GIVEN_NAMES,
    JOBS,
    PETS,
    THINGS,
    city,
    syllables,
)
from scripts.demo_model.dialogues.words import WORDS

MAX_PASSAGE = 700
"""Characters of a real passage."""
NOT_SAID = "The passage does not say."
"""The answer to what the passage does not tell."""

_SENTENCE = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"”']))(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)(?<!\b[A-Z]\.)\s+(?=[\"“A-Z])"
)
_MARKS = ".,;:!?\"'“”‘’()[]_-—*"
# A sentence, two ways to ask for something in it, and what that is.
_FACTS: tuple[tuple[str, tuple[str, str], str], ...] = (
    (
        "{name} lives in {city}.",
        ("Where does {name} live?", "In which city does {name} live?"),
        "city",
    ),
    (
        "{name} works as a {job}.",
        ("What is the job of {name}?", "What does {name} work as?"),
        "job",
    ),
    (
        "{name} has a {color} {article}.",
        ("What color is the {article} of {name}?", "Which color has {name}'s {article}?"),
        "color",
    ),
    (
        "{name} owns {count} {things}.",
        ("How many {things} does {name} own?", "What number of {things} does {name} have?"),
        "count",
    ),
    (
        "{name} has a {pet} called {called}.",
        ("What is the {pet} of {name} called?", "What is the name of {name}'s {pet}?"),
        "called",
    ),
    (
        "On {day}, {name} visited {friend}.",
        ("Whom did {name} visit?", "Who was visited by {name}?"),
        "friend",
    ),
    (
        "{name} came to {town} on {day}.",
        ("When did {name} come to {town}?", "On which day did {name} come to {town}?"),
        "day",
    ),
    (
        "The {article} of {name} is in the {room}.",
        ("Where is the {article} of {name}?", "Where can we find {name}'s {article}?"),
        "room",
    ),
    (
        "{name} bought the {article} for {price} coins.",
        ("How much was the {article}?", "What did {name} pay for the {article}?"),
        "price",
    ),
    (
        "{name} likes {things} most of all.",
        ("What does {name} like most?", "Which things does {name} like most of all?"),
        "things",
    ),
    (
        "The best friend of {name} is {friend}.",
        ("Who is the best friend of {name}?", "Who is {name}'s best friend?"),
        "friend",
    ),
    (
        "{name} is {age} years old.",
        ("How old is {name}?", "What is the age of {name}?"),
        "age",
    ),
)
_ROOMS = ("kitchen", "garden", "cellar", "attic", "hall", "barn", "garage", "library")
_ASKED = (
    "{p}\n\n{q}",
    "{p}\n{q}",
    "Passage: {p}\nQuestion: {q}",
    "Read this: {p}\n\n{q}",
    "{q}\n\n{p}",
    "Text:\n{p}\n\nQuestion: {q}",
)


@dataclass(frozen=True)
class Told:
    """A made-up passage and one question about it."""

    sentences: tuple[str, ...]
    question: str
    source: str
    """The sentence that answers; empty if none does."""
    answer: str

    @property
    def passage(self) -> str:
        """All sentences."""
        return " ".join(self.sentences)

    @property
    def key(self) -> str:
        """Passage and question."""
        return f"passage:{self.passage} {self.question}"

    @property
    def steps(self) -> str:
        """The sentence that answers, quoted."""
        return f'It says: "{self.source}"' if self.source else "No sentence says this."


def told(rng: random.Random, *, answered: bool = True) -> Told:
    """Three to eight facts about two or three people; an unanswered question is about one of them."""
    people = rng.sample(GIVEN_NAMES, rng.choice((2, 2, 3)))
    facts, taken = [], set()
    for _ in range(rng.randint(3, 8) + (not answered)):
        form, questions, field = rng.choice(_FACTS)
        question = rng.choice(questions)
        name = rng.choice(people)
        if (form, name) in taken:
            continue
        taken.add((form, name))
        values = _values(rng, name)
        sentence = with_articles(form.format(**values))
        facts.append((sentence, question.format(**values), values[field], values["article"]))
    index = rng.randrange(len(facts))
    source, question, value, article = facts[index]
    # Two facts about like things would make the question ambiguous.
    facts = [f for i, f in enumerate(facts) if i == index or f[3] != article]
    sentences = [fact[0] for fact in facts]
    if answered:
        return Told(tuple(sentences), question, source, capital(value) + ".")
    sentences.remove(source)
    return Told(tuple(sentences) or ("It was a cold day.",), question, "", NOT_SAID)


def placed(rng: random.Random, passage: str, question: str) -> str:
    """Passage and question in one message."""
    return rng.choice(_ASKED).format(p=passage, q=question)


def passages(rng: random.Random, sources: Sources) -> Dialogue:
    """Half of the questions are about real passages, if there are any."""
    if sources.passages and rng.random() < 0.5:
        passage = cut(rng.choice(sources.passages))
        if len(passage.split()) >= 8:
            return _real(rng, passage)
    one = told(rng, answered=rng.random() < 0.85)
    thinking = rng.random() < 0.85
    question = placed(rng, one.passage, one.question)
    return asked("passages", one.key, question, one.steps, one.answer, thinking=thinking)


def cut(passage: str) -> str:
    """As many whole sentences as fit, with single spaces."""
    text = " ".join(passage.split())
    kept = ""
    for sentence in _SENTENCE.split(text):
        if len(kept) + len(sentence) + 1 > MAX_PASSAGE:
            break
        kept = f"{kept} {sentence}".strip()
    return kept or text[:MAX_PASSAGE].rpartition(" ")[0]


def _real(rng: random.Random, passage: str) -> Dialogue:
    words = passage.split()
    first = _SENTENCE.split(passage)[0]
    kind = rng.random()
    if kind < 0.15:
        question = rng.choice(("What is the first word of the passage?", "Give me its first word."))
        steps, answer = "I look at its beginning.", words[0].strip(_MARKS)
    elif kind < 0.25:
        question = rng.choice(("What is the last word of the passage?", "Give me its last word."))
        steps, answer = "I look at its end.", words[-1].strip(_MARKS)
    elif kind < 0.5 and len(first) <= 200:
        question = rng.choice(
            (
                "Copy the first sentence.",
                "What is the first sentence?",
                "Repeat the first sentence.",
            )
        )
        steps, answer = f"The first sentence ends with: {' '.join(first.split()[-2:])}", first
    elif kind < 0.75:
        question, steps, answer = _occurring(rng, words)
    else:
        question, steps, answer = _following(rng, words)
    key = f"passage:{passage[:200]} {question}"
    return asked("passages", key, placed(rng, passage, question), steps, answer)


def _occurring(rng: random.Random, words: list[str]) -> tuple[str, str, str]:
    plain = {word.strip(_MARKS).lower() for word in words}
    candidates = sorted(word for word in plain if word.isalpha() and len(word) > 3)
    absent = [word for word in rng.sample(WORDS, 12) if word not in plain][:2]
    present = rng.choice(candidates) if candidates else words[0]
    offered = rng.sample([present, *absent], 3)
    question = f"Which of these words occurs in the passage: {', '.join(offered)}?"
    return question, f"I find {present}.", present


def _following(rng: random.Random, words: list[str]) -> tuple[str, str, str]:
    starts = [i for i in range(len(words) - 7) if _once(words, i)]
    at = rng.choice(starts) if starts else 0
    before, after = " ".join(words[at : at + 3]), " ".join(words[at + 3 : at + 7])
    question = f"Which four words come after '{before}'?"
    return question, f"I find: {before} {after}", after


def _once(words: list[str], at: int) -> bool:
    """Whether the three words from here stand nowhere else."""
    wanted = words[at : at + 3]
    return sum(words[i : i + 3] == wanted for i in range(len(words) - 2)) == 1


def _values(rng: random.Random, name: str) -> dict[str, str]:
    return {
        "name": name,
        "city": city(rng),
        "town": city(rng),
        "job": rng.choice(JOBS),
        "color": rng.choice(COLORS),
        "article": rng.choice(ARTICLES),
        "count": str(rng.randint(2, 99)),
        "things": rng.choice(THINGS),
        "pet": rng.choice(PETS),
        "called": syllables(rng).capitalize(),
        "day": rng.choice(DAYS),
        "friend": rng.choice([other for other in rng.sample(GIVEN_NAMES, 2) if other != name]),
        "room": rng.choice(_ROOMS),
        "price": str(rng.randint(2, 99)),
        "age": str(rng.randint(4, 95)),
    }
