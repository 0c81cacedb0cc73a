"""Tool calls: read the schemas, call the right one with the right values, answer from its result."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.demo_model.dialogues.basics import fact
from scripts.demo_model.dialogues.dialogue import (
    Dialogue,
    Sources,
    assistant,
    calling,
    capital,
    is_held_out,
    tool_answer,
    user,
    with_articles,
)
from scripts.demo_model.dialogues.pools import syllables
from scripts.demo_model.dialogues.tool_parameters import PARAMETERS
from scripts.demo_model.dialogues.tool_pool import TOOLS, Tool
from scripts.demo_model.dialogues.tool_results import RESULTS
from scripts.demo_model.dialogues.words import NOUNS, VERBS

_SLOT = re.compile(r"{(\w+)}")
_GENERIC = (
    *("city", "color", "size", "count", "level", "person", "day", "priority", "shape"),
    *("weight", "word", "minutes", "number", "room"),
)


@dataclass(frozen=True)
class Offer:
    """A tool under the names by which one dialogue offers it."""

    tool: Tool
    name: str
    names: Mapping[str, str]
    """Of its parameters, by their usual ones."""
    schema: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What a user asks of one of the tools offered."""

    offer: Offer
    offers: tuple[Offer, ...]
    question: str
    values: Mapping[str, Any]
    """By the parameters' usual names."""

    @property
    def key(self) -> str:
        """The tool and its values, under whichever names."""
        values = json.dumps(self.values, sort_keys=True, ensure_ascii=False)
        return f"tool {self.offer.tool.name}:{values}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the call."""
        return {self.offer.names[name]: value for name, value in self.values.items()}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools offered, as OpenAI's API has them."""
        return [offer.schema for offer in self.offers]

    @property
    def steps(self) -> str:
        """`The user wants the weather in Oslo. I call get_weather: city = Oslo.`"""
        wants = with_articles(self.offer.tool.wants.format(**_said(self.values)))
        given = ", ".join(f"{n} = {_plain(v)}" for n, v in self.arguments.items())
        return f"The user wants {wants}. I call {self.offer.name}: {given}."


def request(rng: random.Random, offers: tuple[Offer, ...] = ()) -> Request:
    """A request that one of the tools serves: those given, or one to three others."""
    offers = offers or _offers(rng)
    offer = rng.choice(offers)
    phrase = rng.choice(offer.tool.requests)
    slots = _SLOT.findall(phrase)
    chosen = [name for name in offer.tool.parameters.split() if name in slots]
    values = {name: PARAMETERS[name].draw(rng) for name in chosen}
    question = with_articles(phrase.format(**_said(values)))
    if rng.random() < 0.1:
        question = f"{rng.choice(('Hi!', 'Hello!', 'One more thing.'))} {question}"
    return Request(offer, offers, capital(question), values)


def tools(rng: random.Random, sources: Sources) -> Dialogue:
    """A call, half of the time with the answer after it; sometimes no call is right."""
    kind = rng.random()
    if kind < 0.08:
        return _needless(rng)
    if kind < 0.14:
        return _impossible(rng)
    one = request(rng)
    if kind < 0.24 and one.offer.tool.vague:
        return _missing(one, rng)
    thinking = rng.random() < 0.85
    kind = rng.random()
    if kind < 0.1:
        return _twice(one, rng, thinking)
    messages = _exchange(one, rng, thinking) if kind < 0.5 else _call(one, thinking)
    return Dialogue("tools", one.key, messages, one.schemas, thinking)


def _call(one: Request, thinking: bool) -> list[dict[str, Any]]:
    steps = one.steps if thinking else ""
    return [user(one.question), calling(one.offer.name, one.arguments, steps)]


def _exchange(one: Request, rng: random.Random, thinking: bool) -> list[dict[str, Any]]:
    """With the tool's answer and what the user is told of it."""
    result = {name: RESULTS[name](rng) for name in one.offer.tool.result.split()}
    texts = {**_said(one.values), **result}  # what the tool says counts
    answer = capital(with_articles(one.offer.tool.answer.format(**texts)))
    steps = "The tool has answered." if thinking else ""
    return [*_call(one, thinking), tool_answer(result), assistant(answer, steps)]


def _twice(one: Request, rng: random.Random, thinking: bool) -> Dialogue:
    """A second request after the first; none that is held out, or training would show it."""
    first = request(rng, one.offers)
    while is_held_out(first.key):
        first = request(rng, one.offers)
    messages = [*_exchange(first, rng, thinking), *_call(one, thinking)]
    return Dialogue("tools", one.key, messages, one.schemas, thinking)


