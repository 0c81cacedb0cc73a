"""KV rules on driven states: every step is also verified against the device model."""

import numpy as np
import pytest

from planner import kv, unit_arrays, usage
from planner.errors import BusyError, HandleError, IllegalError, PlannerError, ShortageError
from planner.kv import Page, Pool, history
from planner.operations import apply
from planner.physical import block_table, checkpoint, sequence, table_row
from planner.plans import Bind, Capture, Edge, ImageRef, Infeasible, PageRange, Target
from planner.retention import Discard, Release, Retain
from planner.testing import Driver, tiny_layout
from planner.transactions import Advance, Fail, Start, assess
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


def big(**changes: int) -> Driver:
    """Pages of 64 tokens, one pool unless ``backend``."""
    numbers = {"pages": 40, "blocks": 20, "rows": 3, "slots": 6, "host": 60, "page_tokens": 64}
    return Driver(tiny_layout(**(numbers | changes)))


def counts(pool: Pool) -> tuple[int, int, int]:
    return pool.allocated, pool.reserved, kv.available(pool)


def main(d: Driver) -> Pool:
    return d.state.pools[0]


def test_x05_move() -> None:
    """X-05, KV-34: a private source moves: 0 bytes, identity kept, next write at (15, 40)."""
    d = big()
    source = d.cached(1, 1000)
    before = main(d).histories
    plan = d.plan(
        Target(Bind(1, (1001,), checkpoint(d.state, source).identity, source, (Edge(1, source),)))
    )
    assert (plan.form, plan.kv_forms, plan.bytes_moved) == ("move", ("move",), 0)
    q = d.bind(1, 1001, source, consume=True)
    assert [hid for hid, _ in main(d).histories.items()] == [hid for hid, _ in before.items()]
    assert [p.serial for p in history(main(d), q.histories[0]).pages.values()] == list(range(1, 17))
    assert divmod(q.frontiers[0], 64) == (15, 40)
    d.write(q.id, 1001)
    assert usage(d.state).pages == (16,)


def test_x05_fork() -> None:
    """X-05, KV-35, KV-36: 15 pages shared, one new page with 40 columns, 17 unique in all."""
    d = big()
    source = d.cached(1, 1000)
    kept = checkpoint(d.state, source)
    plan = d.start(Target(Bind(2, (1000,), kept.identity, source)))
    assert plan.kv_forms == ("fork",)
    d.advance(2)
    assert d.state.transaction is not None
    tails = [c for c in d.state.transaction.work.copies if c.kind == "page"]
    assert [(c.direction, c.columns, c.block) for c in tails] == [("d2d", 40, 15)]
    d.advance(2)
    q = d.state.sequences[0]
    h = history(main(d), q.histories[0])
    assert (h.base, h.blocks, q.frontiers[0]) == (15, 16, 1000)  # never rounded to 960
    assert usage(d.state).pages == (17,)
    assert checkpoint(d.state, source) == kept
    assert list(table_row(d.state, 0, q.id)[:15]) == [
        p.device for p in kv.prefix_pages(main(d), kept.prefixes[0].history, 15)
    ]
    d.write(q.id, 1010)
    assert checkpoint(d.state, source) == kept


def test_x05_aligned_fork_copies_nothing() -> None:
    """X-05, KV-36: at 960 the fork shares 15 pages and copies none."""
    d = big()
    source = d.cached(1, 960)
    plan = d.complete(Target(Bind(2, (960,), checkpoint(d.state, source).identity, source)))
    assert (plan.kv_forms, plan.copies) == (("fork",), 0)
    assert usage(d.state).pages == (15,)


def test_x06_terminal_boundary() -> None:
    """X-06, KV-28..30, UN-03: trim after publication, then settlement returns the rest."""
    d = big(pages=8, blocks=8)
    q = d.bind(1, 3 * 64)
    d.run(Launch((RowTokens(q.id, (63,)),)))
    d.run(Commit(sequence(d.state, q.id).unit, (RowCommit(q.id, (63,), 63),)))
    d.run(Launch((RowTokens(q.id, (71,)),)))
    assert counts(main(d)) == (2, 1, 5)
    d.run(Commit(sequence(d.state, q.id).unit, (RowCommit(q.id, (64,), 64),)))
    assert counts(main(d)) == (2, 1, 5)  # still mapped after publication of 64
    d.run(Truncate(RowTokens(q.id, (0,))))
    assert counts(main(d)) == (1, 2, 5)
    d.run(Settle((q.id,)))
    assert counts(main(d)) == (1, 0, 7)


