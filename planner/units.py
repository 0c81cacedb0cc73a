"""Bounded model steps on active sequences: reserve, map, launch, commit, truncate, settle.

The order of one unit is Reserve (its permit) -> Launch (maps what it writes, freezes the rows) ->
Commit (frontiers move) or Abort -> Truncate (trailing mappings go back to the reservation) ->
Settle (that, and unused reservation goes back to everybody; a lease stays). A sequence has at most
one unit in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planner import kv, state_images
from planner.capacity import ceil_div
from planner.errors import BusyError, HandleError, IllegalError, ShortageError
from planner.kv import Pool
from planner.physical import Draft, PhysicalState, Sequence


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
    """Map what each row writes and freeze rows, membership and frontiers to the unit's end."""

    rows: tuple[RowTokens, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """End a unit: every row of it, once (UN-07). With ``settle``, also Settle."""

    unit: int
    rows: tuple[RowCommit, ...]
    settle: bool = False


@dataclass(frozen=True, slots=True)
class AbortUnit:
    """End a unit without a result: no frontier moves, what it wrote stays invisible."""

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


def _lookup(s: PhysicalState, sid: int) -> tuple[int, Sequence]:
    """Index and record of a sequence that no transaction has frozen."""
    for i, q in enumerate(s.sequences):
        if q.id == sid:
            if s.transaction is not None and sid in s.transaction.frozen:
                raise BusyError(
                    f"sequence {sid} is frozen by transaction {s.transaction.id}; wait for its end"
                )
            return i, q
    raise HandleError(f"sequence {sid} is not active; it ended or was paused")


def _blocks(pool: Pool, q: Sequence, i: int) -> int:
    h = pool.histories.get(q.histories[i])
    assert h is not None
    return h.blocks


def reserve(s: PhysicalState, op: Reserve) -> PhysicalState:
    """Withdraw what each row's unit may need and mark its permit; all rows or none."""
    page_tokens = s.layout.page_tokens
    sequences = list(s.sequences)
    wanted = [0] * len(s.pools)
    for sid, tokens in op.rows:
        i, _ = _lookup(s, sid)
        q = sequences[i]
        grown = None
        for k, n in enumerate(tokens):
            blocks = ceil_div(n, page_tokens)
            more = blocks - _blocks(s.pools[k], q, k) - q.reserved[k]
            if more <= 0:
                continue
            if blocks > s.layout.logical_pages:
                raise IllegalError(
                    f"sequence {sid}: {n} tokens exceed max_context {s.layout.max_context}"
                )
            wanted[k] += more
            grown = grown or list(q.reserved)
            grown[k] += more
        if grown or not q.permit:
            sequences[i] = q._replace(permit=True, reserved=tuple(grown) if grown else q.reserved)
    gaps = tuple(
        (p.name, n - kv.available(p))
        for p, n in zip(s.pools, wanted, strict=True)
        if n > kv.available(p)
    )
    if gaps:
        raise ShortageError(
            f"units of {len(op.rows)} row(s) lack pages: {gaps}; reclaim or pause", gaps
        )
    d = Draft(s)
    d.sequences = tuple(sequences)
    if any(wanted):
        d.pools = [kv.reserve(p, n) for p, n in zip(s.pools, wanted, strict=True)]
        d.revision += 1
    return d.freeze()


def _map(d: Draft, q: Sequence, tokens: tuple[int, ...]) -> Sequence:
    page_tokens = d.layout.page_tokens
    for k, n in enumerate(tokens):
        pool = d.pools[k]
        more = ceil_div(n, page_tokens) - _blocks(pool, q, k)
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
    """Start a unit: every row needs a permit that covers what it writes (INV-09)."""
    d = Draft(s)
    unit = d.new_id()
    sequences = list(s.sequences)
    for sid, tokens in op.rows:
        i, _ = _lookup(s, sid)
        q = sequences[i]
        if q.unit or not q.permit:
            why = f"unit {q.unit} is in flight" if q.unit else "it holds no permit; reserve first"
            raise BusyError(f"sequence {sid} cannot launch: {why}")
        if q.source and s.transaction is not None:
            raise BusyError(
                f"sequence {sid} settles a fork with its first unit; transaction "
                f"{s.transaction.id} is open (ST-07)"
            )
        q = _map(d, q, tokens)
        sequences[i] = q._replace(unit=unit, provisional=tuple(map(max, tokens, q.frontiers)))
    if not op.rows:
        raise IllegalError("a unit without rows")
    d.sequences = tuple(sequences)
    return d.freeze()


def commit(s: PhysicalState, op: Commit) -> PhysicalState:
    """Move the frontiers of every row of a unit; a cancelled row repeats its old numbers."""
    sequences = list(s.sequences)
    members = sum(q.unit == op.unit for q in sequences)
    if not members or members != len(op.rows):
        raise HandleError(f"unit {op.unit} has {members} rows, the commit names {len(op.rows)}")
    forks: list[int] = []
    for sid, frontiers, position in op.rows:
        i, _ = _lookup(s, sid)
        q = sequences[i]
        if q.unit != op.unit:
            raise HandleError(f"sequence {sid} is in unit {q.unit}, not {op.unit}")
        for before, new, limit in zip(q.frontiers, frontiers, q.provisional, strict=True):
            if not before <= new <= limit:
                raise IllegalError(f"sequence {sid}: frontier {new} is outside {before}..{limit}")
        if position < q.position:
            raise IllegalError(
                f"sequence {sid}: a state never goes back ({position} < {q.position})"
            )
        source = q.source
        if source and position > q.position:
            forks.append(i)
            source = 0
        sequences[i] = Sequence(
            q.id, q.owner, q.image, source, q.histories, q.rows, frontiers, position,
            q.reserved, q.lease, q.permit, 0, (), -1 if position > q.recovery else q.recovery,
        )  # fmt: skip
    if not forks and not op.settle:
        return _with_sequences(s, sequences)
    d = Draft(s)
    for i in forks:
        old = s.sequences[i]
        im = state_images.image(d.states, old.image)
        d.states = state_images.put(d.states, im._replace(ready=True))
        d.states = state_images.pin(d.states, old.source, -1)
        d.states, extents = state_images.settle(d.states, old.source)
        d.free(extents)
    if forks:
        d.revision += 1
    if op.settle:
        for sid, _, _ in op.rows:
            i, _ = _lookup(s, sid)
            sequences[i] = _settle(d, sequences[i])
    d.sequences = tuple(sequences)
    return d.freeze()


def _with_sequences(s: PhysicalState, sequences: list[Sequence]) -> PhysicalState:
    d = Draft(s)
    d.sequences = tuple(sequences)
    return d.freeze()


def abort_unit(s: PhysicalState, op: AbortUnit) -> PhysicalState:
    """Roll all rows of a unit back; their permits stay for a retry."""
    members = [q for q in s.sequences if q.unit == op.unit]
    if not members or not op.unit:
        raise HandleError(f"unit {op.unit} is not in flight")
    return _with_sequences(
        s, [q._replace(unit=0, provisional=()) if q.unit == op.unit else q for q in s.sequences]
    )


def _truncate(d: Draft, q: Sequence, tokens: tuple[int, ...]) -> Sequence:
    page_tokens = d.layout.page_tokens
    for k, pool in enumerate(d.pools):
        end = max(q.frontiers[k], tokens[k]) if tokens else q.frontiers[k]
        blocks = ceil_div(end, page_tokens)
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
    if q.recovery >= 0:
        return q
    q = _truncate(d, q, ())
    kept: list[int] = []
    for k, have in enumerate(q.reserved):
        keep = 0
        if have:
            keep = min(have, max(0, q.lease[k] - _blocks(d.pools[k], q, k)))
            if keep < have:
                d.pools[k] = kv.unreserve(d.pools[k], have - keep)
                d.revision = d.start.revision + 1
        kept.append(keep)
    return q._replace(permit=False, reserved=tuple(kept))


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
