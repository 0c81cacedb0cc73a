"""ST rules: adoption forms derived from the post-state, pins, slots, positions."""

import pytest

from planner import state_images, usage
from planner.errors import BusyError, HandleError, IdentityError, IllegalError, ShortageError
from planner.operations import apply
from planner.physical import checkpoint, sequence
from planner.plans import Bind, Capture, Edge, ImageRef, Infeasible, Pause, Target
from planner.retention import Finish, Release, Retain
from planner.state_images import image
from planner.testing import Driver, tiny_layout
from planner.transactions import Cancel, assess
from planner.units import AbortUnit, Commit, Launch, Reserve, RowCommit, RowTokens


def driver(**changes: int) -> Driver:
    return Driver(
        tiny_layout(**({"pages": 12, "blocks": 6, "rows": 3, "slots": 4, "host": 12} | changes))
    )


def bind_from(d: Driver, cid: int, owner: int = 2, *retire: Edge) -> Target:
    ck = checkpoint(d.state, cid)
    return Target(Bind(owner, (ck.frontier + 1,), ck.identity, cid, retire))


def test_root() -> None:
    """ST-03, ST-06: a reserved slot is no content; initialisation completes with the copy."""
    d = driver()
    d.start(Target(Bind(1, (2,))))
    d.advance(2)
    reserved = d.state.states.images.values()[0]
    assert (reserved.ready, reserved.pins, reserved.position) == (False, 1, state_images.WRITING)
    d.advance(2)
    q = d.state.sequences[0]
    assert image(d.state.states, q.image) == state_images.StateImage(1, -1, 1, True, writer=q.id)


def test_in_place_and_freeze() -> None:
    """ST-04, ST-13: one writer advances in place; freezing makes the same image immutable."""
    d = driver()
    q = d.bind(1, 4)
    d.write(q.id, 1)
    q = d.write(q.id, 3)
    assert q.image == d.state.sequences[0].image
    cid = d.finish(q.id, 1)
    frozen = image(d.state.states, q.image)
    assert (frozen.position, frozen.writer, frozen.refs) == (3, 0, 1)
    assert checkpoint(d.state, cid).image == q.image


def test_move() -> None:
    """ST-06: a consumed source on the Device becomes the active image itself."""
    d = driver()
    cid = d.cached(1, 3)
    source = checkpoint(d.state, cid).image
    plan = d.complete(bind_from(d, cid, 1, Edge(1, cid)))
    assert plan.form == "move"
    assert d.state.sequences[0].image == source
    assert usage(d.state).slots == 1


def test_fork_pins_its_source_until_the_first_state_write() -> None:
    """ST-06, ST-07, ST-08: no copy is ordered; the source stays pinned, even without owners."""
    d = driver()
    cid = d.cached(1, 3)
    source = checkpoint(d.state, cid).image
    plan = d.complete(bind_from(d, cid))
    assert plan.form == "fork"
    q = d.state.sequences[0]
    assert (q.source, image(d.state.states, q.image).ready) == (source, False)
    d.run(Release((Edge(1, cid),)))
    assert image(d.state.states, source).pins == 1
    assert usage(d.state).slots == 2
    with pytest.raises(IllegalError, match="fork source"):
        apply(d.state, Finish(q.id, 2, d.identity(q.id)))
    revision = d.state.revision
    d.write(q.id, 4)
    assert d.state.sequences[0].source == 0
    assert d.state.states.images.get(source) is None
    assert d.state.revision == revision + 1
    assert usage(d.state).slots == 1


def test_fork_settlement_overlaps_no_transaction() -> None:
    """ST-07: neither starts while the other is under way."""
    d = driver()
    cid = d.cached(1, 3)
    d.complete(bind_from(d, cid))
    q = d.state.sequences[0]
    d.run(Launch((RowTokens(q.id, (4,)),)))
    with pytest.raises(BusyError, match="ST-07"):
        assess(d.state, Target(Bind(3, (2,))))
    d.run(AbortUnit(sequence(d.state, q.id).unit))
    assert d.state.sequences[0].source  # an aborted unit settles nothing
    d.start(Target(Bind(3, (2,))))
    with pytest.raises(BusyError, match="ST-07"):
        apply(d.state, Launch((RowTokens(q.id, (4,)),)))


