"""The scenarios of contracts.md, X-14, X-15 and X-31..X-39, as far as the planner decides them.

Each runs on the fake device: contents, lives, tokens and invariants are checked on the way, and at
the end nothing is in use (INV-20).
"""

import pytest
from world_cases import alone, commands, engine, notes, run_until, text

from planner.checkpoints import identity
from planner.testing import Ask, WorldDriver, solo
from planner.world import (
    Admitted,
    Cancelled,
    Ended,
    Paused,
    Resumed,
    RunPrefill,
    RunTransfer,
    Tick,
    advance,
    check_world,
)

# Queue


def bypassing() -> WorldDriver:
    """X-14: request 1 leaves three pages, the head 2 needs four, requests 3, 4, 5 one each."""
    d = engine(pages=9, rows=2, host=0, cache=False)
    d.submit(Ask(text(1, 21), max_tokens=11))
    run_until(d, lambda: len(d.lives[1].outputs) > 0)
    d.submit(Ask(text(2, 18), max_tokens=2))
    for name in (3, 4, 5):
        d.submit(Ask(text(name, 2), max_tokens=1))
    return d


def order(d: WorldDriver) -> list[int]:
    return [c.request for c in commands(d, Admitted)]


def test_x14_a_blocked_head_is_passed_by_at_most_c() -> None:
    """X-14, SCH-06, SCH-07: its credit is used up by two, the third waits behind it."""
    d = bypassing()
    d.drain()
    assert order(d) == [1, 3, 4, 2, 5]
    first = next(c for c in commands(d, Ended) if c.request == 1)
    ended = commands(d, Ended)
    assert ended.index(first) == 2  # 3 and 4 came and went while 1 ran
    d.settle()


def test_x14_cancelling_the_head_lets_the_next_in() -> None:
    """X-14, SCH-06: credits are each request's own; nothing is left of the head's."""
    d = bypassing()
    run_until(d, lambda: d.lives[4].phase == "ended")
    assert d.lives[1].phase == "resident"
    d.cancel(2)
    run_until(d, lambda: d.lives[5].admitted == 1)
    assert d.lives[1].phase == "resident"
    d.settle()
    assert d.lives[2].outcome == "cancelled"
    assert order(d) == [1, 3, 4, 5]


# Pressure


def pressure(host: int) -> WorldDriver:
    """X-15: two prompts of 192 tokens, 256 outputs each, a pool of 512 tokens."""
    d = engine(pages=8, blocks=7, rows=2, slots=4, host=host, page_tokens=64, chunk=256)
    for name in (1, 2):
        d.submit(Ask(text(name, 192), max_tokens=256))
    return d


def finished_exactly(d: WorldDriver, *tickets: int) -> None:
    """Right tokens were compared with the solo run by the driver; here: all of them, once."""
    for ticket in tickets:
        life = d.lives[ticket]
        assert life.outcome == "finished"
        assert len(life.outputs) == life.ask.max_tokens
        assert life.admitted == 1
        assert life.reused == 0
    assert len(commands(d, Admitted)) == len(d.lives)


@pytest.mark.parametrize(("host", "form"), [(40, "snapshot"), (0, "replay")])
def test_x15_the_younger_pauses_and_both_end(host: int, form: str) -> None:
    """X-15, SCH-10..13, PR-02, PR-06, INV-18: at position 256, and no output is repeated."""
    d = pressure(host)
    run_until(d, lambda: d.lives[2].phase == "paused")
    assert [(c.request, c.form) for c in commands(d, Paused)] == [(2, form)]
    assert commands(d, Paused)[0].beneficiary == 1
    assert d.lives[1].launched in (256, 257)
    assert d.lives[2].launched in (255, 256)  # one behind while rows are one unit apart
    assert len(d.world.physical.sequences) == 1
    d.settle()
    finished_exactly(d, 1, 2)
    assert (d.counts["replayed"] > 0) == (form == "replay")
    assert len({c.request for c in commands(d, Resumed)}) == 1


def test_cancelling_twice_ends_once() -> None:
    """ENG-06, ENG-10: of several that wait, in the order of their tickets."""
    d = engine(rows=1)
    for name in (1, 2, 3, 4):
        d.submit(Ask(text(name, 5), max_tokens=3))
    run_until(d, lambda: bool(d.world.residents) and d.world.job is None)
    world = d.world
    for ticket in (4, 2, 4):
        world, _ = advance(world, Cancelled(ticket))
    world, ordered = advance(check_world(world), Tick())
    assert [order for order in ordered if isinstance(order, Ended)] == [
        Ended(2, "cancelled"),
        Ended(4, "cancelled"),
    ]
    assert check_world(world).waiting == (3,)
    assert world.cancelled == ()


