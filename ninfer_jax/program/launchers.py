"""Threads that launch units.

JAX runs one after the other what one thread launches on CPU; launches of different threads run beside each other.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Call = tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]


class Launchers:
    """Threads that take turns. No executor of Python's: those take no work while the interpreter ends, when engines
    still run to their close."""

    def __init__(self, count: int) -> None:
        self._queues: list[SimpleQueue[_Call | None]] = [SimpleQueue() for _ in range(count)]
        self._turns = itertools.cycle(self._queues)
        self._threads = [
            threading.Thread(target=_serve, args=(queue,), name="ninfer-launch", daemon=True)
            for queue in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def launch(self, unit: Callable[..., Any], *args: Any) -> Any:
        """Call a unit in the next thread; waits for the launch, not for the results. What it raises is raised here."""
        done: Future[Any] = Future()
        next(self._turns).put((unit, args, done))
        return done.result()

    def close(self) -> None:
        """End the threads."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()


def _serve(queue: SimpleQueue[_Call | None]) -> None:
    while (call := queue.get()) is not None:
        unit, args, done = call
        try:
            done.set_result(unit(*args))
        except BaseException as error:
            done.set_exception(error)
        del call, unit, args, done  # a result kept here would keep its memory
