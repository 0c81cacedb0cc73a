"""Assess a target, seal a plan, and run it phase by phase (TX).

Assessment runs the very phases that execution runs, on a draft that is thrown away: what it calls
feasible is feasible at every boundary, and its usage numbers are exact. Execution is `Start`, then
one `Advance` a phase; `Advance` in CopiesInFlight says that the copies completed. `Cancel` and
`Fail` end in an absolute result with the source valid and finished reclaim kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner import activation, captures, kv, pressure, state_images
from planner.errors import BusyError, HandleError, ShortageError, StalePlanError
from planner.physical import Draft, PhysicalState, Result, Usage, sequence, usage
from planner.plans import (
    NO_WORK,
    PHASES,
    Bind,
    Capture,
    Infeasible,
    Pause,
    Phase,
    Plan,
    Stage,
    StagePoint,
    Target,
    Transaction,
    Work,
)


@dataclass(frozen=True, slots=True)
class Start:
    """Open the transaction slot with a sealed plan: leases the source, withdraws what it holds."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Advance:
    """Run the next phase; in CopiesInFlight: the copies of this transaction have completed."""

    transaction: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Withdraw the intent: at once before copies are submitted, else when they have completed."""

    transaction: int


@dataclass(frozen=True, slots=True)
class Fail:
    """A copy or its submission failed and the device is at rest: abort."""

    transaction: int


def _stages(target: Target) -> list[tuple[Stage, Phase]]:
    first: Stage = "activation" if isinstance(target.action, Bind | Capture) else "pressure"
    if (target.demote or target.backup) and first == "activation":
        stages: list[Stage] = ["pressure", "activation"]
    else:
        stages = [first]
    out = [(stages[0], PHASES[0])]
    for stage in stages:
        out += [(stage, phase) for phase in PHASES[1:]]
    return out


def _run(d: Draft, target: Target, stage: Stage, phase: Phase, work: Work, readers: int) -> Work:
    """Run one phase on a draft; the work of the stage comes back, empty once it published."""
    action = target.action
    if phase == "HostReleases":
        pressure.release_phase(d, target)
        return NO_WORK
    if phase == "CopyPreparation":
        if stage == "pressure":
            return pressure.prepare_phase(d, target)
        if isinstance(action, Bind):
            return activation.prepare_bind(d, action, readers)
        assert isinstance(action, Capture)
        return captures.prepare_capture(d, action)
    if phase == "CopiesInFlight":
        return work
    if stage == "pressure" and not isinstance(action, Pause):
        pressure.unpin(d, work)
        pressure.publish_copies(d, work)
    return NO_WORK


def _adopt(d: Draft, target: Target, work: Work) -> tuple[int, int]:
    """Publish the action: (new sequence, new checkpoint)."""
    action = target.action
    if isinstance(action, Bind):
        return activation.publish_bind(d, action, work), 0
    if isinstance(action, Capture):
        return 0, captures.publish_capture(d, action, work)
    if isinstance(action, Pause):
        return 0, captures.publish_pause(d, action, work)
    return 0, 0


def _validate(s: PhysicalState, target: Target) -> tuple[int, ...]:
    """Sequences that the target freezes; raises where it cannot run beside what is in flight."""
    for q in s.sequences:
        if q.source and q.unit:
            raise BusyError(
                f"sequence {q.id} settles a fork in unit {q.unit} (ST-07); commit first"
            )
    if isinstance(target.action, Capture | Pause):
        q = sequence(s, target.action.sequence)
        captures.require_settled(Draft(s), q.id, target.action.identity)
        return (q.id,)
    return ()


def _moment(s: PhysicalState, target: Target) -> tuple[int, ...]:
    """What a plan depends on and the revision does not count: where its sequence stands (TX-08)."""
    if not isinstance(target.action, Capture | Pause):
        return ()
    q = sequence(s, target.action.sequence)
    blocks = [kv.history(p, hid).blocks for p, hid in zip(s.pools, q.histories, strict=True)]
    return (q.position, *q.frontiers, *blocks)


def _bytes(d: Draft, work: Work) -> int:
    sizes = [p.page_bytes for p in d.pools]
    return sum(
        d.layout.image_bytes if c.kind == "image" else sizes[c.pool]
        for c in work.copies
        if c.direction != "init"
    )


def assess(s: PhysicalState, target: Target) -> Plan | Infeasible:
    """Decide feasibility on the complete post-state and every boundary; read-only.

    Raises for targets that are wrong rather than too large (stale handle, inexact identity, content
    in use, another transaction open).
    """
    if s.transaction is not None:
        raise BusyError(f"transaction {s.transaction.id} is open; assess at its end (TX-01)")
    _validate(s, target)
    d = Draft(s)
    points: list[StagePoint] = []
    work = NO_WORK
    form, copies, moved = "", 0, 0
    kv_forms: tuple[str, ...] = ()
    for stage, phase in _stages(target):
        if phase == "CopiesInFlight" and not work.copies:
            continue
        try:
            done = _run(d, target, stage, phase, work, 0)
            if phase == "CopyPublication" and stage == _stages(target)[-1][0]:
                _adopt(d, target, work)
        except ShortageError as e:
            return Infeasible(target, stage, phase, e.gaps, str(e))
        if phase == "CopyPreparation":
            copies += len(done.copies)
            moved += _bytes(d, done)
            form, kv_forms = done.form, tuple(w.form for w in done.pools)
        work = done
        points.append(StagePoint(stage, phase, usage(d)))
    return Plan(
        target, s.revision, form, kv_forms, tuple(points), _holds(usage(s), points), copies, moved,
        tuple(d.retired), _moment(s, target),
    )  # fmt: skip


def _holds(start: Usage, points: list[StagePoint]) -> tuple[tuple[int, ...], ...]:
    """Before each point: pages per pool that later points use beyond what is used then."""
    used = [start.pages, *(p.usage.pages for p in points)]
    holds: list[tuple[int, ...]] = []
    for i in range(len(points)):
        later = [max(column) for column in zip(*used[i:], strict=True)]
        holds.append(tuple(m - u for m, u in zip(later, used[i], strict=True)))
    return tuple(holds)


def _hold(d: Draft, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    for k, (a, b) in enumerate(zip(old, new, strict=True)):
        pool = d.pools[k]
        d.pools[k] = kv.reserve(pool, b - a) if b >= a else kv.unreserve(pool, a - b)


def _lease_source(d: Draft, target: Target, delta: int) -> None:
    if isinstance(target.action, Bind) and target.action.source:
        ck = d.checkpoint(target.action.source)
        d.checkpoints = d.checkpoints.put(ck._replace(readers=ck.readers + delta))


def start(s: PhysicalState, op: Start) -> PhysicalState:
    """Refuse a stale plan without effect; otherwise claim it (GP-40)."""
    if s.transaction is not None:
        raise BusyError(f"transaction {s.transaction.id} is open; at most one runs (TX-01)")
    plan = op.plan
    if plan.revision != s.revision:
        raise StalePlanError(f"plan of revision {plan.revision}, now {s.revision}; assess again")
    frozen = _validate(s, plan.target)
    if _moment(s, plan.target) != plan.moment:
        raise StalePlanError("the sequence moved since the plan was sealed; assess again")
    d = Draft(s)
    _lease_source(d, plan.target, +1)
    _hold(d, (0,) * len(d.pools), plan.hold[0])
    d.transaction = Transaction(d.new_id(), plan, 0, plan.hold[0], frozen)
    return d.freeze()


def _open(s: PhysicalState, tid: int) -> Transaction:
    if s.transaction is None or s.transaction.id != tid:
        now = s.transaction.id if s.transaction else "none"
        raise HandleError(f"transaction {tid} has ended (open: {now}); a late event is dropped")
    return s.transaction


def advance(s: PhysicalState, op: Advance) -> PhysicalState:
    """Run the next phase, or abort where a cancelled transaction reached a stable boundary."""
    t = _open(s, op.transaction)
    d = Draft(s)
    target = t.plan.target
    last = t.cursor == len(t.plan.points) - 1
    moved = t.bytes_moved + (_bytes(d, t.work) if t.phase == "CopiesInFlight" else 0)
    if t.cancelled:
        return _abort(d, replace(t, bytes_moved=moved), "cancelled")
    _hold(d, t.held, (0,) * len(d.pools))
    before = usage(d)
    work = _run(d, target, t.stage, t.phase, t.work, 1)
    if last:
        _lease_source(d, target, -1)
        sid, cid = _adopt(d, target, t.work)
        d.transaction = None
        d.touched.update(t.touched)
        d.finish(Result(t.id, target.kind, "committed", sid, cid, t.retired, (), moved))
        return d.freeze()
    held = t.plan.hold[t.cursor + 1]
    _hold(d, (0,) * len(d.pools), held)
    changed = t.changed or (t.phase in ("HostReleases", "CopyPublication") and bool(
        d.retired or d.touched or usage(d) != before or t.work.copies))  # fmt: skip
    d.transaction = Transaction(
        t.id, t.plan, t.cursor + 1, held, t.frozen, work, False, moved, changed,
        (*t.retired, *d.retired), tuple(sorted({*t.touched, *d.touched})),
    )  # fmt: skip
    return d.freeze()


def cancel(s: PhysicalState, op: Cancel) -> PhysicalState:
    """Abort at once, or mark the transaction while its copies are in flight (TX-10)."""
    t = _open(s, op.transaction)
    d = Draft(s)
    if t.phase == "CopiesInFlight":
        d.transaction = replace(t, cancelled=True)
        return d.freeze()
    return _abort(d, t, "cancelled")


def fail(s: PhysicalState, op: Fail) -> PhysicalState:
    """Abort after a copy failed; its bytes count as not moved."""
    return _abort(Draft(s), _open(s, op.transaction), "failed")


def _abort(d: Draft, t: Transaction, why: str) -> PhysicalState:
    """Free unused destinations, reservations and pins; the source stays valid (TX-14)."""
    work = t.work
    pressure.unpin(d, work)
    _hold(d, t.held, (0,) * len(d.pools))
    for c in work.copies:
        if c.kind == "page" and c.direction != "d2h":
            d.pools[c.pool] = kv.free_pages(d.pools[c.pool], [c.destination])
    for k, w in enumerate(work.pools):
        d.pools[k] = kv.unreserve(d.pools[k], w.growth)
    d.free(list(work.extents))
    if work.image:
        im = state_images.image(d.states, work.image)
        if im.refs or im.writer:  # the source itself: a consumed restore leased it a slot
            if work.form == "restore":
                d.states = state_images.drop_device(d.states, work.image)
        else:
            d.states, _ = state_images.settle(
                state_images.pin(d.states, work.image, -1), work.image
            )
    _lease_source(d, t.plan.target, -1)
    d.transaction = None
    d.touched.update(t.touched)
    revision = d.revision
    result = Result(t.id, t.plan.target.kind, f"aborted: {why}", 0, 0, t.retired, (), t.bytes_moved)
    d.finish(result)
    if not t.changed:
        d.revision = revision
    return d.freeze()
