"""Where requests start from, and how they wait for it (SRC)."""

import pytest
from world_cases import (
    alone,
    asker,
    at,
    commands,
    engine,
    named,
    notes,
    ranked,
    record_of,
    run_until,
    text,
)

from planner.physical import usage
from planner.testing import Ask, WorldDriver
from planner.world import Admitted, CostModel, Resumed, RunTransfer, TransferCost
from planner.world.config import attention_pairs
from planner.world.eviction import FOREVER, Rights, points
from planner.world.records import Demand
from planner.world.sources import Source, restore
from planner.world.step import Step


def test_x16_costs() -> None:
    """X-16, SRC-04, SRC-05: 1000 * 24 + 24 * 25 / 2 pairs; copies overlap their own set-up."""
    assert attention_pairs(1000, 24) == 24_300
    copies = TransferCost(batch_ns=10_000, operation_ns=2_000, ns_per_byte=0.05)
    assert copies.of(4, 1 << 20) == pytest.approx(52_428.8)
    assert copies.of(4, 100) == 18_000
    assert copies.of(0, 0) == 0
    prefill = CostModel(token_ns=7, pair_ns=0.5).prefill_ns(1000, 24)
    assert prefill == 24 * 7 + 24_300 * 0.5


def test_every_point_of_the_path_and_root_are_sources() -> None:
    """SRC-01: private and shared ones, none of another path, and one token is left to run."""
    d = engine(pages=20, slots=10)
    alone(d, Ask(text(1, 20), max_tokens=1, recovery=16, anchors=(12,), markers=(6,)))
    alone(d, Ask(text(2, 20), max_tokens=1, recovery=16))
    before = d.world
    found = ranked(d, asker((*text(1, 20), 7)))
    assert [s.frontier for s in found] == [20, 16, 12, 6, 0]
    assert [s.private for s in found] == [True, True, True, False, False]
    assert [s.frontier for s in ranked(d, asker(text(1, 20)))] == [16, 12, 6, 0]
    assert [s.frontier for s in ranked(d, asker((*text(1, 11), 7, 7)))] == [6, 0]
    assert d.world is before
    d.settle()


def test_order_of_sources_breaks_every_tie() -> None:
    """SRC-02: each source wins by one criterion and loses by all that come later."""
    expected = [
        Source(1.0, 9, 0, False, False, 0, 99),
        Source(2.0, 0, 0, False, False, 0, 99),
        Source(2.0, 5, 8, False, False, 0, 99),
        Source(2.0, 5, 4, True, False, 0, 99),
        Source(2.0, 5, 4, False, True, 0, 99),
        Source(2.0, 5, 4, False, False, 7, 99),
        Source(2.0, 5, 4, False, False, 0, 3),
        Source(2.0, 5, 4, False, False, 0, 4),
    ]
    shuffled = [*expected[5:], *expected[2:5], *expected[:2]]
    assert sorted(shuffled, key=lambda s: s.rank) == expected


def test_equal_positions_of_two_sessions() -> None:
    """SRC-02, SRC-03: computed twice they stay two; the hint decides, then the newer result."""
    d = engine()
    for session in ("a", "b"):
        d.submit(Ask(text(1, 8), max_tokens=1, session=session))
    d.drain()
    one, two = at(d, 8)
    prompt = (*text(1, 8), 7, 7)
    for session, best in (("a", one), ("b", two), ("", two)):
        found = [s for s in ranked(d, asker(prompt, session=session)) if s.frontier == 8]
        assert len(found) == 2
        assert found[0].checkpoint == best.id
    d.settle()


def test_holders_of_one_point_are_one_source() -> None:
    """SRC-03: the private and the shared use of one checkpoint would be branched alike."""
    d = engine()
    alone(d, Ask(text(1, 9), max_tokens=1, session="s", recovery=8, markers=(8,)))
    assert [len(ck.holders) for ck in at(d, 8)] == [2]
    found = ranked(d, asker((*text(1, 8), 7, 7), session="other"))
    assert [(s.frontier, s.private) for s in found] == [(8, True), (0, False)]
    mine = ranked(d, asker((*text(1, 8), 7, 7), session="s"))
    assert [(s.frontier, s.take) for s in mine] == [(8, True), (8, False), (0, False)]
    d.settle()