def test_x06_under_a_lease() -> None:
    """INV-11, KV-31 (gp): settlement keeps the entitlement; the terminal release returns it."""
    d = big(pages=8, blocks=8)
    q = d.bind(1, 3 * 64, lease=True)
    d.write(q.id, 64)
    assert counts(main(d)) == (1, 2, 5)
    d.finish(q.id, 1)
    assert counts(main(d)) == (1, 0, 7)


def test_entitlement_changes_only_explicitly() -> None:
    """INV-11, GP-02, GP-03: a lease grows while there is room, shrinks on request, keeps pages."""
    d = big(pages=8, blocks=8)
    q = d.bind(1, 128, lease=True)
    d.write(q.id, 70)
    d.run(Entitle(RowTokens(q.id, (320,))))
    assert counts(main(d)) == (2, 3, 3)
    other = d.bind(2, 190)
    with pytest.raises(ShortageError):
        apply(d.state, Entitle(RowTokens(other.id, (512,))))
    d.run(Entitle(RowTokens(q.id, (64,))))
    assert counts(main(d))[:1] == (2,)
    assert sequence(d.state, q.id).reserved == (0,)
    with pytest.raises(IllegalError, match="not possible"):
        apply(d.state, Entitle(RowTokens(q.id, (64 * 9,))))


def test_x07_ensure_mapped() -> None:
    """X-07, KV-25: a lower bound; beyond entitlement it fails without mutation."""
    d = big(pages=8, blocks=8)
    q = d.bind(1, 3 * 64)
    d.run(EnsureMapped(RowTokens(q.id, (192,))))
    assert history(main(d), q.histories[0]).blocks == 3
    before = d.state
    assert apply(before, EnsureMapped(RowTokens(q.id, (100,)))) is before
    with pytest.raises(IllegalError, match="entitled to 0"):
        apply(before, EnsureMapped(RowTokens(q.id, (193,))))
    assert sequence(before, q.id).frontiers == (0,)  # it never moves the frontier


def test_conservation_and_materialisation() -> None:
    """KV-17, INV-01: materialise and dematerialise change nobody else's view."""
    d = big(pages=8, blocks=8)
    q = d.bind(1, 128)
    assert counts(main(d)) == (0, 2, 6)
    d.run(EnsureMapped(RowTokens(q.id, (128,))))
    assert counts(main(d)) == (2, 0, 6)
    d.run(Truncate(RowTokens(q.id, (0,))))
    assert counts(main(d)) == (0, 2, 6)


def test_reserve_is_atomic_and_exact() -> None:
    """UN-02, KV-27: all rows and pools or none, with the exact gap; a border takes one page."""
    d = big(pages=4, blocks=4, backend=4)
    a, b = d.bind(1, 64), d.bind(2, 64)
    d.write(a.id, 64)
    before = d.state
    with pytest.raises(ShortageError) as caught:
        apply(before, Reserve((RowTokens(a.id, (192, 128)), RowTokens(b.id, (192, 192)))))
    assert caught.value.gaps == (("main", 2), ("mtp", 1))
    assert counts(before.pools[0]) == (1, 1, 2)
    d.run(Reserve((RowTokens(a.id, (65, 64)),)))
    assert counts(main(d)) == (1, 2, 1)
    with pytest.raises(IllegalError, match="max_context"):
        apply(d.state, Reserve((RowTokens(a.id, (64 * 4 + 1, 0)),)))


def test_fork_chain_reads_the_right_pages() -> None:
    """KV-08, KV-12, KV-24: the table is the logical order; physical ids may be in any order."""
    d = big()
    first = d.cached(1, 100)
    q = d.bind(2, 300, first)
    d.write(q.id, 200)
    second = d.finish(q.id, 2)
    d.run(Release((Edge(1, first),)))
    q = d.bind(3, 400, second)
    d.write(q.id, 260)
    row = table_row(d.state, 0, q.id)
    assert len(row) == 5
    assert len(set(row.tolist())) == 5
    table = block_table(d.state, 0)
    assert table.shape == (20, 3)
    assert table.dtype == np.int32
    assert table[:5, q.rows[0]].tolist() == row.tolist()
    assert not table[5:, q.rows[0]].any()
    assert list(table_row(d.state, 0, q.id, 3)) == list(row[3:])  # the slice to publish (KV-33)


