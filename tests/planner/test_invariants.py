"""Each INV rule of the physical core: a field broken by hand is caught under that rule's name."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from planner import check, checkpoint, initial, usage, violations
from planner.errors import InvariantError
from planner.host import Arena, Extent
from planner.kv import Pool, history
from planner.persistent import IntMap
from planner.physical import Flight, PhysicalState
from planner.plans import Bind, Capture, Edge, ImageRef, PageRange, Target
from planner.retention import Discard, Release
from planner.state_images import image
from planner.testing import Driver, tiny_layout
from planner.units import AbortUnit, Launch, RowTokens

Break = Callable[[PhysicalState], PhysicalState]


def rich() -> Driver:
    """Active and cached, shared and forked, on Device and Host, unit in flight, two pools."""
    d = Driver(tiny_layout(pages=12, backend=12, blocks=6, rows=3, slots=6, host=12, page_tokens=2))
    base = d.cached(1, 5)
    q = d.bind(2, 8, base)
    d.write(q.id, 7)
    kept = d.finish(q.id, 2)
    p = checkpoint(d.state, kept).prefixes[0]
    h = history(d.state.pools[0], p.history)
    d.complete(
        Target(
            demote=(PageRange(0, h.id, h.base, h.blocks), ImageRef(checkpoint(d.state, kept).image))
        )
    )
    a = d.bind(3, 10, base, lease=True)
    d.write(a.id, 6)
    d.complete(Target(Capture(a.id, 3, d.identity(a.id))))
    b = d.bind(4, 6)
    d.run(Launch((RowTokens(b.id, (4, 3)),)))
    return d


RICH = rich().state


def pool0(change: Callable[[Pool], Pool]) -> Break:
    def broken(s: PhysicalState) -> PhysicalState:
        return s._replace(pools=(change(s.pools[0]), *s.pools[1:]))

    return broken


def in_history(hid: int, **fields: Any) -> Break:
    def change(p: Pool) -> Pool:
        return p._replace(histories=p.histories.set(hid, history(p, hid)._replace(**fields)))

    return pool0(change)


def in_page(hid: int, block: int, **fields: Any) -> Break:
    def change(p: Pool) -> Pool:
        h = history(p, hid)
        page = h.pages.slice(block, block + 1)[0]._replace(**fields)
        return p._replace(
            histories=p.histories.set(hid, h._replace(pages=h.pages.set(block, page)))
        )

    return pool0(change)


def in_image(iid: int, **fields: Any) -> Break:
    def broken(s: PhysicalState) -> PhysicalState:
        images = s.states.images.set(iid, image(s.states, iid)._replace(**fields))
        return s._replace(states=s.states._replace(images=images))

    return broken


def in_sequence(index: int, **fields: Any) -> Break:
    def broken(s: PhysicalState) -> PhysicalState:
        qs = list(s.sequences)
        qs[index] = qs[index]._replace(**fields)
        return s._replace(sequences=tuple(qs))

    return broken


def in_checkpoint(index: int, **fields: Any) -> Break:
    def broken(s: PhysicalState) -> PhysicalState:
        ck = s.checkpoints.values()[index]
        return s._replace(checkpoints=s.checkpoints.put(ck._replace(**fields)))

    return broken


def unlisted(**indexes: Any) -> Break:
    return lambda s: s._replace(checkpoints=dataclasses.replace(s.checkpoints, **indexes))


def states(**fields: Any) -> Break:
    return lambda s: s._replace(states=s.states._replace(**fields))


def arena(*free: Extent) -> Break:
    return lambda s: s._replace(arena=Arena(s.arena.capacity, free))


def flying(*ends: tuple[int, ...]) -> Break:
    return in_sequence(1, flights=tuple(Flight(n, end) for n, end in enumerate(ends, start=1)))


def recoveries(frontier: int) -> Break:
    return lambda s: in_sequence(0, recovery=frontier)(in_sequence(1, recovery=frontier)(s))


BASE = checkpoint(RICH, RICH.checkpoints.items()[0][0])
OWN = checkpoint(RICH, RICH.checkpoints.items()[2][0])
KEPT = checkpoint(RICH, RICH.checkpoints.items()[1][0])
A, B = RICH.sequences
OLD, ON_HOST = BASE.prefixes[0].history, KEPT.prefixes[0].history

BROKEN: list[tuple[str, str, Break]] = [
    ("INV-01", "more than the pool", pool0(lambda p: p._replace(capacity=p.allocated))),
    ("INV-01", "arena longer", lambda s: s._replace( arena=Arena(13, s.arena.free))),
    ("INV-02", "lost lease", pool0(lambda p: p._replace(allocated=p.allocated - 1))),
    ("INV-02", "ownerless reserve", pool0(lambda p: p._replace(reserved=p.reserved + 1))),
    ("INV-02", "page twice free", pool0(lambda p: p._replace(fresh=p.fresh - 1))),
    ("INV-02", "page lost", pool0(lambda p: p._replace(fresh=p.fresh + 1))),
    ("INV-02", "Host byte free and owned", arena(Extent(0, 12))),
    ("INV-02", "replicas miscounted", in_history(OLD, on_host=1)),
    ("INV-02", "Device content not listed", pool0(lambda p: p._replace(resident=p.resident[1:]))),
    ("INV-02", "slot lost", states(slots=(0, *RICH.states.slots[1:]))),
    ("INV-02", "reserved by a sequence", in_sequence(0, reserved=(9, 9))),
    ("INV-03", "two pages in one group", in_page(OLD, 0, device=2)),
    ("INV-03", "one identity twice", in_page(OLD, 0, serial=2)),
    ("INV-03", "foreign writer", in_history(OLD, sequence=A.id)),
    ("INV-03", "no writer", in_history(A.histories[0], sequence=0)),
    ("INV-03", "two writers of an image", in_sequence(0, image=B.image)),
    ("INV-03", "foreign image writer", in_image(BASE.image, writer=B.id)),
    ("INV-04", "lost protection", in_history(OLD, refs=())),
    ("INV-04", "lost fork edge", in_history(OLD, children=())),
    ("INV-04", "writer in protected columns", in_sequence(0, frontiers=(0, 6))),
    ("INV-05", "lost state reference", in_image(BASE.image, refs=0)),
    ("INV-05", "checkpoint of a written image", in_image(BASE.image, position=-1)),
    ("INV-05", "lost pages", in_page(ON_HOST, 3, host_columns=0)),
    ("INV-05", "lost state", in_image(KEPT.image, host=None)),
    ("INV-06", "state of another position", in_image(BASE.image, position=4)),
    ("INV-06", "identity too short", in_checkpoint(0, identity=BASE.identity.prefix(4))),
    ("INV-07", "no replica", in_page(ON_HOST, 3, host=-1, host_columns=0)),
    ("INV-07", "stale epoch", in_page(ON_HOST, 3, epoch=5)),
    ("INV-07", "columns without a copy", in_page(OLD, 0, host_columns=1)),
    ("INV-07", "too many columns", in_page(ON_HOST, 2, host_columns=3)),
    ("INV-07", "half-written state", in_image(B.image, ready=False)),
    ("INV-07", "ready without a place", in_image(KEPT.image, ready=True)),
    ("INV-08", "left-over pin", in_history(OLD, pins=1)),
    ("INV-08", "left-over image pin", in_image(BASE.image, pins=1)),
    ("INV-08", "read and not listed", unlisted(read=(BASE.id,))),
    ("INV-08", "owned and not listed", unlisted(_owned=IntMap())),
    ("INV-08", "on no path", unlisted(_places=())),
    ("INV-08", "image of nobody", unlisted(_imaged=IntMap())),
    ("INV-08", "no holder", in_checkpoint(0, holders=())),
    ("INV-08", "reader below zero", in_checkpoint(0, readers=-1)),
    ("INV-09", "unit below its frontier", in_sequence(1, frontiers=(5, 0))),
    ("INV-09", "unit beyond its mapping", in_sequence(1, flights=(Flight(B.unit, (5, 3)),))),
    ("INV-09", "unit below the one before", flying((4, 3), (4, 2))),
    ("INV-09", "newer unit beyond its mapping", flying((4, 3), (5, 3))),
    ("INV-09", "three units", flying((1, 1), (2, 2), (3, 3))),
    ("INV-09", "units out of order", in_sequence(1, flights=(Flight(2, (4, 3)), Flight(1, (4, 3))))),
    ("INV-09", "one unit twice", in_sequence(1, flights=(Flight(1, (4, 3)),) * 2)),
    ("INV-09", "active page not on Device", in_page(OLD, 1, device=0, host=0, host_columns=2)),
    ("INV-10", "two recoveries", recoveries(9)),
    ("INV-10", "passed recovery", in_sequence(0, recovery=2, permit=True)),
    ("INV-11", "lent entitlement", in_sequence(0, lease=(6, 5))),
    ("INV-11", "kept after settlement", in_sequence(0, lease=(0, 0))),
    ("INV-12", "row of nobody", pool0(lambda p: p._replace(rows=(A.id, B.id, 77)))),
    ("INV-12", "one row twice", in_sequence(1, rows=A.rows)),
    ("INV-12", "inactive with free blocks", in_history(ON_HOST, sequence=0, blocks=5)),
    ("INV-13", "id from the future", lambda s: s._replace( next_id=1)),
    ("INV-13", "unit from the future", in_sequence(1, flights=(Flight(RICH.next_id, (4, 3)),))),
    ("INV-13", "history id reused", pool0(lambda p: p._replace(next_history=1))),
    ("INV-13", "page identity reused", pool0(lambda p: p._replace(next_serial=1))),
    ("INV-13", "image id reused", states(next_image=1)),
    ("INV-13", "dangling history", in_sequence(0, histories=(99, 99))),
    ("INV-13", "dangling image", in_checkpoint(0, image=99)),
    ("INV-14", "missing pool entry", in_sequence(0, frontiers=(6,))),
    ("INV-14", "missing pool entry of a unit", flying((4, 3), (4,))),
    ("INV-14", "missing prefix", in_checkpoint(0, prefixes=BASE.prefixes[:1])),
    ("INV-14", "other page size", pool0(lambda p: p._replace(page_tokens=4))),
    ("INV-14", "frontier beyond membership", in_sequence(0, frontiers=(11, 6))),
    ("INV-14", "hole in a history", in_history(OLD, blocks=4)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "what", "broken"), BROKEN, ids=[f"{r} {w}" for r, w, _ in BROKEN])
def test_a_broken_field_is_caught(rule: str, what: str, broken: Break) -> None:
    """INV-01, INV-02, INV-03, INV-04, INV-05, INV-06, INV-07, INV-08, INV-09, INV-10, INV-11,
    INV-12, INV-13, INV-14: the check of that rule fires."""
    found = {r for r, _ in violations(broken(RICH))}
    assert rule in found, (what, sorted(found))
    with pytest.raises(InvariantError):
        check(broken(RICH))


def test_the_unbroken_state_is_sound() -> None:
    """INV-01..14: the state the mutations start from has no finding."""
    assert check(RICH) is RICH


def test_idle_state_must_be_empty() -> None:
    """INV-20: with nothing held, any use or object is a leak; cleared equals initial."""
    d = rich()
    leaked = initial(RICH.layout)._replace(
        states=d.state.states, arena=d.state.arena, pools=d.state.pools
    )
    assert "INV-20" in {rule for rule, _ in violations(leaked)}
    unit = d.state.sequences[1].unit
    d.run(AbortUnit(unit))
    for q in d.state.sequences:
        d.run(Discard(q.id))
    d.run(Release((Edge(1, BASE.id), Edge(2, KEPT.id), Edge(3, OWN.id))))
    assert usage(d.state) == usage(initial(RICH.layout))


def test_transaction_findings() -> None:
    """INV-07, INV-08: a source without lease, an impossible cursor, a frozen ghost."""
    d = Driver(tiny_layout(pages=12, blocks=6, slots=4))
    cid = d.cached(1, 3)
    d.start(Target(Bind(2, (4,), checkpoint(d.state, cid).identity, cid)))
    t = d.state.transaction
    assert t is not None

    def rules(s: PhysicalState) -> set[str]:
        return {rule for rule, _ in violations(s)}

    unleased = d.state.checkpoints.put(checkpoint(d.state, cid)._replace(readers=0))
    assert "INV-07" in rules(d.state._replace(checkpoints=unleased))
    far = dataclasses.replace(t, cursor=9)
    assert "INV-08" in rules(d.state._replace(transaction=far))
    ghost = dataclasses.replace(t, frozen=(99,))
    assert "INV-08" in rules(d.state._replace(transaction=ghost))
    greedy = dataclasses.replace(t, held=(-1,))
    assert {"INV-01", "INV-02"} <= rules(d.state._replace(transaction=greedy))
    gone = d.state._replace(transaction=None)
    assert "INV-02" in rules(gone)  # its reservations are left over
