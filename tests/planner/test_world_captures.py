"""When a state is saved on the way, where to, and when not (CAPT)."""

import pytest
from world_cases import alone, at, commands, engine, following, frontiers, named, notes, text

from planner.checkpoints import identity
from planner.testing import Ask, WorldDriver
from planner.world import RunPrefill, Submitted, saving
from planner.world.requests import Request, Save, chunk_end, opportunities
from planner.world.step import Step


def spec(length: int, **given: object) -> Submitted:
    return Submitted(1, identity(range(length)), 1, **given)  # type: ignore[arg-type]


def test_opportunities_are_limited_and_merged() -> None:
    """CAPT-01, CAPT-08, CAT-12: four of a kind in the order given, one for each position inside."""
    wanted = spec(20, recovery=8, anchors=(4, 8, 30, 12, 16), markers=(8, 2, 20, 6, 10))
    assert opportunities(wanted, 4, 4) == (
        Save(2, ("shared",)),
        Save(4, ("anchor",)),
        Save(6, ("shared",)),
        Save(8, ("input", "anchor", "shared")),
        Save(12, ("anchor",)),
    )


def test_units_end_at_every_opportunity() -> None:
    """CAPT-02, CAPT-07: what stands at a frontier is decided before the unit that crosses it."""
    d = engine(pages=20, slots=12)
    alone(d, Ask(text(1, 12), max_tokens=1, recovery=6, anchors=(9,), markers=(3,)))
    units = [(c.start, c.length) for c in commands(d, RunPrefill)]
    assert units == [(0, 3), (3, 3), (6, 3), (9, 2)]
    said = [n.text.split(" point")[0] for n in notes(d, "saved")]
    assert said == ["shared", "input", "anchor"]
    d.settle()


def test_chunks_lie_on_one_grid_whatever_is_saved() -> None:
    """CAPT-01, CAPT-06: splits cut a unit also where nothing may be saved, and in a replay alike."""
    request = Request(spec(41), stops=(10, 24))
    ends = {0: 10, 10: 16, 16: 24, 24: 32, 32: 40}
    for start, end in ends.items():
        assert chunk_end(request, start, 16, replay=0) == end
        assert chunk_end(request, start, 16, replay=40) == end
    assert chunk_end(request, 16, 16, replay=20) == 20


def turn(slots: int, host: int) -> WorldDriver:
    """One lane; the second turn of a session wants a later input point than the first left."""
    d = engine(rows=1, slots=slots, host=host, pages=12)
    one = Ask(text(1, 9), max_tokens=2, session="s", recovery=4)
    alone(d, one)
    assert frontiers(d) == {4, 10}
    alone(d, Ask(following(one, 5, 6, 7), max_tokens=2, session="s", recovery=12))
    return d


@pytest.mark.parametrize(("slots", "host"), [(3, 40), (2, 40), (2, 0)])
def test_where_an_input_point_goes(slots: int, host: int) -> None:
    """CAPT-03, CAT-07: on the Device, with the outdated point's slot where no other is free."""
    d = turn(slots, host)
    assert notes(d, "saved")[-1].text == "input point at 12 tokens, on Device"
    assert frontiers(d) == {12, 15}
    assert not notes(d, "skipped")
    record = named(d, "s")
    assert [ck.id for ck in at(d, 12)] == [record.input]
    d.settle()


def test_without_a_slot_it_goes_to_host() -> None:
    """CAPT-03: the one slot is the request's own."""
    d = engine(rows=1, slots=1, host=40)
    alone(d, Ask(text(1, 9), max_tokens=2, recovery=4))
    assert [n.text for n in notes(d, "saved")] == ["input point at 4 tokens, on Host"]
    d.settle()


@pytest.mark.parametrize(("recovery", "holders"), [(6, 2), (0, 0)])
def test_a_private_point_is_kept_where_a_shared_view_does_not_fit(
    recovery: int, holders: int
) -> None:
    """CAPT-03, CAPT-04: no page is free for a tail copy; both uses may stand on the private point."""
    d = engine(pages=2, blocks=2, rows=1, host=0)
    alone(d, Ask(text(1, 8), max_tokens=1, recovery=recovery, markers=(6,)))
    assert [len(ck.holders) for ck in at(d, 6)] == ([holders] if holders else [])
    assert len(notes(d, "skipped")) == (not holders)
    assert d.lives[1].outcome == "finished"
    d.settle()


def test_a_save_without_room_is_skipped() -> None:
    """CAPT-05: the only other slot belongs to a request that runs; nobody pauses for it."""
    d = engine(rows=2, slots=2, host=0, pages=16)
    for name in (1, 2):
        d.submit(Ask(text(name, 9), max_tokens=4, recovery=8))
    d.drain()
    assert len(notes(d, "skipped")) == 2
    assert all(life.paused == 0 and life.outcome == "finished" for life in d.lives.values())
    d.settle()


def test_an_input_point_is_carried() -> None:
    """CAPT-06, CAT-07: the next turn wants the same position and finds it in its own record."""
    d = engine()
    one = Ask(text(1, 9), max_tokens=2, session="s", recovery=8)
    alone(d, one)
    (before,) = at(d, 8)
    alone(d, Ask(following(one, 5, 6), max_tokens=1, session="s", recovery=8))
    record = named(d, "s")
    assert record.input == before.id
    assert len(notes(d, "saved")) == 1
    d.settle()


def test_a_position_started_from_is_named_without_a_copy() -> None:
    """CAPT-06, CAT-11: a branch from exactly there holds the same checkpoint."""
    d = engine()
    alone(d, Ask(text(1, 12), max_tokens=1, session="a", recovery=8))
    alone(d, Ask((*text(1, 8), 5, 6), max_tokens=1, session="b", recovery=8))
    (ck,) = at(d, 8)
    a, b = named(d, "a"), named(d, "b")
    assert a.input == b.input == ck.id
    assert len(notes(d, "saved")) == 1
    d.settle()


def test_nothing_is_saved_under_a_recovery_permit() -> None:
    """CAPT-06: the opportunity is used up, no transaction starts, and the row may go on."""
    d = engine()
    d.submit(Ask(text(1, 12), max_tokens=1, recovery=8))
    while not (d.world.residents and d.world.residents[0].position == 8):
        d.tick()
        if d.transfer:
            d.finish_transfer()
    while d.unread:
        d.read()
    step = Step(d.world)
    (q,) = step.physical.sequences
    step.physical = step.physical._replace(sequences=(q._replace(recovery=8),))
    saving.save(step, step.residents[0])
    assert step.job is None
    assert step.request(1).saves == ()
    (note,) = step.commands
    assert "recovery permit" in str(note)
    d.settle()