def test_rows_are_leased_by_active_sequences_only() -> None:
    """KV-24, INV-12: an inactive history has no row; the next activation may take another."""
    d = big()
    a, b = d.bind(1, 64), d.bind(2, 64)
    assert (a.rows, b.rows) == ((0,), (1,))
    d.write(b.id, 10)
    kept = d.finish(b.id, 2)
    assert main(d).rows == (a.id, 0, 0)
    d.write(a.id, 5)
    d.finish(a.id, 1)
    again = d.bind(2, 64, kept, consume=True)
    assert again.rows == (0,)
    assert again.histories == b.histories


def test_leases_are_generation_checked() -> None:
    """KV-16, KV-18: a page identity is never used twice; a stale history handle fails."""
    d = big(pages=8, blocks=8)
    cid = d.cached(1, 64)
    old = checkpoint(d.state, cid).prefixes[0].history
    serial = history(main(d), old).pages.values()[0].serial
    d.run(Release((Edge(1, cid),)))
    with pytest.raises(HandleError, match="gone"):
        history(main(d), old)
    again = d.cached(1, 64)
    page = history(main(d), checkpoint(d.state, again).prefixes[0].history).pages.values()[0]
    assert page.serial > serial
    assert page.device == 1  # the same page group, another identity


def test_replica_validity() -> None:
    """KV-13, KV-14, KV-15: a replica serves n columns iff epochs agree and coverage reaches n."""
    page = Page(1, epoch=3, device=0, host=5, host_epoch=3, host_columns=40)
    assert kv.host_covers(page, 40)
    assert not kv.host_covers(page, 41)
    assert not kv.host_covers(page._replace(host_epoch=2), 40)
    assert not kv.host_covers(page._replace(host=kv.NO_HOST), 1)


def test_descriptor_lives_on_host_alone() -> None:
    """KV-18, CK-02: Host-only content keeps its logical page; it goes at zero references."""
    d = big()
    cid = d.cached(1, 130)
    hid = checkpoint(d.state, cid).prefixes[0].history
    serials = [p.serial for p in history(main(d), hid).pages.values()]
    d.complete(Target(demote=(PageRange(0, hid, 0, 3),)))
    pages = history(main(d), hid).pages.values()
    assert [p.device for p in pages] == [0, 0, 0]
    assert [p.host_columns for p in pages] == [64, 64, 2]
    assert [p.serial for p in pages] == serials
    assert usage(d.state).pages == (0,)
    d.run(Release((Edge(1, cid),)))
    assert main(d).histories.items() == []
    assert usage(d.state).host == 0


def test_rewound_tail_keeps_only_the_true_part_of_its_host_copy() -> None:
    """KV-14, KV-15, KV-34: giving up committed columns advances the epoch and clips the copy."""
    d = big()
    q = d.bind(1, 200)
    d.write(q.id, 70)
    inner = Capture(q.id, 1, d.identity(q.id))
    d.complete(Target(inner))
    point = d.state.result.published  # type: ignore[union-attr]
    d.write(q.id, 100)
    end = d.finish(q.id, 1)
    hid = checkpoint(d.state, end).prefixes[0].history
    d.complete(Target(demote=(PageRange(0, hid, 1, 2),)))
    assert history(main(d), hid).pages.values()[1].host_columns == 36
    q = d.bind(1, 140, point, retire=(Edge(1, end),))
    page = history(main(d), hid).pages.values()[1]
    assert q.histories == (hid,)
    assert (page.host_columns, page.epoch, page.host_epoch) == (6, 1, 1)
    d.write(q.id, 140)
    assert kv.host_covers(history(main(d), hid).pages.values()[1], 6)
    assert not kv.host_covers(history(main(d), hid).pages.values()[1], 64)


