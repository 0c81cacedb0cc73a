"""Requests that are in memory, through an engine, without files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ninfer_jax.batch.bodies import Work
from ninfer_jax.batch.flow import Flow
from ninfer_jax.batch.requests import Line
from ninfer_jax.batch.windows import Ahead, Row, place, windows
from ninfer_jax.engine import Engine
from ninfer_jax.outputs import RequestOutput

Answer = tuple[dict[str, Any], list[RequestOutput]]
"""An output line, and the results it was made of: none if it was refused or scored."""


def answer_lines(engine: Engine, lines: Iterable[Line], *, cache: bool = True) -> list[Answer]:
    """Answer lines in an order that suits the engine. Raises EngineFailure if it fails."""
    context = engine.limits.max_context
    return _answer(engine, windows(lines, engine.frontend, context, ordered=cache), cache)


def answer_works(engine: Engine, works: list[Work], *, cache: bool = True) -> list[Answer]:
    """The same for rows that are prepared already."""
    rows = place(works, engine.limits.max_context)
    return _answer(engine, iter([rows]), cache)


def _answer(engine: Engine, source: Iterator[list[Row]], cache: bool) -> list[Answer]:
    answers: list[Answer] = []
    flow = Flow(engine, lambda line, outputs: answers.append((line, outputs)), cache=cache)
    ahead = Ahead(source, flow.wake)
    try:
        flow.run(ahead, lambda: None, lambda: 0)
    finally:
        ahead.close()
    return answers
