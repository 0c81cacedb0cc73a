"""A recorded life in words: why a prefix was or was not reused, who was paused or evicted for whom."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from planner.world.commands import Admitted, Command, Ended, Note, Paused, Resumed
from planner.world.events import CacheCleared, Cancelled, Event, Submitted
from planner.world.journal import read


class Line(NamedTuple):
    """One thing that happened to a request (0: the whole engine), with its line in the record."""

    line: int
    request: int
    text: str

    def __str__(self) -> str:
        who = f"request {self.request}" if self.request else "engine"
        return f"{self.line:6d}  {who}: {self.text}"


def explain(path: str | Path, request: int | None = None) -> list[Line]:
    """Notes and life-cycle of one request, or of everything, in order.

    A torn last line is named at the end; a request that the record does not know gives no lines.
    """
    record = read(path)
    out: list[Line] = []
    last = 1
    for entry in record:
        last = entry.line
        found = [_of_event(entry.event), *map(_of_command, entry.commands)]
        if entry.error:
            found.append((0, f"the planner failed: {entry.error}"))
        out += [
            Line(entry.line, who, text)
            for who, text in filter(None, found)
            if request is None or who == request
        ]
    if record.torn and (out or request is None):
        out.append(Line(last + 1, 0, "the last line is torn; the record ends here"))
    return out


def _of_event(event: Event) -> tuple[int, str] | None:
    if isinstance(event, Submitted):
        return event.request, _submitted(event)
    if isinstance(event, Cancelled):
        return event.request, "cancel asked for"
    if isinstance(event, CacheCleared):
        return 0, "cache cleared"
    return None


def _submitted(s: Submitted) -> str:
    parts = [f"submitted: {s.prompt.frontier} prompt tokens, at most {s.max_tokens} output tokens"]
    if not s.cache:
        parts.append("cache disabled")
    if s.session:
        parts.append(f"session {s.session!r}")
    if s.recovery:
        parts.append(f"recovery point {s.recovery}")
    for name, values in (("splits", s.splits), ("anchors", s.anchors), ("markers", s.markers)):
        if values:
            parts.append(f"{name} {', '.join(map(str, values))}")
    return "; ".join(parts)


def _of_command(command: Command) -> tuple[int, str] | None:
    match command:
        case Admitted(request, lane, reused, source):
            what = f"{reused} tokens of checkpoint {source} reused" if source else "from root"
            return request, f"admitted to lane {lane}, {what}"
        case Resumed(request, lane, restored):
            return request, f"resumed in lane {lane}, {restored} tokens need no recomputation"
        case Paused(request, form, beneficiary):
            return request, f"paused ({form}) for request {beneficiary}"
        case Ended(request, outcome):
            return request, outcome
        case Note(request, kind, text):
            return request, f"{kind}: {text}"
    return None
