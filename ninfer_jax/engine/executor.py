"""Runs a world's orders on the program and keeps track of what is in flight."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

import jax

from ninfer_jax.engine.flight import DecodeFlight, Flight, PrefillFlight
from ninfer_jax.engine.request import Sequence
from ninfer_jax.engine.rows import Rows
from ninfer_jax.engine.stats import Stats
from ninfer_jax.errors import EngineFailure
from ninfer_jax.program.program import Program
from ninfer_jax.program.transfers import Transfer
from planner.world import PublishTable, RunDecode, RunPrefill, RunTransfer, TransferFinished

Order = PublishTable | RunTransfer | RunPrefill | RunDecode


class Executor:
    """The device side of the worker. `live` maps tickets to sequences; it is the worker's and only read here."""

    def __init__(
        self, program: Program, vocab: int, live: Mapping[int, Sequence], stats: Stats
    ) -> None:
        self.rows = Rows(program, vocab)
        self._program = program
        self._live = live
        self._stats = stats
        self._flights: deque[Flight] = deque()
        self._transfers: dict[int, Transfer] = {}
        self._prefilled: jax.Array | None = None
        """Result of the prefill unit that was settled last."""

    @property
    def transferring(self) -> bool:
        """Whether copies are in flight."""
        return bool(self._transfers)

    @property
    def computing(self) -> bool:
        """Whether units are in flight."""
        return bool(self._flights)

    def run(self, order: Order, cycle: int) -> None:
        """Dispatch one order; nothing waits for its completion."""
        match order:
            case RunDecode():
                self._decode(order, cycle)
            case RunPrefill():
                self._prefill(order, cycle)
            case PublishTable():
                self._program.publish_table(order)
            case RunTransfer():
                self._stats.transfer(order, self._program.limits.layout)
                self._transfers[order.transaction] = self._program.start_transfer(order)

    def finished_transfers(self) -> list[TransferFinished]:
        """Complete and verify the transfers that are ready."""
        ready = [number for number, t in self._transfers.items() if t.ready()]
        return [TransferFinished(n, ok=self._complete(self._transfers.pop(n))) for n in ready]

    def _complete(self, transfer: Transfer) -> bool:
        try:
            transfer.complete()
        except EngineFailure as error:  # of the copies alone: none is under way any more
            self._stats.failed_transfers += 1
            logging.getLogger("ninfer_jax").warning("copies failed: %s", error)
            return False
        return True

    def next_flight(self, cycle: int) -> Flight | None:
        """The oldest unit launched before `cycle`; the caller settles it."""
        if self._flights and self._flights[0].cycle < cycle:
            return self._flights.popleft()
        return None

    def prefill_finished(self, flight: PrefillFlight) -> None:
        """Keep the device at most two prefill units ahead, and read what is asked about the prompt."""
        if self._prefilled is not None:
            self._prefilled.block_until_ready()
        self._prefilled = flight.hidden
        if flight.sequence is not None and flight.scored is not None:
            assert flight.targets is not None
            scores = jax.device_get(flight.scored)
            flight.sequence.request.scored.append((flight.targets, scores))

    def _prefill(self, order: RunPrefill, cycle: int) -> None:
        sequence = self._live[order.request]
        request = sequence.request
        end = order.start + order.length
        tokens = request.ids[order.start : end]
        hidden = self._program.prefill(order, tokens)
        if order.replay:
            self._stats.replayed_tokens += order.length
            request.replayed_tokens += order.length
        else:
            self._stats.computed_tokens += order.length
            request.prefill_tokens += order.length
        if request.sampling.prompt_logprobs is not None and not sequence.index and not order.replay:
            targets = request.ids[order.start + 1 : end + 1]
            scored = self._program.prompt_logprobs(hidden, targets)
            flight = PrefillFlight(
                order.unit, cycle, order.request, hidden, sequence, targets, scored
            )
        else:
            flight = PrefillFlight(order.unit, cycle, order.request, hidden)
        self._flights.append(flight)

    def _decode(self, order: RunDecode, cycle: int) -> None:
        full = drawn = scored = False
        sampling = 0
        for row in order.rows:
            sequence = self._live[row.request]
            request = sequence.request
            if row.replay:
                request.replayed_tokens += 1
                continue
            self.rows.prepare(sequence)
            request.decode_steps += 1
            sampling += 1
            full = full or sequence.needs_sampler
            drawn = drawn or not request.sampling.greedy
            scored = scored or request.sampling.logprobs is not None
        self._stats.decode_steps += 1
        self._stats.replayed_tokens += len(order.rows) - sampling
        logits, sampled = self._program.decode(order)
        if full:
            sampled = self._program.sample(logits, self.rows.sampling())
        elif drawn:
            sampled = self._program.sample_plain(logits, self.rows.sampling())
        flight = DecodeFlight(
            order.unit,
            cycle,
            order.rows,
            sampled if sampling else None,
            self._program.token_logprobs(logits) if scored else None,
        )
        self._flights.append(flight)