def on_host(cost: CostModel | None = None) -> WorldDriver:
    """A point of 24 tokens, two of its pages only on Host: request 2 needed their place."""
    d = engine(pages=8, host=40, cost=cost)
    alone(d, Ask(text(1, 24), max_tokens=1, session="s"))
    alone(d, Ask(text(2, 16), max_tokens=1))
    return d


def test_what_a_restore_costs() -> None:
    """SRC-04: two pages of a byte come back, in one batch of two operations; nothing else moves."""
    d = on_host()
    assert restore(Step(d.world), at(d, 24)[0]) == (10_000 + 2 * 2_000, 2)
    (tail,) = at(d, 16)
    assert restore(Step(d.world), tail) == (0, 0)
    d.settle()


@pytest.mark.parametrize(("token_ns", "reused"), [(20_000, 24), (0, 0)])
def test_costs_order_sources_and_nothing_else(token_ns: int, reused: int) -> None:
    """SRC-07: where computing is free, root wins, and the point on Host stays what it is."""
    d = on_host(CostModel(token_ns=token_ns, pair_ns=0))
    ticket = alone(d, Ask((*text(1, 24), 7, 7), max_tokens=1))
    assert d.lives[ticket].reused == reused
    assert d.lives[ticket].outcome == "finished"
    assert at(d, 24)
    d.settle()


def test_use_counts_once_the_state_is_installed() -> None:
    """SRC-18: no admission and no heat while the copies run, both at their end."""
    d = on_host()
    third = d.submit(Ask((*text(1, 24), 7, 7), max_tokens=1, session="s"))
    run_until(d, lambda: d.step(transfers=False) and bool(d.transfer))
    record = named(d, "s")
    assert record.demand == Demand()
    assert not d.lives[third].admitted
    while d.transfer:
        d.finish_transfer()
        d.tick()
    record = named(d, "s")
    assert record.demand.proven == 24
    assert d.lives[third].reused == 24
    d.settle()


def test_a_cancelled_bind_retires_nothing() -> None:
    """SRC-08, CAT-18: the deeper point would have gone at adoption only."""
    d = engine(pages=9, host=40)
    alone(d, Ask(text(1, 22), max_tokens=3, session="s", recovery=20))
    alone(d, Ask(text(2, 28), max_tokens=1))
    third = d.submit(Ask((*text(1, 20), 7, 7, 7), max_tokens=1, session="s"))
    run_until(d, lambda: d.step(transfers=False) and d.world.job is not None)
    assert d.world.job is not None
    run_until(d, lambda: (j := d.world.job) is not None and j.kind == "bind" and d.transfer > 0)
    assert d.world.job.retire
    d.cancel(third)
    d.drain()
    assert at(d, 20)
    assert at(d, 24)
    d.settle()


# Waiting


def waiting(*, prompt: int = 16, outputs: int = 1) -> tuple[WorldDriver, int]:
    """Request 3 continues a point of six pages and needs one more, but request 2 has the other four.

    Root's first chunk of four pages would fit, if the point went."""
    d = engine(pages=10, rows=3, host=0)
    alone(d, Ask(text(1, 24), max_tokens=1, session="s"))
    d.submit(Ask(text(2, prompt), max_tokens=outputs))
    run_until(d, lambda: d.lives[2].phase == "resident")
    third = d.submit(Ask((*text(1, 24), 7, 7), max_tokens=1, session="s"))
    return d, third


def hold(d: WorldDriver, ticket: int) -> tuple[int, int]:
    """(owner number of its waiting reference, checkpoint)."""
    request = d.world.requests.get(ticket)
    assert request is not None
    return request.waiter, request.wait


def test_a_blocked_source_is_kept_and_waited_for() -> None:
    """SRC-09, SRC-12, SRC-13: it takes nothing and proves nothing until it is adopted."""
    d, third = waiting()
    before, record, seen = usage(d.world.physical), named(d, "s"), d.world.catalog.observed
    d.tick()
    waiter, cid = hold(d, third)
    assert [ck.id for ck in at(d, 24)] == [cid]
    assert waiter in at(d, 24)[0].holders
    assert usage(d.world.physical) == before
    assert named(d, "s") == record
    assert d.world.catalog.observed == seen
    assert len(commands(d, Admitted)) == 2
    d.drain()
    assert d.lives[third].reused == 24
    d.settle()


