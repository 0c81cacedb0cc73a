"""What counts as evidence of reuse, and what it is worth (EV, RC-13, RC-16)."""

from world_cases import (
    alone,
    at,
    commands,
    engine,
    following,
    named,
    notes,
    record_of,
    run_until,
    text,
)

from planner.checkpoints import identity
from planner.plans import Edge
from planner.testing import Ask, WorldDriver
from planner.world import Paused, Resumed, saving
from planner.world.records import Catalog, Demand, Entry, observe, repeated_demand
from planner.world.step import Step

# The digest


def test_x19_two_requests_prove_repetition() -> None:
    """X-19, EV-05: one request counts once at a position, however often it computes it."""
    p = identity(text(1, 8))
    one = observe(observe(Catalog(), p, 1, 10, 256), p, 1, 11, 256)
    assert [(o.frontier, o.requests, o.repeated) for o in one.observed] == [(8, (1,), 0)]
    two = observe(one, p, 2, 12, 256)
    assert repeated_demand(two, p) == 12
    assert repeated_demand(observe(two, p, 2, 13, 256), p) == 12
    assert repeated_demand(two, p.prefix(7)) == 0


def test_x19_a_full_digest_forgets_the_oldest() -> None:
    """X-19, EV-04: 256 items; the 257th evicts the one observed longest ago."""
    catalog = Catalog()
    for n in range(256):
        catalog = observe(catalog, identity(text(n, 2)), 1, n + 1, 256)
    catalog = observe(catalog, identity(text(0, 2)), 1, 300, 256)  # again: no longer the oldest
    catalog = observe(catalog, identity(text(256, 2)), 1, 301, 256)
    digests = {o.digest for o in catalog.observed}
    assert len(catalog.observed) == 256
    assert identity(text(0, 2)).digest() in digests
    assert identity(text(1, 2)).digest() not in digests


def test_an_adoption_proves_repetition_at_once() -> None:
    """EV-05: one request is enough where it really started from there."""
    p = identity(text(1, 8))
    assert repeated_demand(observe(Catalog(), p, 7, 10, 256, adopted=True), p) == 10


def test_a_prompt_that_is_seen_twice() -> None:
    """X-39, EV-05, EV-06: reuse is counted in the request, computation in the digest."""
    d = engine(pages=20, slots=12)
    point = identity(text(1, 8))
    base = Ask((*text(1, 8), 1, 1), max_tokens=1, anchors=(8,))
    alone(d, base)
    assert repeated_demand(d.world.catalog, point) == 0
    second = alone(d, Ask((*text(1, 8), 2, 2), max_tokens=1))
    assert d.lives[second].reused == 8
    assert repeated_demand(d.world.catalog, point) > 0
    d.settle()


# Pairs of owners


def chain(d: WorldDriver) -> tuple[Ask, Demand]:
    """A session whose end at 13 was adopted once: its record is proven there."""
    one = Ask(text(1, 9), max_tokens=5, session="s", recovery=4)
    alone(d, one)
    two = Ask(following(one, 7, 7), max_tokens=1, session="s", recovery=4)
    alone(d, two)
    record = named(d, "s")
    return two, record.demand


def test_consuming_resets_the_pair_to_its_source() -> None:
    """EV-01, EV-02: also to a shallower position than was proven before."""
    d = engine(pages=20, slots=12)
    _, demand = chain(d)
    assert demand.proven == 13
    alone(d, Ask((*text(1, 4), 9, 9, 9), max_tokens=1, session="s", recovery=4))
    record = named(d, "s")
    assert record.demand.proven == 4
    assert record.demand.time > demand.time
    d.settle()


def test_forks_and_their_parents() -> None:
    """EV-02: a fork below the proven position leaves the parent's pair, one at it renews it."""
    d = engine(pages=30, slots=12)
    two, demand = chain(d)
    below = d.submit(Ask((*text(1, 4), 9, 9, 9), max_tokens=2))
    run_until(d, lambda: d.lives[below].phase == "resident")
    parent, child = named(d, "s"), record_of(d, below)
    assert parent.demand == demand
    assert child.demand.proven == 4
    d.drain()
    past = d.submit(Ask(following(two, 8), max_tokens=2))
    run_until(d, lambda: d.lives[past].phase == "resident")
    parent, child = named(d, "s"), record_of(d, past)
    assert parent.demand == child.demand
    assert parent.demand.proven == 16
    assert parent.demand.time > demand.time
    d.settle()


def test_public_use_updates_the_entry_alone() -> None:
    """EV-01, EV-02: the private record that once saved the prefix stays as it is."""
    d = engine(pages=20, slots=12)
    alone(d, Ask(text(1, 12), max_tokens=1, session="s", markers=(8,)))
    before = named(d, "s")
    alone(d, Ask((*text(1, 8), 7, 7), max_tokens=1))
    assert named(d, "s") == before
    (entry,) = d.world.catalog.entries.values()
    assert entry.demand.proven == 8
    d.settle()


