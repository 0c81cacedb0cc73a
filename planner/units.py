"""Bounded model steps on active sequences: reserve, map, launch, commit, truncate, settle.

The order of one unit is Reserve (its permit) -> Launch (maps what it writes, freezes the rows) ->
Commit (frontiers move) or Abort -> Truncate (trailing mappings go back to the reservation) ->
Settle (that, and unused reservation goes back to everybody; a lease stays).

A sequence has at most two units in flight, so that the next one is launched before the results of
one are read. The newer writes from where the older ends and takes all of it for granted: units of a
row commit in launch order, are aborted newest first, and what the newer builds on commits whole.
Its launch may append blocks; nothing that is mapped changes until no unit is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from planner import kv, state_images
from planner.errors import BusyError, HandleError, IllegalError, ShortageError
from planner.kv import Pool
from planner.physical import MAX_FLIGHTS, Draft, Flight, PhysicalState, Sequence


class RowTokens(NamedTuple):
    """Tokens per pool that a sequence must be able to write: a lower bound of coverage (KV-25)."""

    sequence: int
    tokens: tuple[int, ...]


class RowCommit(NamedTuple):
    """Committed frontier per pool and state position of a row; unchanged for a cancelled row."""

    sequence: int
    frontiers: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Permit of one unit for a set of rows, atomic over rows and pools (UN-02)."""

    rows: tuple[RowTokens, ...]


@dataclass(frozen=True, slots=True)
class EnsureMapped:
    """Materialise pages up to a lower bound out of the sequence's reservation (KV-25)."""

    row: RowTokens


