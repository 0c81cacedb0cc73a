"""Zero-stage transitions: finish, discard, release, retain, reader leases (TX-17).

They need no new capacity, follow the same serialisation as transactions (none may be open) and
give the same absolute result.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner import captures, state_images
from planner.checkpoints import Identity
from planner.errors import BusyError, HandleError
from planner.physical import Draft, PhysicalState, Result, sequence
from planner.plans import Edge


@dataclass(frozen=True, slots=True)
class Finish:
    """Freeze a sequence to a checkpoint of ``owner``: main, backend and state together (KV-31)."""

    sequence: int
    owner: int
    identity: Identity
    next_input: int = -1


@dataclass(frozen=True, slots=True)
class Discard:
    """End a sequence and keep nothing of it."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Release:
    """Owners let go of checkpoints."""

    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Retain:
    """One more owner (shared entry, waiter) holds a checkpoint; nothing is copied."""

    checkpoint: int
    owner: int


@dataclass(frozen=True, slots=True)
class LeaseReader:
    """Protect a checkpoint and its replicas while something reads them (CK-11)."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class EndReader:
    """The reader is done."""

    checkpoint: int


def _draft(s: PhysicalState, what: str) -> Draft:
    if s.transaction is not None:
        raise BusyError(f"{what}: transaction {s.transaction.id} is open; retry at its end (TX-17)")
    return Draft(s)


def finish(s: PhysicalState, op: Finish) -> PhysicalState:
    """Publish the endpoint; raises where the state stands elsewhere than the identity."""
    d = _draft(s, "finish")
    q = captures.require_settled(d, op.sequence, op.identity)
    cid = captures.freeze_sequence(d, q, op.owner, op.identity, op.next_input)
    d.finish(Result(0, "finish", "committed", published=cid))
    return d.freeze()


def discard(s: PhysicalState, op: Discard) -> PhysicalState:
    """Free everything that only this sequence held."""
    d = _draft(s, "discard")
    q = sequence(d, op.sequence)
    if q.unit:
        raise BusyError(f"sequence {q.id}: unit {q.unit} is in flight; abort it first")
    captures.leave(d, q)
    im = state_images.image(d.states, q.image)
    d.states = state_images.put(d.states, im._replace(writer=0))
    d.states, extents = state_images.settle(d.states, q.image)
    d.free(extents)
    if q.source:
        d.states = state_images.pin(d.states, q.source, -1)
        d.states, extents = state_images.settle(d.states, q.source)
        d.free(extents)
    d.finish(Result(0, "discard", "committed"))
    return d.freeze()


def release(s: PhysicalState, op: Release) -> PhysicalState:
    """Drop owner edges in order; last references free their content."""
    d = _draft(s, "release")
    for owner, cid in op.edges:
        d.drop_edge(owner, cid)
    d.finish(Result(0, "release", "committed"))
    return d.freeze()


def retain(s: PhysicalState, op: Retain) -> PhysicalState:
    """Add an owner edge."""
    d = _draft(s, "retain")
    ck = d.checkpoint(op.checkpoint)
    if op.owner in ck.holders:
        raise HandleError(f"owner {op.owner} already holds checkpoint {ck.id}")
    holders = tuple(sorted((*ck.holders, op.owner)))
    d.checkpoints = d.checkpoints.put(ck._replace(holders=holders))
    d.touched.add(op.owner)
    d.finish(Result(0, "retain", "committed"))
    return d.freeze()


def lease_reader(s: PhysicalState, op: LeaseReader) -> PhysicalState:
    """Add a reader lease; it also pins the image in its place."""
    return _readers(s, op.checkpoint, +1)


def end_reader(s: PhysicalState, op: EndReader) -> PhysicalState:
    """Remove a reader lease."""
    return _readers(s, op.checkpoint, -1)


def _readers(s: PhysicalState, cid: int, delta: int) -> PhysicalState:
    d = _draft(s, "reader lease")
    ck = d.checkpoint(cid)
    if ck.readers + delta < 0:
        raise HandleError(f"checkpoint {cid} has no reader lease to end")
    d.checkpoints = d.checkpoints.put(ck._replace(readers=ck.readers + delta))
    d.revision += 1
    return d.freeze()
