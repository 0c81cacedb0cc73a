"""Two units in flight on one sequence: the newer is launched before the older is read."""

import numpy as np
import pytest

from planner import kv, unit_arrays, usage
from planner.errors import BusyError, HandleError, IllegalError, ShortageError
from planner.operations import apply
from planner.physical import Flight, PhysicalState, Sequence, UnitArrays, checkpoint, sequence
from planner.physical import table_row as row
from planner.plans import Bind, Capture, Edge, Pause, Plan, Target
from planner.retention import Discard, Finish, Release
from planner.state_images import image
from planner.testing import (
    ATOMIC,
    ContentError,
    CounterexampleError,
    Driver,
    explore,
    populated,
    tiny_layout,
)
from planner.testing.explorer import canonical
from planner.transactions import assess
from planner.units import (
    AbortUnit,
    Commit,
    EnsureMapped,
    Entitle,
    Launch,
    Reserve,
    RowCommit,
    RowTokens,
    Settle,
    Truncate,
)


def driver(**changes: int) -> Driver:
    """Pages of 64 tokens, one pool unless ``backend``."""
    numbers = {"pages": 8, "blocks": 8, "rows": 3, "slots": 4, "host": 12, "page_tokens": 64}
    return Driver(tiny_layout(**(numbers | changes)))


def counts(d: Driver) -> tuple[int, int, int]:
    p = d.state.pools[0]
    return p.allocated, p.reserved, kv.available(p)


def now(d: Driver, q: Sequence) -> Sequence:
    return sequence(d.state, q.id)


def same(a: UnitArrays, b: UnitArrays) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_launch_launch_commit_commit() -> None:
    """UN-07, KV-27: frontiers move with the commits, in launch order; at no other moment."""
    d = driver()
    q = d.bind(1, 64)
    d.write(q.id, 10)
    first, second = d.launch(q.id, 11), d.launch(q.id, 12)
    q = now(d, q)
    assert q.flights == (Flight(first, (11,)), Flight(second, (12,)))
    assert (q.unit, q.end, q.frontiers, q.position) == (first, (12,), (10,), 10)
    q = d.commit(q.id, 11)
    assert (q.unit, q.end, q.frontiers, q.position) == (second, (12,), (11,), 11)
    third = d.launch(q.id, 13)
    assert [f.unit for f in now(d, q).flights] == [second, third]
    d.commit(q.id, 12)
    q = d.commit(q.id, 13)
    assert (q.flights, q.unit, q.end, q.frontiers, q.position) == ((), 0, (13,), (13,), 13)
    d.finish(q.id, 1)


def test_the_arrays_of_a_unit_stay() -> None:
    """OWN-10, KV-32: where a unit begins and what it reads is fixed from launch to end."""
    d = driver(backend=8)
    a, b = d.bind(1, 64), d.bind(2, 64)
    d.write(b.id, 30, 20)
    d.run(Launch((RowTokens(a.id, (40, 40)), RowTokens(b.id, (31, 21)))))
    first = now(d, a).unit
    old = unit_arrays(d.state, first)
    second = d.launch(b.id, 33, 0)  # its backend writes nothing
    new = unit_arrays(d.state, second)
    assert same(unit_arrays(d.state, first), old)
    assert (new.frontiers.tolist(), new.write_to.tolist()) == ([[31], [21]], [[33], [21]])
    d.run(Commit(first, (RowCommit(a.id, (40, 40), 40), RowCommit(b.id, (31, 21), 31))))
    assert same(unit_arrays(d.state, second), new)
    with pytest.raises(HandleError, match="not in flight"):
        unit_arrays(d.state, first)


def test_blocks_are_appended_under_a_running_unit() -> None:
    """KV-32, KV-33, UN-02: the newer unit gets its permit and its pages while the older runs;
    nothing that is mapped changes."""
    d = driver()
    q = d.bind(1, 64)
    d.write(q.id, 63)
    d.launch(q.id, 64)
    assert counts(d) == (1, 0, 7)
    before = row(d.state, 0, q.id).tolist()
    with pytest.raises(IllegalError, match="entitled to 0"):
        apply(d.state, Launch((RowTokens(q.id, (65,)),)))
    d.run(Reserve((RowTokens(q.id, (65,)),)))
    assert counts(d) == (1, 1, 6)
    d.run(Launch((RowTokens(q.id, (65,)),)))
    assert counts(d) == (2, 0, 6)
    assert row(d.state, 0, q.id).tolist()[:1] == before
    assert len(row(d.state, 0, q.id)) == 2
    other = d.bind(2, 5 * 64)
    with pytest.raises(ShortageError) as caught:
        apply(d.state, Reserve((RowTokens(q.id, (64 * 4,)), RowTokens(other.id, (64 * 8,)))))
    assert caught.value.gaps == (("main", 4),)