def test_x15_cancel_while_paused() -> None:
    """X-15, ENG-06: the other finishes as if it had been alone."""
    d = pressure(40)
    run_until(d, lambda: d.lives[2].phase == "paused")
    d.cancel(2)
    d.settle()
    finished_exactly(d, 1)
    assert d.lives[2].outcome == "cancelled"
    assert not commands(d, Resumed)


def test_x15_cancel_in_replay() -> None:
    """X-15, ENG-06, PR-06: at the boundary of the unit that replays."""
    d = pressure(0)
    run_until(d, lambda: d.counts["replayed"] > 0)
    assert d.lives[2].phase == "resident"
    published = len(d.lives[2].outputs)
    d.cancel(2)
    d.settle()
    finished_exactly(d, 1)
    assert d.lives[2].outcome == "cancelled"
    assert len(d.lives[2].outputs) == published


def test_x15_a_revoked_snapshot_becomes_replay() -> None:
    """PR-05, RC-14: the youngest's snapshot gives way to that of an older request."""
    d = engine(pages=9, blocks=7, rows=3, slots=6, host=6, page_tokens=64, chunk=256)
    for name in (1, 2, 3):
        d.submit(Ask(text(name, 128), max_tokens=256))
    run_until(d, lambda: d.lives[2].phase == "paused")
    assert [c.request for c in commands(d, Paused)][:2] == [3, 2]
    revoked = [n for n in notes(d, "revoked") if "snapshot" in n.text]
    assert [n.request for n in revoked] == [3]
    d.settle()
    finished_exactly(d, 1, 2, 3)
    assert d.counts["replayed"] > 0


# Catalog


def test_x31_a_normalised_response_restores_the_input_point() -> None:
    """X-31, CAT-02, CAT-07: E is adopted, then missed; R is before what the client rewrote."""
    d = engine()
    one = Ask(text(1, 9), max_tokens=3, session="s", recovery=8)
    alone(d, one)
    turn = one.prompt + solo(one.prompt, 3)
    two = Ask((*turn, 71, 72), max_tokens=4, session="s", recovery=len(turn) + 1)
    second = alone(d, two)
    assert d.lives[second].reused == len(turn) - 1  # E: the last output was never an input
    answer = solo(two.prompt, 4)
    rewritten = (*two.prompt, answer[0], answer[1] + 1, 73)
    third = alone(d, Ask(rewritten, max_tokens=2, session="s"))
    assert d.lives[third].reused == two.recovery
    d.settle()


def test_x32_private_point_and_marker_share_one_state() -> None:
    """X-32, CAT-11: the conversation moves on, the shared entry lives by its own references."""
    d = engine()
    one = Ask(text(1, 9), max_tokens=2, session="s", recovery=8, markers=(8,))
    alone(d, one)
    there = [ck for ck in d.world.physical.checkpoints.values() if ck.frontier == 8]
    assert len({ck.image for ck in there}) == 1
    assert len({owner for ck in there for owner in ck.holders}) == 2
    turn = one.prompt + solo(one.prompt, 2)
    alone(d, Ask((*turn, 5, 6), max_tokens=2, session="s", recovery=len(turn) + 1))
    other = alone(d, Ask((*text(1, 8), 7, 7, 7), max_tokens=1))
    assert d.lives[other].reused == 8
    d.settle()


def test_x33_a_shallow_marker_serves_a_changed_suffix() -> None:
    """X-33, CAT-12: alpha and alpha+beta are saved; alpha+gamma starts from alpha."""
    d = engine()
    alpha, beta, gamma = text(1, 7), text(2, 5), text(3, 6)
    alone(d, Ask((*alpha, *beta, 1, 2), max_tokens=1, markers=(7, 12)))
    frontiers = {ck.frontier for ck in d.world.physical.checkpoints.values()}
    assert {7, 12} <= frontiers
    changed = alone(d, Ask((*alpha, *gamma), max_tokens=1))
    same = alone(d, Ask((*alpha, *beta, 9, 9), max_tokens=1))
    assert (d.lives[changed].reused, d.lives[same].reused) == (7, 12)
    d.settle()


