"""Taking residents off: as a Snapshot that is read back, or to be replayed (PR)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from planner.errors import PlannerError
from planner.physical import sequence
from planner.plans import PageRange, Pause, Target
from planner.retention import Discard
from planner.world.binding import end_without_lane, feasible, give_up, start
from planner.world.commands import Paused
from planner.world.eviction import FOREVER, Rights
from planner.world.requests import Resident
from planner.world.step import Job, Step


def pause(step: Step, resident: Resident) -> None:
    """Take a drained resident off: as a Snapshot where it fits, else for Replay (PR-02..04)."""
    request = step.request(resident.request)
    q = sequence(step.physical, resident.sequence)
    plan = None
    if step.demote and q.position and not q.source and step.physical.layout.host_bytes:
        pages = tuple(
            PageRange(k, hid, h.base, h.blocks)
            for k, (pool, hid) in enumerate(zip(step.physical.pools, q.histories, strict=True))
            if (h := pool.histories.get(hid)) is not None and h.blocks > h.base
        )
        identity = step.ledger(resident).prefix(q.position)
        target = Target(Pause(q.id, step.next_owner, identity, True, pages))
        rights = Rights(reused_before=FOREVER, snapshots=request.id, demote=False)
        try:
            plan = feasible(step, target, rights)
        except PlannerError:
            plan = None
    request = replace(request, outputs=resident.outputs, frontier=max(q.position, resident.replay))
    step.put(request)
    if plan is None:
        step.apply(Discard(q.id))
        leave(step, resident, "replay")
        return
    give_up(step, plan.target.release, resident.pausing)
    start(step, plan, Job("pause", request.id, holder=step.new_owner()))


def leave(
    step: Step,
    resident: Resident,
    form: Literal["snapshot", "replay"],
    snapshot: int = 0,
    holder: int = 0,
) -> None:
    """The lane is free; the request joins the paused queue."""
    request = step.request(resident.request)
    step.residents = [r for r in step.residents if r.request != resident.request]
    step.paused = tuple(sorted({*step.paused, request.id}))
    step.put(replace(request, phase="paused", snapshot=snapshot, holder=holder))
    step.commands.append(Paused(request.id, form, resident.pausing))
    step.note(request.id, "paused", f"as {form}, to let request {resident.pausing} go on")
    step.scan = True
    step.recover |= step.paused[0] < request.id  # its own pause brings nobody back (SCH-15)
    if request.cancelled:
        end_without_lane(step, step.request(request.id))
