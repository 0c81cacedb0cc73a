"""Whose points are kept under which name, and what the next request makes of them (CAT)."""

import pytest
from world_cases import (
    alone,
    asker,
    at,
    commands,
    engine,
    following,
    frontiers,
    named,
    notes,
    ranked,
    run_until,
    text,
)

from planner.physical import initial, usage
from planner.testing import Ask, WorldDriver
from planner.world import RunPrefill, RunTransfer, saving
from planner.world.records import Catalog, Record, bind_session, session_owner
from planner.world.step import Step


def owners(d: WorldDriver) -> list[int]:
    return [r.owner for r in d.world.catalog.records.values()]


# Points of a record


def test_the_oldest_anchor_is_replaced() -> None:
    """CAT-01, CAT-09, CAPT-13: a fifth anchor takes the place of the one published first."""
    d = engine(pages=20, slots=12)
    one = Ask(text(1, 17), max_tokens=1, session="s", anchors=(4, 8, 12, 16))
    alone(d, one)
    record = named(d, "s")
    assert len(record.anchors) == 4
    alone(d, Ask(following(one, 5, 6, 7), max_tokens=1, session="s", anchors=(19,)))
    assert frontiers(d) >= {8, 12, 16, 19}
    assert 4 not in frontiers(d)
    d.settle()


def test_an_anchor_is_updated_at_its_position() -> None:
    """CAT-09: four stay four; the new state of that position replaces the old one, no other."""
    d = engine(pages=20, slots=12)
    for name in ("a", "b"):
        d.submit(Ask(text(1, 17), max_tokens=1, session=name, anchors=(4, 8, 12, 16)))
    d.drain()
    mine, other = named(d, "a"), named(d, "b")
    step = Step(d.world)
    saving._enter(step, mine.owner, "anchor", other.anchors[1])
    now = step.record(mine.owner)
    assert now is not None
    first, second, *rest = mine.anchors
    assert now.anchors == (first, *rest, other.anchors[1])
    assert step.checkpoint(second) is None
    d.settle()


def copied(d: WorldDriver) -> list[str]:
    orders = commands(d, RunTransfer)
    return [c.kind for o in orders for c in o.copies if c.direction != "init"]


@pytest.mark.parametrize(("markers", "pages"), [((), 0), ((6,), 1)])
def test_points_of_one_history_share_its_pages(markers: tuple[int, ...], pages: int) -> None:
    """CAT-10, CAPT-03: in a partial page a private point copies no KV, a shared view its tail."""
    d = engine()
    alone(d, Ask(text(1, 12), max_tokens=1, anchors=() if markers else (6,), markers=markers))
    inner, end = at(d, 6)[0], at(d, 12)[0]
    assert copied(d).count("page") == pages
    assert (inner.prefixes[0].history == end.prefixes[0].history) == (not markers)
    d.settle()


def test_a_generation_leaves_its_end_and_its_input_point() -> None:
    """CAT-08, CAT-11: no third image at the end of the prompt; an anchor shares the input point's."""
    d = engine()
    alone(d, Ask(text(1, 12), max_tokens=3, recovery=8, anchors=(8,)))
    assert frontiers(d) == {8, 14}
    assert len(at(d, 8)) == 1
    d.settle()


def test_splits_stay_where_the_input_says() -> None:
    """CAT-05, CAT-06: the state is kept at 6, so that 6..8 run again; the split at 8 does not move."""
    d = engine()
    prompt = text(1, 12)
    alone(d, Ask(prompt, max_tokens=1, recovery=6, splits=(8,)))
    units = [(c.start, c.length) for c in commands(d, RunPrefill)]
    assert units == [(0, 6), (6, 2), (8, 3)]
    again = alone(d, Ask((*prompt[:8], 7, 7), max_tokens=1, splits=(8,)))
    assert d.lives[again].reused == 6
    d.settle()


# Take over or branch


