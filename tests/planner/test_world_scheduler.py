"""Who runs, who waits and who is told (SCH, PR, ENG, UN-01)."""

import sys

import pytest
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

from planner import LeaseReader, apply
from planner.checkpoints import identity
from planner.errors import IllegalError
from planner.physical import usage
from planner.plans import Edge
from planner.testing import Ask, WorldDriver
from planner.world import (
    Admitted,
    CapacityContractError,
    Ended,
    Event,
    Paused,
    Resumed,
    RowResult,
    RunDecode,
    RunPrefill,
    RunTransfer,
    Submitted,
    Tick,
    TransferFinished,
    UnitFinished,
    advance,
    binding,
)
from planner.world.step import Step


def pressure(host: int, **given: int) -> WorldDriver:
    """Two prompts of 192 tokens and 256 outputs in a pool of 512 tokens: the younger pauses."""
    d = engine(pages=8, blocks=7, rows=2, slots=6, host=host, page_tokens=64, chunk=256)
    for name in (1, 2):
        d.submit(Ask(text(name, 192), max_tokens=256, **given))  # type: ignore[arg-type]
    return d


# Cycle


def test_a_cycle_of_decoding_does_no_work_for_those_who_wait() -> None:
    """A queue of a thousand requests costs a step of the others nothing."""

    def calls(waiting: int) -> int:
        d = engine(rows=1)
        d.submit(Ask(text(1, 5), max_tokens=20))
        run_until(d, lambda: len(commands(d, RunDecode)) == 3)
        for name in range(2, 2 + waiting):
            d.submit(Ask(text(name, 5), max_tokens=1))
        run_until(d, lambda: len(commands(d, RunDecode)) == 6)
        assert len(d.world.waiting) == waiting
        world, counted = d.world, 0
        while not any(isinstance(order, RunDecode) for order in advance(world, Tick())[1]):
            world, _ = advance(world, UnitFinished(world.units[0].id, (RowResult(1, (7,)),)))

        def count(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            advance(world, Tick())
        finally:
            sys.setprofile(None)
        return counted

    assert calls(1) == calls(400) > 50


def test_one_cycle_ends_admits_and_launches_in_this_order() -> None:
    """SCH-01, SCH-18, ENG-05: the lane and the result of the one are there for the next at once."""
    d = engine(rows=1)
    one = Ask(text(1, 9), max_tokens=2, session="s")
    d.submit(one)
    d.submit(Ask(following(one, 7, 7), max_tokens=1, session="s"))
    while not commands(d, Ended):
        assert len(commands(d, Admitted)) <= 1  # all lanes are taken
        d.step()
    (tick,) = [e.commands for e in d.log if any(isinstance(c, Ended) for c in e.commands)]
    kinds = [type(c) for c in tick if isinstance(c, Ended | Admitted | RunPrefill)]
    assert kinds == [Ended, Admitted, RunPrefill]
    assert d.lives[2].reused == 10
    d.settle()


def test_one_decode_batch_and_one_chunk_a_cycle() -> None:
    """SCH-02: with prompts to prefill beside rows that decode."""
    d = engine(pages=40, rows=4, slots=12, chunk=4)
    for name in range(6):
        d.submit(Ask(text(name, 9 + name), max_tokens=4))
    d.drain()
    both = 0
    for entry in d.log:
        units = [type(c) for c in entry.commands if isinstance(c, RunDecode | RunPrefill)]
        assert units in ([], [RunDecode], [RunPrefill], [RunDecode, RunPrefill])
        both += len(units) == 2
    assert both
    d.settle()


def test_a_row_without_a_page_does_not_hold_up_others() -> None:
    """SCH-03: request 3 lacks its second page; 1 and 2 decode on without it."""
    d = engine(pages=7, rows=3, host=0, cache=False)
    for name, length in ((1, 9), (2, 9), (3, 4)):
        d.submit(Ask(text(name, length), max_tokens=3))
    d.drain()
    (third,) = [e for e in commands(d, Ended) if e.request == 3]
    assert commands(d, Ended)[-1] == third
    assert not commands(d, Paused)
    units = [tuple(r.request for r in c.rows) for c in commands(d, RunDecode)]
    assert (1, 2, 3) in units
    assert (1, 2) in units
    d.settle()


def test_reclaim_is_used_in_the_same_cycle_and_a_move_is_waited_for() -> None:
    """SCH-04: without Host the page is there at once; with it the row waits for the transfer."""
    for host in (0, 40):
        d = engine(pages=7, rows=1, host=host)
        alone(d, Ask(text(1, 16), max_tokens=1))  # four pages
        d.submit(Ask(text(2, 12), max_tokens=3))  # three, and a fourth for its last output
        run_until(d, lambda d=d: d.lives[2].launched == 12)
        before = len(d.log)
        run_until(d, lambda d=d: d.lives[2].launched == 13)
        made = [
            {type(c) for c in e.commands if isinstance(c, RunTransfer | RunDecode)}
            for e in d.log[before:]
        ]
        assert [m for m in made if m] == ([{RunTransfer}] if host else []) + [{RunDecode}]
        freed = [e.commands for e in d.log if any(n in e.commands for n in notes(d, "evicted"))]
        assert [any(isinstance(c, RunDecode) for c in one) for one in freed] == [True] * (not host)
        d.settle()


def test_ordinary_decode_starts_no_scan() -> None:
    """SCH-08: the blocked head is looked at when it comes, and when request 1 really releases."""
    d = engine(pages=9, rows=2, host=0, cache=False)
    d.submit(Ask(text(1, 21), max_tokens=11))
    run_until(d, lambda: len(d.lives[1].outputs) > 0)
    d.submit(Ask(text(2, 18), max_tokens=2))
    run_until(d, lambda: d.lives[1].phase == "ended")
    assert len(d.lives[1].outputs) == 11
    assert len(notes(d, "blocked")) == 1
    d.settle()


def test_inspection_costs_the_head_no_credit() -> None:
    """SCH-06, SCH-07: only admissions count, and only those of younger requests."""
    d = engine(pages=9, rows=2, host=0, cache=False)
    d.submit(Ask(text(1, 21), max_tokens=11))
    run_until(d, lambda: len(d.lives[1].outputs) > 0)
    for name in (2, 3):
        d.submit(Ask(text(name, 18), max_tokens=2))
    for _ in range(3):
        d.step()
    heads = [d.world.requests.get(t) for t in (2, 3)]
    assert [h.bypassed for h in heads if h is not None] == [0, 0]
    d.submit(Ask(text(4, 2), max_tokens=1))
    run_until(d, lambda: d.lives[4].admitted == 1)
    heads = [d.world.requests.get(t) for t in (2, 3)]
    assert [h.bypassed for h in heads if h is not None] == [1, 1]
    d.settle()


# Units


def test_a_request_reserves_its_first_unit_and_no_more() -> None:
    """UN-01, UN-03: a chunk of 16 of 21 tokens takes four pages, whatever may follow."""
    d = engine(rows=1)
    d.submit(Ask(text(1, 21), max_tokens=11))
    run_until(d, lambda: d.lives[1].phase == "resident")
    assert usage(d.world.physical).pages == (4,)
    run_until(d, lambda: d.lives[1].launched == 21)
    assert usage(d.world.physical).pages == (6,)
    d.settle()


# Pause


@pytest.mark.parametrize("host", [40, 0])
def test_a_paused_request_stays_what_it_was(host: int) -> None:
    """PR-01, PR-04, ENG-01, ENG-04: record, outputs and ticket persist; it is admitted once."""
    d = pressure(host)
    run_until(d, lambda: d.lives[2].phase == "resident")
    owner = record_of(d, 2).owner
    run_until(d, lambda: d.lives[2].phase == "paused")
    request = d.world.requests.get(2)
    assert request is not None
    assert request.owner == owner
    assert record_of(d, 2).request == 2
    assert len(request.outputs) == 4 * len(d.lives[2].outputs)
    assert Step(d.world).resident(2) is None
    run_until(d, lambda: d.lives[2].phase == "resident")
    assert record_of(d, 2).owner == owner
    d.drain()
    assert [c.request for c in commands(d, Admitted)] == [1, 2]
    assert [c.request for c in commands(d, Paused)] == [2]  # nobody pauses to save a victim
    d.settle()


def test_a_revoked_snapshot_leaves_the_input_point() -> None:
    """PR-05, SRC-19: the whole snapshot goes, the request is replayed from what its record keeps."""
    d = pressure(40, recovery=64)
    run_until(d, lambda: d.lives[2].phase == "paused" and not d.transfer)
    request = d.world.requests.get(2)
    assert request is not None
    step, edge = Step(d.world), Edge(request.holder, request.snapshot)
    assert step.holds(edge)
    step.release((edge,))
    binding.commit_release(step, (edge,))
    assert step.checkpoint(edge.checkpoint) is None
    assert step.request(2).snapshot == 0
    assert record_of(d, 2).input in {ck.id for ck in step.physical.checkpoints.values()}
    d.world = step.freeze()
    d.drain()
    assert [c.restored for c in commands(d, Resumed)] == [64]
    d.settle()


# Lifecycle


def test_phases_follow_one_another() -> None:
    """ENG-01: a request binds before it is resident, and again after a pause."""
    d = pressure(0)
    seen: list[str] = []
    while (request := d.world.requests.get(2)) is not None:
        if seen[-1:] != [request.phase]:
            seen.append(request.phase)
        d.tick()
        request = d.world.requests.get(2)
        if request is not None and seen[-1] != request.phase:
            seen.append(request.phase)
        d.step()
    assert seen == ["waiting", "binding", "resident", "paused", "binding", "resident"]
    d.settle()


def test_a_result_is_named_before_its_end_is_told() -> None:
    """ENG-05, ENG-10: one terminal, and after that event nothing of the request is left to settle."""
    d = engine(rows=1)
    d.submit(Ask(text(1, 9), max_tokens=2, session="s"))
    while not commands(d, Ended):
        d.step()
    record = named(d, "s")
    assert at(d, 10)[0].id == record.endpoint
    assert (d.world.residents, d.world.physical.sequences, record.request) == ((), (), 0)
    d.drain()
    assert len(commands(d, Ended)) == 1


@pytest.mark.parametrize(
    "event",
    [
        UnitFinished(77, ()),
        TransferFinished(77),
        Submitted(1, identity(text(1, 4)), 1),
        Submitted(2, identity(()), 1),
    ],
    ids=["unit", "transfer", "ticket", "empty"],
)
def test_an_event_that_cannot_be_true_is_an_engine_failure(event: Event) -> None:
    """ENG-08: raised, never treated as a miss; the world is what it was."""
    d = engine()
    d.submit(Ask(text(1, 9)))
    with pytest.raises(IllegalError):
        advance(d.world, event)
    d.settle()


@pytest.mark.parametrize(("prompt", "words"), [(12, "become resident"), (7, "no legal unit")])
def test_no_legal_unit_is_a_contract_error(prompt: int, words: str) -> None:
    """ENG-11, SCH-16, RC-12: a reader holds six of eight pages, which nothing may take."""
    d = engine(host=0, pages=8)
    alone(d, Ask(text(1, 24), max_tokens=1))
    d.world = d.world._replace(physical=apply(d.world.physical, LeaseReader(at(d, 24)[0].id)))
    d.submit(Ask(text(2, prompt), max_tokens=5))
    with pytest.raises(CapacityContractError, match=words):
        run_until(d, lambda: d.send(Tick()) is None)