def test_move_needs_no_survivor_beyond_or_beside() -> None:
    """KV-34, KV-37, TX-07: what survives decides between Move and Fork, not the caller."""
    d = big()
    q = d.bind(1, 200)
    d.write(q.id, 70)
    d.complete(Target(Capture(q.id, 1, d.identity(q.id))))
    point = d.state.result.published  # type: ignore[union-attr]
    d.write(q.id, 100)
    end = d.finish(q.id, 1)
    prompt = checkpoint(d.state, point).identity

    def form(source: int, owner: int, *retire: Edge) -> tuple[str, ...]:
        identity = checkpoint(d.state, source).identity
        return d.plan(Target(Bind(owner, (101,), identity, source, retire))).kv_forms

    assert form(end, 1, Edge(1, end)) == ("move",)  # the own inner point is carried
    assert form(point, 1) == ("fork",)  # the deeper end survives
    assert form(point, 1, Edge(1, end)) == ("move",)
    assert form(point, 2) == ("fork",)
    d.run(Retain(point, 2))  # a public alias on the partial tail page
    assert form(end, 1, Edge(1, end)) == ("fork",)
    assert prompt.frontier == 70


def test_shared_full_pages_do_not_stop_a_move() -> None:
    """KV-34, KV-35: forks that share only full pages leave the tail to the one writer."""
    d = big()
    source = d.cached(1, 100)
    q = d.bind(2, 130, source)
    plan = d.plan(
        Target(Bind(1, (130,), checkpoint(d.state, source).identity, source, (Edge(1, source),)))
    )
    assert plan.kv_forms == ("move",)
    p = d.bind(1, 130, source, consume=True)
    d.write(p.id, 128)
    d.write(q.id, 129)
    assert table_row(d.state, 0, p.id)[0] == table_row(d.state, 0, q.id)[0]
    assert table_row(d.state, 0, p.id)[1] != table_row(d.state, 0, q.id)[1]


def test_one_writer_a_history() -> None:
    """KV-21, KV-37, INV-03: a second bind of the same source forks while the first one writes."""
    d = big()
    source = d.cached(1, 100)
    a = d.bind(1, 130, source)  # own source, kept: same history, state forks
    assert a.histories[0] == checkpoint(d.state, source).prefixes[0].history
    d.write(a.id, 101)
    b = d.bind(1, 130, source)
    assert b.histories != a.histories
    d.write(b.id, 120)
    d.write(a.id, 130)


def test_unit_arrays() -> None:
    """KV-24, ST-08, OWN-10: a unit is a few int32 arrays; a fork reads the old slot once."""
    d = big(backend=40)
    source = d.cached(1, 100)
    a, b = d.bind(9, 130, source), d.bind(8, 130)
    rows = (RowTokens(b.id, (70, 60)), RowTokens(a.id, (101, 100)))
    d.run(Launch(rows))
    unit = unit_arrays(d.state, sequence(d.state, a.id).unit)
    assert all(column.dtype == np.int32 for column in unit)
    assert unit.sequences.tolist() == [a.id, b.id]
    assert (unit.read_slots.tolist(), unit.write_slots.tolist()) == ([1, 3], [2, 3])
    assert unit.table_rows.tolist() == [[0, 1], [0, 1]]
    assert unit.frontiers.tolist() == [[100, 0], [100, 0]]
    assert unit.write_to.tolist() == [[101, 70], [100, 60]]
    with pytest.raises(HandleError, match="not in flight"):
        unit_arrays(d.state, 0)


def test_holders_of_a_page() -> None:
    """RC-01, KV-35: who reaches a page, through forks of forks too."""
    d = big()
    first = d.cached(1, 130)
    q = d.bind(2, 200, first)
    d.write(q.id, 190)
    second = d.finish(q.id, 2)
    third = d.bind(3, 260, second)
    hid = checkpoint(d.state, first).prefixes[0].history
    assert kv.holders(main(d), hid, 0) == ((first, second), (third.id,))
    assert kv.holders(main(d), hid, 2) == ((first,), ())
    child = checkpoint(d.state, second).prefixes[0].history
    assert kv.holders(main(d), child, 2) == ((second,), ())


def test_capture_shapes() -> None:
    """KV-38, CAPT-03: the own point shares the tail; a foreign one keeps it and the writer gets a
    copy; an aligned one copies nothing and the writer stays."""
    d = big()
    q = d.bind(1, 400)
    d.write(q.id, 70)
    own = d.complete(Target(Capture(q.id, 1, d.identity(q.id))))
    assert own.kv_forms == ("share",)
    assert usage(d.state).pages == (2,)
    foreign = d.complete(Target(Capture(q.id, 2, d.identity(q.id))))
    assert foreign.kv_forms == ("cow",)
    assert usage(d.state).pages == (3,)
    now = sequence(d.state, q.id)
    assert now.histories != q.histories
    assert history(main(d), q.histories[0]).sequence == 0
    d.write(q.id, 128)
    aligned = d.complete(Target(Capture(q.id, 2, d.identity(q.id), "host")))
    assert aligned.kv_forms == ("share",)
    assert sequence(d.state, q.id).histories == now.histories
    d.write(q.id, 140)


