"""Events: the facts that change a world. Nothing else does (OWN-07).

An event is plain data, so that a record of events replays to the same commands. ``request`` is the
ticket: the number of the original submit, the order of fairness and of publication (SCH-06, CAT-20).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from planner.checkpoints import Identity


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request entered the queue, in submit order.

    All but the last of the prompt's tokens are prefilled; the last is the input of the first decode
    step (CK-08), so ``len(prompt) - 1`` is the deepest useful source. Frontiers are token counts of
    the prompt; those outside 1..len(prompt) - 1 are ignored.
    """

    request: int
    prompt: Identity
    max_tokens: int
    """Most output tokens; at least 1."""
    cache: bool = True
    """ReadWrite, or Disabled: root only, leaves nothing behind (CAT-22)."""
    endpoint: bool = True
    """False: the end is not kept, and no other record is continued: for requests that nobody goes on from."""
    session: str = ""
    """Lookup hint and name of the result (CAT-20); empty: none."""
    recovery: int = 0
    """recovery_frontier of the input (CAT-04): an R-point, or the P-point ``len(prompt) - 1``; 0: none."""
    splits: tuple[int, ...] = ()
    """rewrite_execution_frontiers: prefill is split there whether or not anything is saved (CAT-06)."""
    anchors: tuple[int, ...] = ()
    """Explicit private long recovery points (CAT-09)."""
    markers: tuple[int, ...] = ()
    """Caller boundaries for shared entries, at most four (CAT-12)."""
    synchronous: int = 0
    """While fewer outputs than this are committed, a step waits for the result of the one before."""


class RowResult(NamedTuple):
    """What became of one row of a unit.

    ``tokens`` are the committed outputs (empty for prefill, replay, and for a row that already
    ended). ``end``: "" goes on; "finished" keeps the endpoint; "failed" keeps nothing and drops the
    checkpoint the request came from.
    """

    request: int
    tokens: tuple[int, ...] = ()
    end: Literal["", "finished", "failed"] = ""


@dataclass(frozen=True, slots=True)
class UnitFinished:
    """The results of a unit were read and committed; units end in launch order, rows as launched."""

    unit: int
    rows: tuple[RowResult, ...]


@dataclass(frozen=True, slots=True)
class TransferFinished:
    """All copies of a transaction completed and were verified, or failed with the device at rest."""

    transaction: int
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Give a request up at its next stable boundary (ENG-06). Unknown or ended: no effect."""

    request: int


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Let go of every private record, shared entry and piece of evidence that nobody runs on."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Run one scheduler cycle (SCH-01)."""


Event = Submitted | UnitFinished | TransferFinished | Cancelled | CacheCleared | Tick
