"""Rows through the engine: as many at a time as keep it busy, their lines in the order in which they end.

One thread does everything here. Other threads (the engine's worker, the one that makes windows, the one that scores)
only put a word into its queue.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ninfer_jax.batch.answers import answer_line, refusal_line, score_line
from ninfer_jax.batch.bodies import Generation, Scoring
from ninfer_jax.batch.requests import BadLine
from ninfer_jax.batch.windows import Ahead, Ready, Refused, Row
from ninfer_jax.engine import Engine, RequestHandle
from ninfer_jax.errors import EngineFailure, InputError, NinferError, NumericError, OverloadError
from ninfer_jax.outputs import RequestOutput
from ninfer_jax.scoring import Score

LOOK_AHEAD = 512
"""Rows looked at for one that need not wait for another's prefix."""
OPEN_GROUPS = 3
"""Prefixes that may be kept for rows that wait; more would push each other out of the cache."""
SCORE_PAIRS = 64
"""Contexts and continuations of one call of `Engine.score`, at least one row."""
TICK = 0.25
"""Seconds after which the journal is looked after although nothing happened."""

Done = Callable[[dict[str, Any], list[RequestOutput]], None]
"""Takes a row's line and its results; none if it was refused or scored."""


class _Event(NamedTuple):
    kind: str
    number: int = 0
    value: Any = None


class _Running(NamedTuple):
    row: Ready
    handles: list[RequestHandle]
    leads: list[tuple[int, int]]
    """Prefixes that other rows wait for it to compute."""


