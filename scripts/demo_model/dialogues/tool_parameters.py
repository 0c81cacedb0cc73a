"""The parameters of made-up tools, each with the values that dialogues give it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.demo_model.dialogues.dialogue import capital
from scripts.demo_model.dialogues.pools import (
    ARTICLES,
    COLORS,
    COUNTRIES,
    DAYS,
    GIVEN_NAMES,
    LANGUAGES,
    MONTHS,
    city,
    full_name,
)
from scripts.demo_model.dialogues.words import ADJECTIVES, NOUNS


@dataclass(frozen=True)
class Parameter:
    """One parameter: its JSON schema, its values, and other names that it may go by."""

    about: str
    draw: Callable[[random.Random], Any]
    type: str = "string"
    names: tuple[str, ...] = ()
    enum: tuple[str, ...] = ()
    said: Mapping[Any, str] = field(default_factory=dict)
    """How requests say a value that is not its own word."""

    def schema(self, described: bool) -> dict[str, Any]:
        """JSON schema."""
        out: dict[str, Any] = {"type": self.type}
        if self.enum:
            out["enum"] = list(self.enum)
        return {**out, "description": self.about} if described else out


def _enum(about: str, values: str, *names: str) -> Parameter:
    choices = tuple(values.split())
    return Parameter(about, lambda rng: rng.choice(choices), names=names, enum=choices)


def _text(about: str, draw: Callable[[random.Random], str], *names: str) -> Parameter:
    return Parameter(about, draw, names=names)


def _integer(about: str, low: int, high: int, *names: str) -> Parameter:
    return Parameter(about, lambda rng: rng.randint(low, high), "integer", names)


def _number(about: str, low: int, high: int, *names: str) -> Parameter:
    def draw(rng: random.Random) -> int | float:
        whole = rng.randint(low, high)
        return whole if rng.random() < 0.5 else whole + rng.randint(1, 9) / 10

    return Parameter(about, draw, "number", names)


def _boolean(about: str, yes: str, no: str, *names: str) -> Parameter:
    said = {True: yes, False: no}
    return Parameter(about, lambda rng: rng.random() < 0.5, "boolean", names, said=said)


def _phrase(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def _noun(rng: random.Random) -> str:
    return rng.choice(NOUNS)


def _clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.choice((0, 15, 30, 45)):02d}"


def _date(rng: random.Random) -> str:
    return f"{rng.randint(2020, 2030)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _file(rng: random.Random) -> str:
    return f"{rng.choice(NOUNS)}.{rng.choice(('txt', 'md', 'csv', 'pdf', 'py'))}"


def _mail(rng: random.Random) -> str:
    return f"{rng.choice(GIVEN_NAMES).lower()}@{rng.choice(NOUNS)}.example"


def _symbol(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHIKLMNOPRSTUVXZ") for _ in range(rng.choice((3, 4))))


PARAMETERS: Mapping[str, Parameter] = {
    "city": _text("Name of the city.", city, "place", "town", "location"),
    "origin": _text("Where it starts.", city, "start", "from_city"),
    "destination": _text("Where it goes.", city, "target", "to_city"),
    "country": _text("Name of the country.", lambda rng: rng.choice(COUNTRIES), "nation", "land"),
    "day": _enum("Day of the week.", " ".join(DAYS), "weekday"),
    "month": _text("Month of the year.", lambda rng: rng.choice(MONTHS)),
    "date": _text("Date as YYYY-MM-DD.", _date, "on_date", "when"),
    "time": _text("Time as HH:MM.", _clock, "at", "clock", "hour"),
    "person": _text("Name of the person.", full_name, "name", "contact", "who"),
    "title": _text(
        "Short title.", lambda rng: capital(f"{_noun(rng)} meeting"), "subject", "label"
    ),
    "topic": _text("What it is about.", _phrase, "subject", "theme"),
    "query": _text("Words to look for.", _phrase, "q", "keywords", "search_text"),
    "text": _text("The text.", lambda rng: f"the {_phrase(rng)}", "content", "phrase"),
    "word": _text("One word.", _noun, "term"),
    "item": _text("Name of the thing.", lambda rng: rng.choice(ARTICLES), "product", "article"),
    "file": _text("Name of the file.", _file, "path", "filename"),
    "address": _text("Mail address.", _mail, "to", "recipient"),
    "symbol": _text("Symbol of the share.", _symbol, "ticker", "code"),
    "language": _text("Language.", lambda rng: rng.choice(LANGUAGES), "target_language", "lang"),
    "source_currency": _enum(
        "Currency to convert from.", "EUR USD GBP JPY CHF SEK", "from", "base"
    ),
    "target_currency": _enum("Currency to convert to.", "AUD CAD NOK DKK PLN INR", "to", "into"),
    "source_unit": _enum("Unit to convert from.", "miles feet pounds gallons inches", "from_unit"),
    "target_unit": _enum("Unit to convert to.", "meters grams liters kilometers", "to_unit"),
    "room": _enum("Room of the house.", "kitchen bedroom bathroom hall office garage", "zone"),
    "device": _enum("Kind of device.", "fan heater radio printer camera oven", "machine"),
    "color": _text("Color.", lambda rng: rng.choice(COLORS), "colour", "tint"),
    "size": _enum("Size.", "small medium large"),
    "genre": _enum("Kind of music.", "jazz rock classical folk pop blues", "style"),
    "priority": _enum("How urgent it is.", "low normal high", "urgency"),
    "shape": _enum("Shape.", "circle square triangle star", "form"),
    "amount": _number("Amount of money.", 1, 500, "sum", "value"),
    "quantity": _number("How much.", 1, 300, "value", "number"),
    "weight": _number("Weight in kilograms.", 1, 90, "mass", "kilos"),
    "temperature": _number("Degrees Celsius.", 5, 30, "degrees", "celsius"),
    "minutes": _integer("Length in minutes.", 1, 90, "duration", "length"),
    "count": _integer("How many.", 1, 40, "number", "n", "amount"),
    "level": _integer("Level from 0 to 100.", 0, 100, "percent", "strength"),
    "people": _integer("Number of people.", 1, 12, "guests", "seats"),
    "nights": _integer("Number of nights.", 1, 14, "stay"),
    "limit": _integer("Most results to give.", 1, 20, "max_results", "top"),
    "low": _integer("Smallest number.", 0, 40, "minimum", "min_value"),
    "high": _integer("Largest number.", 41, 99, "maximum", "max_value"),
    "number": _integer("The number.", 1, 999, "id", "value"),
    "year": _integer("Year.", 1900, 2030),
    "on": _boolean("Whether to switch it on.", "on", "off", "enabled", "active", "state"),
    "locked": _boolean("Whether to lock it.", "Lock", "Unlock", "lock", "closed"),
    "open": _boolean("Whether to open it.", "Open", "Close", "opened"),
    "round_trip": _boolean("Whether to come back too.", "and back", "one way", "both_ways"),
    "urgent": _boolean("Whether it is urgent.", "urgently", "without haste", "hurry"),
}
"""By their usual name."""
