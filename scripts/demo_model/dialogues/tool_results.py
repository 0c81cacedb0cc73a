"""What made-up tools answer, field by field."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from scripts.demo_model.dialogues.pools import syllables
from scripts.demo_model.dialogues.words import ADJECTIVES, NOUNS


def _between(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randint(low, high)


def _one(*values: str) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(values)


def _phrase(rng: random.Random) -> str:
    return f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


RESULTS: Mapping[str, Callable[[random.Random], Any]] = {
    "degrees": _between(-12, 36),
    "sky": _one("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "stormy"),
    "clock": lambda rng: f"{rng.randrange(24):02d}:{rng.randrange(60):02d}",
    "value": lambda rng: rng.randint(10, 99999) / 100,
    "price": _between(5, 990),
    "count": _between(1, 60),
    "number": _between(100, 999),
    "kilometers": _between(40, 9000),
    "hours": _between(2, 30),
    "road": _one("north", "south", "east", "west", "coast", "mountain"),
    "status": _one("done", "ready", "confirmed"),
    "sent": _one("sent", "on its way"),
    "deleted": _one("deleted", "gone"),
    "drawn": _one("drawn", "on the page"),
    "state": _one("packed", "sent", "on its way", "delivered"),
    "translation": lambda rng: f"{syllables(rng)} {syllables(rng)}",
    "title": lambda rng: (
        f"The {rng.choice(ADJECTIVES).capitalize()} {rng.choice(NOUNS).capitalize()}"
    ),
    "meaning": _phrase,
    "content": _phrase,
    "phone": lambda rng: f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}",
    "millions": _between(1, 300),
    "platform": _between(1, 24),
}
"""By the field's name."""