def test_restore_of_a_consumed_source() -> None:
    """ST-06: Host-only and consumed: the same identity gets a slot, its Host copy goes."""
    d = driver()
    cid = d.cached(1, 3)
    source = checkpoint(d.state, cid).image
    d.complete(Target(demote=(ImageRef(source),)))
    assert usage(d.state).slots == 0
    plan = d.complete(bind_from(d, cid, 1, Edge(1, cid)))
    assert plan.form == "restore"
    assert d.state.sequences[0].image == source
    assert image(d.state.states, source).host is None
    assert usage(d.state).host == 0


def test_restore_of_a_retained_source() -> None:
    """ST-06, CK-07: Host-only and kept: a new image is filled, the old one stays on Host."""
    d = driver()
    cid = d.cached(1, 3)
    source = checkpoint(d.state, cid).image
    d.complete(Target(demote=(ImageRef(source),)))
    plan = d.complete(bind_from(d, cid))
    assert plan.form == "restore"
    assert d.state.sequences[0].image != source
    assert image(d.state.states, source).host is not None
    d.write(d.state.sequences[0].id, 4)


def test_cancelled_restore_gives_the_slot_back() -> None:
    """TX-10, TX-14, ST-06: the source is as before: Host only, no slot."""
    d = driver()
    cid = d.cached(1, 3)
    d.complete(Target(demote=(ImageRef(checkpoint(d.state, cid).image),)))
    before = d.state
    d.start(bind_from(d, cid, 1, Edge(1, cid)))
    d.advance(2)
    d.run(Cancel(d.state.transaction.id))  # type: ignore[union-attr]
    d.advance()
    assert d.state.states.images == before.states.images
    assert d.state.checkpoints == before.checkpoints
    assert usage(d.state) == usage(before)


def full_slots(host: int) -> tuple[Driver, int]:
    """Two slots: a kept checkpoint of owner 1 and an active sequence of owner 3."""
    d = driver(slots=2, host=host)
    cid = d.cached(1, 3)
    q = d.bind(3, 2)
    d.write(q.id, 1)
    return d, cid


def test_backup_split() -> None:
    """ST-06, ST-14: without slot and Host copy: D2H first, then the slot is handed over."""
    d, cid = full_slots(host=4)
    source = checkpoint(d.state, cid).image
    old = state_images.slot_lease(d.state.states, image(d.state.states, source).slot)
    plan = d.complete(bind_from(d, cid))
    assert plan.form == "backup_split"
    now = image(d.state.states, source)
    assert (now.slot, now.host is not None) == (0, True)
    q = d.state.sequences[-1]
    assert image(d.state.states, q.image).slot == old.slot
    with pytest.raises(HandleError, match="freed since"):
        state_images.check_slot(d.state.states, old)
    d.write(q.id, 4)


def test_split_without_copy() -> None:
    """ST-04, ST-06: with a Host copy kept beside it, the slot changes hands without a copy."""
    d, cid = full_slots(host=4)
    source = checkpoint(d.state, cid).image
    d.complete(Target(backup=(ImageRef(source),)))
    both = image(d.state.states, source)
    assert (both.slot, both.ready, both.host is not None) == (1, True, True)
    plan = d.complete(bind_from(d, cid))
    assert (plan.form, plan.bytes_moved) == ("split", 1)  # one tail page, no image copy
    assert image(d.state.states, source).slot == 0
    d.write(d.state.sequences[-1].id, 4)


def test_no_form_possible() -> None:
    """ST-06, ST-09: neither slot nor Host space: infeasible, nothing happens, the source stays."""
    d, cid = full_slots(host=1)
    verdict = assess(d.state, bind_from(d, cid))
    assert isinstance(verdict, Infeasible)
    assert verdict.gaps == (("host", 2),)
    assert "host_capacity_bytes" in str(verdict)


