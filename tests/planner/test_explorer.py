"""Exhaustive small worlds. The counts make up the 200,000 states of one CI run."""

import pytest

from planner import activation, retention, transactions, units
from planner.errors import IllegalError
from planner.plans import Copy
from planner.testing import (
    ATOMIC,
    TINY,
    TWO_POOLS,
    CounterexampleError,
    Driver,
    World,
    explore,
    populated,
    tiny_layout,
)
from planner.testing.explorer import canonical


def empty(world: World) -> Driver:
    return Driver(world.layout)


SIZES = {
    "tiny": (TINY, empty, 60_000),
    "atomic": (ATOMIC, populated, 76_000),
    "two pools": (TWO_POOLS, populated, 66_000),
}


@pytest.mark.parametrize("name", SIZES)
def test_no_counterexample(name: str) -> None:
    """INV-01..14, INV-16, INV-20, TX-01..15, TX-17, TX-18: every operation, failure and
    cancellation at every stage, breadth first, contents verified in every distinct state."""
    world, prepare, states = SIZES[name]
    d = prepare(world)
    found = explore(world, states, start=(d.state, d.shadow))
    assert found.complete or found.states >= states
    every = {
        "Reserve", "Launch", "Commit", "AbortUnit", "EnsureMapped", "Truncate", "Settle",
        "Finish", "Discard", "Release", "Retain", "Start", "Advance", "Cancel", "Fail",
    }  # fmt: skip
    assert not every - set(found.applied)
    assert found.overlapping > 200


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explorer catches a second writer in one history, and prints how to get there."""
    small = World(tiny_layout(pages=5, host=0), owners=1, readers=False, atomic=True)
    monkeypatch.setattr("planner.activation._moves", lambda *args: True)
    with pytest.raises(CounterexampleError, match="InvariantError") as caught:
        explore(small, 20_000)
    text = str(caught.value)
    assert "state before the last step" in text
    assert "1. Start" in text


def test_a_planted_content_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device model, not the planner's own bookkeeping, sees a copy from a wrong place."""
    real = activation._take_pages

    def swapped(d, k, p, n, copies, pinned):  # type: ignore[no-untyped-def]
        mine: list[Copy] = []
        work = real(d, k, p, n, mine, pinned)
        copies += [c._replace(source=c.destination) if c.direction == "d2d" else c for c in mine]
        return work

    d = populated(ATOMIC)
    monkeypatch.setattr("planner.activation._take_pages", swapped)
    with pytest.raises(CounterexampleError, match="ContentError"):
        explore(ATOMIC, 20_000, start=(d.state, d.shadow))


def test_a_failing_plan_is_a_counterexample(monkeypatch: pytest.MonkeyPatch) -> None:
    """GP-41, INV-21: adoption may not fail; the explorer treats a refusal there as a bug."""

    def refuse(*_: object) -> None:
        raise IllegalError("no")

    real = transactions._adopt
    calls = {"n": 0}

    def sometimes(d, target, work):  # type: ignore[no-untyped-def]
        calls["n"] += 1
        return refuse() if calls["n"] > 60 else real(d, target, work)

    monkeypatch.setattr("planner.transactions._adopt", sometimes)
    with pytest.raises(CounterexampleError):
        explore(World(ATOMIC.layout, readers=False, atomic=True), 3000)


def test_canonical_ignores_names_only() -> None:
    """Two routes to one situation share a key; a different frontier does not."""

    def state(warm: bool, tokens: int) -> int:
        d = Driver(tiny_layout())
        if warm:
            q = d.bind(2, 2)
            d.run(retention.Discard(q.id))
        q = d.bind(1, 2)
        d.run(units.Reserve((units.RowTokens(q.id, (2,)),)))
        d.write(q.id, tokens)
        return canonical(d.state)

    assert state(False, 1) == state(True, 1)
    assert state(False, 1) != state(False, 2)
