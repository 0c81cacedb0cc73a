"""The scratch copy of a world inside one `advance`, and what every part of the cycle does with it.

Parts change a `Step`; `freeze` makes the next world. A step that raises is thrown away.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal, NamedTuple

from planner import state_images
from planner.checkpoints import Checkpoint, Identity
from planner.errors import PlannerError
from planner.operations import Operation, apply
from planner.persistent import IntMap
from planner.physical import PhysicalState, sequence, table_row
from planner.plans import Edge, Plan
from planner.retention import Release, Retain
from planner.transactions import Advance, Start
from planner.world.commands import Command, Ended, Note, PublishTable, RunTransfer
from planner.world.config import WorldConfig
from planner.world.records import Catalog, Entry, Lost, Record, unbind
from planner.world.requests import Request, Resident, Save, ledger

LOST = 64
"""Given-up points that `explain` remembers."""


class CapacityContractError(PlannerError):
    """The oldest request has no legal unit although nothing is left to give up (SCH-16, ENG-11)."""


class UnitRow(NamedTuple):
    """A row of a unit in flight: where its frontier will stand."""

    request: int
    sequence: int
    frontier: int
    replay: bool


class Unit(NamedTuple):
    """A unit in flight."""

    id: int
    kind: Literal["prefill", "decode"]
    rows: tuple[UnitRow, ...]


class Job(NamedTuple):
    """What the open context transaction is for (TX-01).

    ``owner`` is the record or entry it serves, ``retire`` what a bind lets go at adoption.
    """

    kind: Literal["bind", "capture", "pause", "demote"]
    request: int
    owner: int = 0
    source: int = 0
    retire: tuple[Edge, ...] = ()
    save: Save = Save(0, ())
    holder: int = 0


class World(NamedTuple):
    """Everything the planner knows (OWN-06): an immutable value. Build it with `new_world`."""

    config: WorldConfig
    physical: PhysicalState
    requests: IntMap[Request] = IntMap()
    residents: tuple[Resident, ...] = ()
    """By ticket."""
    waiting: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()
    catalog: Catalog = Catalog()
    job: Job | None = None
    units: tuple[Unit, ...] = ()
    """In flight, in launch order."""
    clock: int = 1
    """Logical time: counts adoptions, observations and publications."""
    next_owner: int = 1
    scan: bool = False
    """Something happened that may let a fresh request in (SCH-08)."""
    recover: bool = False
    """Something happened that may let a paused request in (SCH-15)."""
    turn: int = 0
    """Ticket that prefilled last (SCH-17)."""
    demote: bool = True
    """Whether moving content to Host is tried: not after a failed transfer."""
    cancelled: tuple[int, ...] = ()
    """Tickets that were cancelled while they held no lane, and end at the next stable boundary (ENG-06)."""


def without(tickets: tuple[int, ...], ticket: int) -> tuple[int, ...]:
    """Tickets in order but for one, whether or not it is among them; a queue may be long."""
    i = bisect_left(tickets, ticket)
    there = i < len(tickets) and tickets[i] == ticket
    return (*tickets[:i], *tickets[i + 1 :]) if there else tickets


class Step:
    """A world being advanced; ``commands`` collects the orders."""

    __slots__ = (
        "cancelled", "catalog", "clock", "commands", "config", "demote", "job", "next_owner", "paused",
        "physical", "recover", "requests", "residents", "scan", "turn", "units", "waiting",
    )  # fmt: skip

    def __init__(self, world: World) -> None:
        (
            self.config, self.physical, self.requests, residents, self.waiting, self.paused,
            self.catalog, self.job, self.units, self.clock, self.next_owner, self.scan,
            self.recover, self.turn, self.demote, self.cancelled,
        ) = world  # fmt: skip
        self.residents = list(residents)
        self.commands: list[Command] = []

    def freeze(self) -> World:
        """The world this step describes."""
        return World(
            self.config, self.physical, self.requests, tuple(self.residents), self.waiting,
            self.paused, self.catalog, self.job, self.units, self.clock, self.next_owner,
            self.scan, self.recover, self.turn, self.demote, self.cancelled,
        )  # fmt: skip

    # Small changes

    def apply(self, op: Operation) -> None:
        """Apply an operation to the physical state."""
        self.physical = apply(self.physical, op)

    def note(self, request: int, kind: str, text: str) -> None:
        """Say why."""
        self.commands.append(Note(request, kind, text))

    def tick(self) -> int:
        """The next logical time."""
        self.clock += 1
        return self.clock

    def new_owner(self) -> int:
        """A never-used owner number."""
        self.next_owner += 1
        return self.next_owner - 1

    def request(self, ticket: int) -> Request:
        """A live request."""
        found = self.requests.get(ticket)
        assert found is not None
        return found

    def put(self, request: Request) -> None:
        """Replace a request."""
        self.requests = self.requests.set(request.id, request)

    def resident(self, ticket: int) -> Resident | None:
        """The resident of a request, if it has a lane."""
        return next((r for r in self.residents if r.request == ticket), None)

    def put_resident(self, resident: Resident) -> None:
        """Replace a resident."""
        for i, old in enumerate(self.residents):
            if old.request == resident.request:
                self.residents[i] = resident

    def capacity_event(self) -> None:
        """Something was really released: blocked requests may try again (SCH-08, SCH-15)."""
        self.scan = self.recover = True

    # Points and owners

    def checkpoint(self, cid: int) -> Checkpoint | None:
        """A checkpoint, if it still exists."""
        return self.physical.checkpoints.get(cid)

    def record(self, owner: int) -> Record | None:
        """The private record of an owner number."""
        return self.catalog.records.get(owner)

    def put_record(self, record: Record) -> None:
        """Replace a record; one that holds nothing and serves nobody is forgotten (CAP-15)."""
        if not record.request and not record.points:
            records = self.catalog.records
            if records.get(record.owner) is not None:
                records = records.delete(record.owner)
            self.catalog = unbind(self.catalog._replace(records=records), record.owner)
            return
        self.catalog = self.catalog._replace(records=self.catalog.records.set(record.owner, record))

    def put_entry(self, entry: Entry) -> None:
        """Add or replace a shared entry."""
        self.catalog = self.catalog._replace(entries=self.catalog.entries.set(entry.owner, entry))

    def caches(self, request: Request) -> bool:
        """Whether a request may read the cache and leave something in it (CAT-22, CAT-23)."""
        return request.spec.cache and self.config.cache

    def retain(self, cid: int, owner: int) -> None:
        """One more owner of a checkpoint."""
        ck = self.physical.checkpoints.get(cid)
        if ck is not None and owner not in ck.holders:
            self.apply(Retain(cid, owner))

    def release(self, edges: tuple[Edge, ...]) -> None:
        """Let edges go that really exist; no transaction may be open."""
        held = tuple(e for e in edges if self.holds(e))
        if held:
            self.apply(Release(held))
            self.forget(held)

    def holds(self, edge: Edge) -> bool:
        """Whether an edge exists."""
        ck = self.physical.checkpoints.get(edge.checkpoint)
        return ck is not None and edge.owner in ck.holders

    def forget(self, edges: tuple[Edge, ...]) -> None:
        """Take released edges out of records and entries."""
        for owner, cid in edges:
            record = self.catalog.records.get(owner)
            if record is not None:
                self.put_record(
                    record._replace(
                        endpoint=0 if record.endpoint == cid else record.endpoint,
                        input=0 if record.input == cid else record.input,
                        anchors=tuple(a for a in record.anchors if a != cid),
                    )
                )
            elif self.catalog.entries.get(owner) is not None:
                self.catalog = self.catalog._replace(entries=self.catalog.entries.delete(owner))

    def lose(self, cid: int, why: str) -> None:
        """Remember a point that is about to be given up, for `explain`."""
        ck = self.checkpoint(cid)
        if ck is not None:
            lost = (*self.catalog.lost, Lost(ck.identity, why))[-LOST:]
            self.catalog = self.catalog._replace(lost=lost)

    def ledger(self, resident: Resident) -> Identity:
        """All committed tokens of a resident."""
        return ledger(self.request(resident.request).spec.prompt, resident.outputs)

    # The context transaction

    def start(self, plan: Plan, job: Job) -> None:
        """Open the transaction and run it up to its copies."""
        self.apply(Start(plan))
        self.job = job
        self.run_phases()

    def run_phases(self) -> None:
        """Advance the open transaction until copies are in flight or it ended."""
        while (t := self.physical.transaction) is not None:
            self.apply(Advance(t.id))
            now = self.physical.transaction
            if now is not None and now.phase == "CopiesInFlight":
                self.commands.append(RunTransfer(now.id, now.work.copies))
                return

    # Tables and slots

    def publish_table(self, resident: Resident, start: int) -> Resident:
        """Publish a lane's row from block ``start`` on; returns the resident with its new count."""
        q = sequence(self.physical, resident.sequence)
        pages = table_row(self.physical, 0, q.id)
        start = min(start, len(pages))
        self.commands.append(
            PublishTable(resident.lane, start, tuple(int(p) for p in pages[start:]))
        )
        return resident._replace(blocks=len(pages))

    def slots(self, sid: int) -> tuple[int, int]:
        """(slot the first unit reads, slot units write) of a sequence."""
        q = sequence(self.physical, sid)
        images = self.physical.states
        write = state_images.image(images, q.image).slot
        read = state_images.image(images, q.source).slot if q.source else write
        return read, write

    # Ends

    def end(self, request: Request, outcome: Literal["finished", "cancelled", "failed"]) -> None:
        """The one terminal outcome (ENG-10)."""
        record = self.record(request.owner) if request.owner else None
        if record is not None and record.request == request.id:
            self.put_record(record._replace(request=0))
        self.requests = self.requests.delete(request.id)
        self.waiting = without(self.waiting, request.id)
        self.paused = without(self.paused, request.id)
        self.commands.append(Ended(request.id, outcome))
        self.capacity_event()
