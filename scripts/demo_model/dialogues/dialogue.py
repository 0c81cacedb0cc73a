"""One synthetic dialogue, and what its makers share."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Dialogue:
    """A conversation as OpenAI's API writes it."""

    task: str
    key: str
    """What is asked, apart from how: decides whether the dialogue is held out."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = True
    """Whether the answers to the last question think; without, their think block is empty."""


@dataclass(frozen=True)
class Sources:
    """Real text that some makers draw from."""

    passages: Sequence[str] = ()
    glosses: Sequence[tuple[str, str]] = ()


_BEFORE_VOWEL = re.compile(r"\b([aA])(?= [aeioAEIO])")
Maker = Callable[[random.Random, Sources], Dialogue]


def is_held_out(key: str) -> bool:
    """Whether a question is kept for testing: one key in fifty."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()) % 50 == 0


def system(text: str) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(content: str, reasoning: str = "") -> dict[str, Any]:
    """An answer in words."""
    return {"role": "assistant", "content": content, "reasoning_content": reasoning}


def calling(name: str, arguments: Mapping[str, Any], reasoning: str) -> dict[str, Any]:
    """An answer that calls one tool."""
    function = {"name": name, "arguments": dict(arguments)}
    call = {"type": "function", "id": "call_0", "function": function}
    return {**assistant("", reasoning), "tool_calls": [call]}


def tool_answer(value: Any) -> dict[str, Any]:
    """What a tool gave back."""
    content = json.dumps(value, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": "call_0", "content": content}


def asked(
    task: str, key: str, question: str, reasoning: str, answer: str, *, thinking: bool = True
) -> Dialogue:
    """A dialogue of one question and one answer."""
    reply = assistant(answer, reasoning if thinking else "")
    return Dialogue(task, key, [user(question), reply], thinking=thinking)


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def with_articles(text: str) -> str:
    """`an` for `a` before vowels."""
    return _BEFORE_VOWEL.sub(r"\1n", text)
