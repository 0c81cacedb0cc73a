"""What is given up, in which order, and who may ask for it (RC, SRC-14..15)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world_cases import alone, at, engine, named, run_until, text

from planner import (
    Advance,
    ImageRef,
    Layout,
    LeaseReader,
    PageRange,
    Plan,
    PoolLayout,
    Start,
    Target,
    apply,
    assess,
    kv,
    state_images,
)
from planner.checkpoints import Checkpoint, Checkpoints, identity
from planner.physical import PhysicalState, pool_index
from planner.plans import Edge
from planner.testing import Ask, Workload, WorldDriver, run_workload, workloads
from planner.world import (
    Submitted,
    TraceRequest,
    WorldConfig,
    advance,
    new_world,
    saving,
    simulate,
)
from planner.world.eviction import (
    FOREVER,
    Relief,
    Rights,
    lost_tokens,
    movable,
    points,
    relieve,
    what_stays,
)
from planner.world.records import Demand, Entry, observe
from planner.world.requests import Request, Save
from planner.world.step import Step

ANY = Rights(reused_before=FOREVER)


def known(*frontiers: int) -> Step:
    """Points 1, 2, .. of one path at these positions; only their identities matter."""
    step = Step(engine().world)
    path = identity(range(5000))
    cks = Checkpoints()
    for cid, frontier in enumerate(frontiers, 1):
        cks = cks.put(Checkpoint(cid, path.prefix(frontier), 0, (), (cid,)))
    step.physical = step.physical._replace(checkpoints=cks)
    return step


def gone(relief: Relief | None) -> set[int]:
    assert relief is not None
    return {e.checkpoint for e in relief.release}


def heat(step: Step, owner: int, time: int, proven: int) -> None:
    record = step.record(owner)
    step.put_record(record._replace(demand=Demand(time, proven)))


def to_host(step: Step, ck: Checkpoint) -> None:
    """Move a point to Host, state and pages, as a demotion does."""
    history, tokens = ck.prefixes[0]
    pages = PageRange(0, history, 0, -(-tokens // step.physical.layout.page_tokens))
    plan = assess(step.physical, Target(demote=(ImageRef(ck.image), pages)))
    assert isinstance(plan, Plan)
    step.apply(Start(plan))
    while (t := step.physical.transaction) is not None:
        step.apply(Advance(t.id))


# Loss


@pytest.mark.parametrize(
    ("deleted", "loss"), [({1}, 1000), ({2}, 2000), ({1, 2}, 3000)], ids=["E", "R", "both"]
)
def test_x12_nested_points(deleted: set[int], loss: int) -> None:
    """X-12, RC-07: E at 3000 falls back to R at 2000; R falls back to nothing; no double count."""
    assert lost_tokens(known(3000, 2000), deleted) == loss


@pytest.mark.parametrize(
    ("deleted", "loss"), [({2}, 0), ({3}, 0), ({2, 3}, 2000), ({1, 2, 3}, 3000)]
)
def test_x12_aliases(deleted: set[int], loss: int) -> None:
    """X-12, RC-07: an alias at 2000 saves R, unless it goes as well."""
    assert lost_tokens(known(3000, 2000, 2000), deleted) == loss


@given(st.lists(st.tuples(st.text("ab", max_size=5), st.booleans()), max_size=12), st.data())
def test_losses_along_paths(paths: list[tuple[str, bool]], data: st.DataObject) -> None:
    """Alone and together, aliases and equal tokens of another mode among them; together no less (RC-07)."""
    step = known()
    cks = Checkpoints()
    for cid, (tokens, other) in enumerate(paths, 1):
        path = identity([ord(c) for c in tokens], mode="other" if other else "")
        cks = cks.put(Checkpoint(cid, path, 0, (), (cid,)))
    step.physical = step.physical._replace(checkpoints=cks)

    def slow(gone: set[int]) -> int:
        lost = 0
        for ck in map(cks.get, gone):
            assert ck is not None
            left = [
                o.frontier
                for o in cks.values()
                if o.identity.prefix_of(ck.identity)
                and (o.id not in gone or (o.frontier, o.id) < (ck.frontier, ck.id))
            ]
            lost += ck.frontier - max(left, default=0)
        return lost

    alone = {cid: lost_tokens(step, {cid}) for cid, _ in cks.items()}
    assert alone == {cid: slow({cid}) for cid in alone}
    some = data.draw(st.sets(st.sampled_from(sorted(alone)))) if alone else set()
    assert lost_tokens(step, some) == slow(some) >= sum(alone[cid] for cid in some)


def two(length: int) -> Step:
    """Two unrelated ordinary points, of 500 tokens and of so many."""
    d = engine(pages=40, blocks=20, slots=6, host=0, page_tokens=64, chunk=256)
    alone(d, Ask(text(1, 500), max_tokens=1))
    alone(d, Ask(text(3, length), max_tokens=1))
    return Step(d.world)


def test_x13_the_budget_bounds_the_sum_of_losses() -> None:
    """X-13, RC-14, RC-15: 500 + 523 tokens are less than 1024, 500 + 524 are not."""
    rights = Rights(budget=1024)
    assert len(gone(relieve(two(523), {"slots": 2}, rights))) == 2
    assert relieve(two(524), {"slots": 2}, rights) is None
    assert len(gone(relieve(two(524), {"slots": 1}, rights))) == 1


def test_aliases_that_go_together_cost_what_they_kept() -> None:
    """RC-07, RC-15: neither is the other's fallback."""
    d = engine(host=0)
    for name in ("a", "b"):
        d.submit(Ask(text(1, 3), max_tokens=1, session=name))
    d.drain()
    assert len(at(d, 3)) == 2
    step = Step(d.world)
    assert relieve(step, {"slots": 2}, Rights(budget=3)) is None
    assert len(gone(relieve(step, {"slots": 2}, Rights(budget=4)))) == 2
    assert len(gone(relieve(step, {"slots": 1}, Rights(budget=1)))) == 1


