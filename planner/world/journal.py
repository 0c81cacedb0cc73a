"""Flight recorder: every event with the commands it produced, one JSON line each.

The first line is ``{"format": 1, "config": {...}}``, each further line ``{"e": event, "c": [commands]}``
(without "c" where there are none), in the order in which the world advanced. Where `advance` raised, the line has
``"x": "words"`` instead. The record is all there is to know: `replay` rebuilds the world from it. A
line without its newline is the torn end of a crash; readers skip and report it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from planner.world.codec import JournalError, codec
from planner.world.commands import Command
from planner.world.config import WorldConfig
from planner.world.events import Event
from planner.world.step import World
from planner.world.world import advance, new_world

FORMAT: Final = 1
_CONFIG: Final = codec(WorldConfig)
_EVENT: Final = codec(Event)
_COMMAND: Final = codec(Command)


class Entry(NamedTuple):
    """One line: an event and its commands, or the words of the error that it raised."""

    line: int
    event: Event
    commands: tuple[Command, ...]
    error: str = ""


class Journal:
    """Writes a record. Lines are buffered and reach the file every ``flush_every`` lines.

    Use `advance` in the place of the planner's, or `record` what was advanced elsewhere.
    """

    def __init__(self, path: str | Path, config: WorldConfig, *, flush_every: int = 64) -> None:
        if flush_every < 1:
            raise JournalError(f"flush_every is {flush_every}; it counts lines, from 1")
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by `close`
        self._every = flush_every
        self._lines: list[str] = []
        self._write({"format": FORMAT, "config": _CONFIG.encode(config)})
        self.flush()

    def advance(self, world: World, event: Event) -> tuple[World, tuple[Command, ...]]:
        """The planner's `advance`, recorded; an error is recorded too, on disk before it leaves."""
        try:
            after, commands = advance(world, event)
        except Exception as e:
            self.record(event, (), f"{type(e).__name__}: {e}")
            self.flush()
            raise
        self.record(event, commands)
        return after, commands

    def record(self, event: Event, commands: tuple[Command, ...], error: str = "") -> None:
        """Add one line."""
        line: dict[str, Any] = {"e": _EVENT.encode(event)}
        if commands:
            line["c"] = [_COMMAND.encode(c) for c in commands]
        if error:
            line["x"] = error
        self._write(line)
        if len(self._lines) >= self._every:
            self.flush()

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.append(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")

    def flush(self) -> None:
        """Hand all lines to the operating system."""
        self._file.write("".join(self._lines).encode())
        self._lines.clear()
        self._file.flush()

    def close(self) -> None:
        """Flush and close; harmless when closed already."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Record:
    """A record on disk: ``config`` is read at once, iteration reads the entries as it goes.

    ``torn`` says, once the end was reached, whether the last line was cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.torn = False
        with self.path.open("rb") as f:
            self.config = self._header(f.readline())

    def _header(self, text: bytes) -> WorldConfig:
        if not text.endswith(b"\n"):
            raise JournalError(f"{self.path}: no complete first line; this is no planner record")
        head = self._object(1, text, {"format", "config"})
        if head.get("format") != FORMAT:
            raise JournalError(
                f"{self.path}: format {head.get('format')!r}, this version reads {FORMAT}"
            )
        config = self._decode(1, codec(WorldConfig).decode, head.get("config"))
        assert isinstance(config, WorldConfig)
        return config

    def __iter__(self) -> Iterator[Entry]:
        self.torn = False
        with self.path.open("rb") as f:
            f.readline()
            for number, text in enumerate(f, start=2):
                if not text.endswith(b"\n"):
                    self.torn = True
                    return
                yield self._entry(number, text)

    def _entry(self, number: int, text: bytes) -> Entry:
        line = self._object(number, text, {"e", "c", "x"})
        event = self._decode(number, _EVENT.decode, line.get("e"))
        many = line.get("c", [])
        error = line.get("x", "")
        if type(many) is not list or type(error) is not str:
            raise self._error(number, '"c" is a list of commands and "x" a text')
        commands = tuple(self._decode(number, _COMMAND.decode, c) for c in many)
        return Entry(number, event, commands, error)

    def _object(self, number: int, text: bytes, keys: set[str]) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except ValueError as e:
            raise self._error(number, f"no JSON ({e})") from None
        if type(line) is not dict:
            raise self._error(number, "no JSON object")
        unknown = sorted(line.keys() - keys)
        if unknown:
            raise self._error(number, f"{unknown[0]!r} is unknown; a line has {sorted(keys)}")
        return line

    def _decode(self, number: int, decode: Any, value: Any) -> Any:
        try:
            return decode(value)
        except JournalError as e:
            raise self._error(number, str(e)) from None

    def _error(self, number: int, words: str) -> JournalError:
        return JournalError(f"{self.path}, line {number}: {words}")


def read(path: str | Path) -> Record:
    """Open a record; iterate over it for the entries."""
    return Record(path)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay parts from its record: command ``index`` of a line, on both sides in words."""

    line: int
    event: Event
    index: int
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"line {self.line}, {type(self.event).__name__}, command {self.index}:\n"
            f"  recorded: {self.recorded}\n  replayed: {self.replayed}"
        )


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay found: events advanced, the first difference if any, and the world at its end.

    ``error`` is what `advance` raised at the last event, the same as in the record.
    """

    events: int
    difference: Difference | None
    torn: bool
    world: World
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether every command came out the same."""
        return self.difference is None


def replay(path: str | Path) -> ReplayResult:
    """Advance a new world through a record and compare every command (OWN-07)."""
    record = read(path)
    world = new_world(record.config)
    done = 0
    for entry in record:
        try:
            after, commands = advance(world, entry.event)
        except Exception as e:
            words = f"{type(e).__name__}: {e}"
            if words == entry.error:
                return ReplayResult(done, None, record.torn, world, words)
            found = _difference(entry, (), words)
            return ReplayResult(done, found, record.torn, world, words)
        if commands != entry.commands or entry.error:
            return ReplayResult(done, _difference(entry, commands, ""), record.torn, world)
        world = after
        done += 1
    return ReplayResult(done, None, record.torn, world)


def _difference(entry: Entry, commands: tuple[Command, ...], error: str) -> Difference:
    """The first place where an entry and what came out now disagree."""
    recorded = [*map(str, entry.commands), *([f"raised {entry.error}"] if entry.error else [])]
    replayed = [*map(str, commands), *([f"raised {error}"] if error else [])]
    i = next(
        (i for i, (a, b) in enumerate(zip(recorded, replayed, strict=False)) if a != b),
        min(len(recorded), len(replayed)),
    )
    sides = [(side[i] if i < len(side) else "nothing") for side in (recorded, replayed)]
    return Difference(entry.line, entry.event, i, *sides)
