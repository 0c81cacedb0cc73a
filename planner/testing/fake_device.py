"""A device that executes only commands and keeps exact contents: it knows no planner state.

Every KV column and every state stands for one exact token prefix, so a place that holds anything
else than what a unit needs is found by the unit that reads it. Units run in the order given, by
the tables published before them. A transfer's destinations are poisoned when it is submitted, its
sources are read when it completes.

The "model" samples a number that depends on the exact prefix: a wrong state also gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from planner.capacity import Layout, ceil_div
from planner.physical import PhysicalState
from planner.plans import Copy
from planner.testing.replicas import Replica, replicas
from planner.testing.shadow import ContentError
from planner.world.commands import (
    Command,
    DecodeRow,
    PublishTable,
    RunDecode,
    RunPrefill,
    RunTransfer,
)

POISON: Final = -1
VOCABULARY: Final = 1000
_MASK: Final = 2**61 - 1


def _fold(digest: int, token: int) -> int:
    return ((digest + token + 1) * 0x9E3779B97F4A7C15 ^ (digest >> 29)) & _MASK


def next_token(tokens: Sequence[int]) -> int:
    """What the model samples after exactly these tokens."""
    digest = 0
    for token in tokens:
        digest = _fold(digest, token)
    return digest % VOCABULARY


def solo(prompt: Sequence[int], outputs: int) -> tuple[int, ...]:
    """The outputs of a request that runs alone: pure recursion over its own tokens."""
    tokens = list(prompt)
    for _ in range(outputs):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


class Prefixes:
    """Exact token prefixes as small numbers: 0 is the empty one, equal numbers mean equal tokens."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._nodes: list[tuple[int, int]] = [(0, 0)]  # parent, token
        self._digests = [0]

    def extend(self, prefix: int, token: int) -> int:
        """The prefix that is one token longer."""
        key = (prefix, token)
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = len(self._nodes)
            self._nodes.append(key)
            self._digests.append(_fold(self._digests[prefix], token))
        return found

    def sample(self, prefix: int) -> int:
        """`next_token` of the prefix."""
        return self._digests[prefix] % VOCABULARY

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The prefixes of length 0, 1, ..., all."""
        out = [0]
        for token in tokens:
            out.append(self.extend(out[-1], token))
        return out

    def words(self, prefix: int | None) -> str:
        """A prefix for an error message."""
        if prefix is None or prefix == POISON:
            return "nothing" if prefix is None else "poison"
        tokens: list[int] = []
        while prefix:
            prefix, token = self._nodes[prefix]
            tokens.append(token)
        shown = " ".join(map(str, reversed(tokens[:6])))
        return f"{len(tokens)} tokens (..{shown})" if tokens else "the empty prefix"


class Sampled(NamedTuple):
    """What a lane sampled last, and for whom."""

    request: int
    token: int


class FakeDevice:
    """Pages, slots, Host arena, block tables, and what each lane sampled last.

    A page is a list of its columns, a state one number; both hold prefixes (`Prefixes`).
    """

    def __init__(self, layout: Layout) -> None:
        self.prefixes = Prefixes()
        self._layout = layout
        self._pages: dict[int, list[int | None]] = {}
        self._slots: dict[int, int] = {}
        self._host: dict[int, tuple[int, list[int | None]]] = {}
        self._tables = [[0] * layout.logical_pages for _ in range(layout.concurrency)]
        self._sampled: dict[int, Sampled] = {}
        self._paths: dict[int, tuple[int, list[int]]] = {}
        self._identities: dict[bytes, list[int]] = {}
        self._transfers: dict[int, tuple[Copy, ...]] = {}
        self._results: dict[int, dict[int, int]] = {}

    def add(self, request: int, prompt: Sequence[int]) -> None:
        """Make a request's prompt known; commands name only positions of it."""
        self._paths[request] = (len(prompt), self.prefixes.path(prompt))

    def run(self, command: Command) -> None:
        """Execute an order; other commands are none for a device. ContentError where it reads what is not there."""
        match command:
            case PublishTable(lane, start, pages):
                blocks = len(self._tables[lane])
                if start + len(pages) > blocks:
                    raise ContentError(f"{command}: a table row has {blocks} blocks")
                row = [*self._tables[lane][:start], *pages]
                self._tables[lane] = row + [0] * (blocks - len(row))
            case RunTransfer(transaction, copies):
                self._transfers[transaction] = copies
                for c in copies:
                    self._place(c, None)
            case RunPrefill():
                self._prefill(command)
            case RunDecode():
                self._decode(command)

    def complete(self, transaction: int, ok: bool = True) -> None:
        """End a transfer: all its copies run now, or none of them."""
        for c in self._transfers.pop(transaction):
            if ok:
                self._place(c, self._source(c))

    def read(self, unit: int) -> dict[int, int]:
        """Request to sampled token of a unit; rows that sampled nothing are left out."""
        return self._results.pop(unit)

    # Units

    def _path(self, request: int, length: int) -> list[int]:
        """Prefixes of a request of length 0..``length``; past the prompt it goes as `solo` says."""
        path = self._paths[request][1]
        while len(path) <= length:
            path.append(self.prefixes.extend(path[-1], self.prefixes.sample(path[-1])))
        return path

    def _require_read(
        self, what: str, request: int, lane: int, position: int, slot: int
    ) -> list[int]:
        """The path of a request, whose first ``position`` tokens state and table must hold."""
        path = self._path(request, position + 1)
        self._expect(self._slots.get(slot), path[position], f"{what} reads slot {slot}")
        P = self._layout.page_tokens
        for block in range(ceil_div(position, P)):
            lo, hi = block * P, min(position, block * P + P)
            page = self._tables[lane][block]
            self._columns(self._pages.get(page, []), path[lo + 1 : hi + 1], what, f"page {page}")
        return path

    def _write(self, what: str, lane: int, path: list[int], lo: int, hi: int, slot: int) -> None:
        P = self._layout.page_tokens
        for p in range(lo, hi):
            page = self._tables[lane][p // P]
            if not page:
                raise ContentError(f"{what} writes position {p}, which is not mapped")
            self._pages.setdefault(page, [None] * P)[p % P] = path[p + 1]
        if not slot:
            raise ContentError(f"{what} writes slot 0")
        self._slots[slot] = path[hi]

    def _prefill(self, c: RunPrefill) -> None:
        what = f"prefill unit {c.unit} of request {c.request}"
        end = c.start + c.length
        if c.length < 1 or end > self._paths[c.request][0] - 1:
            raise ContentError(f"{what}: tokens {c.start}..{end} are not all prompt but its last")
        self._require_read(what, c.request, c.lane, c.start, c.read_slot)
        path = self._path(c.request, end)
        self._write(what, c.lane, path, c.start, end, c.write_slot)
        self._results[c.unit] = {}

    def _decode(self, c: RunDecode) -> None:
        results: dict[int, int] = {}
        lanes = [row.lane for row in c.rows]
        if len(set(lanes)) != len(lanes) or not lanes:
            raise ContentError(f"decode unit {c.unit} runs lanes {lanes}")
        for row in c.rows:
            what = f"decode unit {c.unit}, request {row.request} at {row.position}"
            path = self._require_read(what, row.request, row.lane, row.position, row.read_slot)
            found = self.prefixes.extend(path[row.position], self._input(what, row))
            self._expect(found, path[row.position + 1], f"{what} has as input")
            self._write(what, row.lane, path, row.position, row.position + 1, row.write_slot)
            if not row.replay:
                token = self.prefixes.sample(found)
                self._sampled[row.lane] = Sampled(row.request, token)
                results[row.request] = token
        self._results[c.unit] = results

    def _input(self, what: str, row: DecodeRow) -> int:
        if row.token >= 0:
            return row.token
        last = self._sampled.get(row.lane)
        if last is None or last.request != row.request:
            raise ContentError(f"{what}: lane {row.lane} sampled nothing for it, but {last}")
        return last.token

    # Copies

    def _source(self, c: Copy) -> list[int | None]:
        if c.direction == "init":
            return [0]
        if c.direction == "h2d":
            found = self._host.get(c.source, (0, []))[1]
        elif c.kind == "image":
            found = [self._slots.get(c.source)]
        else:
            found = self._pages.get(c.source, [])
        need = found[: 1 if c.kind == "image" else c.columns]
        if len(need) < (c.columns or 1) or None in need or POISON in need:
            raise ContentError(f"{c} reads {[self.prefixes.words(n) for n in need]}")
        return need

    def _place(self, c: Copy, value: list[int | None] | None) -> None:
        """Put what a copy brings; None is poison."""
        if c.pool > 0:
            raise ContentError(f"{c}: this device has one pool")
        width = 1 if c.kind == "image" else self._layout.page_tokens
        cells: list[int | None] = [POISON] * width
        if value is not None:
            cells = [*value, *[None] * (width - len(value))]
        if c.direction == "d2h":
            size = self._layout.image_bytes if width == 1 else self._layout.pools[0].page_bytes
            end = c.destination + size
            if not 0 <= c.destination <= end <= self._layout.host_bytes:
                raise ContentError(f"{c} lies outside the Host arena")
            for offset, (length, _) in list(self._host.items()):
                if offset < end and c.destination < offset + length:
                    del self._host[offset]
            self._host[c.destination] = (size, cells)
        elif c.kind == "image":
            self._slots[c.destination] = cells[0] if cells[0] is not None else POISON
        else:
            self._pages[c.destination] = cells

    # Verification

    def verify(self, s: PhysicalState) -> None:
        """Every replica the state calls valid holds exactly the tokens of its identity (INV-05)."""
        for ck in s.checkpoints.values():
            path = self._identities.get(ck.identity.tokens)
            if path is None:
                tokens = np.frombuffer(ck.identity.tokens, "<i4").tolist()
                path = self._identities[ck.identity.tokens] = self.prefixes.path(tokens)
            for r in replicas(s, ck):
                self._verify_replica(r, path)

    def _verify_replica(self, r: Replica, path: list[int]) -> None:
        held: list[int | None]
        if r.host:
            held = self._host.get(r.place, (0, []))[1]
        elif r.kind == "image":
            held = [self._slots.get(r.place)]
        else:
            held = self._pages.get(r.place, [])
        want = path[r.hi : r.hi + 1] if r.kind == "image" else path[r.lo + 1 : r.hi + 1]
        if held[: len(want)] != want:
            self._columns(held, want, str(r), "it")

    def _columns(self, held: Sequence[int | None], want: list[int], what: str, where: str) -> None:
        if held[: len(want)] == want:
            return
        for i, prefix in enumerate(want):
            found = held[i] if i < len(held) else None
            self._expect(found, prefix, f"{what}: column {i} of {where}")

    def _expect(self, found: int | None, want: int, what: str) -> None:
        if found != want:
            words = self.prefixes.words
            raise ContentError(f"{what}: {words(found)}, should be {words(want)}")
