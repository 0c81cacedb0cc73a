"""One scoring job: which rows run in which unit, on which temporary pages and slots. Serial; no scheduler (SC-01)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_jax.config import PAGE_TOKENS
from ninfer_jax.scoring.core import MAX_ROWS, Scored, ScorePlan, Shapes
from ninfer_jax.scoring.windows import Group, Span, bucket_of, grouped, waves

Launch = Callable[[int, ScorePlan], Scored]
"""Run the unit of a bucket on the job's state; the results stay on the device."""
_IN_FLIGHT = 4
"""Units launched before the first of them is read."""


@dataclass
class _Row:
    """A sequence, or a context, on its way."""

    tokens: np.ndarray
    """int32: what is left to run ..."""
    targets: np.ndarray
    """... and the token after each, -1 where it is not scored."""
    position: int
    table: np.ndarray
    pages: list[int]
    """Its own, to be given back."""
    read_slot: int
    write_slot: int
    copied: tuple[int, int] = (0, 0)
    logprobs: np.ndarray | None = None
    """Where results go, with `greedy`: one entry a token left at the start; None for a context."""
    greedy: np.ndarray | None = None
    done: int = 0


@dataclass(frozen=True)
class Result:
    """Results of one sequence, of its tokens from the first scored one on."""

    logprobs: np.ndarray
    """float32"""
    greedy: np.ndarray
    """bool"""


class Job:
    """Runs sequences and gathers their results.

    Contexts live in slots 1..R and rows in R+1..2R (R = `MAX_ROWS`), each on pages of its own. A row of a shared
    context reads the context's image and whole pages, and a copy of the page in which the context ends.
    """

    def __init__(self, shapes: Shapes, launch: Launch) -> None:
        self._shapes = shapes
        self._launch = launch
        self._free = list(range(shapes.pages, 0, -1))
        self._flights: deque[tuple[Scored, list[tuple[_Row, int, int]]]] = deque()
        self.computed = 0
        """Tokens run, padding not counted."""

    def run(
        self, spans: Sequence[Span], progress: Callable[[int], None], *, share: bool = True
    ) -> list[Result]:
        """Score every sequence; results in the order of the sequences.

        Args:
          spans: sequences whose inputs fit the shapes.
          progress: told how many sequences have ended since it was last told.
          share: see `windows.grouped`.
        """
        results: dict[int, Result] = {}
        for wave in waves(
            grouped(spans, share=share), spans, rows=MAX_ROWS, pages=self._shapes.pages
        ):
            contexts = [self._context(group, slot) for slot, group in enumerate(wave, 1)]
            self._advance([row for row in contexts if len(row.tokens)])
            waiting = deque(
                sorted(
                    (
                        (i, c)
                        for group, c in zip(wave, contexts, strict=True)
                        for i in group.members
                    ),
                    key=lambda member: spans[member[0]].inputs - spans[member[0]].branch,
                )
            )
            while waiting:
                rows: dict[int, _Row] = {}
                while (
                    waiting
                    and len(rows) < MAX_ROWS
                    and spans[waiting[0][0]].pages <= len(self._free)
                ):
                    index, context = waiting.popleft()
                    rows[index] = self._member(spans[index], context, MAX_ROWS + 1 + len(rows))
                self._advance(list(rows.values()))
                for index, row in rows.items():
                    assert row.logprobs is not None
                    assert row.greedy is not None
                    skip = spans[index].first - 1 - spans[index].branch
                    results[index] = Result(row.logprobs[skip:], row.greedy[skip:])
                    self._free += row.pages
                progress(len(rows))
            for context in contexts:
                self._free += context.pages
        while self._flights:
            self._read()
        return [results[i] for i in range(len(spans))]

    def _context(self, group: Group, slot: int) -> _Row:
        pages = self._take(group.pages)
        table = np.zeros(self._shapes.blocks, np.int32)
        table[: len(pages)] = pages
        unscored = np.full(len(group.context), -1, np.int32)
        return _Row(group.context, unscored, 0, table, pages, slot, slot)

    def _member(self, span: Span, context: _Row, slot: int) -> _Row:
        pages = self._take(span.pages)
        shared, cut = divmod(span.branch, PAGE_TOKENS)
        table = np.zeros(self._shapes.blocks, np.int32)
        table[:shared] = context.table[:shared]
        table[shared : shared + len(pages)] = pages
        tokens, targets = span.tokens[span.branch : -1], span.tokens[span.branch + 1 :].copy()
        targets[: span.first - 1 - span.branch] = -1
        return _Row(
            tokens,
            targets,
            span.branch,
            table,
            pages,
            context.write_slot,
            slot,
            copied=(int(context.table[shared]), pages[0]) if cut else (0, 0),
            logprobs=np.zeros(len(tokens), np.float32),
            greedy=np.zeros(len(tokens), bool),
        )

    def _take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def _advance(self, rows: list[_Row]) -> None:
        """Run rows to their ends, chunk by chunk, those with an equal bucket together."""
        buckets = self._shapes.buckets
        while rows:
            by_bucket: dict[int, list[_Row]] = defaultdict(list)
            for row in rows:
                by_bucket[bucket_of(min(len(row.tokens), buckets[-1]), buckets)].append(row)
            for bucket, some in sorted(by_bucket.items()):
                size = self._shapes.rows(bucket)
                for first in range(0, len(some), size):
                    self._unit(bucket, some[first : first + size])
            rows = [row for row in rows if len(row.tokens)]

    def _unit(self, bucket: int, rows: list[_Row]) -> None:
        B, L = self._shapes.rows(bucket), self._shapes.blocks
        tokens, targets = np.zeros((B, bucket), np.int32), np.full((B, bucket), -1, np.int32)
        starts, lengths, read, write, source, target = np.zeros((6, B), np.int32)
        tables = np.zeros((B, L), np.int32)
        reads = []
        for b, row in enumerate(rows):
            length = min(bucket, len(row.tokens))
            tokens[b, :length], targets[b, :length] = row.tokens[:length], row.targets[:length]
            starts[b], lengths[b], tables[b] = row.position, length, row.table
            read[b], write[b] = row.read_slot, row.write_slot
            source[b], target[b] = row.copied
            reads.append((row, row.done, length))
            row.tokens, row.targets = row.tokens[length:], row.targets[length:]
            row.position += length
            row.done += length
            row.read_slot, row.copied = row.write_slot, (0, 0)
            self.computed += length
        plan = ScorePlan(tokens, targets, starts, lengths, tables, read, write, source, target)
        scored = self._launch(bucket, plan)
        if any(row.logprobs is not None for row in rows):
            self._flights.append((scored, reads))
        while len(self._flights) > _IN_FLIGHT:
            self._read()

    def _read(self) -> None:
        scored, reads = self._flights.popleft()
        logprobs, greedy = np.asarray(scored.logprobs), np.asarray(scored.greedy)
        for b, (row, at, length) in enumerate(reads):
            if row.logprobs is not None and row.greedy is not None:
                row.logprobs[at : at + length] = logprobs[b, :length]
                row.greedy[at : at + length] = greedy[b, :length]
