"""The generation loop: admits requests as lanes and pages free up, and decodes all running rows together.

One step is always in flight: step n + 1 is launched before step n's tokens are read. A row whose end is learned late
has run one step too many, into its own pages; that result is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from ninfer_jax.engine.request import Logprobs, Request, Sequence, sampler_row
from ninfer_jax.errors import EngineFailure
from ninfer_jax.frontend import Frontend, OutputDelta
from ninfer_jax.outputs import Logprob
from ninfer_jax.program.allocator import Allocator, pages_for
from ninfer_jax.program.plans import Sampled, SamplingRows
from ninfer_jax.program.program import Program
from planner import Copy
from planner.world import DecodeRow, PublishTable, RunDecode, RunPrefill, RunTransfer

Event = tuple[Sequence, OutputDelta]


@dataclass(frozen=True)
class _Step:
    """A launched decode step: which sequences ran, and their results, still on the device."""

    rows: dict[int, Sequence]
    tokens: jax.Array
    healthy: jax.Array
    sampled: Sampled | None
    control: dict[int, int]
    """Lane to the token that the front end puts in the place of the sampled one."""


class GenerationLoop:
    """Runs requests on a program, first come first served. Not re-entrant."""

    def __init__(self, program: Program, allocator: Allocator, frontend: Frontend) -> None:
        self._program = program
        self._allocator = allocator
        self._frontend = frontend
        self._vocab = frontend.vocab_size
        self._running: dict[int, Sequence] = {}
        self._marked_lanes: set[int] = set()
        self._membership_changed = True

    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        """Run requests to their ends, yielding what each commit adds to a sequence.

        Closing the iterator aborts whatever still runs; every lane and page is free afterwards.
        """
        waiting = deque(requests)
        in_flight: _Step | None = None
        try:
            while waiting or self._running or in_flight:
                self._admit(waiting)
                if in_flight and any(s.synchronous for s in self._running.values()):
                    yield from self._settle(in_flight)
                    in_flight = None
                    continue
                step = self._launch()
                if step is None and in_flight is None:
                    raise EngineFailure("requests wait, but none of them can take a step")
                if in_flight:
                    yield from self._settle(in_flight)
                in_flight = step
        finally:
            for sequence in list(self._running.values()):
                self._abort(sequence)

    def _admit(self, waiting: deque[Request]) -> None:
        while waiting:
            request = waiting[0]
            if not self._allocator.can_admit(len(request.sequences), request.total_tokens):
                return
            waiting.popleft()
            request.admitted = time.monotonic()
            for sequence in request.sequences:
                sequence.lease = self._allocator.admit(request.total_tokens)
                self._running[sequence.lease.lane] = sequence
                sequence.forced = request.prompt.token_ids[-1]
                pages = tuple(sequence.lease.block_table[: sequence.lease.pages].tolist())
                self._program.publish_table(PublishTable(sequence.lease.lane, 0, pages))
                self._mark(sequence)
            self._membership_changed = True
            self._prefill(request)

    def _prefill(self, request: Request) -> None:
        """Run all of the prompt but its last token, which the first decode step runs."""
        first, *others = (s.lease for s in request.sequences)
        assert first is not None
        ids = request.prompt.array
        scored = []
        start, end = 0, len(ids) - 1
        while start < end:
            size = self._chunk(end - start)
            unit = RunPrefill(0, 0, first.lane, start, size, first.slot, first.slot)
            hidden = self._program.prefill(unit, ids[start : start + size])
            if request.sampling.prompt_logprobs is not None:
                targets = ids[start + 1 : start + size + 1]
                scored.append((targets, self._program.prompt_logprobs(hidden, targets)))
            start += size
        for lease in others:
            assert lease is not None
            count = pages_for(end)
            pairs = zip(first.block_table[:count], lease.block_table[:count], strict=True)
            copies = [Copy("image", "d2d", -1, first.slot, lease.slot, 0)]
            copies += [
                Copy("page", "d2d", 0, int(source), int(target), 0) for source, target in pairs
            ]
            self._program.start_transfer(RunTransfer(0, tuple(copies))).complete()
        if request.sampling.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
            for targets, result in scored:
                host = jax.device_get(result)
                for i, target in enumerate(targets.tolist()):
                    request.prompt_logprobs.append(
                        self._logprobs(
                            target,
                            float(host.logprob[i]),
                            int(host.rank[i]),
                            host.top_ids[i],
                            host.top_logprobs[i],
                            request.sampling.prompt_logprobs,
                        )
                    )

    def _chunk(self, remaining: int) -> int:
        """Tokens of the next prefill unit: the bucket that fits, unless more than half of it would be padding."""
        buckets = self._program.limits.chunk_buckets
        for bucket in buckets:
            if bucket >= remaining:
                return remaining if remaining * 2 > bucket or bucket == buckets[0] else buckets[0]
        return buckets[-1]

    def _mark(self, sequence: Sequence) -> None:
        """Bring the sampler's memory of the sequence's lane up to date, if it matters."""
        assert sequence.lease is not None
        lane = sequence.lease.lane
        if sequence.needs_sampler_row or lane in self._marked_lanes:
            self._program.install_row(lane, **sampler_row(sequence, self._vocab))
            self._marked_lanes.discard(lane)
            if sequence.needs_sampler_row:
                self._marked_lanes.add(lane)

    def _launch(self) -> _Step | None:
        rows = {lane: s for lane, s in self._running.items() if s.wants_step}
        if not rows:
            return None
        if self._membership_changed:
            self._freeze_rows()
        positions = np.zeros(self._program.limits.max_concurrency, np.int32)
        orders = []
        for lane, sequence in rows.items():
            assert sequence.lease is not None
            slot = sequence.lease.slot
            orders.append(DecodeRow(0, lane, sequence.position, sequence.forced, slot, slot))
            positions[lane] = sequence.position
            sequence.forced = -1
            sequence.launched += 1
            sequence.request.decode_steps += 1
        control = {
            lane: tokens[0] for lane, s in rows.items() if (tokens := s.session.control_tokens())
        }
        logits = self._program.decode(RunDecode(0, tuple(orders)))
        if any(s.needs_full_sampler for s in rows.values()):
            sampled = self._program.sample(logits, self._sampling, positions + 1)
            return _Step(rows, sampled.tokens, sampled.healthy, sampled, control)
        greedy, healthy = self._program.sample_greedy(logits)
        return _Step(rows, greedy, healthy, None, control)

    def _freeze_rows(self) -> None:
        """Rebuild what stays the same until the membership changes again."""
        C = self._program.limits.max_concurrency
        columns = {
            "temperature": np.zeros(C, np.float32),
            "top_k": np.zeros(C, np.int32),
            "top_p": np.ones(C, np.float32),
            "min_p": np.zeros(C, np.float32),
            "presence_penalty": np.zeros(C, np.float32),
            "frequency_penalty": np.zeros(C, np.float32),
            "repetition_penalty": np.ones(C, np.float32),
        }
        seed = np.zeros((C, 2), np.uint32)
        for lane, sequence in self._running.items():
            for name, column in columns.items():
                column[lane] = getattr(sequence.request.sampling, name)
            seed[lane] = sequence.seed >> 32, sequence.seed & 0xFFFFFFFF
        self._sampling = self._program.put(SamplingRows(seed=seed, **columns))
        self._membership_changed = False

    def _settle(self, step: _Step) -> Iterator[Event]:
        """Read a step's tokens and commit them to the sequences that still run."""
        tokens, healthy = np.asarray(step.tokens).tolist(), np.asarray(step.healthy).tolist()
        details = None
        if step.sampled is not None and any(
            s.request.sampling.logprobs is not None for s in step.rows.values()
        ):
            details = jax.device_get(step.sampled)
        now = time.monotonic()
        for lane, sequence in step.rows.items():
            if sequence.finish_reason is not None:
                continue
            sequence.request.first_token = sequence.request.first_token or now
            if not healthy[lane]:
                sequence.error = (
                    "the model's logits are not finite; the weights or the input are damaged"
                )
                yield self._abort(sequence)
            elif (control := step.control.get(lane)) is not None:
                # UN-10: the front end's token takes the place of the sampled one, which the sampler must not count.
                event = self._commit(sequence, control, {})
                if sequence.finish_reason is None:
                    sequence.forced = control
                    self._mark(sequence)
                yield event
            elif details is None or sequence.request.sampling.logprobs is None:
                yield self._commit(sequence, tokens[lane], {})
            else:
                logprob = float(details.logprob[lane])
                sequence.cumulative_logprob += logprob
                entry = self._logprobs(
                    tokens[lane],
                    logprob,
                    int(details.rank[lane]),
                    details.top_ids[lane],
                    details.top_logprobs[lane],
                    sequence.request.sampling.logprobs,
                )
                yield self._commit(sequence, tokens[lane], entry)

    def _commit(self, sequence: Sequence, token: int, entry: Logprobs) -> Event:
        delta = sequence.session.commit(sequence.session.preview([token]))
        sequence.tokens.append(token)
        sequence.logprobs.append(entry)
        sequence.finish_reason, sequence.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.finish_reason is not None:
            self._retire(sequence)
        elif len(sequence.tokens) == sequence.request.sampling.min_tokens:
            self._mark(sequence)
        return sequence, delta

    def _abort(self, sequence: Sequence) -> Event:
        sequence.finish_reason = "abort"
        self._retire(sequence)
        return sequence, OutputDelta((), "", "", None, None)

    def _retire(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        del self._running[sequence.lease.lane]
        self._allocator.release(sequence.lease)
        sequence.lease = None
        self._membership_changed = True
        sequence.request.done = time.monotonic()

    def _logprobs(
        self,
        token: int,
        logprob: float,
        rank: int,
        top_ids: np.ndarray,
        top_logprobs: np.ndarray,
        count: int,
    ) -> Logprobs:
        """The chosen token and the `count` most probable ones."""
        decode = self._frontend.tokenizer.decode
        entry = {token: Logprob(logprob, rank, decode([token], skip_special_tokens=False))}
        for i in range(min(count, len(top_ids))):
            other = int(top_ids[i])
            if other != token:
                text = decode([other], skip_special_tokens=False)
                entry[other] = Logprob(float(top_logprobs[i]), i + 1, text)
        return entry
