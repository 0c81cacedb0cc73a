"""What happened to the latest requests, in words: the material of `Engine.explain`."""

from __future__ import annotations

import threading
from collections import deque

REQUESTS = 1_000
"""Requests remembered."""
LINES = 200
"""Lines remembered of one request, the newest."""


class History:
    """Lines by request, in bounded memory. The worker writes, any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, deque[str]] = {}
        self._engine: deque[str] = deque(maxlen=LINES)

    def add(self, request_id: str | None, line: str) -> None:
        """Add a line to a request; None: to the engine."""
        with self._lock:
            if request_id is None:
                self._engine.append(line)
                return
            lines = self._lines.get(request_id)
            if lines is None:
                while len(self._lines) >= REQUESTS:
                    del self._lines[next(iter(self._lines))]
                lines = self._lines[request_id] = deque(maxlen=LINES)
            lines.append(line)

    def of(self, request_id: str) -> list[str] | None:
        """Lines of a request, oldest first; None if it is not known (any more)."""
        with self._lock:
            lines = self._lines.get(request_id)
            return None if lines is None else list(lines)

    def of_engine(self) -> list[str]:
        """Lines about no single request."""
        with self._lock:
            return list(self._engine)
