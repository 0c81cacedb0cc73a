"""The worker: the one thread that changes the world, the program and the requests (OWN-09).

A cycle: take in what consumers want; report finished transfers; ask the world for the next orders and dispatch
them; then read the units of earlier cycles and commit their tokens. So a unit is in flight before the one
before it is read.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future

from ninfer_jax.engine.executor import Executor
from ninfer_jax.engine.flight import DecodeFlight, PrefillFlight
from ninfer_jax.engine.history import History
from ninfer_jax.engine.ingress import Cancel, Clear, Close, Ingress, Message, Submit
from ninfer_jax.engine.request import Request, Sequence
from ninfer_jax.engine.response import News
from ninfer_jax.engine.settlement import commit_row, preview_rows
from ninfer_jax.engine.stats import Stats
from ninfer_jax.errors import EngineFailure, NinferError
from ninfer_jax.program.program import Program
from planner import render
from planner.world import (
    Admitted,
    CacheCleared,
    Cancelled,
    Command,
    Ended,
    Event,
    Note,
    Paused,
    Resumed,
    RowResult,
    Tick,
    UnitFinished,
    WorldConfig,
    advance,
    new_world,
)
from planner.world.journal import Journal

TRANSFER_WAIT = 0.0005
"""Seconds between looks at copies when nothing else is to be done."""
CLOSED = EngineFailure("the engine is closed and takes no more requests; load it again")

_running: set[Worker] = set()
"""Workers that have not ended. A daemon thread that uses the device must not outlive the interpreter."""


@atexit.register
def _close_all() -> None:
    for worker in list(_running):
        worker.close()


class Worker:
    """Runs requests on a program as its world says."""

    def __init__(
        self,
        program: Program,
        vocab: int,
        ingress: Ingress,
        config: WorldConfig,
        record: str | None = None,
    ) -> None:
        self.stats = Stats()
        self.history = History()
        self.world = new_world(config)
        self.failure: NinferError | None = None
        self._program = program
        self._ingress = ingress
        self._journal = None if record is None else Journal(record, config)
        self._advance = advance if self._journal is None else self._journal.advance
        self._requests: dict[str, Request] = {}
        self._live: dict[int, Sequence] = {}
        self._executor = Executor(program, vocab, self._live, self.stats)
        self._entering: deque[Sequence] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._tickets = itertools.count(1)
        self._cycle = 0
        self._clearing: list[Future[None]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ninfer-worker", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        _running.add(self)
        self._thread.start()

    def close(self) -> None:
        """Cancel every request and wait until the worker has ended."""
        self._ingress.refuse(CLOSED)
        self._ingress.send(Close())
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._release()
        except BaseException as error:
            self._fail(error)
        finally:
            _running.discard(self)

    def _turn(self) -> bool:
        """One cycle, then a wait if nothing moves; False at the end of the worker's life."""
        self._cycle += 1
        self.stats.cycles += 1
        self._take_in()
        for event in self._executor.finished_transfers():
            self._give(event)
        self._clear()
        ordered = self._give(Tick())
        settled = self._settle()
        if ordered or settled or self._entering or self._executor.computing:
            pass
        elif self._executor.transferring:
            self._wait(TRANSFER_WAIT)
        elif self._live:
            raise EngineFailure("requests wait, and the planner gives no order")
        elif self._closing:
            return False
        else:
            self._wait(None)
        return True

    # What comes in

    def _wait(self, timeout: float | None) -> None:
        message = self._ingress.receive(timeout)
        if message is not None:
            self._handle(message)

    def _take_in(self) -> None:
        while (message := self._ingress.receive()) is not None:
            self._handle(message)
        while self._entering:
            self._enter(self._entering.popleft())
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, _, request = heapq.heappop(self._deadlines)
            where = "running" if request.admitted else "waiting in the queue"
            self._cancel(request, f"timeout of {request.timeout} s reached while {where}")

    def _handle(self, message: Message) -> None:
        match message:
            case Submit(request):
                self._submit(request)
            case Cancel(request, released):
                self._cancel(request, "cancelled by the caller")
                if released:
                    request.response.release()
            case Clear(done):
                self._clearing.append(done)
            case Close():
                self._closing = True
                for request in list(self._requests.values()):
                    self._cancel(request, "the engine was closed")

    def _clear(self) -> None:
        """Empty the cache for those who asked, between two transactions."""
        if self._clearing and not self._executor.transferring:
            self._give(CacheCleared())
            for done in self._clearing:
                done.set_result(None)
            self._clearing.clear()

    def _submit(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.stats.submitted += 1
        self.history.add(
            request.request_id,
            f"submitted: {len(request.ids)} prompt tokens, at most {request.max_tokens} output tokens"
            + ("" if request.cache.enabled else "; cache off")
            + (f"; session {request.cache.session!r}" if request.cache.session else ""),
        )
        for note in request.prompt.notes:
            self.history.add(request.request_id, note)
        if request.timeout is not None:
            due = request.arrival + request.timeout
            heapq.heappush(self._deadlines, (due, self.stats.submitted, request))
        # The others follow when this one has computed the prompt, which they then share.
        self._entering.append(request.sequences[0])

    def _enter(self, sequence: Sequence) -> None:
        """Submit a sequence to the world, unless it was cancelled meanwhile."""
        if sequence.settled:
            return
        sequence.ticket = next(self._tickets)
        self._live[sequence.ticket] = sequence
        self.stats.sequences += 1
        self.stats.prompt_tokens += len(sequence.request.ids)
        self._give(sequence.request.submitted(sequence))

    def _cancel(self, request: Request, why: str) -> None:
        """Give up what has not ended by itself (ENG-06)."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.stop(why)
                self._tell(sequence, why)
                if sequence.ticket:
                    self._give(Cancelled(sequence.ticket))
                else:
                    self._settled(sequence)

    # The world's orders

    def _give(self, event: Event) -> bool:
        """Advance the world and carry out what it orders; whether it ordered anything."""
        self.world, commands = self._advance(self.world, event)
        self._carry_out(commands)
        return bool(commands)

    def _carry_out(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            match command:
                case Note():
                    self._note(command)
                case Admitted():
                    self._admitted(command)
                case Resumed():
                    sequence = self._live[command.request]
                    self._executor.rows.seat(sequence, command.lane)
                    self._tell(
                        sequence,
                        f"resumed in lane {command.lane}; {command.restored} tokens need no recomputation",
                    )
                case Paused():
                    self._paused(command)
                case Ended():
                    sequence = self._live.pop(command.request)
                    self._executor.rows.leave(sequence)
                    if sequence.finish_reason is None:
                        sequence.stop(f"the planner ended it: {command.outcome}", failed=True)
                    self._settled(sequence)
                case _:
                    self._executor.run(command, self._cycle)

    def _admitted(self, command: Admitted) -> None:
        sequence = self._live[command.request]
        request = sequence.request
        self._executor.rows.seat(sequence, command.lane)
        self.stats.cached_tokens += command.reused
        if not sequence.index:
            request.admitted = time.monotonic()
            request.cached_tokens = command.reused
            self.stats.queue_time.add(request.admitted - request.arrival)
        self._tell(
            sequence, f"admitted to lane {command.lane}; {command.reused} prompt tokens reused"
        )

    def _paused(self, command: Paused) -> None:
        sequence = self._live[command.request]
        self._executor.rows.leave(sequence)
        sequence.request.preemptions += 1
        self.stats.preemptions[command.form] += 1
        self._tell(sequence, f"paused ({command.form}) for ticket {command.beneficiary}")

    def _note(self, note: Note) -> None:
        self.stats.note(note)
        sequence = self._live.get(note.request)
        if sequence is None:
            self.history.add(None, f"{note.kind}: {note.text}")
        else:
            self._tell(sequence, f"{note.kind}: {note.text}")

    def _tell(self, sequence: Sequence, line: str) -> None:
        if len(sequence.request.sequences) > 1:
            line = f"output {sequence.index}: {line}"
        self.history.add(sequence.request.request_id, line)

    def _settled(self, sequence: Sequence) -> None:
        """The world has let a sequence go: its end is published, and with the last one the result."""
        request = sequence.request
        sequence.settled = True
        outcome = sequence.error or sequence.finish_reason
        self._tell(sequence, f"ended after {len(sequence.tokens)} tokens: {outcome}")
        self._start_others(request)
        news = News(sequence.index, None, sequence.finish_reason, sequence.stop_reason)
        if not request.finished:
            request.response.post(news)
            return
        request.done = time.monotonic()
        del self._requests[request.request_id]
        self.stats.ended(request)
        self._ingress.ended()
        request.response.end(news._replace(last=True))

    def _start_others(self, request: Request) -> None:
        """Let the further sequences of a request begin, which share the prompt of the first."""
        for sequence in request.sequences[1:]:
            if sequence.finish_reason is None and not sequence.ticket:
                self._entering.append(sequence)

    # Results

    def _settle(self) -> bool:
        """Commit the units launched in earlier cycles, in launch order."""
        settled = False
        while (flight := self._executor.next_flight(self._cycle)) is not None:
            settled = True
            if isinstance(flight, DecodeFlight):
                self._settle_decode(flight)
            else:
                self._settle_prefill(flight)
        return settled

    def _settle_prefill(self, flight: PrefillFlight) -> None:
        self._executor.prefill_finished(flight)
        self._give(UnitFinished(flight.unit, (RowResult(flight.ticket),)))

    def _settle_decode(self, flight: DecodeFlight) -> None:
        """UN-08: preview, commit to the world, commit to the output session, tell the consumer."""
        results, commits = preview_rows(flight, self._live, self.stats)
        self.world, commands = self._advance(self.world, UnitFinished(flight.unit, results))
        now = time.monotonic()
        for commit in commits:
            first = not commit.sequence.request.first_token
            commit_row(commit, self.stats, now)
            if first:
                self._start_others(commit.sequence.request)
        self._carry_out(commands)

    # The end

    def _release(self) -> None:
        self._ingress.refuse(CLOSED)
        self._program.close()
        if self._journal is not None:
            self._journal.close()
        self._turn_away(CLOSED)

    def _fail(self, error: BaseException) -> None:
        """ENG-09: the engine stops, and every response is completed."""
        logging.getLogger("ninfer_jax").error("the engine failed", exc_info=error)
        failure = EngineFailure(
            f"the engine failed and takes no more requests; load it again. "
            f"{type(error).__name__}: {error}\n{self._describe()}"
        )
        self.failure = failure
        self._ingress.refuse(failure)
        for end in (
            self._program.close,
            *(() if self._journal is None else (self._journal.close,)),
        ):
            try:
                end()
            except Exception as second:
                logging.getLogger("ninfer_jax").error("after the failure", exc_info=second)
        for request in self._requests.values():
            self._ingress.ended()
            request.response.end(failure=failure)
        self._requests.clear()
        for done in self._clearing:
            done.set_exception(failure)
        self._turn_away(failure)

    def _turn_away(self, reason: NinferError) -> None:
        """Answer what came in after the last cycle; nothing comes any more."""
        while (message := self._ingress.receive()) is not None:
            match message:
                case Submit(request):
                    self._ingress.ended()
                    request.response.end(failure=reason)
                case Clear(done):
                    done.set_exception(reason)
                case _:
                    pass

    def _describe(self) -> str:
        """The world in words, for the message of a failure."""
        world = self.world
        return (
            f"waiting {world.waiting}, paused {world.paused}, resident {world.residents}, "
            f"in flight {world.units}, transaction for {world.job}\n{render(world.physical)}"
        )
