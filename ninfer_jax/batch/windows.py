"""Rows made ready ahead of the engine: parsed, checked, tokenised and put in order, a window at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ninfer_jax.batch.bodies import Generation, Scoring, Work, prepare
from ninfer_jax.batch.order import Placed, arrange
from ninfer_jax.batch.requests import BadLine, BatchRequest, Line
from ninfer_jax.errors import InputError
from ninfer_jax.frontend import Frontend

FIRST_ROWS = 512
"""Rows of the first window; each next one is twice as long, so that the engine starts soon."""
MAX_ROWS = 4096
MAX_TOKENS = 8 << 20
"""Prompt tokens at which a window ends early."""


@dataclass(frozen=True)
class Refused:
    """A row whose body makes no sense."""

    request: BatchRequest | BadLine
    message: str
    status: int = 400


@dataclass(frozen=True)
class Ready:
    """A row that can run."""

    work: Work
    nodes: tuple[tuple[int, int], ...] = ()
    """Names of the prefixes it shares (window and node), outermost first."""


Row = Ready | Refused
T = TypeVar("T")


def windows(
    lines: Iterable[Line], frontend: Frontend, max_context: int, *, ordered: bool
) -> Iterator[list[Row]]:
    """The rows, a window at a time; in the order of the lines unless `ordered`."""
    number, size, tokens = 0, FIRST_ROWS, 0
    window: list[Row] = []
    for line in lines:
        row = _row(line, frontend)
        window.append(row)
        if isinstance(row, Ready) and isinstance(row.work, Generation):
            tokens += sum(len(call.prompt) for call in row.work.calls)
        if len(window) >= size or tokens >= MAX_TOKENS:
            yield _arranged(window, number, max_context) if ordered else window
            number, size, tokens, window = number + 1, min(2 * size, MAX_ROWS), 0, []
    if window:
        yield _arranged(window, number, max_context) if ordered else window


class Ahead(Generic[T]):
    """The next window, made by a thread while this one is worked on."""

    def __init__(self, source: Iterator[list[T]], wake: Callable[[], None]) -> None:
        self._source, self._wake = source, wake
        self._ready: queue.Queue[list[T] | BaseException | None] = queue.Queue(1)
        self._stop = threading.Event()
        self.exhausted = False
        """Whether everything was taken."""
        self._thread = threading.Thread(target=self._make, name="batch-windows", daemon=True)
        self._thread.start()

    def take(self) -> list[T]:
        """The next window if it is ready, else nothing. Raises what making it raised."""
        try:
            window = self._ready.get_nowait()
        except queue.Empty:
            return []
        if isinstance(window, BaseException):
            raise window
        self.exhausted = window is None
        return window or []

    def close(self, timeout: float | None = None) -> None:
        """End the thread, and wait for it: for `timeout` seconds, or until the window is made that it is at."""
        self._stop.set()
        self._thread.join(timeout)

    def _make(self) -> None:
        try:
            for window in self._source:
                if not self._put(window):
                    return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, item: list[T] | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            self._wake()
            return True
        return False


def _row(line: Line, frontend: Frontend) -> Row:
    if isinstance(line, BadLine):  # the file has changed since it was looked at
        return Refused(line, line.message)
    try:
        return Ready(prepare(line, frontend))
    except InputError as error:
        return Refused(line, str(error))
    except Exception as error:  # a fault of ours costs its row, and no other
        return Refused(line, f"{type(error).__name__}: {error}", 500)


def place(works: list[Work], max_context: int) -> list[Row]:
    """Rows that are prepared already, as one window."""
    return _arranged([Ready(work) for work in works], 0, max_context)


def _arranged(window: list[Row], number: int, max_context: int) -> list[Row]:
    """Refused rows, which cost nothing, then generation by prefix, then what is scored."""
    refused = [row for row in window if isinstance(row, Refused)]
    ready = [row for row in window if isinstance(row, Ready)]
    generating = [row.work for row in ready if isinstance(row.work, Generation)]
    scoring: list[Row] = [row for row in ready if isinstance(row.work, Scoring)]
    placed = arrange(
        [work.calls[0].prompt.token_ids for work in generating],
        [_tokens(work, max_context) for work in generating],
    )
    return [*refused, *(_placed(generating[p.index], p, number) for p in placed), *scoring]


def _placed(work: Generation, place: Placed, window: int) -> Ready:
    first, *others = work.calls
    prompt = replace(first.prompt, markers=place.markers)
    calls = (replace(first, prompt=prompt), *others)
    return Ready(replace(work, calls=calls), tuple((window, node) for node in place.nodes))


def _tokens(work: Generation, max_context: int) -> int:
    """Most tokens that a row may generate."""
    return sum(
        call.sequences * (call.params.max_tokens or max(0, max_context - len(call.prompt)))
        for call in work.calls
    )
