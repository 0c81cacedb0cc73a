"""`advance(world, event) -> (world', commands)`: the whole planner as one pure function (OWN-07)."""

from __future__ import annotations

from planner.errors import IllegalError
from planner.physical import initial
from planner.plans import Edge
from planner.transactions import Cancel, Fail
from planner.units import Commit, RowCommit
from planner.world import cycle
from planner.world.commands import Command
from planner.world.config import WorldConfig
from planner.world.events import (
    CacheCleared,
    Cancelled,
    Event,
    Submitted,
    Tick,
    TransferFinished,
    UnitFinished,
)
from planner.world.records import Catalog
from planner.world.requests import Request, encode
from planner.world.step import Step, World


def new_world(config: WorldConfig) -> World:
    """The empty world of an engine: everything available, nothing remembered."""
    chunk, page = config.prefill_chunk, config.layout.page_tokens
    if chunk < page or chunk % page:
        raise IllegalError(f"prefill_chunk {chunk} is no multiple of the page size {page}")
    return World(config, initial(config.layout))


def advance(world: World, event: Event) -> tuple[World, tuple[Command, ...]]:
    """The world after a fact, and the orders that follow from it.

    Facts only change what is known; work is ordered by `Tick`, and copies go on with
    `TransferFinished`. Raises IllegalError for an event that cannot be true in this world, and
    CapacityContractError where the oldest request has no legal unit (SCH-16): both are engine
    failures, never cache misses (ENG-08).
    """
    step = Step(world)
    match event:
        case Tick():
            cycle.run(step)
        case UnitFinished():
            _unit_finished(step, event)
        case TransferFinished():
            _transfer_finished(step, event)
        case Submitted():
            _submitted(step, event)
        case Cancelled():
            _cancelled(step, event)
        case CacheCleared():
            _clear(step)
    return step.freeze(), tuple(step.commands)


def _submitted(step: Step, event: Submitted) -> None:
    newest = max(0, step.requests.last())
    if event.request <= newest:
        raise IllegalError(f"request {event.request} after {newest}: tickets grow from 1")
    if event.max_tokens < 1 or event.prompt.frontier < 1:
        raise IllegalError(f"request {event.request}: an empty prompt or no output")
    need = event.prompt.frontier + event.max_tokens - 1
    layout = step.physical.layout
    pages = -(-need // layout.page_tokens)
    if need > layout.max_context or pages > min(p.pages for p in layout.pools):
        raise IllegalError(
            f"request {event.request}: {need} positions do not fit max_context "
            f"{layout.max_context} and {layout.pools[0].pages} pages"
        )
    step.put(Request(event))
    step.waiting = (*step.waiting, event.request)
    step.scan = True


def _unit_finished(step: Step, event: UnitFinished) -> None:
    if not step.units or step.units[0].id != event.unit:
        now = step.units[0].id if step.units else "none"
        raise IllegalError(f"unit {event.unit} ended, but the oldest in flight is {now}")
    unit = step.units[0]
    if tuple(r.request for r in unit.rows) != tuple(r.request for r in event.rows):
        raise IllegalError(f"unit {unit.id}: its rows are not those that ran (UN-06)")
    pools = len(step.physical.pools)
    rows = tuple(RowCommit(r.sequence, (r.frontier,) * pools, r.frontier) for r in unit.rows)
    step.units = step.units[1:]
    before = step.physical.revision
    step.apply(Commit(unit.id, rows, settle=True))
    if step.physical.revision != before:
        step.capacity_event()
    for row, result in zip(unit.rows, event.rows, strict=True):
        resident = step.resident(row.request)
        assert resident is not None
        produced = int(unit.kind == "decode" and not row.replay and result.end != "failed")
        if not resident.ending and len(result.tokens) != produced:
            raise IllegalError(
                f"request {row.request}: {len(result.tokens)} tokens of a unit that produced {produced} (UN-06)"
            )
        outputs = resident.outputs
        if produced and not resident.ending:
            outputs += encode(result.tokens)
        ending = resident.ending or result.end
        step.put_resident(
            resident._replace(outputs=outputs, units=resident.units[1:], ending=ending)
        )


def _transfer_finished(step: Step, event: TransferFinished) -> None:
    t = step.physical.transaction
    if t is None or t.id != event.transaction:
        raise IllegalError(f"transaction {event.transaction} is not in flight (TX-11)")
    if not event.ok:
        step.apply(Fail(t.id))
    else:
        step.demote = True
        step.run_phases()
    cycle.settle(step)


def _cancelled(step: Step, event: Cancelled) -> None:
    cycle.cancel(step, event.request)
    job, t = step.job, step.physical.transaction
    if job is not None and job.request == event.request and job.kind == "bind" and t is not None:
        step.apply(Cancel(t.id))
        cycle.settle(step)


def _clear(step: Step) -> None:
    """Everything optional goes; it needs no open transaction, so a busy world keeps it."""
    if step.physical.transaction is not None:
        raise IllegalError("a transaction is open: clear the cache at its end")
    edges: list[Edge] = []
    for record in step.catalog.records.values():
        edges += [Edge(record.owner, cid) for cid in record.points]
    edges += [Edge(e.owner, e.checkpoint) for e in step.catalog.entries.values()]
    step.release(tuple(edges))
    step.catalog = Catalog(step.catalog.records, step.catalog.entries, step.catalog.sessions)
    step.capacity_event()
