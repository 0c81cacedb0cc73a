"""Held-out questions with one right answer each, and a strict judge."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from scripts.demo_model.dialogues import arithmetic, extraction, sorting, tools
from scripts.demo_model.dialogues.dialogue import is_held_out, user

_NUMBER = re.compile(r"-?\d+")


class Call(Protocol):
    """A tool call as the runtime gives it."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> str: ...


class Output(Protocol):
    """What the judge reads of a `CompletionOutput`."""

    @property
    def text(self) -> str: ...

    @property
    def tool_calls(self) -> Sequence[Call]: ...


@dataclass(frozen=True)
class Question:
    """One question and what answers it."""

    task: str
    key: str
    messages: list[dict[str, Any]]
    expected: Any
    """Arithmetic: the last numbers of the answer. Sorting: the list. JSON: the object. Tools: name
    and arguments."""
    tools: list[dict[str, Any]] = field(default_factory=list)


def questions(count: int = 100, seed: int = 0) -> list[Question]:
    """Different held-out questions, as many of each of the four tasks as the count allows."""
    rng = random.Random(f"questions {seed}")
    makers = (_arithmetic, _sorting, _json, _tool)
    asked: dict[str, Question] = {}
    while len(asked) < count:
        question = makers[len(asked) % len(makers)](rng)
        if is_held_out(question.key):
            asked.setdefault(question.key, question)
    return sorted(asked.values(), key=lambda question: question.task)


def judge(question: Question, output: Output) -> bool:
    """Whether the output is exactly right."""
    if question.task == "tools":
        return _called(question.expected, output.tool_calls)
    if output.tool_calls:
        return False
    return _JUDGES[question.task](question.expected, output.text.strip())


def _arithmetic(rng: random.Random) -> Question:
    one = arithmetic.exercise(rng)
    expected = [int(number) for number in _NUMBER.findall(one.result)]
    return Question("arithmetic", one.key, [user(arithmetic.question(rng, one))], expected)


def _sorting(rng: random.Random) -> Question:
    one = sorting.word_order(rng, 5)
    return Question("sorting", one.key, [user(sorting.question(rng, one))], list(one.result))


def _json(rng: random.Random) -> Question:
    one = extraction.record(rng)
    return Question("json", one.key, [user(extraction.question(rng, one))], one.result)


def _tool(rng: random.Random) -> Question:
    one = tools.request(rng)
    expected = {"name": one.offer.name, "arguments": one.arguments}
    return Question("tools", one.key, [user(one.question)], expected, one.schemas)


def _numbers(expected: list[int], text: str) -> bool:
    return [int(number) for number in _NUMBER.findall(text)][-len(expected) :] == expected


def _list(expected: list[str], text: str) -> bool:
    return text.rstrip(".") == ", ".join(expected)


def _object(expected: dict[str, Any], text: str) -> bool:
    try:
        return _same(json.loads(text), expected)
    except ValueError:
        return False


def _called(expected: dict[str, Any], calls: Sequence[Call]) -> bool:
    if len(calls) != 1 or calls[0].name != expected["name"]:
        return False
    return _object(expected["arguments"], calls[0].arguments)


def _same(left: Any, right: Any) -> bool:
    """Equal as JSON, where 1, 1.0 and true differ."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


_JUDGES: dict[str, Callable[[Any, str], bool]] = {
    "arithmetic": _numbers,
    "sorting": _list,
    "json": _object,
}