def test_two_pools_move_alone() -> None:
    """KV-03, KV-19, KV-26, KV-39, INV-14: pools reserve, map, commit and trim separately."""
    d = big(backend=40)
    q = d.bind(1, 130)
    d.run(Launch((RowTokens(q.id, (70, 130)),)))  # MTP mapping leads Main
    blocks = [history(p, h).blocks for p, h in zip(d.state.pools, q.histories, strict=True)]
    assert blocks == [2, 3]
    unit = sequence(d.state, q.id).unit
    d.run(Commit(unit, (RowCommit(q.id, (70, 69), 70),)))
    d.run(Truncate(RowTokens(q.id, (0, 0))))
    assert [counts(p)[0] for p in d.state.pools] == [2, 2]
    assert sequence(d.state, q.id).frontiers == (70, 69)
    d.run(Reserve((RowTokens(q.id, (129, 0)),)))
    d.run(Launch((RowTokens(q.id, (129, 0)),)))  # a stage maps only what it writes
    assert [counts(p)[0] for p in d.state.pools] == [3, 2]


def test_provisional_lead_is_no_coverage() -> None:
    """KV-14, KV-27, KV-39: uncommitted bytes are invisible; a checkpoint cannot claim them."""
    d = big(backend=40)
    q = d.bind(1, 130)
    d.run(Launch((RowTokens(q.id, (70, 130)),)))
    with pytest.raises(BusyError, match="in flight"):
        assess(d.state, Target(Capture(q.id, 1, d.identity(q.id))))
    d.run(AbortUnit(sequence(d.state, q.id).unit))
    assert sequence(d.state, q.id).frontiers == (0, 0)
    d.write(q.id, 70, 60)
    with pytest.raises(IllegalError, match="committed"):
        assess(d.state, Target(Capture(q.id, 1, d.identity(q.id), frontiers=(70, 61))))


def test_frozen_while_a_unit_runs() -> None:
    """KV-32, KV-33, INV-09: rows, membership and frontiers stay until the unit ends."""
    d = big()
    q = d.bind(1, 200)
    d.run(Launch((RowTokens(q.id, (70,)),)))
    for op in (
        EnsureMapped(RowTokens(q.id, (200,))),
        Truncate(RowTokens(q.id, (0,))),
        Settle((q.id,)),
        Discard(q.id),
    ):
        with pytest.raises(BusyError):
            apply(d.state, op)


def test_launch_needs_a_permit() -> None:
    """INV-09, UN-04: no unit without a full permit, no shortage inside a step."""
    d = big()
    q = d.bind(1, 64)
    d.write(q.id, 10)
    assert apply(d.state, Reserve((RowTokens(q.id, (64,)),))) is d.state  # the tail has room
    with pytest.raises(IllegalError, match="entitled to 0"):
        apply(d.state, Launch((RowTokens(q.id, (65,)),)))
    d.run(Reserve((RowTokens(q.id, (65,)),)))
    d.run(Launch((RowTokens(q.id, (65,)),)))
    assert counts(main(d)) == (2, 0, 38)


def test_commit_is_whole_and_bounded() -> None:
    """UN-07, KV-27: every row once, frontiers between the old and the provisional one."""
    d = big()
    a, b = d.bind(1, 64), d.bind(2, 64)
    d.run(Launch((RowTokens(a.id, (5,)), RowTokens(b.id, (6,)))))
    unit = sequence(d.state, a.id).unit
    with pytest.raises(HandleError, match="2 rows"):
        apply(d.state, Commit(unit, (RowCommit(a.id, (5,), 5),)))
    with pytest.raises(HandleError):
        apply(d.state, Commit(unit, (RowCommit(a.id, (5,), 5),) * 2))
    with pytest.raises(IllegalError, match=r"0\.\.6"):
        apply(d.state, Commit(unit, (RowCommit(a.id, (5,), 5), RowCommit(b.id, (7,), 7))))
    d.run(Commit(unit, (RowCommit(a.id, (5,), 5), RowCommit(b.id, (0,), 0))))  # b cancelled
    with pytest.raises(HandleError):
        apply(d.state, Commit(unit, (RowCommit(a.id, (5,), 5),)))
    assert [q.frontiers for q in d.state.sequences] == [(5,), (0,)]


