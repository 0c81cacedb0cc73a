"""SIGINT and SIGTERM as wishes: the first to stop, the second to stop at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Counts signals while a run goes on; outside the main thread, where Python has none, it stays 0."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.count = 0
        self.since = 0.0
        """When the first came, on the monotonic clock."""
        self._wake = wake
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._called) for s in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: a handler that no Python code has set, which Python cannot set again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _called(self, number: int, frame: FrameType | None) -> None:
        self.since = self.since or time.monotonic()
        self.count += 1
        self._wake()
