"""Saving states at opportunities, and endpoints (CAPT, CAT-07..12, EV-05..08)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Literal

from planner import state_images
from planner.errors import PlannerError
from planner.physical import Result, sequence, usage
from planner.plans import Capture, Edge, Plan, Target
from planner.reclaim import reclaim
from planner.retention import Discard, Finish
from planner.world import records
from planner.world.binding import drop_point, feasible, give_up, start
from planner.world.eviction import Rights
from planner.world.records import Demand, Entry, Record
from planner.world.requests import Request, Resident, Save, SaveKind, token_at
from planner.world.step import Job, Step


def due(step: Step, resident: Resident) -> Save | None:
    """The opportunity at which a resident stands; no unit runs past it before it is decided (CAPT-07)."""
    if resident.position >= resident.prompt_length:
        return None
    saves = step.request(resident.request).saves
    return saves[0] if saves and saves[0].frontier == resident.position else None


def save(step: Step, resident: Resident) -> None:
    """Decide an opportunity: reuse a point that is there, capture one, or skip it with a reason."""
    request = step.request(resident.request)
    here = request.saves[0]
    request = replace(request, saves=request.saves[1:])
    step.put(request)
    point = request.spec.prompt.prefix(here.frontier)
    step.catalog = records.observe(step.catalog, point, request.id, step.tick(), step.config.digest)
    q = sequence(step.physical, resident.sequence)
    record = step.record(request.owner)
    assert record is not None
    kinds = _without_existing(step, request, record, here)
    if not kinds:
        return
    if q.recovery >= 0:
        _skip(step, request, here, "a recovery permit is running")  # CAPT-06
        return
    if q.source:
        _skip(step, request, here, "its state is still the one it was forked from")
        return
    private = "input" in kinds or "anchor" in kinds
    plan = _capture(step, request, here, request.owner) if private else None
    owner = request.owner
    if plan is None and "shared" in kinds:
        kinds = ("shared",)
        owner = step.next_owner
        plan = _capture(step, request, here, owner)
    if plan is None:
        _skip(step, request, here, "no state slot or Host space within its rights (RC-14)")
        return
    if owner == step.next_owner:
        step.new_owner()
    give_up(step, plan.target.release, request.id)
    start(step, plan, Job("capture", request.id, owner, save=here._replace(kinds=kinds)))


def _skip(step: Step, request: Request, here: Save, why: str) -> None:
    step.note(request.id, "skipped", f"save at {here.frontier} tokens: {why}")


def _without_existing(
    step: Step, request: Request, record: Record, here: Save
) -> tuple[SaveKind, ...]:
    """Serve what an existing point at exactly this position can serve by reference (CAT-11, CAPT-06)."""
    point = request.spec.prompt.prefix(here.frontier)
    left = list(here.kinds)
    for ck in reversed(list(step.physical.checkpoints.on_path(point))):
        if ck.identity != point:
            continue
        cid = ck.id
        shared = any(step.catalog.entries.get(o) is not None for o in ck.holders)
        own = request.owner in ck.holders
        if "shared" in left and shared:
            left.remove("shared")
        if cid not in (request.source, record.input) and not own:
            continue  # another computation of the same tokens is never joined (CK-06)
        for kind in tuple(left):
            _enter(step, request.owner, kind, cid)
            left.remove(kind)
    return tuple(left)


def _enter(step: Step, owner: int, kind: SaveKind, cid: int) -> None:
    """Name a checkpoint in the catalog; what it replaces is let go."""
    if kind == "shared":
        public = step.new_owner()
        step.retain(cid, public)
        step.put_entry(Entry(public, cid, Demand(), step.tick()))
        return
    step.retain(cid, owner)
    record = step.record(owner)
    assert record is not None
    gone = 0
    if kind == "input":
        gone, record = record.input, record._replace(input=cid)
    else:
        anchors = tuple(a for a in record.anchors if a != cid and not _same(step, a, cid))
        gone = next((a for a in record.anchors if a not in anchors and a != cid), 0)
        if len(anchors) >= step.config.anchors:
            gone, anchors = anchors[0], anchors[1:]
        record = record._replace(anchors=(*anchors, cid))
    step.put_record(record._replace(published=step.tick()))
    if gone and gone not in record.points:
        step.lose(gone, f"replaced by a later {kind} point of the same history")
        step.release((Edge(owner, gone),))


def _same(step: Step, a: int, b: int) -> bool:
    one, two = step.checkpoint(a), step.checkpoint(b)
    return one is not None and two is not None and one.frontier == two.frontier


def _capture(step: Step, request: Request, here: Save, owner: int) -> Plan | None:
    """A plan that saves the present state: Device, then Host, then by giving up what it may (CAPT-03)."""
    resident = step.resident(request.id)
    assert resident is not None
    identity = request.spec.prompt.prefix(here.frontier)
    record = step.record(request.owner)
    old = record.input if record is not None and "input" in here.kinds else 0
    outdated = (Edge(request.owner, old),) if old and owner == request.owner else ()
    tries: tuple[tuple[Literal["device", "host"], Rights | None], ...] = (
        ("device", None),
        ("host", None),
        ("device", _rights(step, request, here)),
    )
    for place, rights in tries:
        if place == "host" and not step.physical.layout.host_bytes:
            continue
        for release in ((), outdated) if outdated else ((),):
            capture = Capture(resident.sequence, owner, identity, place)
            try:
                plan = feasible(step, Target(capture, release=release), rights)
            except PlannerError:
                plan = None
            if plan is not None:
                return plan
    return None


def _rights(step: Step, request: Request, here: Save) -> Rights:
    """RC-14: a point with demand of its own replaces ordinary and older reused content; another one may
    cost less coverage than it gains, against the fallback that stands now (RC-15)."""
    point = request.spec.prompt.prefix(here.frontier)
    demand = records.repeated_demand(step.catalog, point)
    protect = frozenset({request.source} - {0})
    if demand:
        return Rights(reused_before=demand, demote=step.demote, protect=protect)
    gain = here.frontier
    for ck in step.physical.checkpoints.on_path(point):
        if ck.frontier < here.frontier and ck.identity.prefix_of(point):
            gain = min(gain, here.frontier - ck.frontier)
    return Rights(budget=gain, demote=step.demote, protect=protect)


def captured(step: Step, job: Job, result: Result) -> None:
    """A capture committed: name the point; a tail that moved is published to its lane."""
    cid = result.published
    request = step.request(job.request)
    ck = step.checkpoint(cid)
    assert ck is not None
    where = "Device" if state_images.image(step.physical.states, ck.image).slot else "Host"
    kinds = job.save.kinds
    step.note(request.id, "saved", f"{'+'.join(kinds)} point at {ck.frontier} tokens, on {where}")
    if job.owner != request.owner:
        step.put_entry(Entry(job.owner, cid, Demand(), step.tick()))
    else:
        for kind in kinds:
            _enter(step, request.owner, kind, cid)
        _promote(step, request, cid)
    resident = step.resident(request.id)
    if resident is not None:
        block = resident.position // step.physical.layout.page_tokens
        step.put_resident(step.publish_table(resident, block))


def _promote(step: Step, request: Request, cid: int) -> None:
    """Repeated demand at the input point makes the owner reused, proven there (EV-07)."""
    record, ck = step.record(request.owner), step.checkpoint(cid)
    if record is None or ck is None or record.input != cid:
        return
    time = records.repeated_demand(step.catalog, ck.identity)
    if time > record.demand.time:
        step.put_record(record._replace(demand=Demand(time, ck.frontier)))
        rebalance(step)


def rebalance(step: Step) -> None:
    """Walk reused owners newest first; past 3/4 of a capacity they become ordinary (EV-08)."""
    owners: list[tuple[int, int, tuple[int, ...]]] = [
        (r.demand.time, r.owner, r.points) for r in step.catalog.records.values() if r.demand.time
    ]
    owners += [
        (e.demand.time, e.owner, (e.checkpoint,))
        for e in step.catalog.entries.values()
        if e.demand.time
    ]
    owners.sort(reverse=True)
    s = step.physical
    limits = (*(p.capacity for p in s.pools), len(s.states.slots))

    taken = usage(s)
    if all(4 * n <= 3 * c for n, c in zip((*taken.pages, taken.slots), limits, strict=True)):
        return  # no part of it can be more

    def exceeds(last: int) -> bool:
        points = {c: step.checkpoint(c) for _, _, cids in owners[: last + 1] for c in cids}
        unread = [ck for ck in points.values() if ck is not None and not ck.readers]
        got = reclaim(s, [Edge(o, ck.id) for ck in unread for o in ck.holders])
        return any(4 * n > 3 * c for n, c in zip((*got.pages, got.slots), limits, strict=True))

    first = bisect_left(range(len(owners)), True, lo=1, key=exceeds)  # the newest may exceed alone
    for _, owner, _ in owners[first:]:
        record, entry = step.record(owner), step.catalog.entries.get(owner)
        if record is not None:
            step.put_record(record._replace(demand=Demand()))
        elif entry is not None:
            step.put_entry(entry._replace(demand=Demand()))


def finish(step: Step, resident: Resident) -> None:
    """Settle the terminal of a drained resident: endpoint or nothing, then the one outcome (ENG-05)."""
    request = step.request(resident.request)
    q = sequence(step.physical, resident.sequence)
    wanted = step.caches(request) and request.spec.endpoint
    keep = resident.ending == "finished" and wanted and not q.source and q.position > 0
    if keep:
        whole = step.ledger(resident)
        after = token_at(whole.tokens, q.position) if whole.frontier > q.position else -1
        step.apply(Finish(q.id, request.owner, whole.prefix(q.position), after))
        assert step.physical.result is not None
        _publish(step, request, step.physical.result.published)
        rebalance(step)
    else:
        step.apply(Discard(q.id))
        if resident.ending == "failed":
            _drop_everything(step, request)
    step.residents = [r for r in step.residents if r.request != resident.request]
    if not step.caches(request):
        _forget_record(step, request)
    step.end(request, resident.ending or "finished")


def _publish(step: Step, request: Request, cid: int) -> None:
    """The result becomes the record's endpoint and, if it names one, the session's (CAT-19, CAT-20)."""
    record = step.record(request.owner)
    assert record is not None
    old = record.endpoint
    record = record._replace(
        endpoint=cid, order=request.id, session=request.spec.session, published=step.tick()
    )
    step.put_record(record)
    if name := request.spec.session:
        former = records.session_owner(step.catalog, name)
        step.catalog = records.bind_session(step.catalog, name, record.owner, request.id)
        named = records.session_owner(step.catalog, name)
        for owner in (former, record.owner):
            nameless = step.record(owner)
            if nameless is not None and owner != named:
                step.put_record(nameless._replace(session=""))
    if old and old != cid and old not in record.points:
        step.release((Edge(record.owner, old),))


def _forget_record(step: Step, request: Request) -> None:
    """A request without cache leaves nothing (CAT-22)."""
    record = step.record(request.owner)
    if record is not None:
        edges = tuple(Edge(record.owner, c) for c in record.points)
        step.release(edges)


def _drop_everything(step: Step, request: Request) -> None:
    """A request whose numbers broke: what it saved and what it came from may be broken as well."""
    record = step.record(request.owner)
    cids = {*(record.points if record is not None else ()), request.source} - {0}
    for cid in sorted(cids):
        drop_point(
            step, cid, "dropped because a request that used it produced numbers that are not finite"
        )