class Flow:
    """A run over one engine."""

    def __init__(self, engine: Engine, done: Done, *, cache: bool) -> None:
        self._engine, self._done, self._cache = engine, done, cache
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._waiting: deque[Row] = deque()
        self._running: dict[int, _Running] = {}
        self._ended: dict[int, int] = {}
        """Handles that have ended, of rows with several."""
        self._warm: set[tuple[int, int]] = set()
        self._led: set[tuple[int, int]] = set()
        self._scoring: list[Scoring] = []
        self._cancelled = False
        # Twice the lanes: one in each, and one that is ready when it ends.
        self._places = 2 * engine.limits.max_concurrency

    def wake(self) -> None:
        """Look around; from any thread, or a signal handler."""
        self._events.put(_Event("wake"))

    def run(self, ahead: Ahead[Row], tick: Callable[[], None], level: Callable[[], int]) -> None:
        """Until every row has its line, or what runs has ended after an interruption.

        Args:
          ahead: the rows.
          tick: called at least four times a second.
          level: 0: go on, 1: start nothing new, 2: cancel what runs.

        Raises:
          EngineFailure: the engine is closed or has failed.
        """
        try:
            while True:
                wish = level()
                if wish >= 2:
                    self._cancel()
                if not wish:
                    self._fill(ahead)
                busy = bool(self._running or (self._scoring and not self._cancelled))
                if not busy and (wish or (ahead.exhausted and not self._waiting)):
                    return
                self._next()
                tick()
        finally:
            self._cancel()
            for running in self._running.values():
                with contextlib.suppress(EngineFailure):
                    for handle in running.handles:
                        handle.close()

    def _next(self) -> None:
        """Deal with what happened."""
        try:
            event = self._events.get(timeout=TICK)
            while True:
                if event.kind == "started" and event.number in self._running:
                    self._warm.update(self._running[event.number].leads)
                elif event.kind == "ended":
                    self._handle_ended(event.number)
                elif event.kind == "scored":
                    self._score_ended(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _fill(self, ahead: Ahead[Row]) -> None:
        """Start what there is room for."""
        while True:
            if len(self._waiting) < self._places and not ahead.exhausted:
                self._take(ahead.take())
            row = self._pick()
            if row is None:
                return
            if isinstance(row, Refused):
                self._refuse(row)
            elif isinstance(row.work, Scoring):
                self._start_scoring(row.work)
            elif not self._start(row, row.work):
                self._waiting.appendleft(row)
                return

    def _take(self, window: list[Row]) -> None:
        self._waiting.extend(window)
        groups = [row.nodes[-1] for row in window if isinstance(row, Ready) and row.nodes]
        if groups:  # rows of the window before may still wait, of none before that
            self._led = {n for n in self._led if n[0] >= groups[0][0] - 1}
            self._warm &= self._led

    def _pick(self) -> Row | None:
        """The first row that can start now, taken out."""
        load = sum(_weight(r.row.work) for r in self._running.values())
        near = list(itertools.islice(self._waiting, LOOK_AHEAD))
        groups = {row.nodes[-1] for row in near if isinstance(row, Ready) and row.nodes}
        full = len(groups & self._led) >= OPEN_GROUPS
        for i, row in enumerate(near):
            if isinstance(row, Ready) and not self._can_start(row, load, full):
                continue
            del self._waiting[i]
            return row
        return None

    def _can_start(self, row: Ready, load: int, full: bool) -> bool:
        if isinstance(row.work, Scoring):
            return not self._scoring
        if load and load + _weight(row.work) > self._places:
            return False
        if full and row.nodes and row.nodes[-1] not in self._led:
            return False
        return not any(n in self._led and n not in self._warm for n in row.nodes)

    def _start(self, row: Ready, work: Generation) -> bool:
        """Submit a row; False if the engine has no place for it now."""
        handles: list[RequestHandle] = []
        try:
            if _weight(work) > self._engine.limits.max_queue:
                raise InputError(
                    f"the row has {_weight(work)} outputs, max_queue is {self._engine.limits.max_queue}; split it"
                )
            for call in work.calls:
                cache = "prompt" if self._cache else "off"
                handles.append(self._engine.submit(call.prompt, call.params, cache=cache))  # type: ignore[arg-type]
        except InputError as error:
            _close(handles)
            self._refuse(Refused(work.request, str(error)))
            return True
        except OverloadError:
            _close(handles)
            return False
        number = next(self._numbers)
        leads = [n for n in row.nodes if n not in self._led]
        self._led.update(leads)
        self._running[number] = _Running(row, handles, leads)
        self._ended[number] = 0
        handles[0].when_started(partial(self._events.put, _Event("started", number)))
        for handle in handles:
            handle.when_done(partial(self._events.put, _Event("ended", number)))
        return True

    def _handle_ended(self, number: int) -> None:
        self._ended[number] += 1
        if self._ended[number] < len(self._running[number].handles):
            return
        del self._ended[number]
        running = self._running.pop(number)
        self._warm.update(running.leads)
        outputs = [handle.wait() for handle in running.handles]
        sequences = [s for output in outputs for s in output.outputs]
        aborted = [s for s in sequences if s.finish_reason == "abort"]
        request = running.row.work.request
        if not aborted:
            decode = partial(_decode, self._engine)
            self._done(answer_line(request, outputs, self._engine.name, decode), outputs)
        elif not self._cancelled:
            self._done(refusal_line(request, 500, aborted[0].error or "aborted"), outputs)

    def _refuse(self, row: Refused) -> None:
        if isinstance(row.request, BadLine):
            return  # the input has changed since it was looked at; the next run says so
        self._done(refusal_line(row.request, row.status, row.message), [])

    def _cancel(self) -> None:
        if self._cancelled or not self._running:
            self._cancelled = self._cancelled or bool(self._scoring)
            return
        self._cancelled = True
        for running in self._running.values():
            for handle in running.handles:
                handle.cancel()

    # Scores: calls that block, so another thread makes them, one at a time

    def _start_scoring(self, first: Scoring) -> None:
        rows = [first]
        pairs = len(first.continuations)
        for row in list(itertools.islice(self._waiting, LOOK_AHEAD)):
            if not (isinstance(row, Ready) and isinstance(row.work, Scoring)):
                continue
            pairs += len(row.work.continuations)
            if pairs > SCORE_PAIRS:
                break
            rows.append(row.work)
            self._waiting.remove(row)
        self._scoring = rows
        call = partial(self._score, rows)
        threading.Thread(target=call, name="batch-scores", daemon=True).start()

    def _score(self, rows: list[Scoring]) -> None:
        """All rows in one call; if that is refused, one by one, to find whose fault it is."""
        results: list[Any] = []
        try:
            results = _split(rows, _scores(self._engine, rows))
        except (InputError, NumericError):
            for row in rows:
                try:
                    results.append(_scores(self._engine, [row]))
                except Exception as error:
                    results.append(error)
        except Exception as error:
            results = [error] * len(rows)
        self._events.put(_Event("scored", value=results))

    def _score_ended(self, event: _Event) -> None:
        rows, self._scoring = self._scoring, []
        for row, result in zip(rows, event.value, strict=True):
            if isinstance(result, InputError):
                self._refuse(Refused(row.request, str(result)))
            elif isinstance(result, NinferError) and not isinstance(result, EngineFailure):
                self._done(refusal_line(row.request, 500, str(result)), [])
            elif isinstance(result, Exception):
                raise result
            else:
                self._done(score_line(row.request, result, self._engine.name), [])


def _scores(engine: Engine, rows: list[Scoring]) -> list[Score]:
    contexts = [row.context for row in rows for _ in row.continuations]
    return engine.score(contexts, [c for row in rows for c in row.continuations])


def _split(rows: list[Scoring], scores: list[Score]) -> list[list[Score]]:
    each = iter(scores)
    return [list(itertools.islice(each, len(row.continuations))) for row in rows]


def _weight(work: Generation | Scoring) -> int:
    """Outputs that a row has running."""
    return sum(call.sequences for call in work.calls) if isinstance(work, Generation) else 0


def _close(handles: list[RequestHandle]) -> None:
    for handle in handles:
        handle.close()


def _decode(engine: Engine, token: int) -> str:
    return engine.frontend.tokenizer.decode([token], skip_special_tokens=False)
