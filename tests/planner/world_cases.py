"""What the tests of worlds share: a small engine and how to look at what it did."""

from collections.abc import Callable

from planner.checkpoints import Checkpoint, identity
from planner.testing import Ask, WorldDriver, solo, tiny_layout
from planner.world import Command, CostModel, Note, Submitted, WorldConfig
from planner.world.records import Record, session_owner
from planner.world.requests import Request
from planner.world.sources import Source, sources
from planner.world.step import Step


def engine(
    pages: int = 12,
    blocks: int = 8,
    rows: int = 2,
    slots: int = 6,
    host: int = 40,
    page_tokens: int = 4,
    chunk: int = 16,
    cache: bool = True,
    cost: CostModel | None = None,
) -> WorldDriver:
    """Small by default: contexts of 32 tokens in pages of 4; a Host page is 1 byte, an image 2."""
    layout = tiny_layout(
        pages=pages, blocks=blocks, rows=rows, slots=slots, host=host, page_tokens=page_tokens
    )
    return WorldDriver(WorldConfig(layout, chunk, cache, cost=cost or CostModel()))


def commands(d: WorldDriver, kind: type[Command]) -> list:
    return [c for entry in d.log for c in entry.commands if isinstance(c, kind)]


def notes(d: WorldDriver, kind: str) -> list[Note]:
    return [n for n in commands(d, Note) if n.kind == kind]


def run_until(d: WorldDriver, true: Callable[[], bool], steps: int = 2000) -> None:
    for _ in range(steps):
        if true():
            return
        d.step()
    raise AssertionError("it never came to that")


def alone(d: WorldDriver, ask: Ask) -> int:
    """Submit and run to the end; the ticket."""
    ticket = d.submit(ask)
    d.drain()
    return ticket


def text(name: int, length: int) -> tuple[int, ...]:
    return tuple(1000 * name + i for i in range(length))


def at(d: WorldDriver, frontier: int) -> list[Checkpoint]:
    """The checkpoints at a position, oldest first."""
    return [ck for ck in d.world.physical.checkpoints.values() if ck.frontier == frontier]


def frontiers(d: WorldDriver) -> set[int]:
    return {ck.frontier for ck in d.world.physical.checkpoints.values()}


def named(d: WorldDriver, session: str) -> Record:
    """The record that a session names."""
    record = d.world.catalog.records.get(session_owner(d.world.catalog, session))
    assert record is not None
    return record


def asker(prompt: tuple[int, ...], ticket: int = 1000, session: str = "") -> Request:
    return Request(Submitted(ticket, identity(prompt), 1, session=session))


def ranked(d: WorldDriver, request: Request) -> list[Source]:
    """Its sources, best first."""
    return sources(Step(d.world), request, request.spec.prompt, request.prompt_length - 1)


def record_of(d: WorldDriver, ticket: int) -> Record:
    """The private record of a live request."""
    request = d.world.requests.get(ticket)
    assert request is not None
    record = d.world.catalog.records.get(request.owner)
    assert record is not None
    return record


def following(ask: Ask, *new: int) -> tuple[int, ...]:
    """The prompt of the next turn."""
    return (*ask.prompt, *solo(ask.prompt, ask.length), *new)
