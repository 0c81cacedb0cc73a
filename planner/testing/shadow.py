"""A model of the device and Host memory: which exact tokens every column really holds.

It executes only orders a runtime would get (block tables, copy batches, slots) and never reads the
planner's references, coverage or reservations. Every cell a sequence writes carries a token that
no other sequence could have written, so a read of stale, foreign or half-written content shows.
Destinations are poisoned when a copy is submitted and sources are read when it completes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from planner import physical, retention, transactions, units
from planner.capacity import ceil_div
from planner.checkpoints import Identity, identity
from planner.operations import Operation
from planner.physical import PhysicalState, Sequence
from planner.plans import Bind, Copy
from planner.testing.replicas import Replica, replicas

GARBAGE: Final = -1
Cells = tuple[int, ...]


class ContentError(AssertionError):
    """A place holds other tokens than the state says."""


def token(sequence: int, position: int) -> int:
    """The token that a sequence writes at a position: unique over sequences and positions."""
    return sequence * 64 + position % 64 + 1


class Shadow:
    """Contents of pages, slots and Host, and the committed tokens of every active sequence."""

    def __init__(self, pools: int) -> None:
        self.pages: list[dict[int, Cells]] = [{} for _ in range(pools)]
        self.slots: dict[int, Cells | None] = {}
        self.host: dict[int, Cells | None] = {}
        self.ledger: dict[int, Cells] = {}
        self.units: dict[int, tuple[tuple[tuple[int, ...], ...], Cells]] = {}

    def copy(self) -> Shadow:
        """An independent copy; the cells themselves are immutable."""
        other = Shadow(0)
        other.pages = [dict(p) for p in self.pages]
        other.slots, other.host = dict(self.slots), dict(self.host)
        other.ledger, other.units = dict(self.ledger), dict(self.units)
        return other

    def tokens(self, q: Sequence) -> Cells:
        """Committed tokens of a sequence."""
        return self.ledger[q.id]

    def identity(self, q: Sequence) -> Identity:
        """What a sequence may be published under."""
        return identity(self.ledger[q.id][: q.position])

    # One operation

    def step(self, before: PhysicalState, op: Operation, after: PhysicalState) -> None:
        """Do on the device what ``op`` orders."""
        if isinstance(op, units.Launch):
            for row in op.rows:
                self._launch(after, physical.sequence(after, row.sequence))
        elif isinstance(op, units.Commit):
            for commit in op.rows:
                self._commit(before, physical.sequence(before, commit.sequence), commit)
        elif isinstance(op, units.AbortUnit):
            for q in before.sequences:
                if q.unit == op.unit:
                    self._abort(before, q)
        elif isinstance(op, transactions.Advance):
            self._advance(before, after)
        if isinstance(op, retention.Discard | retention.Finish):
            del self.ledger[op.sequence]
        for sid in [sid for sid in self.ledger if all(q.id != sid for q in after.sequences)]:
            del self.ledger[sid]  # paused

    def _tables(self, s: PhysicalState, q: Sequence) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(physical.block_table(s, k)[:, q.rows[k]].tolist()) for k in range(len(s.pools))
        )

    def _cells(self, k: int, page: int, width: int) -> list[int]:
        return list(self.pages[k].get(page, (GARBAGE,) * width))

    def _write(self, k: int, table: tuple[int, ...], width: int, lo: int, values: Cells) -> None:
        for i, value in enumerate(values):
            page, offset = table[(lo + i) // width], (lo + i) % width
            if not page:
                raise ContentError(f"pool {k}: position {lo + i} is written but not mapped")
            cells = self._cells(k, page, width)
            cells[offset] = value
            self.pages[k][page] = tuple(cells)

    def _launch(self, s: PhysicalState, q: Sequence) -> None:
        tables = self._tables(s, q)
        self.verify_sequence(s, q)
        read = s.states.images.get(q.source or q.image)
        write = s.states.images.get(q.image)
        assert read is not None
        assert write is not None
        for k, table in enumerate(tables):
            span = q.provisional[k] - q.frontiers[k]
            self._write(k, table, s.layout.page_tokens, q.frontiers[k], (GARBAGE,) * span)
        self.units[q.id] = (tables, self.slots[read.slot] or ())
        self.slots[write.slot] = None

    def _commit(self, s: PhysicalState, q: Sequence, c: units.RowCommit) -> None:
        tables, old = self.units.pop(q.id)
        if tables != self._tables(s, q):
            raise ContentError(f"sequence {q.id}: its table rows changed under a unit")
        ledger = self.ledger[q.id]
        end = max(c.position, *c.frontiers)
        ledger += tuple(token(q.id, p) for p in range(len(ledger), end))
        self.ledger[q.id] = ledger
        for k, table in enumerate(tables):
            new = ledger[q.frontiers[k] : c.frontiers[k]]
            self._write(k, table, s.layout.page_tokens, q.frontiers[k], new)
        image = s.states.images.get(q.image)
        assert image is not None
        if c.position > q.position or not q.source:
            self.slots[image.slot] = old + ledger[len(old) : c.position]

    def _abort(self, s: PhysicalState, q: Sequence) -> None:
        _, old = self.units.pop(q.id)
        image = s.states.images.get(q.image)
        assert image is not None
        self.slots[image.slot] = None if q.source else old

    def _advance(self, before: PhysicalState, after: PhysicalState) -> None:
        t = before.transaction
        assert t is not None
        if t.phase == "CopyPreparation" and after.transaction is not None:
            for c in after.transaction.work.copies:
                self._place(before, c, None)
        if t.phase == "CopiesInFlight":
            for c in t.work.copies:
                self._place(before, c, self._read(c))
        if after.transaction is None and after.result and after.result.sequence:
            action = t.plan.target.action
            assert isinstance(action, Bind)
            source = before.checkpoints.get(action.source)
            tokens = np.frombuffer(source.identity.tokens, "<i4").tolist() if source else []
            ledger = tuple(tokens)
            q = physical.sequence(after, after.result.sequence)
            prompt = np.frombuffer(action.prompt.tokens, "<i4").tolist()
            self.ledger[q.id] = ledger + tuple(prompt[len(ledger) : max(q.frontiers)])

    def _read(self, c: Copy) -> Cells | None:
        if c.direction == "init":
            return ()
        if c.direction == "h2d":
            return self.host.get(c.source)
        return self.slots.get(c.source) if c.kind == "image" else self.pages[c.pool].get(c.source)

    def _place(self, s: PhysicalState, c: Copy, value: Cells | None) -> None:
        if c.direction == "d2h":
            self.host[c.destination] = value
        elif c.kind == "image":
            self.slots[c.destination] = value
        else:
            width = s.layout.page_tokens
            self.pages[c.pool][c.destination] = value or (GARBAGE,) * width

    # Verification

    def verify(self, s: PhysicalState) -> None:
        """Every replica the state calls valid holds exactly the tokens of its identity."""
        for q in s.sequences:
            if not q.unit:
                self.verify_sequence(s, q)
        for ck in s.checkpoints.values():
            tokens = tuple(np.frombuffer(ck.identity.tokens, "<i4").tolist())
            for r in replicas(s, ck):
                self._expect(self._held(r), tokens[r.lo : r.hi], str(r))

    def _held(self, r: Replica) -> Cells | None:
        if r.kind == "image":
            return self.host.get(r.place) if r.host else self.slots.get(r.place)
        cells = self.host.get(r.place) if r.host else self.pages[r.pool].get(r.place)
        return (cells or ())[: r.hi - r.lo]

    def verify_sequence(self, s: PhysicalState, q: Sequence) -> None:
        """What a unit of ``q`` would read now."""
        ledger = self.ledger[q.id]
        width = s.layout.page_tokens
        for k, table in enumerate(self._tables(s, q)):
            for b in range(ceil_div(q.frontiers[k], width)):
                want = ledger[b * width : min(q.frontiers[k], (b + 1) * width)]
                got = self.pages[k].get(table[b], ())[: len(want)]
                self._expect(got, want, f"sequence {q.id}, pool {k} block {b} page {table[b]}")
        im = s.states.images.get(q.source or q.image)
        assert im is not None
        got_state = self.slots.get(im.slot)
        self._expect(got_state, ledger[: q.position], f"sequence {q.id}, slot {im.slot}")

    @staticmethod
    def _expect(got: Cells | None, want: Cells, where: str) -> None:
        if got != want:
            raise ContentError(f"{where} holds {got}, should hold {want}")