def test_continuing_an_unnamed_end_takes_it_over() -> None:
    """CAT-17, CAT-21: exact content finds it; there is one record, and it moved on."""
    d = engine()
    one = Ask(text(1, 9), max_tokens=2)
    alone(d, one)
    (parent,) = owners(d)
    second = alone(d, Ask(following(one, 7, 7), max_tokens=1))
    assert d.lives[second].reused == 10
    assert owners(d) == [parent]
    assert 10 not in frontiers(d)
    d.settle()


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", "")])
def test_another_session_branches(first: str, second: str) -> None:
    """CAT-17: the parent's record and end stay."""
    d = engine()
    one = Ask(text(1, 9), max_tokens=2, session=first)
    alone(d, one)
    parent = named(d, first)
    ticket = alone(d, Ask(following(one, 7, 7), max_tokens=1, session=second))
    assert d.lives[ticket].reused == 10
    now = named(d, first)
    assert now._replace(demand=parent.demand) == parent
    assert len(owners(d)) == 2
    d.settle()


def test_an_earlier_point_of_an_unnamed_record_is_branched() -> None:
    """CAT-17, CAT-18: nobody says that the later points are rewritten, so they stay."""
    d = engine()
    alone(d, Ask(text(1, 12), max_tokens=1, recovery=8))
    second = alone(d, Ask((*text(1, 8), 7, 7), max_tokens=1))
    assert d.lives[second].reused == 8
    assert {8, 10, 12} <= frontiers(d)
    assert len(owners(d)) == 2
    d.settle()


def test_a_record_in_use_is_branched() -> None:
    """CAT-17: while a request runs on it, the other of the same session starts beside it."""
    d = engine(pages=20)
    one = Ask(text(1, 9), max_tokens=2, session="s", recovery=8)
    alone(d, one)
    second = d.submit(Ask(following(one, 7, 7), max_tokens=8, session="s"))
    run_until(d, lambda: d.lives[second].phase == "resident")
    third = d.submit(Ask((*text(1, 8), 5, 5), max_tokens=1, session="s"))
    run_until(d, lambda: d.lives[third].phase == "resident")
    assert (d.lives[second].reused, d.lives[third].reused) == (10, 8)
    assert len(owners(d)) == 2
    d.settle()


def test_a_later_result_is_not_taken_over() -> None:
    """SRC-17: a request may read the record of a younger one, and never continue it."""
    d = engine()
    alone(d, Ask(text(2, 9), max_tokens=1))
    alone(d, Ask(text(1, 9), max_tokens=1))
    prompt = (*text(1, 9), 7, 7)
    for ticket, take in ((3, True), (2, True), (1, False)):
        assert ranked(d, asker(prompt, ticket))[0].take is take
    d.settle()


def test_rewriting_uses_the_room_of_what_it_rewrites() -> None:
    """CAT-18: six pages of the old end and two more do not fit in seven; the old end retires."""
    d = engine(pages=7, blocks=7, host=0)
    alone(d, Ask(text(1, 22), max_tokens=3, session="s", recovery=8))
    assert frontiers(d) == {8, 24}
    second = d.submit(Ask((*text(1, 8), *text(2, 10)), max_tokens=1, session="s", recovery=8))
    run_until(d, lambda: d.lives[second].phase == "resident")
    assert d.lives[second].reused == 8
    assert frontiers(d) == {8}
    assert not notes(d, "evicted")
    assert len(owners(d)) == 1
    d.settle()


# Ends and names


def test_cancel_loses_only_what_it_took_over() -> None:
    """CAT-19, CAT-07: the continued end is gone; input point, public alias and name remain."""
    d = engine()
    one = Ask(text(1, 9), max_tokens=2, session="s", recovery=8, markers=(8,))
    alone(d, one)
    before = named(d, "s")
    second = d.submit(Ask(following(one, 7, 7), max_tokens=9, session="s"))
    run_until(d, lambda: len(d.lives[second].outputs) > 1)
    d.cancel(second)
    d.drain()
    after = named(d, "s")
    assert (after.owner, after.endpoint, after.input) == (before.owner, 0, before.input)
    assert frontiers(d) == {8}
    assert len(at(d, 8)[0].holders) == 2
    d.settle()


