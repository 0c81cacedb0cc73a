"""The root value: everything that is physically true at one moment (OWN-06).

`PhysicalState` is immutable. Operations build the next one in a `Draft`, a scratch copy of the root
fields that is thrown away when anything raises, so a refused operation has no side effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner import host, kv, state_images
from planner.capacity import Layout, PoolName, ceil_div
from planner.checkpoints import Checkpoint, Checkpoints
from planner.errors import BusyError, HandleError
from planner.host import Arena, Extent
from planner.kv import Pool
from planner.state_images import StateStore

if TYPE_CHECKING:
    from planner.plans import Transaction


MAX_FLIGHTS: Final = 2
"""Units in flight of one sequence: the next is launched before the results of one are read."""


class Flight(NamedTuple):
    """A unit in flight of a sequence: it writes up to ``provisional`` tokens per pool."""

    unit: int
    provisional: tuple[int, ...]


class Sequence(NamedTuple):
    """An active sequence: the one writer of one history per pool and of one state image.

    ``source`` is the image a Fork still reads (0 once settled, ST-07). ``frontiers`` are the
    committed tokens per pool, ``position`` the tokens its state stands for; the store derives no
    relation between them (KV-03). ``reserved`` pages per pool are withdrawn for it and not yet
    materialised; ``lease`` is the membership it may always reach (gp; zeros under inc).
    ``permit`` says that it holds unit reservation which settlement gives back.
    ``flights`` are its units in flight, oldest first: one writes from where the one before it ends.
    ``recovery`` is the frontier a recovery permit has to pass (-1: none).
    The hot path in `planner.units` rebuilds records by position: keep the order of fields.
    """

    id: int
    owner: int
    image: int
    source: int
    histories: tuple[int, ...]
    rows: tuple[int, ...]
    lease: tuple[int, ...]
    frontiers: tuple[int, ...]
    position: int
    reserved: tuple[int, ...]
    permit: bool = False
    flights: tuple[Flight, ...] = ()
    recovery: int = -1

    @property
    def unit(self) -> int:
        """The oldest unit in flight, the next one to commit (0: none)."""
        return self.flights[0].unit if self.flights else 0

    @property
    def end(self) -> tuple[int, ...]:
        """Tokens per pool that are committed or in flight: where the next unit writes."""
        return self.flights[-1].provisional if self.flights else self.frontiers


class Usage(NamedTuple):
    """Used_r of every axis: unique allocations + concrete reservations (TX-05)."""

    pages: tuple[int, ...]
    slots: int
    host: int
    rows: int


@dataclass(frozen=True, slots=True)
class Result:
    """Complete stable end state of one transaction or zero-stage transition, never a delta (TX-13).

    ``retired`` names exactly the checkpoints that are gone. ``owners`` gives, for every owner
    that lost or gained a point, all its points now. ``sequence`` is the new active one (0: none),
    ``published`` the new checkpoint (0: none), ``bytes_moved`` the copies that really completed.
    """

    transaction: int
    kind: str
    outcome: str
    sequence: int = 0
    published: int = 0
    retired: tuple[int, ...] = ()
    owners: tuple[tuple[int, tuple[int, ...]], ...] = ()
    bytes_moved: int = 0


class PhysicalState(NamedTuple):
    """All stores, the one transaction slot and the resource revision.

    ``result`` is the end state of the last ended transaction. ``next_id`` numbers sequences,
    checkpoints, units and transactions; ids are never reused.
    """

    layout: Layout
    pools: tuple[Pool, ...]
    states: StateStore
    arena: Arena
    checkpoints: Checkpoints
    sequences: tuple[Sequence, ...] = ()
    transaction: Transaction | None = None
    result: Result | None = None
    revision: int = 0
    next_id: int = 1


def initial(layout: Layout) -> PhysicalState:
    """The empty state of a layout: everything available, nothing cached."""
    rows = (0,) * layout.concurrency
    pools = tuple(
        Pool(p.name, p.pages, p.page_bytes, layout.page_tokens, layout.logical_pages, rows)
        for p in layout.pools
    )
    return PhysicalState(
        layout,
        pools,
        state_images.state_store(layout.slots),
        host.arena(layout.host_bytes),
        Checkpoints(),
    )


class Draft:
    """Scratch copy of a state inside one operation; `freeze` makes the next state."""

    __slots__ = (
        "arena", "checkpoints", "layout", "next_id", "pools", "result", "retired", "revision",
        "sequences", "start", "states", "touched", "transaction",
    )  # fmt: skip

    def __init__(self, s: PhysicalState) -> None:
        self.start = s
        self.layout = s.layout
        self.pools = list(s.pools)
        self.states = s.states
        self.arena = s.arena
        self.checkpoints = s.checkpoints
        self.sequences = s.sequences
        self.transaction = s.transaction
        self.result = s.result
        self.revision = s.revision
        self.next_id = s.next_id
        self.retired: list[int] = []
        self.touched: set[int] = set()

    def freeze(self) -> PhysicalState:
        """The state this draft describes."""
        return PhysicalState(
            self.layout, tuple(self.pools), self.states, self.arena, self.checkpoints,
            self.sequences, self.transaction, self.result, self.revision, self.next_id,
        )  # fmt: skip

    def new_id(self) -> int:
        """The next never-used id."""
        self.next_id += 1
        return self.next_id - 1

    def free(self, extents: list[Extent]) -> None:
        """Return Host extents to the arena."""
        if extents:
            self.arena = host.release_all(self.arena, extents)

    def checkpoint(self, cid: int) -> Checkpoint:
        """The live checkpoint with this id."""
        return _checkpoint(self.checkpoints, cid)

    def put_sequence(self, seq: Sequence) -> None:
        """Replace the record of an active sequence."""
        self.sequences = tuple(seq if q.id == seq.id else q for q in self.sequences)

    def publish(
        self,
        owner: int,
        checkpoint: Checkpoint,
    ) -> None:
        """Enter a checkpoint: references on its image and on one history per pool."""
        self.states = state_images.hold(self.states, checkpoint.image)
        for i, p in enumerate(checkpoint.prefixes):
            self.pools[i] = kv.add_ref(self.pools[i], p.history, p.frontier, checkpoint.id)
        self.checkpoints = self.checkpoints.put(checkpoint)
        self.touched.add(owner)

    def drop_edge(self, owner: int, cid: int) -> None:
        """One owner lets go; the last one deletes the checkpoint and what only it reached."""
        ck = self.checkpoint(cid)
        if owner not in ck.holders:
            raise HandleError(f"owner {owner} does not hold checkpoint {cid}; holders {ck.holders}")
        self.touched.add(owner)
        rest = tuple(o for o in ck.holders if o != owner)
        if rest:
            self.checkpoints = self.checkpoints.put(ck._replace(holders=rest))
            return
        if ck.readers:
            raise BusyError(
                f"checkpoint {cid} has {ck.readers} reader lease(s); wait for their end"
            )
        self.checkpoints = self.checkpoints.delete(cid)
        self.retired.append(cid)
        for i, p in enumerate(ck.prefixes):
            self.pools[i], extents = kv.drop_ref(self.pools[i], p.history, p.frontier, cid)
            self.free(extents)
        self.states, extents = state_images.unhold(self.states, ck.image)
        self.free(extents)

    def finish(self, result: Result) -> None:
        """Store the absolute end result and advance the revision once (TX-08, TX-13)."""
        self.result = Result(
            result.transaction, result.kind, result.outcome, result.sequence, result.published,
            (*result.retired, *self.retired),
            tuple((owner, self.checkpoints.owned(owner)) for owner in sorted(self.touched)),
            result.bytes_moved,
        )  # fmt: skip
        self.revision += 1


def _checkpoint(checkpoints: Checkpoints, cid: int) -> Checkpoint:
    found = checkpoints.get(cid)
    if found is None:
        raise HandleError(f"checkpoint {cid} is gone; choose a source again")
    return found


def checkpoint(s: PhysicalState, cid: int) -> Checkpoint:
    """The live checkpoint with this id, or HandleError."""
    return _checkpoint(s.checkpoints, cid)


def sequence(s: PhysicalState | Draft, sid: int) -> Sequence:
    """The active sequence with this id, or HandleError."""
    for seq in s.sequences:
        if seq.id == sid:
            return seq
    raise HandleError(f"sequence {sid} is not active; it ended or was paused")


def pool_index(s: PhysicalState, name: PoolName) -> int:
    """Index of a pool in every per-pool tuple."""
    for i, p in enumerate(s.pools):
        if p.name == name:
            return i
    raise HandleError(f"no pool {name!r}; this layout has {[p.name for p in s.pools]}")


def checkpoints_of(s: PhysicalState, owner: int) -> tuple[int, ...]:
    """Every checkpoint an owner holds, ascending."""
    return s.checkpoints.owned(owner)


def usage(s: PhysicalState | Draft) -> Usage:
    """Used_r of every axis. A unit is an allocation or a reservation, never both."""
    return Usage(
        tuple(p.allocated + p.reserved for p in s.pools),
        len(s.states.slots) - state_images.free_slots(s.states),
        host.used_bytes(s.arena),
        len(s.sequences),
    )


def table_row(s: PhysicalState, pool: int, sid: int, lo: int = 0) -> NDArray[np.int32]:
    """int32 [n]: page ids of blocks lo.. mapped by a sequence: the slice to publish (KV-33)."""
    p = s.pools[pool]
    h = kv.history(p, sequence(s, sid).histories[pool])
    own = lo >= h.base
    pages = h.pages.slice(lo, h.blocks) if own else kv.prefix_pages(p, h.id, h.blocks)[lo:]
    return np.array(kv.leases(pages), np.int32)


def block_table(s: PhysicalState, pool: int) -> NDArray[np.int32]:
    """int32 [L, C]: the whole matrix of a pool; unmapped entries and free rows are 0 (KV-24)."""
    table = np.zeros((s.pools[pool].logical_pages, len(s.pools[pool].rows)), np.int32)
    for seq in s.sequences:
        row = table_row(s, pool, seq.id)
        table[: len(row), seq.rows[pool]] = row
    return table


class UnitArrays(NamedTuple):
    """What a jitted unit needs of the plan, int32, row b of the batch in every column (B rows).

    ``read_slots`` differ from ``write_slots`` only for a fork's first unit (ST-08). The last three
    are [pools, B]: rows of the block tables, the tokens before it (committed, or written by the
    unit in flight before it), and the tokens written up to. They stay the same until the unit ends.
    """

    sequences: NDArray[np.int32]
    read_slots: NDArray[np.int32]
    write_slots: NDArray[np.int32]
    table_rows: NDArray[np.int32]
    frontiers: NDArray[np.int32]
    write_to: NDArray[np.int32]


def unit_arrays(s: PhysicalState, unit: int) -> UnitArrays:
    """The rows of a unit in flight, in sequence order."""
    rows = [
        (q, f.provisional, q.flights[i - 1].provisional if i else q.frontiers, 0 if i else q.source)
        for q in s.sequences
        for i, f in enumerate(q.flights)
        if f.unit == unit
    ]
    if not rows:
        raise HandleError(f"unit {unit} is not in flight")

    def column(values: list[int]) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    def columns(values: list[tuple[int, ...]]) -> NDArray[np.int32]:
        return np.ascontiguousarray(np.array(values, np.int32).T)

    slots = [state_images.image(s.states, q.image).slot for q, *_ in rows]
    reads = [state_images.image(s.states, source or q.image).slot for q, _, _, source in rows]
    return UnitArrays(
        column([q.id for q, *_ in rows]), column(reads), column(slots),
        columns([q.rows for q, *_ in rows]), columns([start for _, _, start, _ in rows]),
        columns([end for _, end, _, _ in rows]),
    )  # fmt: skip


def is_complete(s: PhysicalState | Draft, cid: int) -> bool:
    """CK-02: a complete image replica, and for each required page a Device or Host replica."""
    ck = _checkpoint(s.checkpoints, cid)
    im = state_images.image(s.states, ck.image)
    if not ((im.slot and im.ready) or im.host):
        return False
    for pool, p in zip(s.pools, ck.prefixes, strict=True):
        pages = kv.prefix_pages(pool, p.history, ceil_div(p.frontier, pool.page_tokens))
        if all(page.device for page in pages):
            continue
        for b, page in enumerate(pages):
            columns = min(pool.page_tokens, p.frontier - b * pool.page_tokens)
            if not page.device and not kv.host_covers(page, columns):
                return False
    return True


def is_device_ready(s: PhysicalState, cid: int) -> bool:
    """CK-03 without growth: state and every required page are on the Device."""
    ck = _checkpoint(s.checkpoints, cid)
    im = state_images.image(s.states, ck.image)
    return bool(im.slot and im.ready) and all(
        page.device
        for pool, p in zip(s.pools, ck.prefixes, strict=True)
        for page in kv.prefix_pages(pool, p.history, ceil_div(p.frontier, pool.page_tokens))
    )
