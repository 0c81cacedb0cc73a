"""A scripted engine around a `World`: it executes commands on a `FakeDevice` and checks every one.

Like the real engine it launches a step before it reads the one before, so a unit's results are
committed while the next unit is in flight. Everything else is in the script's hands: when requests
come and are cancelled, when transfers complete or fail, what the output means.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from planner.checkpoints import identity
from planner.physical import initial, usage
from planner.testing.fake_device import FakeDevice, solo
from planner.world import World, advance, check_world, new_world
from planner.world import commands as c
from planner.world.config import WorldConfig
from planner.world.events import (
    CacheCleared,
    Cancelled,
    Event,
    RowResult,
    Submitted,
    Tick,
    TransferFinished,
    UnitFinished,
)

End = Literal["", "finished", "failed"]


class ProtocolError(AssertionError):
    """The world gave an order that makes no sense, or never came to an end."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a script. ``stop`` and ``fail`` are what the engine finds out and the planner does
    not know: the output ends, or is unusable, after that many tokens (0: never)."""

    prompt: tuple[int, ...]
    max_tokens: int = 4
    cache: bool = True
    endpoint: bool = True
    session: str = ""
    recovery: int = 0
    splits: tuple[int, ...] = ()
    anchors: tuple[int, ...] = ()
    markers: tuple[int, ...] = ()
    synchronous: int = 0
    stop: int = 0
    fail: int = 0

    @property
    def length(self) -> int:
        """Outputs it ends with when nothing fails."""
        return min(self.stop or self.max_tokens, self.max_tokens)


@dataclass(slots=True)
class Life:
    """What the driver knows of one request.

    ``launched`` tokens were given to units, ``computed`` is the furthest ever, ``asked`` the outputs
    launched, ``unread`` the units in flight.
    """

    ask: Ask
    phase: Literal["waiting", "resident", "paused", "ended"] = "waiting"
    lane: int = -1
    outputs: list[int] = field(default_factory=list)
    launched: int = 0
    computed: int = 0
    asked: int = 0
    unread: int = 0
    end: End = ""
    cancelled: bool = False
    admitted: int = 0
    reused: int = 0
    paused: int = 0
    outcome: str = ""


class Row(NamedTuple):
    """A row of a unit whose result is not read yet."""

    request: int
    samples: bool


class Entry(NamedTuple):
    """One event and what came of it."""

    event: Event
    commands: tuple[c.Command, ...]


class WorldDriver:
    """Holds the world, the device and the lives of all requests; every method sends events.

    ``check`` verifies invariants and contents after every event, not only at rest.
    """

    def __init__(self, config: WorldConfig, *, check: bool = True) -> None:
        self.world: World = new_world(config)
        self.device = FakeDevice(config.layout)
        self.lives: dict[int, Life] = {}
        self.log: list[Entry] = []
        self.counts: Counter[str] = Counter()
        self.transfer = 0
        self._check = check
        self._units: deque[tuple[int, list[Row]]] = deque()
        self._last_unit = 0

    # Events

    def submit(self, ask: Ask) -> int:
        """Submit a request; its ticket."""
        ticket = len(self.lives) + 1
        self.lives[ticket] = Life(ask)
        self.device.add(ticket, ask.prompt)
        self.send(
            Submitted(
                ticket,
                identity(ask.prompt, splits=ask.splits),
                ask.max_tokens,
                cache=ask.cache,
                endpoint=ask.endpoint,
                session=ask.session,
                recovery=ask.recovery,
                splits=ask.splits,
                anchors=ask.anchors,
                markers=ask.markers,
                synchronous=ask.synchronous,
            )
        )
        return ticket

    def cancel(self, ticket: int) -> None:
        """Give a request up; ended ones too, as a late cancel does."""
        self.lives[ticket].cancelled = True
        self.send(Cancelled(ticket))

    def tick(self) -> tuple[c.Command, ...]:
        """One scheduler cycle."""
        return self.send(Tick())

    def finish_transfer(self, ok: bool = True) -> None:
        """Complete or fail the open transfer."""
        transaction, self.transfer = self.transfer, 0
        self.device.complete(transaction, ok)
        self.send(TransferFinished(transaction, ok))

    @property
    def unread(self) -> int:
        """Units whose results are not read."""
        return len(self._units)

    def read(self) -> None:
        """Read and commit the oldest unit."""
        unit, rows = self._units.popleft()
        sampled = self.device.read(unit)
        results = [self._result(row, sampled.get(row.request)) for row in rows]
        self.send(UnitFinished(unit, tuple(results)))

    def _result(self, row: Row, token: int | None) -> RowResult:
        life = self.lives[row.request]
        life.unread -= 1
        if life.cancelled or life.end or life.phase == "ended":
            return RowResult(row.request)
        if not row.samples:
            return RowResult(row.request)
        assert token is not None
        if life.ask.fail and len(life.outputs) + 1 == life.ask.fail:
            life.end = "failed"
            return RowResult(row.request, (), "failed")
        life.outputs.append(token)
        life.end = "finished" if len(life.outputs) == life.ask.length else ""
        return RowResult(row.request, (token,), life.end)

    def clear_cache(self) -> None:
        """Let go of everything cached."""
        self.send(CacheCleared())

    def send(self, event: Event) -> tuple[c.Command, ...]:
        """Advance the world, execute what it orders, verify."""
        self.world, given = advance(self.world, event)
        given = tuple(given)
        self.log.append(Entry(event, given))
        for command in given:
            self.counts[type(command).__name__] += 1
            self._follow(command)
            self.device.run(command)
        if self._check:
            self.verify()
        return given

    def verify(self) -> None:
        """Invariants of both halves, and the contents of every replica."""
        check_world(self.world)
        self.device.verify(self.world.physical)

    # Checks of single commands

    def _require(self, true: bool, words: str, command: object) -> None:
        if not true:
            raise ProtocolError(f"{words}: {command}")

    def _follow(self, command: c.Command) -> None:
        if isinstance(command, c.Admitted | c.Resumed):
            self._enter(command)
        elif isinstance(command, c.Paused):
            life = self.lives[command.request]
            self._require(life.phase == "resident", f"pauses a {life.phase} request", command)
            self._require(not life.unread, "pauses with a unit in flight (SCH-12)", command)
            life.phase, life.lane = "paused", -1
            life.paused += 1
            self.counts[command.form] += 1
        elif isinstance(command, c.Ended):
            self._end(command)
        elif isinstance(command, c.RunTransfer):
            self._require(not self.transfer, "a second open transfer (TX-01)", command)
            self.transfer = command.transaction
        elif isinstance(command, c.RunPrefill):
            self._new_unit(command.unit, command)
            self._prefill(command)
            self._units.append((command.unit, [Row(command.request, False)]))
        elif isinstance(command, c.RunDecode):
            self._new_unit(command.unit, command)
            for row in command.rows:
                self._decode(row)
            rows = [Row(r.request, not r.replay) for r in command.rows]
            self._units.append((command.unit, rows))

    def _new_unit(self, unit: int, command: object) -> None:
        self._require(unit > self._last_unit, "unit numbers go up", command)
        self._last_unit = unit

    def _enter(self, command: c.Admitted | c.Resumed) -> None:
        life = self.lives[command.request]
        taken = [r for r, other in self.lives.items() if other.lane == command.lane]
        self._require(not taken, f"lane is held by {taken}", command)
        lanes = self.world.config.layout.concurrency
        self._require(0 <= command.lane < lanes, f"there are {lanes} lanes", command)
        if isinstance(command, c.Admitted):
            self._require(life.phase == "waiting", f"admits a {life.phase} request", command)
            self._require(command.reused < len(life.ask.prompt), "reuses too much", command)
            life.admitted += 1
            life.reused = life.launched = life.computed = command.reused
        else:
            self._require(life.phase == "paused", f"resumes a {life.phase} request", command)
            self._require(command.restored <= life.computed, "restores the future", command)
            life.launched = command.restored
        life.phase, life.lane = "resident", command.lane
        life.asked = len(life.outputs)

    def _end(self, command: c.Ended) -> None:
        life = self.lives[command.request]
        self._require(life.phase != "ended", "a second terminal (ENG-10)", command)
        self._require(not life.unread, "ends with a unit in flight (ENG-05)", command)
        expected: set[str] = {life.end} if life.end else set()
        if life.cancelled:
            expected.add("cancelled")
        self._require(command.outcome in expected, f"should be one of {expected}", command)
        if command.outcome == "finished":
            want = solo(life.ask.prompt, life.ask.length)
            self._require(tuple(life.outputs) == want, f"its tokens are not {want}", command)
        life.phase, life.lane, life.outcome = "ended", -1, command.outcome

    def _resident(self, request: int, lane: int, command: object) -> Life:
        life = self.lives[request]
        right = life.phase == "resident" and life.lane == lane
        self._require(right, f"request is {life.phase} in lane {life.lane}", command)
        self._require(not life.end, "runs after its end was committed", command)
        return life

    def _prefill(self, u: c.RunPrefill) -> None:
        life = self._resident(u.request, u.lane, u)
        end = u.start + u.length
        self._require(u.start == life.launched, f"stands at {life.launched}", u)
        self._require(u.length <= self.world.config.prefill_chunk, "longer than a chunk", u)
        crossed = [f for f in life.ask.splits if u.start < f < end]
        self._require(not crossed, f"crosses the splits {crossed} (CAT-06)", u)
        self._count(life, u.start, end, u.replay, u)
        life.unread += 1

    def _decode(self, row: c.DecodeRow) -> None:
        life = self._resident(row.request, row.lane, row)
        self._require(row.position == life.launched, f"stands at {life.launched}", row)
        first = len(life.ask.prompt) - 1
        self._require(row.position >= first, "decodes prompt tokens", row)
        self._count(life, row.position, row.position + 1, row.replay, row)
        if not row.replay:
            self._require(life.asked < life.ask.max_tokens, "runs past max_tokens", row)
            if life.asked < life.ask.synchronous:
                self._require(not life.unread, "does not wait for a synchronous step", row)
            life.asked += 1
        life.unread += 1

    def _count(self, life: Life, lo: int, hi: int, replay: bool, command: object) -> None:
        """Work is done once, and repeated only as replay (OBS-01, PR-06)."""
        self._require(replay == (lo < life.computed), f"computed to {life.computed}", command)
        self._require(not replay or hi <= life.computed, "replays new work", command)
        life.launched = hi
        life.computed = max(life.computed, hi)
        self.counts["replayed" if replay else "computed"] += hi - lo

    # Whole runs

    @property
    def live(self) -> list[int]:
        """Tickets without a terminal."""
        return [t for t, life in self.lives.items() if life.phase != "ended"]

    def step(self, *, transfers: bool = True) -> bool:
        """One turn of the engine: tick, then commit what was launched before it; progress?"""
        before = len(self._units)
        given = self.tick()
        launched = len(self._units) > before
        for _ in range(before):
            self.read()
        if transfers and self.transfer:
            self.finish_transfer()
            return True
        return launched or before > 0 or any(not isinstance(g, c.Note) for g in given)

    def drain(self, patience: int = 6) -> None:
        """Run until everything ended; ProtocolError where nothing moves, or nothing new comes."""
        idle = turns = 0
        total = self._work()
        while self.live or self._units or self.transfer:
            idle = 0 if self.step() else idle + 1
            now = self._work()
            turns = 0 if now > total else turns + 1
            total = max(total, now)
            if idle > patience or turns > 400:
                what = "nothing moves" if idle > patience else "no new work is done"
                raise ProtocolError(f"{what}; live are {self.live} (SCH-16)")
        self.verify()

    def _work(self) -> int:
        ended = sum(life.phase == "ended" for life in self.lives.values())
        return self.counts["computed"] + ended

    def settle(self) -> None:
        """Drain, clear the cache, and check that nothing is used any more (INV-20)."""
        self.drain()
        self.clear_cache()
        self.drain()
        for _ in range(2):
            self.step()
        now, start = usage(self.world.physical), usage(initial(self.world.config.layout))
        if now != start or len(self.world.physical.checkpoints):
            raise ProtocolError(f"after the cache was cleared {now} is used, not {start}")

    def replay(self) -> None:
        """A new world gives the same commands for the same events (OWN-07)."""
        world = new_world(self.world.config)
        for event, given in self.log:
            world, again = advance(world, event)
            if tuple(again) != given:
                raise ProtocolError(f"{event} gives {again}, gave {given}")
