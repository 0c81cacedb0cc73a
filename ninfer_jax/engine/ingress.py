"""Where everything enters: a bounded number of places, and one queue to the worker."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from ninfer_jax.engine.request import Request
from ninfer_jax.errors import NinferError, OverloadError


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """The consumer gives a request up; `released`: and will never look at it again (ENG-03)."""

    request: Request
    released: bool = False


@dataclass(frozen=True, slots=True)
class Clear:
    """Empty the cache."""

    done: Future[None]


@dataclass(frozen=True, slots=True)
class Close:
    """End every request, then the worker."""


Message = Submit | Cancel | Clear | Close


class Ingress:
    """Threads put messages in, the worker takes them out, in one order."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._taken = 0
        self._live = 0
        self._refusal: NinferError | None = None

    def submit(self, request: Request, *, wait: bool = False) -> None:
        """Take a place and queue a request (ENG-02).

        Args:
          request: a request that could run.
          wait: wait for a place instead of being refused.

        Raises:
          OverloadError: every place is taken.
          NinferError: the engine is closed or has failed.
        """
        with self._room:
            while self._refusal is None and self._taken >= self.places:
                if not wait:
                    raise OverloadError(
                        f"{self.places} requests are waiting, running or not yet collected, which is max_queue; "
                        "try again later, or load the engine with a larger max_queue"
                    )
                self._room.wait()
            self._check()
            self._taken += 1
            self._live += 1
            request.arrival = time.monotonic()
            request.response.holds_place(self._free)
            self._messages.put(Submit(request))

    @property
    def live(self) -> int:
        """Requests submitted and not ended."""
        return self._live

    def ended(self) -> None:
        """A request has ended; said before its consumer hears of it."""
        with self._room:
            self._live -= 1

    def clear(self) -> Future[None]:
        """Ask for an empty cache. Raises NinferError if the engine is closed or has failed."""
        done: Future[None] = Future()
        with self._room:
            self._check()
            self._messages.put(Clear(done))
        return done

    def send(self, message: Cancel | Close) -> None:
        """Tell the worker something. Takes no lock: a garbage collection may call this at any point."""
        self._messages.put(message)

    def refuse(self, reason: NinferError) -> None:
        """Let nothing in any more; the first reason stays."""
        with self._room:
            self._refusal = self._refusal or reason
            self._room.notify_all()

    def receive(self, timeout: float | None = 0) -> Message | None:
        """The next message, after at most `timeout` seconds (None: for ever); None if there is none."""
        try:
            return self._messages.get(timeout != 0, timeout)
        except queue.Empty:
            return None

    def _check(self) -> None:
        if self._refusal is not None:
            raise type(self._refusal)(*self._refusal.args)

    def _free(self) -> None:
        with self._room:
            self._taken -= 1
            self._room.notify()