def test_at_most_two() -> None:
    """KV-32, UN-04: a third unit waits, also when one launch names a row twice."""
    d = driver()
    q = d.bind(1, 64)
    once = RowTokens(q.id, (5,))
    with pytest.raises(BusyError, match=r"1 unit\(s\)"):
        apply(d.state, Launch((once, once)))
    d.launch(q.id, 5)
    with pytest.raises(BusyError, match=r"2 unit\(s\)"):
        apply(d.state, Launch((once, once)))
    d.launch(q.id, 6)
    with pytest.raises(BusyError, match=r"2 unit\(s\)"):
        apply(d.state, Launch((RowTokens(q.id, (7,)),)))
    d.commit(q.id, 5)
    d.launch(q.id, 7)


def test_the_newer_begins_where_the_older_ends() -> None:
    """KV-26, KV-39: coverage below the older unit's end is no rewrite, pool by pool."""
    d = driver(backend=8)
    q = d.bind(1, 130)
    d.launch(q.id, 70, 130)
    d.launch(q.id, 71, 60)
    assert [f.provisional for f in now(d, q).flights] == [(70, 130), (71, 130)]
    d.commit(q.id, 70, 130)
    q = d.commit(q.id, 71, 130)
    assert q.frontiers == (71, 130)


def test_launch_order_is_commit_order() -> None:
    """UN-07, UN-08: a unit that builds on another one waits for it; aborts go the other way."""
    d = driver()
    q = d.bind(1, 64)
    first, second = d.launch(q.id, 5), d.launch(q.id, 6)
    with pytest.raises(BusyError, match=f"builds on {first}; commit that first"):
        apply(d.state, Commit(second, (RowCommit(q.id, (6,), 6),)))
    with pytest.raises(BusyError, match=f"unit {second} builds on {first}; abort that first"):
        apply(d.state, AbortUnit(first))
    with pytest.raises(HandleError, match="0 rows"):
        apply(d.state, Commit(second + 1, (RowCommit(q.id, (6,), 6),)))
    with pytest.raises(HandleError, match="not in flight"):
        apply(d.state, AbortUnit(second + 1))
    d.run(AbortUnit(second))
    d.run(AbortUnit(first))
    assert (now(d, q).flights, now(d, q).frontiers) == ((), (0,))


def test_the_older_commits_whole() -> None:
    """UN-06, KV-27: under a newer unit nothing less than all; the last may be cut or cancelled."""
    d = driver()
    q = d.bind(1, 64)
    d.launch(q.id, 5)
    second = d.launch(q.id, 9)
    unit = now(d, q).unit
    for less in (0, 4):
        with pytest.raises(IllegalError, match=f"unit {second} builds on"):
            apply(d.state, Commit(unit, (RowCommit(q.id, (less,), less),)))
    with pytest.raises(IllegalError, match=r"outside 0\.\.5"):
        apply(d.state, Commit(unit, (RowCommit(q.id, (9,), 9),)))
    d.commit(q.id, 5)
    q = d.commit(q.id, 7)
    assert (q.frontiers, q.position) == ((7,), 7)
    d.launch(q.id, 8)
    d.launch(q.id, 9)
    d.commit(q.id, 8)
    q = d.commit(q.id, 8)  # the row ended with the older unit: the newer one is cancelled
    assert (q.frontiers, q.position) == ((8,), 8)
    d.write(q.id, 9)


def test_abort_of_the_newest_lets_the_older_be_cut() -> None:
    """UN-07, UN-03: the abort returns no pages (a retry has its permit); settlement does."""
    d = driver()
    q = d.bind(1, 64)
    d.write(q.id, 60)
    d.launch(q.id, 64)
    second = d.launch(q.id, 128)
    assert counts(d) == (2, 0, 6)
    d.run(AbortUnit(second))
    assert counts(d) == (2, 0, 6)
    retry = d.launch(q.id, 100)
    assert counts(d) == (2, 0, 6)
    d.run(AbortUnit(retry))
    q = d.commit(q.id, 62)
    assert (q.frontiers, counts(d)) == ((62,), (1, 0, 7))
    d.write(q.id, 64)


def test_settlement_waits_for_the_last_unit() -> None:
    """UN-03, KV-28, KV-29: a commit with settlement trims nothing that another unit writes."""
    d = driver()
    q = d.bind(1, 128)
    d.launch(q.id, 64)
    d.launch(q.id, 65)
    d.run(Reserve((RowTokens(q.id, (130,)),)))
    assert counts(d) == (2, 1, 5)
    q = d.commit(q.id, 64, settle=True)
    assert (counts(d), q.permit) == ((2, 1, 5), True)
    for op in (
        Settle((q.id,)),
        Truncate(RowTokens(q.id, (65,))),
        EnsureMapped(RowTokens(q.id, (65,))),
        Entitle(RowTokens(q.id, (65,))),
        Discard(q.id),
        Finish(q.id, 1, d.identity(q.id)),
    ):
        with pytest.raises(BusyError):
            apply(d.state, op)
    for action in (Capture(q.id, 1, d.identity(q.id)), Pause(q.id, 1, d.identity(q.id))):
        with pytest.raises(BusyError, match="in flight"):
            assess(d.state, Target(action))
    q = d.commit(q.id, 65, settle=True)
    assert (counts(d), q.permit) == ((2, 0, 6), False)


