"""TX rules: phases, peaks, joint reclaim, stale plans, absolute results."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import checkpoint, copy_arrays, marginal_loss, reclaim, usage
from planner.errors import (
    BusyError,
    HandleError,
    IllegalError,
    PlannerError,
    ShortageError,
    StalePlanError,
)
from planner.kv import history
from planner.operations import apply
from planner.physical import checkpoints_of, sequence
from planner.plans import Bind, Capture, Edge, ImageRef, Infeasible, PageRange, Pause, Plan, Target
from planner.retention import Discard, Finish, Release, Retain
from planner.testing import Driver, assessed, rehearse, tiny_layout
from planner.testing.strategies import Reached
from planner.transactions import Cancel, Fail, Start, assess
from planner.units import Commit, EnsureMapped, Launch, Reserve, RowCommit, RowTokens, Truncate


def driver(**changes: int) -> Driver:
    numbers = {"pages": 12, "blocks": 6, "rows": 3, "slots": 4, "host": 12}
    return Driver(tiny_layout(**(numbers | changes)))


def pages_of(d: Driver, cid: int, pool: int = 0) -> PageRange:
    p = checkpoint(d.state, cid).prefixes[pool]
    h = history(d.state.pools[pool], p.history)
    return PageRange(pool, h.id, h.base, h.blocks)


def open_id(d: Driver) -> int:
    assert d.state.transaction is not None
    return d.state.transaction.id


def test_one_transaction_and_independent_units() -> None:
    """TX-01, TX-18, INV-08: one slot; units that touch nothing of it go on."""
    d = driver()
    q = d.bind(1, 4)
    d.write(q.id, 2)
    cid = d.cached(2, 4)
    d.start(Target(demote=(pages_of(d, cid),)))
    plan = d.state.transaction.plan  # type: ignore[union-attr]
    with pytest.raises(BusyError, match="TX-01"):
        assess(d.state, Target(Bind(3, (2,))))
    with pytest.raises(BusyError, match="at most one"):
        apply(d.state, Start(plan))
    d.advance(2)
    d.write(q.id, 4)
    d.advance(2)
    assert d.state.transaction is None


def test_a_capture_freezes_its_sequence() -> None:
    """TX-18, CAPT-07: a row with a pending capture enters no unit."""
    d = driver()
    q = d.bind(1, 4)
    d.write(q.id, 2)
    d.start(Target(Capture(q.id, 1, d.identity(q.id))))
    for op in (
        Reserve((RowTokens(q.id, (3,)),)),
        EnsureMapped(RowTokens(q.id, (3,))),
        Launch((RowTokens(q.id, (3,)),)),
    ):
        with pytest.raises(BusyError, match="frozen by transaction"):
            apply(d.state, op)
    d.advance(4)
    d.write(q.id, 3)


def test_phases_are_the_only_order() -> None:
    """TX-02, TX-03: reserve, copy, verify, publish, release; a plan without copies skips flight."""
    d = driver()
    cid = d.cached(1, 4)
    target = Target(demote=(pages_of(d, cid), ImageRef(checkpoint(d.state, cid).image)))
    plan = d.start(target)
    names = []
    used = []
    while d.state.transaction is not None:
        names.append(d.state.transaction.phase)
        d.advance()
        used.append((usage(d.state).pages[0], usage(d.state).host, usage(d.state).slots))
    assert names == ["HostReleases", "CopyPreparation", "CopiesInFlight", "CopyPublication"]
    assert used == [(2, 0, 1), (2, 4, 1), (2, 4, 1), (0, 4, 0)]
    assert plan.copies == 3
    q = d.bind(2, 2)
    d.write(q.id, 1)
    move = d.plan(Target(release=(Edge(1, cid),)))
    assert [p.phase for p in move.points] == ["HostReleases", "CopyPreparation", "CopyPublication"]


def test_published_replicas_are_complete() -> None:
    """TX-02, TX-09, INV-07: before publication nothing points at a destination, sources stay."""
    d = driver()
    cid = d.cached(1, 4)
    d.start(Target(demote=(pages_of(d, cid),)))
    d.advance(3)
    h = history(d.state.pools[0], checkpoint(d.state, cid).prefixes[0].history)
    assert [(p.device > 0, p.host) for p in h.pages.values()] == [(True, -1), (True, -1)]
    assert h.pins == 1
    with pytest.raises(BusyError):
        apply(d.state, Release((Edge(1, cid),)))


def x10(host: int) -> tuple[Driver, int, int]:
    """A (8 pages) on Host, B (8 pages) on a Device of 10."""
    d = driver(pages=10, blocks=8, host=host, image=1, page_tokens=2)
    a = d.cached(1, 16)
    d.complete(Target(demote=(pages_of(d, a),)))
    b = d.cached(2, 16)
    return d, a, b


def test_x10_stage_peak() -> None:
    """X-10, TX-04, TX-20: the end state fits, the intermediate Host does not; then B goes."""
    d, a, b = x10(host=10)
    assert (usage(d.state).pages, usage(d.state).host) == ((8,), 8)
    bind = Bind(1, (16,), checkpoint(d.state, a).identity, a, (Edge(1, a),))
    swap = assess(d.state, Target(bind, demote=(pages_of(d, b),)))
    assert isinstance(swap, Infeasible)
    assert (swap.stage, swap.phase) == ("pressure", "CopyPreparation")
    assert "no free Host extent" in swap.reason
    plan = d.complete(Target(bind, release=(Edge(2, b),)))
    assert plan.retired == (b, a)
    assert d.state.result is not None
    assert set(d.state.result.retired) == {a, b}
    assert usage(d.state).pages == (8,)


def test_x10_with_room() -> None:
    """X-10, TX-04: with 16 Host units the same exchange runs, peak exactly 16."""
    d, a, b = x10(host=16)
    bind = Bind(1, (16,), checkpoint(d.state, a).identity, a, (Edge(1, a),))
    plan = d.complete(Target(bind, demote=(pages_of(d, b),)))
    assert [p.stage for p in plan.points] == ["pressure"] * 4 + ["activation"] * 3
    assert plan.peak.host == 16
    assert plan.peak.pages == (8,)
    assert usage(d.state).host == 16  # A's full pages keep their Host copies until dropped


def test_x11_union_reclaim() -> None:
    """X-11, TX-05, TX-06, INV-02: A {p1,p2,p3}, B {p2,p3,p4}: 1, 1 and together 4."""
    d = driver(page_tokens=1, blocks=6)
    shared = d.cached(9, 2)
    q = d.bind(1, 3, shared)
    d.write(q.id, 3)
    a = d.finish(q.id, 1)
    q = d.bind(2, 3, shared)
    d.write(q.id, 3)
    b = d.finish(q.id, 2)
    d.run(Release((Edge(9, shared),)))
    assert usage(d.state).pages == (4,)
    assert reclaim(d.state, [Edge(1, a)]).pages == (1,)
    assert reclaim(d.state, [Edge(2, b)]).pages == (1,)
    both = reclaim(d.state, [Edge(1, a), Edge(2, b)])
    assert (both.pages, both.checkpoints) == ((4,), (a, b))
    d.run(Release((Edge(1, a), Edge(2, b))))
    assert usage(d.state).pages == (0,)


def test_x11_shared_image() -> None:
    """X-11, TX-06: one image, two owners: either alone frees 0, both 1."""
    d = driver()
    cid = d.cached(1, 2)
    d.run(Retain(cid, 2))
    assert reclaim(d.state, [Edge(1, cid)]).slots == 0
    assert reclaim(d.state, [Edge(2, cid)]).slots == 0
    assert reclaim(d.state, [Edge(1, cid), Edge(2, cid)]).slots == 1


def test_x12_marginal_loss() -> None:
    """X-12, RC-07: union of (fallback, point]; a deeper point is no fallback, an alias is one."""
    E, R = 3000, 2000
    assert marginal_loss([R], [E]) == 1000
    assert marginal_loss([E], [R]) == 2000
    assert marginal_loss([], [R, E]) == 3000
    assert marginal_loss([R, E], [R]) == 0  # a shared alias at 2000 survives
    assert marginal_loss([E], [R, R]) == 2000


@given(st.sets(st.integers(1, 40)), st.sets(st.integers(1, 40)))
def test_marginal_loss_counts_tokens(kept: set[int], gone: set[int]) -> None:
    """RC-07: token by token: lost is what a deleted point reached and its fallback does not."""
    lost = {
        t for x in gone for t in range(1, x + 1) if t > max((p for p in kept if p <= x), default=0)
    }
    assert marginal_loss(kept, gone) == len(lost)


def test_x37_without_host_memory() -> None:
    """X-37, HOST-02: Host 0 and minimal slots: saves are infeasible, required work goes on."""
    d = driver(host=0, slots=1)
    q = d.bind(1, 4)
    d.write(q.id, 3)
    for place in ("device", "host"):
        verdict = assess(d.state, Target(Capture(q.id, 1, d.identity(q.id), place)))  # type: ignore[arg-type]
        assert isinstance(verdict, Infeasible)
    d.write(q.id, 4)


def test_reclaim_refuses_what_release_refuses() -> None:
    """RC-03, TX-06: wrong edges and leased points raise in the quote as in the act."""
    d = driver()
    cid = d.cached(1, 2)
    with pytest.raises(HandleError):
        reclaim(d.state, [Edge(2, cid)])
    with pytest.raises(HandleError):
        reclaim(d.state, [Edge(1, cid + 1)])


def test_reclaim_stops_at_writers() -> None:
    """TX-06, RC-02: what a running sequence stands on is not freed by dropping its checkpoint."""
    d = driver()
    cid = d.cached(1, 4)
    q = d.bind(1, 6, cid)
    assert reclaim(d.state, [Edge(1, cid)]) == ((0,), 0, 0, (cid,), ())
    d.write(q.id, 5)
    assert reclaim(d.state, [Edge(1, cid)]).slots == 1


def test_post_state_decides() -> None:
    """TX-07: with and without the other owner the same bind is a Fork or a Move."""
    d = driver()
    cid = d.cached(1, 3)
    d.run(Retain(cid, 2))
    bind = Bind(1, (4,), checkpoint(d.state, cid).identity, cid, (Edge(1, cid),))
    assert d.plan(Target(bind)).form == "fork"
    both = dataclasses.replace(bind, retire=(Edge(1, cid), Edge(2, cid)))
    plan = d.plan(Target(both))
    assert (plan.form, plan.kv_forms, plan.copies) == ("move", ("move",), 0)
    assert not {"form", "move", "fork", "cow"} & {f.name for f in dataclasses.fields(Bind)}


def test_revision_counts_what_others_see() -> None:
    """TX-08: capacity, references, placement advance it; work inside a reservation does not."""
    d = driver()
    q = d.bind(1, 4, lease=True)
    r = d.state.revision
    d.write(q.id, 1)
    d.write(q.id, 4)
    assert d.state.revision == r  # mapped, committed, settled inside the lease
    d.run(Reserve((RowTokens(q.id, (6,)),)))
    assert d.state.revision == r + 1
    cid = d.finish(q.id, 1)
    assert d.state.revision == r + 2
    d.start(Target(demote=(pages_of(d, cid),)))
    d.advance(3)
    assert d.state.revision == r + 2  # not before the stable end
    d.advance()
    assert d.state.revision == r + 3
    d.run(Retain(cid, 2))
    assert d.state.revision == r + 4


def test_stale_plans_have_no_effect() -> None:
    """TX-08, GP-40, INV-21: another revision, or a sequence that moved on, refuses the plan."""
    d = driver()
    cid = d.cached(1, 4)
    plan = d.plan(Target(Bind(1, (6,), checkpoint(d.state, cid).identity, cid)))
    d.run(Retain(cid, 2))
    before = d.state
    with pytest.raises(StalePlanError, match="assess again"):
        apply(before, Start(plan))
    assert d.state == before
    q = d.bind(3, 4, lease=True)
    d.write(q.id, 1)
    plan = d.plan(Target(Capture(q.id, 4, d.identity(q.id))))
    d.write(q.id, 2)
    with pytest.raises(PlannerError):
        apply(d.state, Start(plan))


def test_later_stages_keep_their_capacity() -> None:
    """TX-04, INV-09: what a later stage needs stays withdrawn while other rows reserve."""
    d = driver(pages=6, blocks=6, slots=3)
    victim = d.cached(1, 8)  # 4 of 6 pages
    q = d.bind(2, 2)  # one more
    d.write(q.id, 1)
    plan = d.start(Target(Bind(3, (10,)), demote=(pages_of(d, victim),)))
    assert plan.hold[0] == (1,)
    with pytest.raises(ShortageError) as caught:
        apply(d.state, Reserve((RowTokens(q.id, (3,)),)))
    assert caught.value.gaps == (("main", 1),)
    d.advance(7)
    assert d.state.sequences[-1].reserved == (5,)


def test_cancel_before_and_after_submit() -> None:
    """TX-10, TX-14: before submit at once; after it the slot stays taken to the completion."""
    d = driver()
    cid = d.cached(1, 4)
    before = d.state
    for phases in (0, 1):
        d.start(Target(demote=(pages_of(d, cid),)))
        d.advance(phases)
        d.run(Cancel(open_id(d)))
        assert d.state.transaction is None
        assert d.state.result.outcome == "aborted: cancelled"  # type: ignore[union-attr]
        assert d.state.revision == before.revision
    d.start(Target(demote=(pages_of(d, cid),)))
    d.advance(2)
    d.run(Cancel(open_id(d)))
    assert d.state.transaction is not None
    assert usage(d.state).host == 2
    d.advance()
    assert d.state.transaction is None
    assert usage(d.state) == usage(before)
    assert d.state.pools == before.pools
    assert d.state.checkpoints == before.checkpoints


def test_cancel_at_publication() -> None:
    """TX-03, TX-14: copied but not published is still an abort without trace."""
    d = driver()
    cid = d.cached(1, 3)
    before = d.state
    d.start(Target(Bind(2, (6,), checkpoint(d.state, cid).identity, cid)))
    d.advance(3)
    d.run(Cancel(open_id(d)))
    assert usage(d.state) == usage(before)
    assert not d.state.sequences


def test_failure_keeps_finished_reclaim() -> None:
    """TX-13, TX-14, HOST-09: an abort reports exactly what is gone, and it stays gone."""
    d = driver()
    gone, kept = d.cached(1, 4), d.cached(2, 4)
    target = Target(
        Bind(2, (6,), checkpoint(d.state, kept).identity, kept), release=(Edge(1, gone),)
    )
    d.start(target)
    d.advance(2)
    d.run(Fail(open_id(d)))
    result = d.state.result
    assert result is not None
    assert (result.outcome, result.retired) == ("aborted: failed", (gone,))
    assert result.owners == ((1, ()),)
    assert checkpoint(d.state, kept).holders == (2,)
    assert usage(d.state).pages == (2,)


def test_finished_pressure_stays_after_a_late_abort() -> None:
    """TX-13, TX-14: the demotion of stage one is stable when stage two aborts."""
    d = driver(pages=6, blocks=6, slots=3)
    victim = d.cached(1, 8)
    revision = d.state.revision
    d.start(Target(Bind(3, (10,)), demote=(pages_of(d, victim),)))
    d.advance(5)
    d.run(Cancel(open_id(d)))  # in flight: root initialisation
    d.advance()
    assert d.state.result.outcome == "aborted: cancelled"  # type: ignore[union-attr]
    assert usage(d.state).pages == (0,)
    assert usage(d.state).host == 4
    assert d.state.revision == revision + 1


def test_results_are_absolute() -> None:
    """TX-13, TX-17, GP-42: every end names the new things, the exact dead, the living of owners."""
    d = driver()
    cid = d.cached(1, 4)
    assert d.state.result == dataclasses.replace(
        d.state.result, kind="finish", published=cid, owners=((1, (cid,)),), retired=()
    )
    d.complete(Target(Bind(1, (6,), checkpoint(d.state, cid).identity, cid, (Edge(1, cid),))))
    result = d.state.result
    assert result is not None
    assert (result.kind, result.outcome) == ("bind", "committed")
    assert result.sequence == d.state.sequences[0].id
    assert (result.retired, result.owners) == ((cid,), ((1, ()),))


def test_zero_stage_transitions_serialise() -> None:
    """TX-17: finish, discard, release and retain wait for the open transaction."""
    d = driver()
    q = d.bind(1, 4)
    d.write(q.id, 2)
    cid = d.cached(2, 4)
    d.start(Target(demote=(pages_of(d, cid),)))
    for op in (
        Finish(q.id, 1, d.identity(q.id)),
        Discard(q.id),
        Release((Edge(2, cid),)),
        Retain(cid, 1),
    ):
        with pytest.raises(BusyError, match="TX-17"):
            apply(d.state, op)


def test_first_permit_and_recovery_permit() -> None:
    """TX-12, PR-07, PR-08, INV-10: a bind brings a permit; recovery ends on new progress."""
    d = driver()
    q = d.bind(1, 2)
    assert q.permit
    d.run(Discard(q.id))
    q = d.bind(1, 8, recovery=4)
    q = d.write(q.id, 2)
    assert (q.recovery, q.permit, q.reserved) == (4, True, (3,))
    q = d.write(q.id, 4)
    assert (q.recovery, q.reserved) == (4, (2,))  # the old frontier is no progress
    q = d.write(q.id, 5)
    assert (q.recovery, q.permit, q.reserved) == (-1, False, (0,))


def test_migration_batch_holds_everything() -> None:
    """TX-15, TX-09, KV-22: readers, destinations and copies are one batch, also as arrays."""
    d = driver()
    cid = d.cached(1, 5)
    d.complete(Target(demote=(PageRange(0, checkpoint(d.state, cid).prefixes[0].history, 0, 1),)))
    d.start(Target(Bind(2, (6,), checkpoint(d.state, cid).identity, cid)))
    d.advance(2)
    t = d.state.transaction
    assert t is not None
    assert checkpoint(d.state, cid).readers == 1
    pages = copy_arrays(t.work.copies, "page", 0)
    assert pages.shape == (2, 4)
    assert sorted(pages[:, 3].tolist()) == [1, 2]  # one restore, one tail copy
    assert pages[:, 2].tolist() == [2, 1]
    assert len(copy_arrays(t.work.copies, "image")) == 0  # the fork defers its state copy


def test_plain_shortage_is_a_value() -> None:
    """TX-19: shortage goes back to policy with every gap at once; wrong targets raise."""
    d = driver(pages=2, rows=1, slots=1, blocks=2)
    d.bind(1, 2)
    verdict = assess(d.state, Target(Bind(2, (4,))))
    assert isinstance(verdict, Infeasible)
    assert verdict.gaps == (("main", 1), ("slots", 1), ("rows", 1))
    assert "release, demote or wait" in verdict.reason
    with pytest.raises(IllegalError, match="max_context"):
        assess(d.state, Target(Bind(2, (99,))))
    with pytest.raises(HandleError):
        assess(d.state, Target(Bind(2, (2,), source=77)))


def test_pause_snapshot() -> None:
    """TX-01, TX-21, PR-03, PR-04: freeze and let the unique content go in one transaction."""
    d = driver()
    q = d.bind(1, 6)
    d.write(q.id, 5)
    own = history(d.state.pools[0], q.histories[0])
    pause = Pause(q.id, 7, d.identity(q.id), pages=(PageRange(0, own.id, 0, 3),), next_input=9)
    plan = d.complete(Target(pause))
    assert plan.copies == 4
    assert not d.state.sequences
    cid = checkpoints_of(d.state, 7)[0]
    assert (usage(d.state).pages, usage(d.state).slots, usage(d.state).host) == ((0,), 0, 5)
    again = d.bind(1, 6, cid, retire=(Edge(7, cid),))
    assert again.position == 5
    d.write(again.id, 6)


def test_cancelled_pause_leaves_the_sequence_running() -> None:
    """TX-14, TX-16, TX-21: abort means the source is valid: here the sequence itself."""
    d = driver()
    q = d.bind(1, 6)
    d.write(q.id, 5)
    before = d.state
    d.start(Target(Pause(q.id, 1, d.identity(q.id))))
    d.advance(2)
    d.run(Cancel(open_id(d)))
    d.advance()
    assert d.state.sequences == before.sequences
    d.write(q.id, 6)


def test_running_content_is_never_a_victim() -> None:
    """TX-18, RC-02, SCH-11: pages under an active fork and images being written stay."""
    d = driver()
    cid = d.cached(1, 4)
    q = d.bind(2, 6, cid)
    with pytest.raises(BusyError, match="executed on"):
        assess(d.state, Target(demote=(pages_of(d, cid),)))
    with pytest.raises(BusyError, match="in use"):
        assess(d.state, Target(demote=(ImageRef(q.image),)))
    with pytest.raises(BusyError, match="in use"):  # the fork still reads it
        assess(d.state, Target(demote=(ImageRef(checkpoint(d.state, cid).image),)))


def test_partial_demotion_closes_a_small_gap() -> None:
    """X-36, RC-09: only the page groups that are needed move; state and the rest stay."""
    d = driver()
    cid = d.cached(1, 8)
    p = pages_of(d, cid)
    d.complete(Target(demote=(p._replace(lo=2),)))
    h = history(d.state.pools[0], p.history)
    assert [bool(page.device) for page in h.pages.values()] == [True, True, False, False]
    assert usage(d.state).slots == 1
    again = d.plan(Target(demote=(p,)))
    assert again.copies == 2  # what already is on Host is freed, not copied


def test_covered_pages_free_at_once() -> None:
    """RC-09, RC-11: a page with a complete Host copy leaves in HostReleases, without a copy."""
    d = driver()
    cid = d.cached(1, 4)
    d.complete(Target(backup=(pages_of(d, cid),)))
    plan = d.start(Target(demote=(pages_of(d, cid),)))
    assert plan.copies == 0
    d.advance()
    assert usage(d.state).pages == (0,)
    d.advance(2)
    d.complete(Target(Bind(1, (4,), checkpoint(d.state, cid).identity, cid)))
    d.run(Discard(d.state.sequences[0].id))
    d.complete(Target(drop_host=(pages_of(d, cid),)))
    assert usage(d.state).host == 0


def test_wrong_placement_targets_raise() -> None:
    """TX-09, HOST-08: named twice, another pool, foreign blocks: refused before anything moves."""
    d = driver()
    cid = d.cached(1, 8)
    image, pages = ImageRef(checkpoint(d.state, cid).image), pages_of(d, cid)
    for target, error in (
        (Target(demote=(image, image)), IllegalError),
        (Target(demote=(image,), backup=(image,)), IllegalError),
        (Target(demote=(pages, pages._replace(lo=1))), IllegalError),
        (Target(demote=(pages._replace(pool=1),)), HandleError),
        (Target(demote=(pages._replace(hi=9),)), IllegalError),
        (Target(demote=(pages._replace(history=99),)), HandleError),
        (Target(drop_host=(pages._replace(hi=9),)), IllegalError),
    ):
        with pytest.raises(error):
            assess(d.state, target)


def test_a_writer_may_truncate_beside_a_transaction() -> None:
    """TX-18, GP-41: only settled blocks are touched, so what units may still do cannot break it."""
    d = driver()
    cid = d.cached(1, 3)
    d.complete(Target(backup=(pages_of(d, cid),)))
    q = d.bind(1, 5, cid, lease=True)
    d.run(EnsureMapped(RowTokens(q.id, (5,))))
    hid = q.histories[0]
    with pytest.raises(IllegalError, match="no settled blocks"):
        assess(d.state, Target(drop_host=(PageRange(0, hid, 0, 3),)))
    d.start(Target(drop_host=(PageRange(0, hid, 0, 2),)))
    d.run(Truncate(RowTokens(q.id, (0,))))
    d.advance(3)
    d.write(q.id, 5)


def test_costs_are_absent() -> None:
    """INV-15: no cost enters the physical core, so none can decide physical truth."""
    for record in (Target, Plan, Bind):
        assert not [f.name for f in dataclasses.fields(record) if "cost" in f.name]


def test_unit_in_flight_blocks_capture_of_its_row() -> None:
    """TX-18, UN-05: the membership of a running unit is frozen."""
    d = driver()
    q = d.bind(1, 4)
    d.run(Launch((RowTokens(q.id, (2,)),)))
    with pytest.raises(BusyError, match="in flight"):
        assess(d.state, Target(Capture(q.id, 1, d.identity(q.id))))
    d.run(Commit(sequence(d.state, q.id).unit, (RowCommit(q.id, (2,), 2),)))
    assert isinstance(assess(d.state, Target(Capture(q.id, 1, d.identity(q.id)))), Plan)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(assessed())
def test_plans_come_true(case: tuple[Reached, Target, Plan | Infeasible]) -> None:
    """TX-04, TX-05, INV-01: a feasible plan runs with exactly the usage it promised; an
    infeasible one names a gap that is really larger than what is free."""
    reached, _, verdict = case
    if isinstance(verdict, Plan):
        rehearse(reached.state, verdict)
    else:
        assert verdict.gaps
        assert all(missing > 0 for _, missing in verdict.gaps)