@pytest.mark.parametrize("late", ["first", "second"])
def test_the_larger_publication_order_names_the_session(late: str) -> None:
    """CAT-20, CAT-21: whoever ends last; the other's result is anonymous and still found."""
    d = engine(pages=20)
    lengths = (8, 2) if late == "first" else (2, 8)
    asks = [
        Ask(text(k, 9), max_tokens=n, session="s") for k, n in zip((1, 2), lengths, strict=True)
    ]
    for ask in asks:
        d.submit(ask)
    d.drain()
    record = named(d, "s")
    assert record.order == 2
    (other,) = [r for r in d.world.catalog.records.values() if r.owner != record.owner]
    assert (other.order, other.session) == (1, "")
    third = alone(d, Ask(following(asks[0], 7, 7), max_tokens=1))  # unnamed: takes it over
    assert d.lives[third].reused == 8 + lengths[0]
    assert owners(d) == [other.owner, record.owner]
    d.settle()


def test_names_by_hand() -> None:
    """CAT-20, INV-17: equal and larger orders replace, smaller ones do not; an owner has one name."""
    catalog = bind_session(Catalog(), "s", 1, 5)
    assert session_owner(bind_session(catalog, "s", 2, 4), "s") == 1
    assert session_owner(bind_session(catalog, "s", 2, 6), "s") == 2
    renamed = bind_session(catalog, "t", 1, 7)
    assert renamed.sessions == (("t", 1, 7),)


def test_without_cache_nothing_is_read_or_left() -> None:
    """CAT-22, CAT-23: root only, the full answer, and the catalog as it was."""
    d = engine()
    one = Ask(text(1, 9), max_tokens=3, session="s", recovery=8, markers=(4,))
    alone(d, Ask(one.prompt, max_tokens=3, cache=False, session="s", recovery=8, markers=(4,)))
    assert d.world.catalog == Catalog()
    assert usage(d.world.physical) == usage(initial(d.world.physical.layout))
    alone(d, one)
    before = d.world.catalog
    third = alone(d, Ask((*one.prompt, 7), max_tokens=3, cache=False, session="s"))
    assert d.lives[third].reused == 0
    assert len(d.lives[third].outputs) == 3
    assert d.world.catalog == before
    d.settle()
    off = engine(cache=False)
    alone(off, one)
    assert off.world.catalog == Catalog()
    assert usage(off.world.physical) == usage(initial(d.world.physical.layout))


def test_an_empty_record_is_forgotten() -> None:
    """CAT-19, CAP-15: a request that is cancelled before it saved anything leaves no record."""
    d = engine()
    ticket = d.submit(Ask(text(1, 12), max_tokens=9, session="s"))
    run_until(d, lambda: len(d.lives[ticket].outputs) > 0)
    assert isinstance(d.world.catalog.records.values()[0], Record)
    d.cancel(ticket)
    d.drain()
    assert owners(d) == []
    assert d.world.catalog.sessions == ()
    d.settle()


# Requests that nobody goes on from


def test_a_request_without_endpoint_leaves_what_its_prompt_asks_for_and_nothing_else() -> None:
    """CAT-12, CAT-19: its markers stay and serve others; what it wrote is gone, and so is its record."""
    d = engine(pages=20, slots=12)
    alone(d, Ask(text(1, 17), max_tokens=4, endpoint=False, markers=(8,)))
    assert frontiers(d) == {8}
    assert not owners(d)
    second = alone(d, Ask((*text(1, 8), *text(2, 6)), max_tokens=4, endpoint=False, markers=(8,)))
    assert d.lives[second].reused == 8
    assert frontiers(d) == {8}
    d.settle()


def test_a_request_without_endpoint_leaves_the_endpoint_it_starts_from() -> None:
    """CAT-17 read with `Submitted.endpoint`: it branches where others would continue the record."""
    for endpoint in (True, False):
        d = engine(pages=20, slots=12)
        one = Ask(text(1, 9), max_tokens=4)
        alone(d, one)
        (end,) = frontiers(d)
        alone(d, Ask(following(one, 5, 6, 7), max_tokens=1, endpoint=endpoint))
        assert (end in frontiers(d)) is not endpoint
        assert (frontiers(d) == {end}) is not endpoint
        d.settle()