def test_settlement_is_row_by_row() -> None:
    """UN-03: of one unit, the rows without a further unit are settled and the others are not."""
    d = driver()
    a, b = d.bind(1, 128), d.bind(2, 128)
    d.run(Launch((RowTokens(a.id, (10,)), RowTokens(b.id, (10,)))))
    first = now(d, a).unit
    d.launch(b.id, 11)
    d.run(Commit(first, (RowCommit(a.id, (10,), 10), RowCommit(b.id, (10,), 10)), settle=True))
    assert [(q.permit, q.reserved) for q in d.state.sequences] == [(False, (0,)), (True, (1,))]


def test_a_lease_survives_two_units() -> None:
    """INV-11: entitlement pays for the pages of both units and gets them back."""
    d = driver()
    q = d.bind(1, 3 * 64, lease=True)
    d.write(q.id, 63)
    d.launch(q.id, 64)
    second = d.launch(q.id, 66)
    assert counts(d) == (2, 1, 5)
    d.run(AbortUnit(second))
    d.commit(q.id, 64)
    assert counts(d) == (1, 2, 5)


def test_rows_of_different_units() -> None:
    """UN-05, UN-07: membership is frozen unit by unit; a row may skip one or join later."""
    d = driver()
    a, b = d.bind(1, 64), d.bind(2, 64)
    d.run(Launch((RowTokens(a.id, (1,)),)))
    one = now(d, a).unit
    d.run(Launch((RowTokens(b.id, (1,)), RowTokens(a.id, (2,)))))
    both = now(d, b).unit
    d.run(Launch((RowTokens(b.id, (2,)),)))
    last = now(d, b).flights[-1].unit
    assert unit_arrays(d.state, both).frontiers.tolist() == [[1, 0]]
    rows = (RowCommit(a.id, (2,), 2), RowCommit(b.id, (1,), 1))
    with pytest.raises(BusyError, match=f"builds on {one}"):  # a's older one first
        apply(d.state, Commit(both, rows))
    with pytest.raises(HandleError, match="2 rows"):  # b alone is not the unit
        apply(d.state, Commit(both, rows[1:]))
    with pytest.raises(BusyError, match=f"unit {last} builds on"):  # b's newer one first
        apply(d.state, AbortUnit(both))
    d.commit(a.id, 1)
    with pytest.raises(HandleError):
        apply(d.state, Commit(both, (rows[1], rows[1])))
    d.run(Commit(both, rows))
    d.commit(b.id, 2)
    assert [(q.frontiers, q.flights) for q in d.state.sequences] == [((2,), ()), ((2,), ())]


def forked() -> tuple[Driver, Sequence, int]:
    """A fork that has not settled, and the slot of its source."""
    d = driver()
    cid = d.cached(1, 3)
    d.complete(Target(Bind(2, (4,), checkpoint(d.state, cid).identity, cid)))
    d.run(Release((Edge(1, cid),)))
    q = d.state.sequences[0]
    return d, q, image(d.state.states, q.source).slot


def slots(s: PhysicalState, unit: int) -> tuple[int, int]:
    arrays = unit_arrays(s, unit)
    return int(arrays.read_slots[0]), int(arrays.write_slots[0])


def test_only_the_first_unit_of_a_fork_reads_the_source() -> None:
    """ST-07, ST-08: the second reads what the first writes; the pin ends at the first commit."""
    d, q, old = forked()
    own = image(d.state.states, q.image).slot
    first, second = d.launch(q.id, 4), d.launch(q.id, 5)
    assert (slots(d.state, first), slots(d.state, second)) == ((old, own), (own, own))
    assert (image(d.state.states, q.source).pins, usage(d.state).slots) == (1, 2)
    d.commit(q.id, 4)
    assert slots(d.state, second) == (own, own)
    assert (d.state.states.images.get(q.source), usage(d.state).slots) == (None, 1)
    q = d.commit(q.id, 5)
    assert (q.source, q.position) == (0, 5)