# Rights of a capture


def rights_at(step: Step, frontier: int) -> Rights:
    request = Request(Submitted(9, identity(range(5000)), 1))
    return saving._rights(step, request, Save(frontier, ("anchor",)))


def test_x13_gain_is_fixed_against_the_fallback_of_now() -> None:
    """X-13, RC-15: a candidate at 4096 with a fallback at 3072 may cost less than 1024."""
    assert rights_at(known(1000, 3072, 4500), 4096).budget == 1024
    assert rights_at(known(), 4096).budget == 4096


def test_own_demand_replaces_the_budget_and_nothing_is_borrowed() -> None:
    """RC-13, RC-14, RC-16: only repeated demand at this very position counts, by its own time."""
    step = known(1000)
    near, here = identity(range(4095)), identity(range(4096))
    step.catalog = observe(step.catalog, near, 3, 70, 256, adopted=True)
    assert rights_at(step, 4096) == Rights(budget=3096)
    step.catalog = observe(step.catalog, here, 3, 50, 256, adopted=True)
    assert rights_at(step, 4096) == Rights(reused_before=50)


def test_reused_content_yields_to_newer_demand_only() -> None:
    """RC-14: a capture without demand of its own takes none of it, however long it is."""
    d = engine()
    alone(d, Ask(text(1, 8), max_tokens=1, session="s"))
    step, record = Step(d.world), named(d, "s")
    heat(step, record.owner, 40, 8)
    gap = {"slots": 1}
    assert relieve(step, gap, Rights(budget=1000, demote=False)) is None
    assert relieve(step, gap, Rights(reused_before=40, demote=False)) is None
    assert gone(relieve(step, gap, Rights(reused_before=41, demote=False))) == {record.endpoint}


# Protection


def protected(step: Step) -> dict[int, int]:
    """Frontier -> heat of every point that could go."""
    return {p.checkpoint.frontier: p.heat for p in points(step, ANY)}


@pytest.mark.parametrize(
    ("proven", "expected"),
    [(16, {16: 40, 24: 0}), (12, {16: 40, 24: 0}), (20, {16: 40, 24: 40}), (24, {16: 40, 24: 40})],
)
def test_protection_ends_where_an_earlier_point_covers_it(
    proven: int, expected: dict[int, int]
) -> None:
    """RC-04: R at 16 covers what was proven up to there; it does not replace a deeper adoption."""
    d = engine()
    alone(d, Ask(text(1, 24), max_tokens=1, session="s", recovery=16))
    step, record = Step(d.world), named(d, "s")
    heat(step, record.owner, 40, proven)
    assert protected(step) == expected
    d.settle()


def test_a_hot_shared_owner_protects_what_it_touches() -> None:
    """RC-04, RC-02: the private holder's own class does not matter, and both edges go together."""
    d = engine()
    alone(d, Ask(text(1, 8), max_tokens=1, session="s"))
    step, (ck,) = Step(d.world), at(d, 8)
    step.retain(ck.id, 900)
    entry = Entry(900, ck.id, Demand(30, 8))
    step.catalog = step.catalog._replace(entries=step.catalog.entries.set(900, entry))
    assert protected(step) == {8: 30}
    assert relieve(step, {"slots": 1}, Rights(demote=False)) is None
    relief = relieve(step, {"slots": 1}, replace(ANY, demote=False))
    assert relief is not None
    assert set(relief.release) == {Edge(900, ck.id), Edge(ck.holders[0], ck.id)}


