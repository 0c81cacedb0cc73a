"""Every operation worth trying in a small world, in a fixed order.

Operations may turn out to be impossible: then `apply` must refuse them without effect. Plans are
listed only where `assess` found them feasible: from there on nothing may fail.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.checkpoints import identity
from planner.errors import BusyError, IllegalError
from planner.kv import NO_HOST
from planner.operations import Operation
from planner.physical import PhysicalState, Sequence
from planner.plans import (
    Bind,
    Capture,
    Edge,
    ImageRef,
    Infeasible,
    PageRange,
    Pause,
    Target,
)
from planner.retention import Discard, EndReader, Finish, LeaseReader, Release, Retain
from planner.testing.shadow import Shadow
from planner.testing.worlds import World
from planner.transactions import Advance, Cancel, Fail, Start, assess
from planner.units import (
    AbortUnit,
    Commit,
    EnsureMapped,
    Launch,
    Reserve,
    RowCommit,
    RowTokens,
    Settle,
    Truncate,
)


def moves(world: World, s: PhysicalState, shadow: Shadow) -> Iterator[Operation]:
    """All operations of this world in state ``s``."""
    t = s.transaction
    if t is not None:
        yield Advance(t.id)
        if not t.cancelled:
            yield Cancel(t.id)
        if t.phase == "CopiesInFlight":
            yield Fail(t.id)
    busy = [q for q in s.sequences if q.unit]
    if world.atomic and (busy or t is not None):
        for q in busy:
            yield from _unit_moves(world, s, q)
        return
    for q in s.sequences:
        if t is None or q.id not in t.frozen:
            yield from _unit_moves(world, s, q)
    if t is None:
        yield from _retention_moves(world, s, shadow)
        for target in targets(world, s, shadow):
            try:
                plan = assess(s, target)
            except (BusyError, IllegalError):
                continue
            if not isinstance(plan, Infeasible):
                yield Start(plan)


def _extent(world: World, s: PhysicalState, main: int) -> tuple[int, ...]:
    return (main, *(max(0, main - world.lag) for _ in s.pools[1:]))


def _unit_moves(world: World, s: PhysicalState, q: Sequence) -> Iterator[Operation]:
    P, limit = s.layout.page_tokens, s.layout.max_context
    if q.flights:
        yield from (AbortUnit(f.unit) for f in q.flights)
        ends = q.flights[0].provisional
        for end in sorted({q.frontiers[0], min(q.frontiers[0] + 1, ends[0]), ends[0]}):
            tokens = tuple(
                max(old, min(new, p))
                for old, new, p in zip(q.frontiers, _extent(world, s, end), ends, strict=True)
            )
            row = RowCommit(q.id, tokens, end)
            yield Commit(q.unit, (row,), settle=end == ends[0])
            if world.lag and end == ends[0]:
                yield Commit(q.unit, (row,))
    reach = min(q.end[0] + P, limit)
    if reach > q.end[0]:
        yield Reserve((RowTokens(q.id, _extent(world, s, reach)),))
        yield Launch((RowTokens(q.id, _extent(world, s, q.end[0] + 1)),))
        yield Launch((RowTokens(q.id, _extent(world, s, reach)),))
        yield EnsureMapped(RowTokens(q.id, _extent(world, s, reach)))
    if q.permit:
        yield Truncate(RowTokens(q.id, q.frontiers))
        yield Settle((q.id,))


def _retention_moves(world: World, s: PhysicalState, shadow: Shadow) -> Iterator[Operation]:
    for q in s.sequences:
        if not q.unit:
            yield Discard(q.id)
            if not q.source and len(s.checkpoints) < world.points:
                yield Finish(q.id, q.owner, shadow.identity(q))
    for cid, ck in s.checkpoints.items():
        for owner in ck.holders:
            yield Release((Edge(owner, cid),))
        for owner in range(1, world.owners + 1):
            if owner not in ck.holders:
                yield Retain(cid, owner)
        if world.readers:
            yield EndReader(cid) if ck.readers else LeaseReader(cid)


def targets(world: World, s: PhysicalState, shadow: Shadow) -> Iterator[Target]:
    """Targets of every kind, feasible or not; pressure beside a bind only for owner 1."""
    P, limit = s.layout.page_tokens, s.layout.max_context
    edges = [Edge(o, cid) for cid, ck in s.checkpoints.items() for o in ck.holders]
    demotions = list(_placements(s))
    for owner in range(1, world.owners + 1):
        root = Bind(owner, _extent(world, s, P))
        yield Target(root)
        if owner == 1:
            yield from (Target(root, release=(edge,)) for edge in edges)
            yield from (Target(root, demote=(item,)) for item in demotions)
        for cid, ck in s.checkpoints.items():
            reach = _extent(world, s, min(ck.frontier + P, limit))
            bind = Bind(owner, reach, ck.identity, cid, lease=owner == 1)
            yield Target(bind)
            if owner == 1:
                yield from (Target(bind, demote=(item,)) for item in demotions)
            if owner in ck.holders:
                mine = tuple(e for e in edges if e.owner == owner)
                yield Target(Bind(owner, reach, ck.identity, cid, (Edge(owner, cid),)))
                if len(mine) > 1:
                    yield Target(Bind(owner, reach, ck.identity, cid, mine))
    for q in s.sequences:
        if q.unit or q.source:
            continue
        if len(s.checkpoints) < world.points:
            for owner in range(1, world.owners + 1):
                yield Target(Capture(q.id, owner, shadow.identity(q)))
                yield Target(Capture(q.id, owner, shadow.identity(q), place="host"))
            pages = tuple(
                PageRange(k, hid, h.base, h.blocks)
                for k, hid in enumerate(q.histories)
                if (h := s.pools[k].histories.get(hid)) is not None and h.blocks > h.base
            )
            yield Target(Pause(q.id, q.owner, shadow.identity(q), pages=pages))
            yield Target(Pause(q.id, q.owner, shadow.identity(q), state=False))
    yield from (Target(demote=(item,)) for item in demotions)
    yield from (Target(backup=(item,)) for item in demotions)
    yield from (Target(drop_host=(item,)) for item in _host_copies(s))


def _placements(s: PhysicalState) -> Iterator[ImageRef | PageRange]:
    for iid, im in s.states.images.items():
        if im.slot and not im.writer and not im.pins:
            yield ImageRef(iid)
    for k, pool in enumerate(s.pools):
        for hid, h in pool.histories.items():
            if h.sequence or h.blocks == h.base:
                continue
            if any(p.device for p in h.pages.values()):
                yield PageRange(k, hid, h.base, h.blocks)
                if h.blocks - h.base > 1:
                    yield PageRange(k, hid, h.blocks - 1, h.blocks)


def _host_copies(s: PhysicalState) -> Iterator[ImageRef | PageRange]:
    for iid, im in s.states.images.items():
        if im.slot and im.host:
            yield ImageRef(iid)
    for k, pool in enumerate(s.pools):
        for hid, h in pool.histories.items():
            pages = h.pages.values()
            if any(p.host != NO_HOST for p in pages) and all(p.device for p in pages):
                yield PageRange(k, hid, h.base, h.blocks)


def unknown_prompt(s: PhysicalState) -> Target:
    """A bind whose prompt no checkpoint matches: the oldest checkpoint must be refused."""
    cid = s.checkpoints.items()[0][0]
    return Target(Bind(1, (1,) * len(s.pools), identity([-7] * s.layout.max_context), cid))