def test_activation_is_atomic() -> None:
    """KV-20, KV-22, KV-23: short in one pool, nothing of the bind stays and the source is valid."""
    d = big(backend=3)
    source = d.cached(1, 100)
    before = d.state
    verdict = assess(
        before, Target(Bind(2, (200, 250), checkpoint(before, source).identity, source))
    )
    assert isinstance(verdict, Infeasible)
    assert verdict.gaps == (("mtp", 2),)
    plan = d.start(Target(Bind(2, (200, 128), checkpoint(before, source).identity, source)))
    d.advance(2)
    d.run(Fail(d.state.transaction.id))  # type: ignore[union-attr]
    assert d.state.pools[0].histories == before.pools[0].histories
    assert usage(d.state) == usage(before)
    assert plan.kv_forms == ("fork", "fork")


def test_entitlement_covers_the_selected_backend() -> None:
    """KV-20: one history per enabled pool; a request cannot leave the backend out."""
    d = big(backend=5)
    with pytest.raises(IllegalError, match="2 pools"):
        assess(d.state, Target(Bind(1, (64,))))
    assert len(d.bind(1, 64).histories) == 2


def test_finish_frees_growth_and_row() -> None:
    """KV-31: row, writer and unmaterialised growth go; pages free at their last reference."""
    d = big(pages=8, blocks=8)
    q = d.bind(1, 256)
    d.run(EnsureMapped(RowTokens(q.id, (256,))))
    d.run(Launch((RowTokens(q.id, (70,)),)))
    d.run(Commit(sequence(d.state, q.id).unit, (RowCommit(q.id, (70,), 70),)))
    cid = d.finish(q.id, 1)
    assert counts(main(d)) == (2, 0, 6)
    d.run(Release((Edge(1, cid),)))
    assert counts(main(d)) == (0, 0, 8)


def test_restore_on_bind() -> None:
    """KV-22, KV-23, TX-20: Host-only pages come back whole before the sequence is active."""
    d = big()
    cid = d.cached(1, 130)
    ck = checkpoint(d.state, cid)
    d.complete(Target(demote=(ImageRef(ck.image), PageRange(0, ck.prefixes[0].history, 0, 3))))
    plan = d.start(Target(Bind(1, (131,), ck.identity, cid, (Edge(1, cid),))))
    assert (plan.form, plan.kv_forms) == ("restore", ("move",))
    d.advance(2)
    assert not d.state.sequences
    copies = d.state.transaction.work.copies  # type: ignore[union-attr]
    assert [(c.kind, c.direction) for c in copies] == [("page", "h2d")] * 3 + [("image", "h2d")]
    d.advance(2)
    d.write(d.state.sequences[0].id, 131)


def test_fork_of_a_host_only_tail() -> None:
    """KV-36, KV-43: the private tail is filled from Host directly; no other staging."""
    d = big()
    cid = d.cached(1, 70)
    ck = checkpoint(d.state, cid)
    d.complete(Target(demote=(PageRange(0, ck.prefixes[0].history, 1, 2),)))
    d.complete(Target(Bind(2, (71,), ck.identity, cid)))
    assert history(main(d), ck.prefixes[0].history).pages.values()[1].device == 0
    d.write(d.state.sequences[0].id, 71)


def test_store_chooses_nothing() -> None:
    """KV-45, KV-01: kv.py knows pages and histories, no request, source, victim or plane."""
    assert set(Pool._fields) & {"victim", "request", "source", "profile", "planes"} == set()
    with pytest.raises(PlannerError):
        kv.history(Pool("main", 4, 1, 2, 2, (0,)), 1)


def test_advance_of_an_old_transaction_is_dropped() -> None:
    """TX-11: late events name an ended transaction and fail."""
    d = big()
    d.bind(1, 64)
    with pytest.raises(HandleError, match="late event"):
        apply(d.state, Advance(1))
    plan = d.plan(Target(Bind(1, (64,))))
    d.run(Start(plan))
    with pytest.raises(HandleError, match="late event"):
        apply(d.state, Advance(1))
