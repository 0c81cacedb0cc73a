"""Making requests resident, for the first time or again (SRC, CAT)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from planner.checkpoints import Identity
from planner.errors import BusyError
from planner.physical import Result, sequence
from planner.plans import Bind, Edge, Plan, Target
from planner.transactions import assess
from planner.world import records
from planner.world.commands import Admitted, Resumed
from planner.world.eviction import Gaps, Rights, relieve
from planner.world.prefixes import divergence, prepare_saves
from planner.world.records import Demand, Record
from planner.world.requests import (
    Request,
    Resident,
    chunk_end,
    ledger,
    token_at,
)
from planner.world.sources import Source, sources
from planner.world.step import Job, Step, without

ROUNDS = 6
"""How often a plan is asked again with more relief; each round closes every gap it was told of."""


def free_lanes(step: Step) -> int:
    """Lanes that nobody holds or is about to take."""
    return step.physical.layout.concurrency - len(step.physical.sequences)


def feasible(step: Step, target: Target, rights: Rights | None) -> Plan | None:
    """A plan for ``target``, with whatever the rights allow given up for it (None: nothing); None: not now."""
    wanted: Gaps = {}
    base = target
    for _ in range(ROUNDS):
        try:
            verdict = assess(step.physical, target)
        except BusyError:
            return None
        if isinstance(verdict, Plan):
            return verdict
        if rights is None:
            return None
        gaps = dict(verdict.gaps)
        if target.demote != base.demote and "host" in gaps:
            # What was to be moved found no place between what is there: then it is given up (HOST-05).
            del gaps["host"]
            rights = replace(rights, demote=False)
        for name, n in gaps.items():
            wanted[name] = wanted.get(name, 0) + n
        relief = relieve(step, wanted, rights)
        if relief is None:
            return None
        more = tuple(e for e in relief.release if e not in base.release)
        target = replace(
            base,
            release=(*base.release, *more),
            demote=(*base.demote, *relief.demote),
            drop_host=(*base.drop_host, *relief.drop_host),
        )
    return None


def give_up(step: Step, edges: tuple[Edge, ...], beneficiary: int) -> None:
    """Say which points end with these edges, before they are gone."""
    who = f"request {beneficiary}"
    for cid in dict.fromkeys(e.checkpoint for e in edges):
        ck = step.checkpoint(cid)
        if ck is None or any(Edge(o, cid) not in edges for o in ck.holders):
            continue  # somebody keeps it
        step.lose(cid, f"evicted to make room for {who}")
        step.note(beneficiary, "evicted", f"checkpoint {cid} at {ck.frontier} tokens for {who}")


def commit_release(step: Step, edges: tuple[Edge, ...]) -> None:
    """Bring catalog and queue up to date after edges are gone."""
    step.forget(edges)
    for request in tuple(step.requests.values()):
        if request.wait and Edge(request.waiter, request.wait) in edges:
            step.put(replace(request, wait=0))
            step.note(request.id, "revoked", f"its hold of checkpoint {request.wait}")
        if request.snapshot and Edge(request.holder, request.snapshot) in edges:
            step.put(replace(step.request(request.id), snapshot=0))
            step.note(request.id, "revoked", "its pause snapshot; it will be replayed")


def start(step: Step, plan: Plan, job: Job) -> None:
    """Open the transaction; what it releases is gone from here on, whatever becomes of it (TX-13)."""
    step.start(plan, job)
    commit_release(step, plan.target.release)


# Admission and resume


def retired_points(step: Step, source: Source, prompt: Identity) -> tuple[Edge, ...]:
    """Points of a record that is taken over which the new history does not carry on (CAT-07, CAT-18)."""
    record = step.record(source.record)
    if record is None or not source.take:
        return ()
    gone = []
    for cid in record.points:
        ck = step.checkpoint(cid)
        if ck is None:
            continue
        carried = ck.frontier <= source.frontier and ck.identity.prefix_of(prompt)
        if not carried or (cid == source.checkpoint and cid == record.endpoint != record.input):
            gone.append(Edge(record.owner, cid))
    return tuple(gone)


def try_bind(step: Step, request: Request, rights: Rights, *, all_sources: bool = False) -> bool:
    """Start a bind of a waiting or paused request; False: nothing changed but its waiting reference.

    The best source is kept and waited for where the binding does not fit yet (SRC-09);
    ``all_sources`` tries the others too, root last (SRC-10).
    """
    resume = request.phase == "paused"
    request = prepare_saves(step, request)
    step.put(request)
    prompt = ledger(request.spec.prompt, request.outputs)
    limit = request.frontier if resume else request.prompt_length - 1
    ranked = sources(step, request, prompt, limit)
    if resume and request.snapshot:
        ranked = [Source(0, 0, request.frontier, False, False, 0, request.snapshot), *ranked]
    elif request.wait and not all_sources:
        kept = [s for s in ranked if s.checkpoint == request.wait]
        if kept and kept[0].cost <= ranked[0].cost:
            ranked = [*kept, *ranked]
    for source in ranked if all_sources else ranked[:1]:
        plan = _plan(step, request, source, prompt, rights)
        if plan is None:
            continue
        give_up(step, plan.target.release, request.id)
        _open(step, request, source, plan)
        return True
    if not resume:
        _wait_for(step, request, ranked[0])
    return False


def _first_unit(step: Step, request: Request, frontier: int) -> int:
    """Tokens that must be mappable before the request may be resident (TX-12)."""
    if request.phase == "paused":  # rebuild to the old frontier and one real unit more (PR-07)
        frontier = request.frontier
    if frontier < request.prompt_length - 1:
        return chunk_end(request, frontier, step.config.prefill_chunk, 0)
    return frontier + 1


def _plan(
    step: Step, request: Request, source: Source, prompt: Identity, rights: Rights
) -> Plan | None:
    owner = source.record if source.take else (request.owner or step.next_owner)
    cid = source.checkpoint
    retire = list(retired_points(step, source, prompt))
    if request.wait and request.wait == cid:
        retire.append(Edge(request.waiter, cid))
    if request.snapshot and request.snapshot == cid:
        retire.append(Edge(request.holder, cid))
    tokens = _first_unit(step, request, source.frontier)
    pools = len(step.physical.pools)
    bind = Bind(
        owner,
        (tokens,) * pools,
        prompt,
        cid,
        tuple(retire),
        recovery=request.frontier if request.phase == "paused" else -1,
    )
    other = tuple(
        e
        for e in (Edge(request.waiter, request.wait), Edge(request.holder, request.snapshot))
        if e.checkpoint != cid and step.holds(e)
    )
    stay = {cid, *(e.checkpoint for e in retire)}
    return feasible(
        step,
        Target(bind, release=other),
        replace(rights, protect=rights.protect | stay),
    )


def _open(step: Step, request: Request, source: Source, plan: Plan) -> None:
    """Make the record that the bind serves, and open the transaction."""
    bind = plan.target.action
    assert isinstance(bind, Bind)
    if not source.take and not request.owner:
        step.new_owner()
    job = Job("bind", request.id, bind.owner, source.checkpoint, retire=bind.retire)
    step.waiting = without(step.waiting, request.id)
    step.put(replace(request, phase="binding", source=source.checkpoint))
    record = step.record(bind.owner) or Record(bind.owner, request.spec.session)
    step.put_record(record._replace(request=request.id))
    start(step, plan, job)


def _wait_for(step: Step, request: Request, source: Source) -> None:
    """Hold the chosen checkpoint while waiting (SRC-12); moves the hold when the choice changed."""
    if request.wait == source.checkpoint or step.physical.transaction is not None:
        return
    if request.wait:
        step.release((Edge(request.waiter, request.wait),))
    waiter = request.waiter or step.new_owner()
    if source.checkpoint:
        step.retain(source.checkpoint, waiter)
    step.put(replace(request, waiter=waiter, wait=source.checkpoint))


def adopt(step: Step, job: Job, result: Result) -> None:
    """A bind committed: the request is resident (SRC-18)."""
    request = step.request(job.request)
    resumed = request.admitted
    step.forget(job.retire)
    q = sequence(step.physical, result.sequence)
    read, write = step.slots(q.id)
    spec = request.spec
    resident = Resident(
        request.id, q.id, q.rows[0], q.position, len(request.outputs) // 4, (), request.outputs,
        request.frontier, 0, read, write, request.prompt_length, spec.max_tokens, spec.synchronous,
        token_at(spec.prompt.tokens, request.prompt_length - 1),
    )  # fmt: skip
    resident = step.publish_table(resident, 0)
    step.residents.append(resident)
    step.residents.sort()
    own = request.snapshot and request.snapshot == job.source
    if job.source and not own:
        _credit(step, job, request, q.position)
    record = step.record(job.owner)
    assert record is not None
    step.put_record(record._replace(request=request.id, session=spec.session))
    step.put(
        replace(
            request, phase="resident", owner=job.owner, wait=0, snapshot=0, admitted=True,
            saves=tuple(s for s in request.saves if s.frontier >= q.position),
        )
    )  # fmt: skip
    step.paused = tuple(t for t in step.paused if t != request.id)
    if resumed:
        step.commands.append(Resumed(request.id, resident.lane, q.position))
    else:
        step.commands.append(Admitted(request.id, resident.lane, q.position, job.source))
        _explain(step, request, q.position)
        if step.caches(request):
            recent = (*step.catalog.recent, spec.prompt)[-LOOK_BACK:]
            step.catalog = step.catalog._replace(recent=recent)
        for ticket in step.waiting[: bisect_left(step.waiting, request.id)]:
            older = step.request(ticket)
            step.put(replace(older, bypassed=older.bypassed + 1))
    if request.cancelled:
        step.put_resident(resident._replace(ending="cancelled"))


LOOK_BACK = 64
"""Prompts remembered to find where a new one leaves them."""


def _credit(step: Step, job: Job, request: Request, position: int) -> None:
    """Evidence of a real cross-request adoption (EV-02, EV-05)."""
    if request.admitted:
        return  # a request's own resume observes and refreshes nothing (EV-03, EV-06)
    now = step.tick()
    point = request.spec.prompt.prefix(min(position, request.prompt_length))
    limit = step.config.digest
    step.catalog = records.observe(step.catalog, point, request.id, now, limit, adopted=True)
    demand = Demand(now, position)
    record = step.record(job.owner)
    if record is not None:
        step.put_record(record._replace(demand=demand))
    ck = step.checkpoint(job.source)
    for owner in ck.holders if ck is not None else ():
        entry, parent = step.catalog.entries.get(owner), step.record(owner)
        if entry is not None:
            step.put_entry(entry._replace(demand=demand))
        elif parent is not None and owner != job.owner and position >= parent.demand.proven:
            step.put_record(parent._replace(demand=demand))


def _explain(step: Step, request: Request, reused: int) -> None:
    """Say where a request started and why not deeper."""
    prompt, total = request.spec.prompt, request.prompt_length
    step.note(request.id, "source", f"reuses {reused} of {total} prompt tokens")
    if not step.caches(request):
        step.note(request.id, "miss", "its cache mode is off: it starts from root")
        return
    best = divergence(step, prompt)
    if reused >= best:
        return
    deepest = None
    for lost in step.catalog.lost:
        if reused < lost.identity.frontier < total and lost.identity.prefix_of(prompt):
            deepest = lost if deepest is None else max(deepest, lost, key=_frontier)
    if deepest is not None:
        text = f"a state at {deepest.identity.frontier} tokens was {deepest.why}"
    else:
        text = (
            f"it shares {best} tokens with earlier input, but no complete state was saved between "
            f"{reused} and there: a recurrent state is reusable only where it was kept"
        )
    step.note(request.id, "miss", text)


def _frontier(lost: records.Lost) -> int:
    return lost.identity.frontier


def abort_bind(step: Step, job: Job, outcome: str) -> None:
    """A bind did not commit: the request waits again, or ends where it was cancelled."""
    request = step.request(job.request)
    record = step.record(job.owner)
    if record is not None:
        keep = request.id if request.owner == job.owner else 0
        step.put_record(record._replace(request=keep))
    request = replace(request, phase="paused" if request.admitted else "waiting")
    step.put(request)
    if request.phase == "waiting":
        step.waiting = tuple(sorted({*step.waiting, request.id}))
    if outcome.endswith("failed") and job.source:
        step.note(request.id, "revoked", f"checkpoint {job.source}: its transfer failed")
        drop_point(step, job.source, "dropped after a failed transfer")
    if request.cancelled:
        end_without_lane(step, request)


def drop_point(step: Step, cid: int, why: str) -> None:
    """Everybody lets go of a damaged point."""
    ck = step.checkpoint(cid)
    if ck is None or ck.readers:
        return
    step.lose(cid, why)
    edges = tuple(Edge(o, cid) for o in ck.holders)
    step.release(edges)
    commit_release(step, edges)


def end_without_lane(step: Step, request: Request) -> None:
    """End a waiting or paused request: its references go (ENG-06)."""
    edges = []
    if request.wait:
        edges.append(Edge(request.waiter, request.wait))
    if request.snapshot:
        edges.append(Edge(request.holder, request.snapshot))
    step.release(tuple(edges))
    step.end(request, "cancelled")