def test_a_waited_for_point_outlives_the_catalog() -> None:
    """SRC-12, SRC-16, SRC-17: nobody else sees it, and its own request moves it into a new record."""
    d, third = waiting()
    d.tick()
    former = named(d, "s")
    d.clear_cache()
    assert [s.frontier for s in ranked(d, asker((*text(1, 24), 7, 7)))] == [0]
    run_until(d, lambda: d.lives[third].phase == "resident")
    assert d.lives[third].reused == 24
    request = d.world.requests.get(third)
    assert request is not None
    assert request.owner != former.owner
    assert not at(d, 24)  # moved: nobody else needed it
    d.settle()


def test_another_waiter_keeps_the_point() -> None:
    """SRC-16, CAT-17: the first to start branches, so that the other finds it again."""
    d, third = waiting()
    d.tick()
    former = named(d, "s")
    fourth = d.submit(Ask((*text(1, 24), 8), max_tokens=1, session="s"))
    d.tick()
    cid = at(d, 24)[0].id
    assert hold(d, third)[1] == hold(d, fourth)[1] == cid
    run_until(d, lambda: d.lives[third].phase == "resident")
    assert record_of(d, third).owner != former.owner
    d.drain()
    assert (d.lives[third].reused, d.lives[fourth].reused) == (24, 24)
    d.settle()


def test_required_work_revokes_and_the_waiter_chooses_again() -> None:
    """SRC-10, SRC-14, SRC-19: request 2 needs a fifth page; request 3 then starts from root."""
    d, third = waiting(prompt=17, outputs=2)
    d.tick()
    assert hold(d, third)[1]
    run_until(d, lambda: bool(notes(d, "revoked")))
    assert [n.request for n in notes(d, "revoked")] == [third]
    assert hold(d, third)[1] == 0
    d.drain()
    assert d.lives[third].reused == 0
    d.settle()


def test_a_cancelled_waiter_lets_go() -> None:
    """SRC-19: only the record is left as a holder."""
    d, third = waiting()
    d.tick()
    waiter, cid = hold(d, third)
    d.cancel(third)
    d.tick()
    (ck,) = at(d, 24)
    assert ck.id == cid
    assert waiter not in ck.holders
    d.settle()


def allowed(d: WorldDriver, rights: Rights) -> set[int]:
    return {p.checkpoint.id for p in points(Step(d.world), rights)}


def test_who_may_revoke_whom() -> None:
    """SRC-14: optional writes nobody, fresh admission younger waiters, required work all."""
    d, third = waiting()
    d.tick()
    cid = hold(d, third)[1]
    assert cid not in allowed(d, Rights(reused_before=FOREVER))
    assert cid not in allowed(d, Rights(reused_before=FOREVER, waiters=third))
    assert cid in allowed(d, Rights(reused_before=FOREVER, waiters=third - 1))
    assert cid in allowed(d, Rights(reused_before=FOREVER, waiters=0))
    d.settle()


def test_an_own_snapshot_is_honoured_first() -> None:
    """SRC-11, SRC-14: a saved prefix would serve too; fresh admission may not take the snapshot."""
    d = engine(pages=8, blocks=7, rows=2, slots=6, host=40, page_tokens=64, chunk=256)
    for name in (1, 2):
        d.submit(Ask(text(name, 192), max_tokens=256, markers=(128,)))
    run_until(d, lambda: d.lives[2].phase == "paused")
    request = d.world.requests.get(2)
    assert request is not None
    assert request.snapshot
    assert request.snapshot not in allowed(d, Rights(reused_before=FOREVER, waiters=0))
    assert request.snapshot in allowed(d, Rights(reused_before=FOREVER, snapshots=1))
    d.drain()
    assert [c.restored for c in commands(d, Resumed)] == [request.frontier]
    assert commands(d, RunTransfer)
    d.settle()
