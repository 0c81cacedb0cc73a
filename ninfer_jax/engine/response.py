"""What the worker tells a consumer about one request, and what the consumer tells back.

The worker posts; any number of threads and event loops wait. Nothing here touches the worker's data.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ninfer_jax.errors import NinferError
from ninfer_jax.frontend import OutputDelta
from ninfer_jax.outputs import FinishReason


class News(NamedTuple):
    """A step forward of one sequence: new tokens, or its end."""

    sequence: int
    delta: OutputDelta | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    last: bool = False
    """Whether the whole request ends with it: the one terminal event (ENG-10)."""


class Response:
    """A mailbox. `when_news` and `when_ended` call back once, from whatever thread makes it true."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: deque[News] = deque()
        self._wakers: list[Callable[[], None]] = []
        self._end_wakers: list[Callable[[], None]] = []
        self._end = threading.Event()
        self._released = False
        self._free: Callable[[], None] | None = None
        self.failure: NinferError | None = None
        """Why there is no result, if the engine failed."""

    @property
    def ended(self) -> bool:
        """Whether the terminal event was posted."""
        return self._end.is_set()

    def wait_ended(self, timeout: float | None) -> bool:
        """Block until the request has ended; False after `timeout` seconds."""
        return self._end.wait(timeout)

    def post(self, news: News) -> None:
        """Tell what happened."""
        with self._lock:
            self._news.append(news)
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def end(self, news: News | None = None, failure: NinferError | None = None) -> None:
        """Tell the last news, or that there is no result and why."""
        with self._lock:
            if news is not None:
                self._news.append(news)
            self.failure = failure
            self._end.set()
            wakers = self._wakers + self._end_wakers
            self._wakers, self._end_wakers = [], []
        for wake in wakers:
            wake()
        self._settle_place()

    def take(self) -> News | None:
        """The oldest news not yet taken."""
        try:
            return self._news.popleft()
        except IndexError:
            return None

    def when_news(self, wake: Callable[[], None]) -> None:
        """Call `wake` once there is something to take, or nothing will come any more."""
        with self._lock:
            if not (self._news or self.ended):
                self._wakers.append(wake)
                return
        wake()

    def when_ended(self, wake: Callable[[], None]) -> None:
        """Call `wake` once the request has ended."""
        with self._lock:
            if not self.ended:
                self._end_wakers.append(wake)
                return
        wake()

    def holds_place(self, free: Callable[[], None]) -> None:
        """The request occupies a place; `free` gives it back, once (ENG-02)."""
        self._free = free

    def release(self) -> None:
        """The consumer has what it wanted, or has gone."""
        with self._lock:
            self._released = True
        self._settle_place()

    def _settle_place(self) -> None:
        with self._lock:
            if not (self.ended and self._released):
                return
            free, self._free = self._free, None
        if free is not None:
            free()
