"""Run a workload through a `World` on a virtual clock: no model, no device, the real decisions.

The clock counts nanoseconds. Units run one after the other on the one device, a transfer runs beside
them; a step is launched before the results of the one before are read, as the engine does. Costs
come from the cost model that the world orders its sources by, and from `SimulationCost`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from planner.checkpoints import identity
from planner.errors import PlannerError
from planner.world.commands import (
    Admitted,
    Command,
    Ended,
    Note,
    Paused,
    Resumed,
    RunDecode,
    RunPrefill,
    RunTransfer,
)
from planner.world.config import CostModel, WorldConfig
from planner.world.events import Event, RowResult, Submitted, Tick, TransferFinished, UnitFinished
from planner.world.journal import Journal
from planner.world.trace import TraceError, TraceRequest
from planner.world.world import advance, new_world

DIRECTIONS: Final = ("h2d", "d2h", "d2d")
STILL: Final = 1000
"""Turns without a unit or a wait after which a run is given up."""


@dataclass(frozen=True, slots=True)
class SimulationCost:
    """What a decode step takes: nanoseconds for the step and for each row of it."""

    decode_step_ns: float = 8_000_000
    decode_row_ns: float = 200_000


class Percentiles(NamedTuple):
    """Nearest-rank percentiles, in seconds."""

    p50: float
    p90: float
    p99: float


def percentiles(values: Sequence[int]) -> Percentiles:
    """Of nanoseconds; zeros where there are none."""
    ordered = sorted(values) or [0]
    ranks = [ordered[max(0, -(-len(ordered) * p // 100) - 1)] / 1e9 for p in (50, 90, 99)]
    return Percentiles(*ranks)


@dataclass(frozen=True, slots=True)
class Report:
    """What a run would have been like (OBS-01, OBS-02). Times are in seconds.

    ``hit_tokens`` were reused at first admission, ``computed_tokens`` prefilled for the first time,
    ``replayed_tokens`` run again and ``restored_tokens`` read back after a pause. ``admission`` is the wait
    for a lane, ``unit_wait`` that of a resident row for its next unit.
    """

    requests: int
    completed: int
    failed: int
    seconds: float
    tokens_per_second: float
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    computed_tokens: int
    replayed_tokens: int
    restored_tokens: int
    snapshots: int
    replays: int
    ttft: Percentiles
    admission: Percentiles
    unit_wait: Percentiles
    largest_gap: float
    bytes_moved: dict[str, int]
    notes: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        plain = asdict(self)
        for name in ("ttft", "admission", "unit_wait"):
            plain[name] = getattr(self, name)._asdict()
        return plain


@dataclass(slots=True)
class _Life:
    trace: TraceRequest
    outputs: int = 0
    first: int = -1
    last: int = 0
    ready: int = 0


class _Unit(NamedTuple):
    """A unit in flight: its rows as (ticket, samples), and when it is done."""

    id: int
    rows: tuple[tuple[int, bool], ...]
    done: int


@dataclass(slots=True)
class _Counts:
    """What is added up on the way."""

    tokens: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    pauses: Counter[str] = field(default_factory=Counter)
    ttft: list[int] = field(default_factory=list)
    admission: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    gap: int = 0


def simulate(
    trace: Sequence[TraceRequest],
    config: WorldConfig,
    cost: SimulationCost | None = None,
    journal: Journal | None = None,
) -> Report:
    """Run a trace (sorted by arrival) to its end. With ``journal`` every event is recorded.

    TraceError where a request does not fit ``max_context``.
    """
    for r in trace:
        need = len(r.prompt) + len(r.output)
        if need > config.layout.max_context:
            raise TraceError(
                f"line {r.line}: prompt and output are {need} tokens, max_context is "
                f"{config.layout.max_context}; raise it or leave the request out"
            )
    return _Simulation(trace, config, cost or SimulationCost(), journal).run()


class _Simulation:
    """The virtual engine: world, clock, units and the transfer in flight."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        config: WorldConfig,
        cost: SimulationCost,
        journal: Journal | None,
    ) -> None:
        self._world = new_world(config)
        self._advance = journal.advance if journal else advance
        self._config, self._cost = config, cost
        self._coming = deque(trace)
        self._lives: dict[int, _Life] = {}
        self._units: deque[_Unit] = deque()
        self._transfer: tuple[int, int] | None = None  # transaction, done
        self._now = self._device_free = 0
        self._ended = self._still = 0
        self._counts = _Counts()

    def run(self) -> Report:
        """Turn until everything ended."""
        while self._coming or self._ended < len(self._lives):
            self._turn()
        return self._report()

    def _turn(self) -> None:
        while self._coming and self._coming[0].arrival <= self._now:
            self._submit(self._coming.popleft())
        if self._transfer and self._transfer[1] <= self._now:
            transaction, self._transfer = self._transfer[0], None
            self._send(TransferFinished(transaction))
        before, ended = len(self._units), self._ended
        busy = any(not isinstance(c, Note) for c in self._send(Tick()))
        for _ in range(before):
            self._read()
        self._still = 0 if before else self._still + 1
        if self._still > STILL:
            raise PlannerError(f"the planner does not come to rest at {self._now} ns")
        if not (before or busy or self._ended > ended):
            self._wait()

    def _wait(self) -> None:
        """Nothing runs: go to the next transfer's end or arrival."""
        times = [self._transfer[1]] if self._transfer else []
        if self._coming:
            times.append(self._coming[0].arrival)
        if times:
            self._now, self._still = max(self._now, min(times)), 0
        elif self._ended < len(self._lives):
            raise PlannerError(f"{len(self._lives) - self._ended} requests wait and nothing moves")

    def _submit(self, r: TraceRequest) -> None:
        ticket = len(self._lives) + 1
        self._lives[ticket] = _Life(r, ready=r.arrival)
        self._counts.tokens["prompt"] += len(r.prompt)
        last = len(r.prompt) - 1
        self._send(
            Submitted(
                ticket, identity(r.prompt), len(r.output), cache=r.cache, session=r.session,
                recovery=last, markers=r.markers,
            )
        )  # fmt: skip

    def _send(self, event: Event) -> tuple[Command, ...]:
        self._world, commands = self._advance(self._world, event)
        for command in commands:
            self._follow(command)
        return commands

    def _follow(self, command: Command) -> None:
        counts = self._counts
        match command:
            case RunPrefill():
                self._prefill(command)
            case RunDecode():
                self._decode(command)
            case RunTransfer():
                self._move(command)
            case Admitted(ticket, _, reused, _):
                life = self._lives[ticket]
                counts.tokens["hit"] += reused
                counts.admission.append(self._now - life.trace.arrival)
                life.ready = self._now
            case Resumed(ticket, _, restored):
                counts.tokens["restored"] += restored
                self._lives[ticket].ready = self._now
            case Paused(_, form, _):
                counts.pauses[form] += 1
            case Ended(_, outcome):
                counts.outcomes[outcome] += 1
                self._ended += 1
            case Note(_, kind, _):
                counts.notes[kind] += 1

    def _launch(self, unit: int, rows: tuple[tuple[int, bool], ...], cost: float) -> None:
        start = max(self._now, self._device_free)
        self._device_free = start + round(cost)
        self._units.append(_Unit(unit, rows, self._device_free))
        for ticket, _ in rows:
            life = self._lives[ticket]
            self._counts.waits.append(max(0, start - life.ready))
            life.ready = self._device_free

    def _prefill(self, c: RunPrefill) -> None:
        self._counts.tokens["replayed" if c.replay else "computed"] += c.length
        cost = self._config.cost.prefill_ns(c.start, c.length)
        self._launch(c.unit, ((c.request, False),), cost)

    def _decode(self, c: RunDecode) -> None:
        self._counts.tokens["replayed"] += sum(row.replay for row in c.rows)
        cost = self._cost.decode_step_ns + self._cost.decode_row_ns * len(c.rows)
        rows = tuple((row.request, not row.replay) for row in c.rows)
        self._launch(c.unit, rows, cost)

    def _move(self, c: RunTransfer) -> None:
        cost = 0.0
        model: CostModel = self._config.cost
        layout = self._config.layout
        for direction in DIRECTIONS:
            copies = [x for x in c.copies if x.direction == direction]
            size = sum(
                layout.image_bytes if x.kind == "image" else layout.pools[x.pool].page_bytes
                for x in copies
            )
            self._counts.moved[direction] += size
            cost += getattr(model, direction).of(len(copies), size)
        self._transfer = (c.transaction, self._now + round(cost))

    def _read(self) -> None:
        """Wait for the oldest unit and commit it."""
        unit = self._units.popleft()
        self._now = max(self._now, unit.done)
        results = [self._result(ticket, samples) for ticket, samples in unit.rows]
        self._send(UnitFinished(unit.id, tuple(results)))

    def _result(self, ticket: int, samples: bool) -> RowResult:
        life = self._lives[ticket]
        output = life.trace.output
        if not samples or life.outputs == len(output):
            return RowResult(ticket)
        token = output[life.outputs]
        life.outputs += 1
        if life.first < 0:
            life.first = self._now
            self._counts.ttft.append(self._now - life.trace.arrival)
        else:
            self._counts.gap = max(self._counts.gap, self._now - life.last)
        life.last = self._now
        return RowResult(ticket, (token,), "finished" if life.outputs == len(output) else "")

    def _report(self) -> Report:
        n, tokens = self._counts, self._counts.tokens
        outputs = sum(life.outputs for life in self._lives.values())
        start = min(life.trace.arrival for life in self._lives.values()) if self._lives else 0
        seconds = (self._now - start) / 1e9
        return Report(
            requests=len(self._lives),
            completed=n.outcomes["finished"],
            failed=n.outcomes["failed"],
            seconds=seconds,
            tokens_per_second=outputs / seconds if seconds else 0.0,
            prompt_tokens=tokens["prompt"],
            output_tokens=outputs,
            hit_tokens=tokens["hit"],
            computed_tokens=tokens["computed"],
            replayed_tokens=tokens["replayed"],
            restored_tokens=tokens["restored"],
            snapshots=n.pauses["snapshot"],
            replays=n.pauses["replay"],
            ttft=percentiles(n.ttft),
            admission=percentiles(n.admission),
            unit_wait=percentiles(n.waits),
            largest_gap=n.gap / 1e9,
            bytes_moved={d: n.moved[d] for d in DIRECTIONS},
            notes=dict(sorted(n.notes.items())),
        )