def test_sources_and_readers_stay() -> None:
    """RC-12: whatever required work may take."""
    d = engine()
    alone(d, Ask(text(1, 8), max_tokens=1))
    step, (ck,) = Step(d.world), at(d, 8)
    assert relieve(step, {"slots": 1}, replace(ANY, protect=frozenset({ck.id}))) is None
    assert gone(relieve(step, {"slots": 1}, replace(ANY, demote=False))) == {ck.id}
    step.physical = apply(step.physical, LeaseReader(ck.id))
    assert relieve(step, {"slots": 1}, ANY) is None


# Order


def order_world() -> tuple[WorldDriver, int, int]:
    """An old point of 8 tokens on two pages; an end at 24 that falls back to 17, on one page more."""
    d = engine(pages=20, host=0)
    alone(d, Ask(text(1, 8), max_tokens=1, session="a"))
    alone(d, Ask(text(2, 24), max_tokens=1, session="b", recovery=17))
    return d, at(d, 8)[0].id, at(d, 24)[0].id


def test_ordinary_content_by_loss_per_useful_unit() -> None:
    """RC-05, RC-06: for a slot 7 tokens are less than 8, for two pages 8 / 2 are less than 7 / 1."""
    d, small, end = order_world()
    alone(d, Ask(text(3, 24), max_tokens=1, recovery=17))  # two such ends have two pages as well
    step = Step(d.world)
    assert gone(relieve(step, {"slots": 1}, Rights())) == {end}
    assert gone(relieve(step, {"main": 2}, Rights())) == {small}
    both = {ck.id for ck in at(d, 24)}  # State first: 7 tokens for the slot, 7 for the second page
    assert gone(relieve(step, {"slots": 1, "main": 2}, Rights())) == both
    d.settle()


def test_ordinary_before_reused_and_reused_by_oldest_demand() -> None:
    """RC-06: a reused point survives a greater loss; between two the time decides."""
    d, small, _ = order_world()
    step, a, b = Step(d.world), named(d, "a"), named(d, "b")
    heat(step, b.owner, 50, 24)
    assert gone(relieve(step, {"slots": 1}, ANY)) == {small}
    heat(step, a.owner, 60, 8)
    assert small not in gone(relieve(step, {"slots": 1}, ANY))
    heat(step, a.owner, 40, 8)
    assert gone(relieve(step, {"slots": 1}, ANY)) == {small}


def test_younger_claims_go_first_and_after_everything_else() -> None:
    """SRC-14, SRC-15: a point that an older request waits for too counts as the older one's."""
    d = engine(pages=20, host=0)
    for name in (1, 2, 3):
        alone(d, Ask(text(name, 8), max_tokens=1, session=str(name)))
    one, both, free = (ck.id for ck in at(d, 8))
    step = Step(d.world)
    for ticket, cid in ((7, one), (5, both), (9, both)):
        step.retain(cid, 900 + ticket)
        spec = Submitted(ticket, identity(text(4, 4)), 1)
        step.put(Request(spec, waiter=900 + ticket, wait=cid))
    heat(step, 3, 99, 8)
    rights = replace(ANY, waiters=0)
    assert gone(relieve(step, {"main": 2}, rights)) == {free}
    assert gone(relieve(step, {"main": 4}, rights)) == {free, one}
    assert gone(relieve(step, {"main": 6}, rights)) == {free, one, both}
    assert relieve(step, {"main": 6}, replace(rights, waiters=5)) is None


# What can help


