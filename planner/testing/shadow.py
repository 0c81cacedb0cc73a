"""A model of the device and Host memory: which exact tokens every column really holds.

It executes only orders a runtime would get (block tables, copy batches, slots) and never reads the
planner's references, coverage or reservations. Every cell a sequence writes carries a token that
no other sequence could have written, so a read of stale, foreign or half-written content shows.
A unit reads and writes at its launch, as `unit_arrays` says; until its commit the tokens it wrote
are negative, and so is the unit's number at the end of the state. Destinations are poisoned when a
copy is submitted and sources are read when it completes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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


class Running(NamedTuple):
    """A row of a unit in flight: table and span per pool, its slot, the state it began with."""

    unit: int
    tables: tuple[tuple[int, ...], ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    slot: int
    state: Cells | None

    def written(self) -> Cells:
        """The state that the next unit reads."""
        return (*(self.state or ()), -self.unit)


class Shadow:
    """Contents of pages, slots and Host; committed tokens and units of every active sequence."""

    def __init__(self, pools: int) -> None:
        self.pages: list[dict[int, Cells]] = [{} for _ in range(pools)]
        self.slots: dict[int, Cells | None] = {}
        self.host: dict[int, Cells | None] = {}
        self.ledger: dict[int, Cells] = {}
        self.units: dict[int, tuple[Running, ...]] = {}

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
            self._launch(after, before.next_id)
        elif isinstance(op, units.Commit):
            for commit in op.rows:
                self._commit(before, physical.sequence(before, commit.sequence), commit)
        elif isinstance(op, units.AbortUnit):
            for q in before.sequences:
                if any(r.unit == op.unit for r in self.units.get(q.id, ())):
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

    def _launch(self, s: PhysicalState, unit: int) -> None:
        rows = physical.unit_arrays(s, unit)
        for b, sid in enumerate(rows.sequences.tolist()):
            q = physical.sequence(s, sid)
            self.verify_sequence(s, q)
            before = self.units.get(sid, ())
            tables, read = self._tables(s, q), int(rows.read_slots[b])
            begin, end = tuple(rows.frontiers[:, b].tolist()), tuple(rows.write_to[:, b].tolist())
            if (begin, read) != self._next(s, q):
                raise ContentError(f"unit {unit}: sequence {sid} begins at {begin}, slot {read}")
            run = Running(unit, tables, begin, end, int(rows.write_slots[b]), self.slots.get(read))
            for k, table in enumerate(tables):
                new = tuple(-token(sid, p) for p in range(begin[k], end[k]))
                self._write(k, table, s.layout.page_tokens, begin[k], new)
            self.slots[run.slot] = run.written()
            self.units[sid] = (*before, run)

    def _next(self, s: PhysicalState, q: Sequence) -> tuple[tuple[int, ...], int]:
        """Where the next unit of a sequence begins to write, and the slot it reads (ST-08)."""
        running = self.units.get(q.id, ())
        if running:
            return running[-1].end, running[-1].slot
        im = s.states.images.get(q.source or q.image)
        assert im is not None
        return q.frontiers, im.slot

    def _end(
        self, s: PhysicalState, q: Sequence, index: int
    ) -> tuple[Running, tuple[Running, ...]]:
        """Take a unit's row out of flight: (it, what still runs)."""
        running = list(self.units.pop(q.id))
        run = running.pop(index)
        if running:
            self.units[q.id] = tuple(running)
        for old, new in zip(run.tables, self._tables(s, q), strict=True):
            if any(a != b for a, b in zip(old, new, strict=True) if a):
                raise ContentError(f"sequence {q.id}: its table rows changed under a unit")
        return run, tuple(running)

    def _commit(self, s: PhysicalState, q: Sequence, c: units.RowCommit) -> None:
        run, newer = self._end(s, q, 0)
        ledger = self.ledger[q.id]
        end = max(c.position, *c.frontiers)
        ledger += tuple(token(q.id, p) for p in range(len(ledger), end))
        self.ledger[q.id] = ledger
        for k, table in enumerate(run.tables):
            new = ledger[run.begin[k] : c.frontiers[k]]
            rejected = (GARBAGE,) * (run.end[k] - c.frontiers[k])
            self._write(k, table, s.layout.page_tokens, run.begin[k], new + rejected)
        old = run.state or ()
        state: Cells | None = old + ledger[len(old) : c.position]
        if q.source and c.position == q.position:
            state = None  # a fork that has no state of its own yet
        if newer:
            self.units[q.id] = (newer[0]._replace(state=state),)
            state = self.units[q.id][0].written()
        self.slots[run.slot] = state

    def _abort(self, s: PhysicalState, q: Sequence) -> None:
        run, older = self._end(s, q, -1)
        for k, table in enumerate(run.tables):
            rejected = (GARBAGE,) * (run.end[k] - run.begin[k])
            self._write(k, table, s.layout.page_tokens, run.begin[k], rejected)
        self.slots[run.slot] = run.state if older or not q.source else None

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
        """What the next unit of ``q`` would read now, with what units in flight wrote."""
        ledger, running = self.ledger[q.id], self.units.get(q.id, ())
        width = s.layout.page_tokens
        ends, slot = self._next(s, q)
        for k, table in enumerate(self._tables(s, q)):
            committed = q.frontiers[k]
            want = ledger[:committed] + tuple(-token(q.id, p) for p in range(committed, ends[k]))
            for b in range(ceil_div(ends[k], width)):
                cells = want[b * width : (b + 1) * width]
                got = self.pages[k].get(table[b], ())[: len(cells)]
                self._expect(got, cells, f"sequence {q.id}, pool {k} block {b} page {table[b]}")
        state = running[-1].written() if running else ledger[: q.position]
        self._expect(self.slots.get(slot), state, f"sequence {q.id}, slot {slot}")

    @staticmethod
    def _expect(got: Cells | None, want: Cells, where: str) -> None:
        if got != want:
            raise ContentError(f"{where} holds {got}, should hold {want}")
