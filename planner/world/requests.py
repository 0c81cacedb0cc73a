"""Requests as the scheduler sees them: what was asked (cold) and where it stands (hot)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from planner.checkpoints import Identity
from planner.world.events import Submitted

Phase = Literal["waiting", "binding", "resident", "paused"]
SaveKind = Literal["input", "anchor", "shared"]


class Save(NamedTuple):
    """An opportunity: a frontier at which a capture may be tried (CAPT-01)."""

    frontier: int
    kinds: tuple[SaveKind, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A live request. ``id`` is its ticket; ``spec`` never changes."""

    spec: Submitted
    phase: Phase = "waiting"
    saves: tuple[Save, ...] = ()
    """Opportunities not yet reached, by frontier."""
    stops: tuple[int, ...] = ()
    """Where prefill is split, whether or not anything is saved there (CAT-06)."""
    waiter: int = 0
    """Owner number of its waiting reference (0: never had one)."""
    wait: int = 0
    """Checkpoint it waits for (0: none) (SRC-12)."""
    bypassed: int = 0
    """Younger requests admitted while it was blocked (SCH-06)."""
    owner: int = 0
    """Owner number of its private record, once it has one."""
    admitted: bool = False
    source: int = 0
    """Checkpoint it last started from (0: root)."""
    snapshot: int = 0
    """Its pause Snapshot while paused (0: Replay)."""
    holder: int = 0
    """Owner number that holds the snapshot."""
    outputs: bytes = b""
    """Committed output tokens while paused or binding, int32 (the ledger's second half)."""
    frontier: int = 0
    """Position to come back to while paused."""
    cancelled: bool = False

    @property
    def id(self) -> int:
        """The ticket."""
        return self.spec.request

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.spec.prompt.frontier


class Resident(NamedTuple):
    """A request with a lane: the few facts that change with every unit.

    ``position`` counts the tokens launched (committed or in flight), ``asked`` the outputs launched;
    ``units`` are in flight, oldest first. Positions below ``replay`` run for the second time.
    ``blocks`` of the table row are published.
    """

    request: int
    sequence: int
    lane: int
    position: int
    asked: int
    units: tuple[int, ...]
    outputs: bytes
    replay: int
    blocks: int
    read_slot: int
    write_slot: int
    prompt_length: int
    max_tokens: int
    synchronous: int
    last_prompt_token: int
    pausing: int = 0
    """Ticket for whose sake it pauses (0: it does not)."""
    ending: Literal["", "finished", "cancelled", "failed"] = ""

    @property
    def committed(self) -> int:
        """Outputs committed."""
        return len(self.outputs) // 4


def ledger(prompt: Identity, outputs: bytes) -> Identity:
    """Identity of prompt and committed outputs: text after the prompt, positions going on (CK-08)."""
    n = len(outputs) // 4
    if not n:
        return prompt
    where = np.arange(prompt.frontier, prompt.frontier + n, dtype="<i4") + prompt.rope_delta
    return Identity(
        prompt.frontier + n,
        prompt.tokens + outputs,
        prompt.types + bytes(n),
        prompt.positions + np.repeat(where, prompt.axes).astype("<i4").tobytes(),
        prompt.axes,
        prompt.spans,
        prompt.rope_delta,
        prompt.mode,
        prompt.splits,
    )


def token_at(data: bytes, index: int) -> int:
    """Token ``index`` of int32 bytes."""
    return int.from_bytes(data[4 * index : 4 * index + 4], "little", signed=True)


def encode(tokens: tuple[int, ...]) -> bytes:
    """Tokens as int32 bytes."""
    return b"".join(t.to_bytes(4, "little", signed=True) for t in tokens)


def opportunities(spec: Submitted, anchors: int, markers: int) -> tuple[Save, ...]:
    """The captures a request asks for, merged by frontier, ascending (CAPT-01, CAPT-08, CAT-12)."""
    kinds: dict[int, list[SaveKind]] = {}
    wanted: list[tuple[SaveKind, tuple[int, ...]]] = [
        ("input", (spec.recovery,)),
        ("anchor", spec.anchors[:anchors]),
        ("shared", spec.markers[:markers]),
    ]
    for kind, frontiers in wanted:
        for f in frontiers:
            if 1 <= f < spec.prompt.frontier and kind not in kinds.setdefault(f, []):
                kinds[f].append(kind)
    return tuple(Save(f, tuple(kinds[f])) for f in sorted(kinds))


def chunk_end(request: Request, position: int, chunk: int, replay: int) -> int:
    """Where the prefill unit that starts at ``position`` ends.

    On the absolute grid of ``chunk`` tokens, cut by the end of the prompt, by the request's stops, and
    where replay passes into new work. A replay therefore splits as the first run did.
    """
    end = min((position // chunk + 1) * chunk, request.prompt_length - 1)
    return min([end, *(f for f in (*request.stops, replay) if position < f)])