def test_a_pinned_source_forks_even_when_consumed() -> None:
    """ST-07, TX-07: another fork still reads it, so it cannot move."""
    d = driver()
    cid = d.cached(1, 3)
    d.complete(bind_from(d, cid))
    plan = d.complete(bind_from(d, cid, 1, Edge(1, cid)))
    assert plan.form == "fork"
    for q in d.state.sequences:
        d.write(q.id, 4)
    assert usage(d.state).slots == 2


def test_snapshots() -> None:
    """ST-05, ST-06: a capture copies one whole image, to a slot or to Host."""
    d = driver()
    q = d.bind(1, 4)
    d.write(q.id, 2)
    on_device = d.complete(Target(Capture(q.id, 1, d.identity(q.id))))
    on_host = d.complete(Target(Capture(q.id, 1, d.identity(q.id), "host")))
    assert (on_device.form, on_device.bytes_moved, on_host.bytes_moved) == ("snapshot", 2, 2)
    assert usage(d.state).slots == 2
    assert usage(d.state).host == 2


def test_positions_never_lie() -> None:
    """ST-01, ST-11, INV-06: publishing at another position raises; states never go back."""
    d = driver()
    q = d.bind(1, 4)
    d.write(q.id, 2)
    early = d.identity(q.id).prefix(1)
    for op in (Finish(q.id, 1, early),):
        with pytest.raises(IdentityError, match="stands at 2"):
            apply(d.state, op)
    for action in (Capture(q.id, 1, early), Pause(q.id, 1, early)):
        with pytest.raises(IdentityError, match="stands at 2"):
            assess(d.state, Target(action))
    d.run(Reserve((RowTokens(q.id, (3,)),)))
    d.run(Launch((RowTokens(q.id, (3,)),)))
    unit = sequence(d.state, q.id).unit
    with pytest.raises(IllegalError, match="never goes back"):
        apply(d.state, Commit(unit, (RowCommit(q.id, (3,), 1),)))
    store = d.state.states
    frozen = state_images.publish(store, q.image, 2)
    with pytest.raises(IdentityError, match="never"):
        state_images.publish(frozen, q.image, 3)


def test_published_images_are_immutable() -> None:
    """ST-13, CK-07: a restore or fork never changes what the checkpoint holds."""
    d = driver()
    cid = d.cached(1, 3)
    before = image(d.state.states, checkpoint(d.state, cid).image)
    d.complete(bind_from(d, cid))
    d.write(d.state.sequences[0].id, 4)
    after = image(d.state.states, before.id)
    assert (after.position, after.slot, after.writer) == (before.position, before.slot, 0)


def test_two_uses_of_one_image() -> None:
    """X-32, CAT-11, CK-11: a second owner is an edge on the same objects; it keeps them alive."""
    d = driver()
    cid = d.cached(1, 3)
    used = usage(d.state)
    d.run(Retain(cid, 2))
    assert usage(d.state) == used
    d.run(Release((Edge(1, cid),)))
    assert usage(d.state) == used
    d.run(Release((Edge(2, cid),)))
    assert usage(d.state).slots == 0


def test_slots_are_not_lanes() -> None:
    """ST-10, ST-02, CAP-12, OWN-10: any slot, any row; images know neither rows nor lanes."""
    d = driver()
    d.cached(1, 1)
    q = d.bind(2, 2)
    assert (q.rows, image(d.state.states, q.image).slot) == ((0,), 2)
    assert not {"row", "lane"} & set(state_images.StateImage._fields)


def test_replay_position_is_the_rebuilt_one() -> None:
    """ST-10: during Replay the sequence records the really rebuilt position."""
    d = driver()
    q = d.bind(1, 6, recovery=4)
    q = d.write(q.id, 2)
    assert (q.position, q.recovery) == (2, 4)


def test_slot_shortage_names_the_cure() -> None:
    """ST-06, CAP-12: the message names the thing, the limit and the cure."""
    d = driver(slots=1)
    d.cached(1, 1)
    with pytest.raises(ShortageError, match="device_state_slots") as caught:
        state_images.reserve_image(d.state.states, True)
    assert caught.value.gaps == (("slots", 1),)
    verdict = assess(d.state, Target(Bind(2, (1,))))
    assert isinstance(verdict, Infeasible)
    assert verdict.gaps == (("slots", 1),)