def test_finishing_and_saving_refresh_nothing() -> None:
    """EV-03: from the adoption to the end, with a point saved in between."""
    d = engine(pages=20, slots=12)
    one = Ask(text(1, 9), max_tokens=2, session="s")
    alone(d, one)
    second = d.submit(Ask(following(one, *text(2, 6)), max_tokens=3, session="s", anchors=(13,)))
    run_until(d, lambda: d.lives[second].phase == "resident")
    demand = record_of(d, second).demand
    assert demand.proven == 10
    d.drain()
    assert notes(d, "saved")
    record = named(d, "s")
    assert record.demand == demand
    d.settle()


def test_an_own_resume_observes_nothing() -> None:
    """EV-03, EV-06, PR-06: a replay that starts from a kept prefix of another is no demand for it."""
    d = engine(pages=8, blocks=7, rows=2, slots=6, host=0, page_tokens=64, chunk=256)
    d.submit(Ask(text(1, 192), max_tokens=128, recovery=100))
    d.submit(Ask((*text(1, 100), *text(2, 92)), max_tokens=256))
    run_until(d, lambda: d.lives[2].phase == "paused")
    assert commands(d, Paused)[0].form == "replay"
    seen = d.world.catalog.observed
    point = at(d, 100)[0].identity
    demand = record_of(d, 2).demand
    run_until(d, lambda: bool(commands(d, Resumed)))
    assert commands(d, Resumed)[0].restored == 100
    assert d.world.catalog.observed == seen
    assert repeated_demand(d.world.catalog, point) == 0
    assert record_of(d, 2).demand == demand
    d.settle()


def test_repeated_computation_promotes_the_input_point() -> None:
    """EV-07: the second request that computes its input point makes its record reused there."""
    d = engine(pages=20, slots=12, rows=1)
    alone(d, Ask((*text(1, 8), 1, 1, 1), max_tokens=1, recovery=8, session="a"))
    first = named(d, "a")
    assert first.demand == Demand()
    step = Step(d.world)
    step.release(tuple(Edge(o, ck.id) for ck in at(d, 8) for o in ck.holders))  # lost
    d.world = step.freeze()
    alone(d, Ask((*text(1, 8), 2, 2, 2), max_tokens=1, recovery=8, session="b"))
    second = named(d, "b")
    assert second.demand.proven == 8
    assert second.demand.time == repeated_demand(d.world.catalog, identity(text(1, 8)))
    d.settle()


# Three quarters


def heated(d: WorldDriver, times: dict[str, int]) -> Step:
    """A step whose named records were last reused at these times."""
    step = Step(d.world)
    for name, time in times.items():
        record = named(d, name)
        assert record is not None
        step.put_record(record._replace(demand=Demand(time, 8)))
    return step


def hot(step: Step) -> set[str]:
    return {r.session for r in step.catalog.records.values() if r.demand.time}


def test_older_reused_records_beyond_three_quarters_become_ordinary() -> None:
    """EV-08, EV-09: of 16 pages, 12 stay reused: the newest three of four records of four pages."""
    d = engine(pages=16, slots=8)
    for k, name in enumerate("abcd"):
        alone(d, Ask(text(k, 16), max_tokens=1, session=name))
    step = heated(d, {"a": 40, "b": 10, "c": 30, "d": 20})
    saving.rebalance(step)
    assert hot(step) == {"a", "c", "d"}
    assert len(step.physical.checkpoints) == 4  # a class only orders, it gives nothing up
    d.settle()


def test_a_shared_footprint_counts_once() -> None:
    """EV-08: a shared entry at the end of a record adds neither page nor slot."""
    d = engine(pages=16, slots=8)
    for k, name in enumerate("abc"):
        alone(d, Ask(text(k, 16), max_tokens=1, session=name))
    step = heated(d, {"a": 40, "b": 10, "c": 30})
    record = named(d, "a")
    step.retain(record.endpoint, 900)
    entry = Entry(900, record.endpoint, Demand(50, 16))
    step.catalog = step.catalog._replace(entries=step.catalog.entries.set(900, entry))
    saving.rebalance(step)
    assert hot(step) == {"a", "b", "c"}
    assert [e.demand.time for e in step.catalog.entries.values()] == [50]


def test_the_newest_large_record_may_exceed_it() -> None:
    """EV-08: 7 of 8 pages are more than three quarters; nothing older stays reused beside it."""
    d = engine(pages=8, slots=8, host=0)
    alone(d, Ask(text(1, 4), max_tokens=1, session="a"))
    alone(d, Ask(text(2, 28), max_tokens=1, session="b"))
    step = heated(d, {"a": 10, "b": 20})
    saving.rebalance(step)
    assert hot(step) == {"b"}


def test_x34_branches_of_a_hot_predecessor_push_older_ones_out() -> None:
    """X-34, EV-08: adoptions alone do it, at the latest when the branch is kept as a result."""
    d = engine(pages=16, slots=12)
    alone(d, Ask(text(1, 8), max_tokens=1, session="s"))
    for name in (2, 3, 4, 5):
        alone(d, Ask((*text(1, 8), *text(name, 12)), max_tokens=1))
    reused = [r for r in d.world.catalog.records.values() if r.demand.time]
    newest = max(d.world.catalog.records.values(), key=lambda r: r.order)
    assert newest in reused
    assert 3 * len(reused) <= 12  # each branch has three pages of its own
    assert len(reused) < len(d.world.catalog.records)
    d.settle()
