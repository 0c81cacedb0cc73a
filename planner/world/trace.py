"""Workload traces: one JSON object a line, real token ids or paths in a synthetic prefix tree.

``{"arrival": seconds, "prompt": [ids], "output": n}`` or ``{"arrival": seconds, "prefix": ["systemA",
"turn1", ...], "lengths": [n1, n2, ...], "output": n}``, and optionally "session" (text), "cache"
(bool) and "markers" (frontiers). The tokens of a synthetic node follow from its path alone, so equal paths are
equal prefixes. A request's output is the node "output" below its own path: a later line that has it
in its prefix continues the conversation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from planner.errors import PlannerError

VOCABULARY: Final = 100_000
"""Synthetic token ids lie below this."""
_KEYS: Final = {"arrival", "prompt", "prefix", "lengths", "output", "session", "cache", "markers"}


class TraceError(PlannerError):
    """A line of a trace that means nothing; the message names the line and the cure."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: ``arrival`` in nanoseconds, ``prompt`` and ``output`` as token ids.

    ``line`` is where it stands in its file, for messages.
    """

    arrival: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    session: str = ""
    cache: bool = True
    markers: tuple[int, ...] = ()
    line: int = 0


def node_tokens(path: Iterable[str], length: int) -> tuple[int, ...]:
    """The first ``length`` tokens of a synthetic node: a hash of its path, nothing else."""
    key = json.dumps(list(path)).encode()
    raw = hashlib.shake_128(key).digest(4 * length)
    return tuple((np.frombuffer(raw, "<u4") % VOCABULARY).tolist())


def load_trace(path: str | Path) -> list[TraceRequest]:
    """Read a trace file; the requests by arrival, equal arrivals in the order of the file."""
    with Path(path).open("rb") as f:
        return parse_trace(f, str(path))


def parse_trace(lines: Iterable[str | bytes], name: str = "trace") -> list[TraceRequest]:
    """`load_trace` for lines in memory; empty lines are skipped."""
    lengths: dict[tuple[str, ...], int] = {}
    requests: list[TraceRequest] = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            requests.append(_request(number, json.loads(text), lengths))
        except (TraceError, ValueError) as e:
            words = str(e) if isinstance(e, TraceError) else f"no JSON ({e})"
            raise TraceError(f"{name}, line {number}: {words}") from None
    if not requests:
        raise TraceError(f"{name} holds no request; give one JSON object a line")
    return sorted(requests, key=lambda r: r.arrival)


def _request(number: int, line: Any, lengths: dict[tuple[str, ...], int]) -> TraceRequest:
    if type(line) is not dict:
        raise TraceError("a line is one JSON object")
    unknown = sorted(line.keys() - _KEYS)
    if unknown:
        raise TraceError(f"{unknown[0]!r} is unknown; a line has {', '.join(sorted(_KEYS))}")
    arrival: Any = line.get("arrival")
    if type(arrival) not in (int, float) or not math.isfinite(arrival) or arrival < 0:
        raise TraceError(f'"arrival" is {arrival!r}; give seconds from 0')
    if ("prompt" in line) == ("prefix" in line):
        raise TraceError('give either "prompt" (token ids) or "prefix" with "lengths"')
    count = line.get("output")
    if type(count) is not int or count < 1:
        raise TraceError(f'"output" is {count!r}; give the number of tokens, at least 1')
    session, cache = line.get("session", ""), line.get("cache", True)
    if type(session) is not str or type(cache) is not bool:
        raise TraceError('"session" is a text and "cache" true or false')
    if "prompt" in line:
        prompt = _integers(line, "prompt", low=0)
        output = node_tokens(["prompt", *map(str, prompt)], count)
        first = 0
    else:
        prompt, output, first = _synthetic(line, count, lengths)
    default = (first,) if first < len(prompt) and first else ()
    markers = _integers(line, "markers", low=1) if "markers" in line else default
    return TraceRequest(
        round(arrival * 1e9), prompt, output, session, cache, markers, number
    )  # fmt: skip


def _integers(line: dict[str, Any], key: str, low: int) -> tuple[int, ...]:
    values = line.get(key)
    good = type(values) is list and all(type(v) is int and low <= v < 2**31 for v in values)
    if not good or not values:
        raise TraceError(f'"{key}" is a list of whole numbers from {low}, and not empty')
    assert isinstance(values, list)
    return tuple(values)


def _synthetic(
    line: dict[str, Any], count: int, lengths: dict[tuple[str, ...], int]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Prompt, output and the length of the first node, where other prompts may leave this one."""
    names = line.get("prefix")
    if type(names) is not list or not names or any(type(n) is not str for n in names):
        raise TraceError('"prefix" is a list of names, from the root down')
    sizes = _integers(line, "lengths", low=1)
    if len(sizes) != len(names):
        raise TraceError(f'"prefix" has {len(names)} names, "lengths" {len(sizes)} numbers')
    prompt: list[int] = []
    for depth, size in enumerate(sizes, start=1):
        path = tuple(names[:depth])
        if lengths.setdefault(path, size) != size:
            raise TraceError(f"{'/'.join(path)} has {size} tokens here and {lengths[path]} before")
        prompt += node_tokens(path, size)
    return tuple(prompt), node_tokens([*names, "output"], count), sizes[0]
