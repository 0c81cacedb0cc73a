"""Commands: the orders a world gives. They are applied in the order given (OWN-08).

A unit's tables are those published before it in the command stream; a table row in flight is never
rewritten (KV-33), because a unit takes its rows by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from planner.plans import Copy


@dataclass(frozen=True, slots=True)
class PublishTable:
    """Main pool: physical pages of blocks ``start``.. of a lane's row; all later blocks are null."""

    lane: int
    start: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunTransfer:
    """Run a copy batch; answer with TransferFinished once it is complete and verified (TX-02)."""

    transaction: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class RunPrefill:
    """Run prompt tokens [start, start + length) of a request; the state goes from one slot to another.

    The slots differ only in the first unit after a fork (ST-08).
    """

    unit: int
    request: int
    lane: int
    start: int
    length: int
    read_slot: int
    write_slot: int
    replay: bool = False


class DecodeRow(NamedTuple):
    """One row of a decode unit: runs one token at ``position``.

    ``token`` is the input, or -1 for the token that this lane sampled in the unit before, which is
    not read yet. ``replay``: an output token runs again; nothing is sampled or published (PR-06).
    """

    request: int
    lane: int
    position: int
    token: int
    read_slot: int
    write_slot: int
    replay: bool = False


@dataclass(frozen=True, slots=True)
class RunDecode:
    """Run one decode step of these rows."""

    unit: int
    rows: tuple[DecodeRow, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request became resident for the first time, with ``reused`` prompt tokens of ``source``."""

    request: int
    lane: int
    reused: int
    source: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A paused request is resident again; ``restored`` tokens need no recomputation."""

    request: int
    lane: int
    restored: int


@dataclass(frozen=True, slots=True)
class Paused:
    """A request gave up its lane; it keeps its place in the paused queue."""

    request: int
    form: Literal["snapshot", "replay"]
    beneficiary: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal outcome of a request, after its resources and cache are settled (ENG-05)."""

    request: int
    outcome: Literal["finished", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Note:
    """A decision in words, about a request (0: the whole engine): the material of `explain`.

    ``kind`` is one of "source", "miss", "evicted", "saved", "skipped", "paused", "revoked", "blocked".
    """

    request: int
    kind: str
    text: str


Command = (
    PublishTable | RunTransfer | RunPrefill | RunDecode | Admitted | Resumed | Paused | Ended | Note
)