def reaches(s: PhysicalState, ck: Checkpoint, gap: str, protect: set[int]) -> bool:
    """Whether a replica of this kind that it reaches, or a page of its history, lies on the Device and nothing keeps
    it there, looked up one by one."""
    kept = [other for cid, other in s.checkpoints.items() if cid in protect or other.readers]
    if gap == "slots":
        im = state_images.image(s.states, ck.image)
        return bool(im.slot) and all(other.image != ck.image for other in kept)
    k = pool_index(s, gap)
    pool = s.pools[k]

    def pages(c: Checkpoint) -> set[kv.Page]:
        history, frontier = c.prefixes[k]
        return {*kv.prefix_pages(pool, history, -(-frontier // pool.page_tokens))}

    stay = set().union(*map(pages, kept))
    for q in s.sequences:
        history = kv.history(pool, q.histories[k])
        stay |= {*kv.prefix_pages(pool, history.id, history.blocks)}
    history = ck.prefixes[k].history
    own = {*kv.history(pool, history).pages.values()} if history else set[kv.Page]()
    return any(page.device for page in (pages(ck) | own) - stay)


@settings(deadline=None, max_examples=60)
@given(workloads(), st.sets(st.integers(0, 40)))
def test_only_what_can_help_is_looked_at(workload: Workload, protect: set[int]) -> None:
    """RC-01: at any moment of any run, the points that hold something of the missing kind which may leave the Device,
    be it their own or shared with the continuation that they branched off, and those beside such a page."""
    d = run_workload(workload, check=False)
    world = new_world(workload.config)
    for event, _ in d.log:
        world, _ = advance(world, event)
        s = world.physical
        fixed = what_stays(s, protect)
        for gap in ("slots", *(pool.name for pool in s.pools)):
            want = {cid for cid, ck in s.checkpoints.items() if reaches(s, ck, gap, protect)}
            assert movable(s, {gap: 1}, fixed) == want


def test_a_point_that_may_go_lets_pages_behind_it_move() -> None:
    """RC-09: the point at 24 is held for an older request; the one at 8 of the same history, whose own pages are in
    use, is not, and moving the pages behind it loses nothing."""
    d = engine(pages=20, blocks=8, host=40)
    alone(d, Ask(text(1, 24), max_tokens=1, recovery=8))
    (deep,) = at(d, 24)
    history = deep.prefixes[0].history
    d.submit(Ask((*text(1, 8), *text(2, 8)), max_tokens=8))
    run_until(d, lambda: bool(d.world.physical.sequences) and not d.world.physical.transaction)
    step = Step(d.world)
    step.retain(deep.id, 905)
    step.put(Request(Submitted(5, identity(text(4, 4)), 1), waiter=905, wait=deep.id))
    relief = relieve(step, {"main": 2}, replace(ANY, waiters=9))
    assert relief == Relief(demote=(PageRange(0, history, 4, 6),))


# Demotion


def full_host(length: int) -> tuple[Step, int, int]:
    """A point of 24 tokens fills the Host; a newer one of so many tokens is on the Device."""
    d = engine(pages=20, host=8)
    alone(d, Ask(text(1, 24), max_tokens=1, session="cold"))
    alone(d, Ask(text(2, length), max_tokens=1, session="new"))
    step = Step(d.world)
    cold, new = named(d, "cold"), named(d, "new")
    ck = step.checkpoint(cold.endpoint)
    assert ck is not None
    to_host(step, ck)
    return step, cold.endpoint, new.endpoint


def test_a_demotion_that_costs_more_than_it_saves_is_none() -> None:
    """RC-08: moving 8 tokens at the price of 24 is worse than deleting them; moving 28 is better."""
    step, _, new = full_host(8)
    relief = relieve(step, {"slots": 1}, Rights())
    assert (gone(relief), relief and relief.demote) == ({new}, ())
    step, cold, new = full_host(28)
    relief = relieve(step, {"slots": 1}, Rights())
    ck = step.checkpoint(new)
    assert ck is not None
    assert (gone(relief), relief and relief.demote) == ({cold}, (ImageRef(ck.image),))


def test_host_victims_are_charged_to_the_capture() -> None:
    """RC-15, RC-17: the 24 tokens lost on Host come out of its one budget."""
    step, cold, _ = full_host(28)
    assert relieve(step, {"slots": 1}, Rights(budget=24)) is None
    assert gone(relieve(step, {"slots": 1}, Rights(budget=25))) == {cold}


def test_required_work_lends_no_rights_to_what_it_moves() -> None:
    """RC-17: it may delete reused content, but an ordinary point does not get its place on Host."""
    step, _, new = full_host(28)
    heat(step, 1, 40, 24)
    relief = relieve(step, {"slots": 1}, ANY)
    assert (gone(relief), relief and relief.demote) == ({new}, ())


def test_only_the_missing_pages_move_in_one_order() -> None:
    """RC-09, RC-10: three pages of two points, the older first; neither state nor other pages."""
    d = engine(pages=20, host=40)
    for name in (1, 2):
        alone(d, Ask(text(name, 8), max_tokens=1))
    one, other = (ck.prefixes[0].history for ck in at(d, 8))
    step = Step(d.world)
    relief = relieve(step, {"main": 3}, ANY)
    assert relief == Relief(demote=(PageRange(0, one, 0, 2), PageRange(0, other, 1, 2)))
    d.settle()


@pytest.mark.parametrize(("image", "host"), [(2, 40), (3, 60), (5, 100), (2, 60), (5, 200)])
def test_a_full_host_arena_blocks_nobody(image: int, host: int) -> None:
    """HOST-05: demotions that find no place between what is there give way to deletions; nobody waits for them."""
    layout = Layout(256, 4, 16, (PoolLayout("main", 60, 1),), 8, image, host)
    ids = iter(range(80 * 40))
    prompts = [tuple(next(ids) for _ in range(40)) for _ in range(80)]
    trace = [TraceRequest(i, prompt, (7, 8, 9)) for i, prompt in enumerate(prompts)]
    report = simulate(trace, WorldConfig(layout, prefill_chunk=16))
    assert report.completed == 80
    assert "blocked" not in report.notes