def _needless(rng: random.Random) -> Dialogue:
    offers = _offers(rng)
    question, steps, answer = fact(rng)
    reply = assistant(answer, f"No tool is needed. {steps}")
    key = f"tool none:{question} {offers[0].name}"
    return Dialogue("tools", key, [user(question), reply], [offer.schema for offer in offers])


def _impossible(rng: random.Random) -> Dialogue:
    offers = _offers(rng)
    tool = rng.choice([tool for tool in TOOLS if not _rivals(tool, offers)])
    values = {name: PARAMETERS[name].draw(rng) for name in tool.parameters.split()}
    question = with_articles(rng.choice(tool.requests).format(**_said(values)))
    wants = with_articles(tool.wants.format(**_said(values)))
    reply = assistant(
        "I have no tool for that.", f"The user wants {wants}. No tool here does that."
    )
    key = f"tool none:{question}"
    return Dialogue("tools", key, [user(question), reply], [offer.schema for offer in offers])


def _missing(one: Request, rng: random.Random) -> Dialogue:
    tool, offer = one.offer.tool, one.offer
    first = tool.parameters.split()[0]
    steps = f"{offer.name} needs {offer.names[first]}, which is missing. I ask."
    key = f"tool ask:{one.key}"
    return Dialogue("tools", key, [user(tool.vague), assistant(tool.back, steps)], one.schemas)


def _offers(rng: random.Random) -> tuple[Offer, ...]:
    offers: list[Offer] = []
    for _ in range(rng.choices((1, 2, 3), (5, 4, 2))[0]):
        tool = _generic(rng) if rng.random() < 0.22 else rng.choice(TOOLS)
        if not _rivals(tool, offers):
            offers.append(_offer(rng, tool))
    return tuple(offers)


def _rivals(tool: Tool, offers: list[Offer] | tuple[Offer, ...]) -> bool:
    """Whether one of the tools offered could be meant as well."""
    families = ({"get_weather", "get_forecast"}, {"get_distance", "find_route"})
    for offer in offers:
        names = {tool.name, offer.tool.name}
        if len(names) == 1 or names in families or tool.about == offer.tool.about:
            return True
    return False


def _generic(rng: random.Random) -> Tool:
    """A tool that nobody knows, whose schema says all."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    names = rng.sample(_GENERIC, rng.choice((1, 2, 2, 3)))
    parts = [f"{name} {{{name}}}" for name in rng.sample(names, len(names))]
    tail = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return Tool(
        f"{verb}_{noun}",
        f"{capital(verb)} the {noun}.",
        " ".join(names),
        f"to {verb} the {noun}",
        (
            f"{capital(verb)} the {noun} with {tail}.",
            f"Please {verb} the {noun}: {', '.join(parts)}.",
            f"Can you {verb} the {noun} with {tail}?",
        ),
        "number",
        f"Done: the {noun} has the number {{number}}.",
        f"{capital(verb)} the {noun}.",
        f"Which {names[0]}?",
    )


def _offer(rng: random.Random, tool: Tool) -> Offer:
    name, style = tool.name, rng.random()
    if style < 0.1:
        name = f"{syllables(rng)}_{tool.name}"
    elif style < 0.2:
        name = f"{tool.name}_{rng.choice(('v2', 'now', 'tool', syllables(rng)))}"
    elif style < 0.3:
        head, *rest = tool.name.split("_")
        name = head + "".join(part.capitalize() for part in rest)
    elif style < 0.4:
        name = f"{syllables(rng)}_{syllables(rng)}"
    names: dict[str, str] = {}
    # Requests for unknown tools say the parameters' own names.
    renamed = tool in TOOLS and rng.random() < 0.35
    for usual in tool.parameters.split():
        free = [other for other in PARAMETERS[usual].names if other not in names.values()]
        names[usual] = rng.choice([usual, *free]) if renamed else usual
    return Offer(tool, name, names, _schema(rng, tool, name, names))


def _schema(rng: random.Random, tool: Tool, name: str, names: Mapping[str, str]) -> dict[str, Any]:
    described = rng.random() < 0.3
    needed = [usual for usual in names if all(f"{{{usual}}}" in phrase for phrase in tool.requests)]
    parameters = {
        "type": "object",
        "properties": {own: PARAMETERS[usual].schema(described) for usual, own in names.items()},
        "required": [names[usual] for usual in needed],
    }
    about = (
        tool.about if rng.random() < 0.8 else f"Use this: {tool.about[0].lower()}{tool.about[1:]}"
    )
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


def _said(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: PARAMETERS[name].said.get(v, _plain(v)) for name, v in values.items()}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
