"""Records read out of a sentence or two, as one line of JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scripts.demo_model.dialogues.dialogue import (
    Dialogue,
    Sources,
    asked,
    capital,
    listed,
    with_articles,
)
from scripts.demo_model.dialogues.pools import (
    ARTICLES,
    BRANDS,
    COLORS,
    COUNTRIES,
    DAYS,
    JOBS,
    MONTHS,
    PETS,
    city,
    full_name,
    syllables,
)
from scripts.demo_model.dialogues.words import ADJECTIVES, NOUNS, listing

Value = str | int
Draw = Callable[[random.Random], Value]


@dataclass(frozen=True)
class Kind:
    """What a text can be about: its fields, how each is drawn, and texts that name them all."""

    name: str
    fields: Mapping[str, Draw]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """One text and what is asked of it."""

    kind: str
    values: Mapping[str, Value]
    """Every field of the text."""
    asked: tuple[str, ...]
    text: str

    @property
    def key(self) -> str:
        """The record, whatever is asked of it."""
        return f"json {self.kind}:{json.dumps(self.values, sort_keys=True, ensure_ascii=False)}"

    @property
    def result(self) -> dict[str, Value]:
        """The fields asked for, in their order."""
        return {name: self.values[name] for name in self.asked}

    @property
    def answer(self) -> str:
        """One line of JSON."""
        return json.dumps(self.result, ensure_ascii=False)

    @property
    def steps(self) -> str:
        """`name = Ada, age = 41.`"""
        return ", ".join(f"{name} = {value}" for name, value in self.result.items()) + "."


def _one(pool: tuple[str, ...]) -> Draw:
    return lambda rng: rng.choice(pool)


def _between(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def _title(rng: random.Random) -> str:
    noun, adjective = rng.choice(NOUNS), rng.choice(ADJECTIVES)
    form = rng.choice(("The {a} {n}", "{a} {n}", "A {a} {n}", "{n} and {m}", "The {n} of {c}"))
    parts = {"a": adjective, "n": noun, "m": rng.choice(NOUNS), "c": city(rng)}
    return with_articles(form.format(**{name: capital(word) for name, word in parts.items()}))


def _event(rng: random.Random) -> str:
    kinds = (
        "concert",
        "market",
        "race",
        "meeting",
        "workshop",
        "dinner",
        "fair",
        "lecture",
        "show",
    )
    return f"{rng.choice(NOUNS)} {rng.choice(kinds)}"


def _invented(rng: random.Random) -> str:
    return syllables(rng, rng.choice((2, 2, 3))).capitalize()


KINDS: tuple[Kind, ...] = (
    Kind(
        "person",
        {"name": full_name, "age": _between(18, 90), "job": _one(JOBS), "city": city},
        (
            "{name} is {age} years old and works as a {job} in {city}.",
            "{name}, {age}, is a {job} from {city}.",
            "The {job} {name} lives in {city} and is {age} years old.",
            "In {city} lives {name}, a {job} of {age} years.",
            "My neighbour {name} moved to {city} last year. At {age}, {name} still works as a {job}.",
            "Meet {name} from {city}. Age: {age}. Job: {job}.",
        ),
    ),
    Kind(
        "order",
        {
            "customer": full_name,
            "product": _one(ARTICLES),
            "quantity": _between(2, 60),
            "price": _between(1, 99),
        },
        (
            "{customer} ordered {quantity} pieces of the {product} at {price} euros each.",
            "Order from {customer}: {product}, quantity {quantity}, price {price}.",
            "We sold a {product} to {customer}. The price is {price} dollars and the quantity {quantity}.",
            "For {price} dollars a piece, {customer} bought the {product}, {quantity} times.",
        ),
    ),
    Kind(
        "book",
        {
            "title": _title,
            "author": full_name,
            "year": _between(1800, 2025),
            "pages": _between(60, 900),
        },
        (
            '{author} wrote "{title}" in {year}. It has {pages} pages.',
            'The book "{title}" by {author} appeared in {year} and has {pages} pages.',
            'In {year}, {author} published "{title}", a book of {pages} pages.',
            "Title: {title}. Author: {author}. Year: {year}. Pages: {pages}.",
        ),
    ),
    Kind(
        "event",
        {
            "event": _event,
            "city": city,
            "day": _one(DAYS),
            "hour": _between(8, 22),
            "guests": _between(5, 500),
        },
        (
            "The {event} in {city} is on {day} at {hour} o'clock. We expect {guests} guests.",
            "On {day} at {hour} there is a {event} in {city} for {guests} guests.",
            "{guests} guests will come to the {event} in {city}. It starts on {day} at {hour} o'clock.",
            "Come to {city} on {day}! The {event} begins at {hour}, with {guests} guests.",
        ),
    ),
    Kind(
        "town",
        {
            "city": _invented,
            "country": _one(COUNTRIES),
            "population": _between(100, 9999),
            "river": _invented,
        },
        (
            "{city} is a town in {country} on the river {river}. It has {population} inhabitants.",
            "The town of {city}, population {population}, lies on the {river} in {country}.",
            "In {country}, on the river {river}, {population} people live in {city}.",
        ),
    ),
    Kind(
        "product",
        {
            "product": _one(ARTICLES),
            "brand": _one(BRANDS),
            "color": _one(COLORS),
            "price": _between(2, 999),
        },
        (
            "The {color} {product} by {brand} costs {price} dollars.",
            "{brand} sells a {product} in {color} for {price} euros.",
            "For {price} dollars you get a {color} {product} made by {brand}.",
            "New from {brand}: a {product}. Color: {color}. Price: {price}.",
        ),
    ),
    Kind(
        "pet",
        {"owner": full_name, "animal": _one(PETS), "name": _invented, "age": _between(1, 20)},
        (
            "{owner} has a {animal} called {name}. It is {age} years old.",
            "{name} is the {animal} of {owner} and is {age} years old.",
            "The {animal} {name}, {age} years old, belongs to {owner}.",
        ),
    ),
    Kind(
        "trip",
        {
            "traveler": full_name,
            "origin": city,
            "destination": city,
            "month": _one(MONTHS),
            "days": _between(2, 40),
        },
        (
            "{traveler} travels from {origin} to {destination} in {month} and stays {days} days.",
            "In {month}, {traveler} will go to {destination} for {days} days, starting from {origin}.",
            "Trip of {traveler}: origin {origin}, destination {destination}, month {month}, days {days}.",
        ),
    ),
    Kind(
        "player",
        {"name": full_name, "team": _invented, "number": _between(1, 99), "goals": _between(0, 50)},
        (
            "{name} plays for {team} with the number {number} and scored {goals} goals.",
            "Number {number} of {team} is {name}, with {goals} goals so far.",
            "With {goals} goals, {name} is the best of {team}. The shirt has the number {number}.",
        ),
    ),
    Kind(
        "message",
        {
            "sender": full_name,
            "receiver": full_name,
            "day": _one(DAYS),
            "subject": lambda rng: rng.choice(NOUNS),
        },
        (
            "{sender} wrote to {receiver} on {day} about the {subject}.",
            "On {day}, {receiver} got a letter from {sender}. Its subject was the {subject}.",
            "Sender: {sender}. Receiver: {receiver}. Day: {day}. Subject: {subject}.",
        ),
    ),
)
_REQUESTS = (
    "Extract {f} as JSON.",
    "Give me {f} as JSON.",
    "Return JSON with the keys {f}.",
    "Return {f} as a JSON object.",
    "extract {f} as json",
    "Read {f} from this text and answer in JSON.",
    "Write {f} as one line of JSON.",
    "JSON with {f}, please.",
)


_ASIDES = (
    "It was a fine day.",
    "Please keep this note.",
    "This is all we know.",
    "More will follow soon.",
    "Thank you for your help.",
    "Nobody knew that before.",
)
_NUMBERS = listing("height weight speed level depth volume score rank code floor seats stock")
_NAMES = listing("color maker owner shape material origin group sign partner use place label")
_FORMS = ("Its {f} is {v}.", "The {f} is {v}.", "It has the {f} {v}.", "As {f} we noted {v}.")


def _thing(rng: random.Random) -> Kind:
    """Something with fields that go together by chance."""
    numbers, names = (
        rng.sample(_NUMBERS, rng.choice((1, 2))),
        rng.sample(_NAMES, rng.choice((2, 3))),
    )
    pools = (_one(COLORS), _one(NOUNS), _invented, full_name)
    draws = {name: rng.choice(pools) for name in names}
    draws.update({name: _between(0, 999) for name in numbers})
    fields = rng.sample(list(draws), len(draws))
    parts = [rng.choice(_FORMS).format(f=name, v=f"{{{name}}}") for name in fields]
    text = f"Here is a {rng.choice(NOUNS)}. {' '.join(parts)}"
    return Kind("thing", {name: draws[name] for name in fields}, (text,))


def record(rng: random.Random) -> Record:
    """A text and two to all of its fields, in any order."""
    kind = _thing(rng) if rng.random() < 0.15 else rng.choice(KINDS)
    values = {name: draw(rng) for name, draw in kind.fields.items()}
    if rng.random() < 0.12:
        names = rng.sample(list(values), len(values))
        mark = rng.choice((": ", " = ", " is "))
        text = rng.choice(("; ", ", ", "\n", ". ")).join(f"{n}{mark}{values[n]}" for n in names)
    else:
        text = with_articles(rng.choice(kind.texts).format(**values))
        if rng.random() < 0.12:
            aside = rng.choice(_ASIDES)
            text = f"{text} {aside}" if rng.random() < 0.5 else f"{aside} {text}"
    count = rng.choices((2, 3, 4, 5), (3, 5, 3, 1))[0]
    names = list(values)
    chosen = rng.sample(names, min(count, len(names)))
    if rng.random() < 0.4:
        chosen.sort(key=names.index)
    return Record(kind.name, values, tuple(chosen), text)


def question(rng: random.Random, one: Record) -> str:
    """The request before or after the text."""
    phrase = rng.choice(_REQUESTS)
    article = "the " if rng.random() < 0.15 and "keys" not in phrase else ""
    names = [f"{article}{name}" for name in one.asked]
    request = phrase.format(f=listed(names) if rng.random() < 0.75 else ", ".join(names))
    gap = rng.choice(("\n", "\n\n", " "))
    if rng.random() < 0.6:
        return f"{one.text}{gap}{request}"
    return f"{request}{gap}{rng.choice(('', '', 'Text: '))}{one.text}"


def extraction(rng: random.Random, sources: Sources) -> Dialogue:
    """A record with its fields found one after the other."""
    one = record(rng)
    thinking = rng.random() < 0.85
    return asked("json", one.key, question(rng, one), one.steps, one.answer, thinking=thinking)