def test_x34_adoption_is_evidence_and_finishing_is_none() -> None:
    """X-34, EV-02, EV-03: a branch carries the time of its adoption, whatever it does afterwards."""
    d = engine(pages=20, blocks=8, slots=12)
    base = Ask(text(1, 9), max_tokens=1, markers=(8,))
    alone(d, base)
    times = []
    for name in (2, 3):
        ticket = d.submit(Ask((*text(1, 8), *text(name, 4)), max_tokens=4))
        run_until(d, lambda t=ticket: d.lives[t].phase == "resident")
        owner = d.world.requests.get(ticket).owner
        adopted = d.world.catalog.records.get(owner).demand
        assert adopted.proven == 8
        d.drain()
        assert d.world.catalog.records.get(owner).demand == adopted
        times.append(adopted.time)
    assert 0 < times[0] < times[1]
    d.settle()


def test_x35_a_long_input_yields_after_each_chunk_and_saves_nothing() -> None:
    """X-35, CAPT-01, SCH-17: chunks only split the work."""
    d = engine(rows=2, chunk=4)
    d.submit(Ask(text(1, 21), max_tokens=1))
    run_until(d, lambda: d.counts["computed"] > 0)
    d.submit(Ask(text(2, 13), max_tokens=1))
    run_until(d, lambda: d.lives[2].phase == "ended")
    chunks = [c.request for c in commands(d, RunPrefill)]
    assert chunks.index(2) < len(chunks) - 1 - chunks[::-1].index(1)  # 1 went on after 2 began
    assert "".join(map(str, chunks)).count("22") <= 1
    d.drain()
    assert not notes(d, "saved")
    d.settle()


def test_x36_only_the_short_pages_move() -> None:
    """X-36, RC-09: two page groups close the gap; state and the other pages stay."""
    d = engine(pages=8, blocks=8, host=40)
    alone(d, Ask(text(1, 24), max_tokens=1))  # six pages stay cached
    before = len(d.log)
    d.submit(Ask(text(2, 16), max_tokens=1, recovery=0))
    run_until(d, lambda: d.lives[2].phase == "ended")
    copies = [
        c
        for entry in d.log[before:]
        for order in entry.commands
        if isinstance(order, RunTransfer)
        for c in order.copies
        if c.direction == "d2h"
    ]
    assert [c.kind for c in copies] == ["page", "page"]
    again = alone(d, Ask((*text(1, 24), 3, 4), max_tokens=1))
    assert d.lives[again].reused == 24
    d.settle()


def test_x37_without_host_and_spare_slots_required_work_goes_on() -> None:
    """X-37, CAPT-05, PR-07: saves are skipped, cached points are reclaimed, replay gets through."""
    d = engine(pages=8, blocks=7, rows=2, slots=2, host=0, page_tokens=64, chunk=128)
    alone(d, Ask(text(9, 100), max_tokens=2, recovery=99))
    for name in (1, 2):
        d.submit(Ask(text(name, 192), max_tokens=256, markers=(128,)))
    d.drain()
    assert notes(d, "skipped")
    assert notes(d, "evicted")
    assert d.counts["replay"] >= 1
    d.settle()


def test_x38_a_short_request_enters_while_a_long_one_waits_paused() -> None:
    """X-38, SCH-13, SCH-14: the paused one waits for itself alone and returns after the older."""
    d = pressure(0)
    run_until(d, lambda: d.lives[2].phase == "paused")
    short = d.submit(Ask(text(3, 20), max_tokens=5))
    run_until(d, lambda: d.lives[short].phase == "ended")
    assert d.lives[1].phase == "resident"
    assert d.lives[2].phase == "paused"
    d.settle()
    marks = [
        (type(c).__name__, c.request)
        for entry in d.log
        for c in entry.commands
        if isinstance(c, Ended | Resumed)
    ]
    assert marks.index(("Ended", 1)) < marks.index(("Resumed", 2))
    finished_exactly(d, 1, 2, 3)


def test_x39_recomputed_prefixes_are_saved_once_two_requests_needed_them() -> None:
    """X-39, EV-05, EV-06: computing twice is demand; a hit is only what was really reused."""
    d = engine(pages=20, blocks=8, slots=12)
    shared = text(1, 8)
    reused = []
    for name in (2, 3, 4):
        ticket = alone(d, Ask((*shared, *text(name, 5)), max_tokens=1))
        reused.append(d.lives[ticket].reused)
    assert reused == [0, 0, 8]
    point = identity(shared)
    assert any(o.digest == point.digest() for o in d.world.catalog.observed)
    d.settle()