@dataclass(frozen=True, slots=True)
class Launch:
    """Map what each row writes and freeze rows, membership and frontiers to the unit's end.

    Where a unit is in flight on a row already, this one begins at the end of that.
    """

    rows: tuple[RowTokens, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """End a unit, the oldest of each of its rows: every row, once (UN-07).

    With ``settle``, also Settle the rows that have no further unit in flight.
    """

    unit: int
    rows: tuple[RowCommit, ...]
    settle: bool = False


@dataclass(frozen=True, slots=True)
class AbortUnit:
    """End a unit, the newest of each of its rows, without a result: its writes stay invisible."""

    unit: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Unmap blocks behind max(committed, tokens); leases return to the reservation (KV-28)."""

    row: RowTokens


@dataclass(frozen=True, slots=True)
class Settle:
    """End permits: the provisional suffix and unused reservation return to everybody (UN-03).

    What a lease (gp) or a recovery permit covers stays reserved.
    """

    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entitle:
    """Set the lease of a sequence: the explicit growth or shrink of a guarantee (GP-02, GP-03)."""

    row: RowTokens


def _index(s: PhysicalState, sid: int) -> int:
    """Place of a sequence that no transaction has frozen."""
    if s.transaction is not None and sid in s.transaction.frozen:
        raise BusyError(
            f"sequence {sid} is frozen by transaction {s.transaction.id}; wait for its end"
        )
    for i, q in enumerate(s.sequences):
        if q.id == sid:
            return i
    raise HandleError(f"sequence {sid} is not active; it ended or was paused")


def _indices(
    s: PhysicalState, rows: tuple[RowTokens, ...] | tuple[RowCommit, ...]
) -> Iterable[int]:
    """Places of the rows of a batch; a whole batch in order is recognised at once."""
    if s.transaction is None and [row[0] for row in rows] == [q.id for q in s.sequences]:
        return range(len(rows))
    return [_index(s, row[0]) for row in rows]


def _lookup(s: PhysicalState, sid: int) -> tuple[int, Sequence]:
    i = _index(s, sid)
    return i, s.sequences[i]


def _with(s: PhysicalState, sequences: list[Sequence], new_ids: int = 0) -> PhysicalState:
    """The state with other sequence records: what most decode steps change."""
    return PhysicalState(
        s.layout, s.pools, s.states, s.arena, s.checkpoints, tuple(sequences), s.transaction,
        s.result, s.revision, s.next_id + new_ids,
    )  # fmt: skip


def _blocks(pool: Pool, q: Sequence, k: int) -> int:
    h = pool.histories.get(q.histories[k])
    assert h is not None
    return h.blocks


def reserve(s: PhysicalState, op: Reserve) -> PhysicalState:
    """Withdraw what each row's unit may still need, for all rows or none; often nothing."""
    page_tokens, pools = s.layout.page_tokens, s.pools
    sequences = s.sequences
    wanted = [0] * len(pools)
    for sid, tokens in op.rows:
        i = _index(s, sid)
        q = sequences[i]
        old = reserved = q.reserved
        if len(tokens) != len(pools):
            raise IllegalError(f"sequence {sid}: {len(tokens)} token counts, {len(pools)} pools")
        for k, n in enumerate(tokens):
            blocks = (n + page_tokens - 1) // page_tokens
            if blocks <= (q.frontiers[k] + page_tokens - 1) // page_tokens:
                continue  # pages up to the frontier are always mapped (INV-14)
            more = blocks - _blocks(pools[k], q, k) - reserved[k]
            if more > 0:
                if blocks > s.layout.logical_pages:
                    raise IllegalError(
                        f"sequence {sid}: {n} tokens exceed max_context {s.layout.max_context}"
                    )
                wanted[k] += more
                reserved = (*reserved[:k], reserved[k] + more, *reserved[k + 1 :])
        if reserved is not old:
            q = Sequence._make((*q[:9], reserved, True, *q[11:]))
            sequences = (*sequences[:i], q, *sequences[i + 1 :])
    if sequences is s.sequences:
        return s
    gaps = tuple(
        (p.name, n - kv.available(p))
        for p, n in zip(pools, wanted, strict=True)
        if n > kv.available(p)
    )
    if gaps:
        raise ShortageError(
            f"units of {len(op.rows)} row(s) lack pages: {gaps}; reclaim or pause", gaps
        )
    d = Draft(s)
    d.sequences = sequences
    d.pools = [kv.reserve(p, n) for p, n in zip(pools, wanted, strict=True)]
    d.revision += 1
    return d.freeze()


def _map(d: Draft, q: Sequence, tokens: tuple[int, ...]) -> Sequence:
    page_tokens = d.layout.page_tokens
    for k, n in enumerate(tokens):
        pool = d.pools[k]
        more = (n + page_tokens - 1) // page_tokens - _blocks(pool, q, k)
        if more <= 0:
            continue
        if more > q.reserved[k]:
            raise IllegalError(
                f"sequence {q.id}, pool {pool.name}: {n} tokens need {more} more pages, "
                f"entitled to {q.reserved[k]}; reserve the unit first"
            )
        pool, ids = kv.materialize(pool, more)
        d.pools[k] = kv.append(pool, q.histories[k], ids)
        reserved = q.reserved
        q = q._replace(reserved=(*reserved[:k], reserved[k] - more, *reserved[k + 1 :]))
    return q


def ensure_mapped(s: PhysicalState, op: EnsureMapped) -> PhysicalState:
    """Membership of at least ``tokens``; more than that already is left alone (KV-25)."""
    _, q = _lookup(s, op.row.sequence)
    if q.unit:
        raise BusyError(f"sequence {q.id}: unit {q.unit} is in flight, its row is frozen (KV-33)")
    d = Draft(s)
    mapped = _map(d, q, op.row.tokens)
    if mapped is q:
        return s
    d.put_sequence(mapped)
    return d.freeze()


def launch(s: PhysicalState, op: Launch) -> PhysicalState:
    """Start a unit: every row must hold all pages that it writes, its permit (INV-09)."""
    d: Draft | None = None
    page_tokens = s.layout.page_tokens
    sequences = list(s.sequences)
    for i, (sid, tokens) in zip(_indices(s, op.rows), op.rows, strict=True):
        q = sequences[i]
        flights = q.flights
        if flights and (len(flights) == MAX_FLIGHTS or flights[-1].unit == s.next_id):
            raise BusyError(
                f"sequence {sid} cannot launch: {len(flights)} unit(s) are in flight, the last is "
                f"{flights[-1].unit}; commit first"
            )
        if q.source and s.transaction is not None:
            raise BusyError(
                f"sequence {sid} settles a fork with its first unit; transaction "
                f"{s.transaction.id} is open (ST-07)"
            )
        begin = q.end
        if len(tokens) != len(begin):
            raise IllegalError(f"sequence {sid}: {len(tokens)} token counts, not one per pool")
        provisional = tokens
        for n, f in zip(tokens, begin, strict=True):
            if n < f:
                provisional = tuple(map(max, tokens, begin))
            elif n > -f % page_tokens + f:  # beyond the tail page
                d = d or Draft(s)
                q = _map(d, q, tokens)
        flights = (*flights, Flight(s.next_id, provisional))
        sequences[i] = Sequence._make((*q[:11], flights, q.recovery))
    if not op.rows:
        raise IllegalError("a unit without rows")
    if d is None:
        return _with(s, sequences, 1)
    d.next_id += 1
    d.sequences = tuple(sequences)
    return d.freeze()


def _committed(q: Sequence, frontiers: tuple[int, ...], position: int) -> Sequence:
    """The row after its oldest unit, or IllegalError."""
    limits = q.flights[0].provisional
    newer = q.flights[1:]
    if frontiers != limits:  # else everything was accepted
        for before, new, limit in zip(q.frontiers, frontiers, limits, strict=True):
            if not before <= new <= limit:
                raise IllegalError(f"sequence {q.id}: frontier {new} is outside {before}..{limit}")
        if newer:
            raise IllegalError(
                f"sequence {q.id}: unit {newer[0].unit} builds on {limits}, so {frontiers} cannot "
                "be committed under it; abort it first"
            )
    if position < q.position:
        raise IllegalError(f"sequence {q.id}: a state never goes back ({position} < {q.position})")
    source = 0 if position > q.position else q.source
    if source and newer:
        raise IllegalError(
            f"sequence {q.id}: unit {newer[0].unit} reads the state that this first unit of a fork "
            "did not write (ST-07); abort it first"
        )
    recovery = -1 if position > q.recovery else q.recovery
    return Sequence._make((*q[:3], source, *q[4:7], frontiers, position, *q[9:11], newer, recovery))


def commit(s: PhysicalState, op: Commit) -> PhysicalState:
    """Move the frontiers of every row of a unit; a cancelled row repeats its old numbers."""
    d = Draft(s)
    sequences = list(s.sequences)
    members = sum([f[0] == op.unit for q in sequences for f in q.flights])
    if not members or members != len(op.rows):
        raise HandleError(f"unit {op.unit} has {members} rows, the commit names {len(op.rows)}")
    for i, (sid, frontiers, position) in zip(_indices(s, op.rows), op.rows, strict=True):
        before = sequences[i]
        flights = before.flights
        if not flights or flights[0].unit != op.unit:
            if flights and flights[-1].unit == op.unit:
                raise BusyError(
                    f"sequence {sid}: unit {op.unit} builds on {before.unit}; commit that first"
                )
            raise HandleError(f"sequence {sid} is in unit {before.unit}, not {op.unit}")
        q = _committed(before, frontiers, position)
        if before.source and not q.source:
            _settle_fork(d, before)
        ends = op.settle and len(flights) == 1 and (q.permit or any(q.lease))
        sequences[i] = _settle(d, q) if ends else q
    d.sequences = tuple(sequences)
    return d.freeze()


def _settle_fork(d: Draft, q: Sequence) -> None:
    """The first state write: the destination is content now, the source is let go (ST-07)."""
    im = state_images.image(d.states, q.image)
    d.states = state_images.put(d.states, im._replace(ready=True))
    d.states = state_images.pin(d.states, q.source, -1)
    d.states, extents = state_images.settle(d.states, q.source)
    d.free(extents)
    d.revision = d.start.revision + 1


def abort_unit(s: PhysicalState, op: AbortUnit) -> PhysicalState:
    """Roll all rows of a unit back; their permits stay for a retry."""
    sequences = list(s.sequences)
    members = [i for i, q in enumerate(sequences) for f in q.flights if f.unit == op.unit]
    if not members:
        raise HandleError(f"unit {op.unit} is not in flight")
    for i in members:
        q = sequences[i]
        if q.flights[-1].unit != op.unit:
            raise BusyError(
                f"sequence {q.id}: unit {q.flights[-1].unit} builds on {op.unit}; abort that first"
            )
        sequences[i] = q._replace(flights=q.flights[:-1])
    return _with(s, sequences)


def _truncate(d: Draft, q: Sequence, tokens: tuple[int, ...]) -> Sequence:
    page_tokens = d.layout.page_tokens
    for k, pool in enumerate(d.pools):
        blocks = (max(q.frontiers[k], tokens[k]) + page_tokens - 1) // page_tokens
        if _blocks(pool, q, k) <= blocks:
            continue
        pool, ids, extents = kv.cut(pool, q.histories[k], blocks)
        d.pools[k] = kv.dematerialize(pool, ids)
        d.free(extents)
        reserved = q.reserved
        q = q._replace(reserved=(*reserved[:k], reserved[k] + len(ids), *reserved[k + 1 :]))
    return q


def truncate(s: PhysicalState, op: Truncate) -> PhysicalState:
    """The only operation that shortens mappings, and never below the committed frontier (KV-29)."""
    _, q = _lookup(s, op.row.sequence)
    if q.unit:
        raise BusyError(f"sequence {q.id}: unit {q.unit} is in flight, mappings are frozen")
    d = Draft(s)
    d.put_sequence(_truncate(d, q, op.row.tokens))
    return d.freeze()


def _settle(d: Draft, q: Sequence) -> Sequence:
    """Trim to the committed frontier and give the unit's reservation back."""
    if q.recovery >= 0 or not (q.permit or any(q.lease)):
        return q  # without reservation nothing is mapped beyond the frontier (INV-11)
    q = _truncate(d, q, q.frontiers)
    if not q.permit:
        return q
    kept: list[int] = []
    for k, have in enumerate(q.reserved):
        keep = min(have, max(0, q.lease[k] - _blocks(d.pools[k], q, k)))
        if keep < have:
            d.pools[k] = kv.unreserve(d.pools[k], have - keep)
            d.revision = d.start.revision + 1
        kept.append(keep)
    return Sequence._make((*q[:9], tuple(kept), False, *q[11:]))


def entitle(s: PhysicalState, op: Entitle) -> PhysicalState:
    """Reserve up to the new lease, or return what it no longer covers; mapped pages stay."""
    i, q = _lookup(s, op.row.sequence)
    if q.unit:
        raise BusyError(f"sequence {q.id}: unit {q.unit} is in flight; commit or abort it first")
    d = Draft(s)
    lease = tuple(-(-n // s.layout.page_tokens) for n in op.row.tokens)
    if len(lease) != len(s.pools) or max(lease) > s.layout.logical_pages:
        raise IllegalError(f"sequence {q.id}: a lease of {op.row.tokens} tokens is not possible")
    wants = [
        max(0, n - _blocks(p, q, k) - q.reserved[k])
        for k, (p, n) in enumerate(zip(s.pools, lease, strict=True))
    ]
    d.pools = [kv.reserve(p, n) for p, n in zip(s.pools, wants, strict=True)]
    reserved = tuple(a + b for a, b in zip(q.reserved, wants, strict=True))
    q = _settle(d, q._replace(lease=lease, reserved=reserved, permit=True))
    if q.reserved != s.sequences[i].reserved:
        d.revision = s.revision + 1
    d.put_sequence(q)
    return d.freeze()


def settle(s: PhysicalState, op: Settle) -> PhysicalState:
    """End the permits of sequences; a recovery permit survives until its progress (PR-07)."""
    d = Draft(s)
    sequences = list(s.sequences)
    for sid in op.sequences:
        i, q = _lookup(s, sid)
        if q.unit:
            raise BusyError(f"sequence {sid}: unit {q.unit} is in flight; commit or abort it first")
        sequences[i] = _settle(d, q)
    d.sequences = tuple(sequences)
    return d.freeze()