def test_aborted_units_of_a_fork_settle_nothing() -> None:
    """ST-07: whichever unit is the first, it reads the source."""
    d, q, old = forked()
    own = image(d.state.states, q.image).slot
    first = d.launch(q.id, 4)
    d.run(AbortUnit(d.launch(q.id, 5)))
    assert slots(d.state, first) == (old, own)
    d.run(AbortUnit(first))
    assert now(d, q).source == q.source
    again = d.launch(q.id, 4)
    assert slots(d.state, again) == (old, own)
    d.commit(q.id, 4)


def test_a_fork_without_a_state_has_no_second_unit_to_keep() -> None:
    """ST-07, ST-08: the first unit may not end without the state that the newer one reads."""
    d, q, _ = forked()
    unit = d.launch(q.id, 4)
    second = d.launch(q.id, 5)
    with pytest.raises(IllegalError, match=f"unit {second} reads the state"):
        apply(d.state, Commit(unit, (RowCommit(q.id, (4,), 3),)))
    d.run(AbortUnit(second))
    d.run(Commit(unit, (RowCommit(q.id, (4,), 3),)))  # pages first, the state later: still a fork
    assert now(d, q).source == q.source


def test_fork_settlement_and_transactions() -> None:
    """ST-07, TX-01: neither unit of an unsettled fork overlaps a transaction; once the first is
    committed, the second is an ordinary one."""
    d, q, _ = forked()
    d.launch(q.id, 4)
    d.launch(q.id, 5)
    root = Target(Bind(3, (2,)))
    with pytest.raises(BusyError, match="ST-07"):
        assess(d.state, root)
    d.commit(q.id, 4)
    d.complete(root)
    d.launch(q.id, 6)
    d.start(Target(Bind(4, (2,))))
    d.launch(d.state.sequences[-1].id, 1)
    d.commit(q.id, 5)
    d.launch(q.id, 7)
    d.advance(2)
    assert d.state.transaction is not None


def test_capture_follows_the_last_commit() -> None:
    """TX-18, UN-05: a plan for a row in flight is refused until its last unit ended."""
    d = driver()
    q = d.bind(1, 64)
    d.launch(q.id, 3)
    d.launch(q.id, 4)
    for end in (3, 4):
        with pytest.raises(BusyError):
            assess(d.state, Target(Capture(q.id, 1, d.identity(q.id))))
        d.commit(q.id, end)
    assert isinstance(assess(d.state, Target(Capture(q.id, 1, d.identity(q.id)))), Plan)


@pytest.mark.parametrize("settle", [False, True])
def test_overlapped_decode_ends_where_one_at_a_time_does(settle: bool) -> None:
    """KV-17, KV-27, UN-07: over page borders, with a fork, the same state up to names."""
    ends = []
    for ahead in (0, 1):
        d = Driver(tiny_layout(pages=13, blocks=6, rows=2, slots=3, host=4))
        cid = d.cached(1, 3)
        q, other = d.bind(2, 4, cid), d.bind(3, 4)
        for n in range(4, 12):
            for sid in (q.id, other.id):
                d.launch(sid, n)
                flights = sequence(d.state, sid).flights
                if len(flights) > ahead:
                    d.commit(sid, flights[0].provisional[0], settle=settle)
        for sid in (q.id, other.id) * ahead:
            d.commit(sid, 11, settle=settle)
        d.run(Settle((q.id, other.id)))
        ends.append(canonical(d.state))
    assert ends[0] == ends[1]


def test_the_device_model_sees_a_wrong_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV-27, KV-32: a newer unit that overwrites what the older wrote is a counterexample."""
    monkeypatch.setattr("planner.physical.Sequence.end", property(lambda q: q.frontiers))
    d = populated(ATOMIC)
    with pytest.raises(CounterexampleError, match=r"INV-09|begins at"):
        explore(ATOMIC, 20_000, start=(d.state, d.shadow))


def test_the_device_model_sees_a_wrong_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """ST-07, ST-08: a second unit that reads the fork source again is a counterexample."""

    def always(s: PhysicalState, unit: int) -> UnitArrays:
        arrays = unit_arrays(s, unit)
        q = sequence(s, int(arrays.sequences[0]))
        slot = image(s.states, q.source or q.image).slot
        return arrays._replace(read_slots=np.array([slot], np.int32))

    monkeypatch.setattr("planner.physical.unit_arrays", always)
    d, q, _ = forked()
    d.launch(q.id, 4)
    with pytest.raises(ContentError, match="begins at"):
        d.launch(q.id, 5)


def test_the_device_model_sees_lost_writes() -> None:
    """KV-27, KV-32: what the newer unit reads is what the older one wrote, to the column."""
    d = driver()
    q = d.bind(1, 64)
    d.launch(q.id, 3)
    page = int(row(d.state, 0, q.id)[0])
    cells = d.shadow.pages[0][page]
    d.shadow.pages[0][page] = (*cells[:2], cells[1], *cells[3:])
    with pytest.raises(ContentError, match="block 0"):
        d.launch(q.id, 4)
