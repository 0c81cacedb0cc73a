"""`check_world(world)`: that catalog, scheduler and physical state tell one story (INV).

Cost is O(everything); it is for tests and idle moments, like `planner.check`.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner import kv
from planner.checks import check
from planner.errors import InvariantError
from planner.world.step import World


def check_world(world: World) -> World:
    """The world itself, or InvariantError for the first broken rule."""
    check(world.physical)
    for rule, message in violations(world):
        raise InvariantError(rule, message)
    return world


def violations(world: World) -> Iterator[tuple[str, str]]:
    """(rule, what is wrong) for every finding above the physical state, in a fixed order."""
    yield from _phases(world)
    yield from _residents(world)
    yield from _owners(world)
    yield from _transaction(world)


def _phases(world: World) -> Iterator[tuple[str, str]]:
    lists = {
        "waiting": world.waiting,
        "paused": world.paused,
        "resident": tuple(r.request for r in world.residents),
    }
    for name, tickets in lists.items():
        if list(tickets) != sorted(set(tickets)):
            yield "ENG-01", f"{name} tickets {tickets} are not in order"
    for ticket, request in world.requests.items():
        places = [name for name, tickets in lists.items() if ticket in tickets]
        if request.phase == "binding":
            places = [p for p in places if p != "paused"]
            if world.job is None or world.job.request != ticket:
                yield "ENG-01", f"request {ticket} is binding without a transaction"
            if places:
                yield "ENG-01", f"request {ticket} is binding and in {places}"
        elif request.cancelled and places != ["resident"] and ticket not in world.cancelled:
            yield "ENG-06", f"request {ticket} was cancelled and is forgotten in {places}"
        elif places != [request.phase]:
            yield "ENG-01", f"request {ticket} is {request.phase}, but stands in {places}"
    for name, tickets in lists.items():
        for ticket in tickets:
            if world.requests.get(ticket) is None:
                yield "ENG-10", f"{name} request {ticket} has ended"


def _residents(world: World) -> Iterator[tuple[str, str]]:
    s = world.physical
    sequences = {q.id: q for q in s.sequences}
    if sorted(sequences) != sorted(r.sequence for r in world.residents):
        yield "INV-08", f"sequences {sorted(sequences)} are not those of the residents"
        return
    recovering = [q.id for q in s.sequences if q.recovery >= 0]
    if len(recovering) > 1:
        yield "INV-10", f"recovery permits of sequences {recovering}"
    for r in world.residents:
        q = sequences[r.sequence]
        request = world.requests.get(r.request)
        if q.rows[0] != r.lane:
            yield "OWN-10", f"request {r.request}: lane {r.lane}, row {q.rows[0]}"
        if not r.units and q.position != r.position:
            yield "CK-08", f"request {r.request} stands at {q.position}, not {r.position}"
        if request is not None and q.owner != request.owner:
            yield "CAT-17", f"request {r.request} runs for owner {q.owner}, not {request.owner}"
        blocks = kv.history(s.pools[0], q.histories[0]).blocks
        if not r.units and blocks < r.blocks:
            yield "KV-33", f"request {r.request}: {r.blocks} blocks published, {blocks} mapped"
    flying = sorted((u.id, row.request) for u in world.units for row in u.rows)
    if flying != sorted((u, r.request) for r in world.residents for u in r.units):
        yield "INV-09", f"units in flight {flying} are not those of the residents"


def _owners(world: World) -> Iterator[tuple[str, str]]:
    """Every hold has a reason, and every reason a hold."""
    expected: set[tuple[int, int]] = set()
    for record in world.catalog.records.values():
        expected |= {(record.owner, cid) for cid in record.points}
        if len(record.anchors) > world.config.anchors:
            yield "CAT-01", f"record {record.owner} has {len(record.anchors)} anchors"
        if record.request and world.requests.get(record.request) is None:
            yield "CAT-17", f"record {record.owner} serves request {record.request}, which ended"
        if not record.request and not record.points:
            yield "CAP-15", f"record {record.owner} is empty"
    expected |= {(e.owner, e.checkpoint) for e in world.catalog.entries.values()}
    for request in world.requests.values():
        if request.wait:
            expected.add((request.waiter, request.wait))
        if request.snapshot:
            expected.add((request.holder, request.snapshot))
    held = {(owner, cid) for cid, ck in world.physical.checkpoints.items() for owner in ck.holders}
    if world.physical.transaction is not None:  # releases of a started plan may still be to come
        held |= {tuple(e) for e in world.physical.transaction.plan.target.release}  # type: ignore[misc]
        expected |= held & {tuple(e) for e in world.physical.transaction.plan.target.release}
    for owner, cid in sorted(expected - held):
        yield "CK-14", f"owner {owner} counts on checkpoint {cid}, which it does not hold"
    for owner, cid in sorted(held - expected):
        yield "CAP-15", f"owner {owner} holds checkpoint {cid} for no reason"
    for name, owner, _ in world.catalog.sessions:
        if world.catalog.records.get(owner) is None:
            yield "CAT-20", f"session {name!r} names owner {owner}, which is gone"


def _transaction(world: World) -> Iterator[tuple[str, str]]:
    if (world.job is None) != (world.physical.transaction is None):
        yield "TX-01", f"job {world.job} beside transaction {world.physical.transaction}"
