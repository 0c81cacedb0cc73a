"""The first look at an input file: which lines are to be run, and which have a line in the output already.

Only offsets of lines are kept, so a file of millions of lines fits; and all that is known before anything runs.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ninfer_jax.batch.answers import error_line
from ninfer_jax.batch.journal import Journal
from ninfer_jax.batch.requests import (
    MAX_LINE_BYTES,
    BadLine,
    BatchRequest,
    Line,
    anonymous_id,
    duplicate_key,
    parse_line,
    trimmed,
)


@dataclass
class Scan:
    """What a run has to do."""

    path: Path
    todo: array[int] = field(default_factory=lambda: array("q"))
    """Byte offsets of the lines to run."""
    rows: int = 0
    """Lines of the input that are not blank."""
    done: int = 0
    """Of these, lines that the output had an answer or an error for."""
    errors: int = 0
    """Of these, lines that are no requests or duplicates, whose error was written now."""
    stale: int = 0
    """Lines of the output that nothing in the input asks for (any more)."""

    def requests(self) -> Iterator[Line]:
        """The lines to run, one after another."""
        with open(self.path, "rb") as file:
            for offset in self.todo:
                file.seek(offset)
                yield parse_line(_line(file))


def scan(path: str | Path, journal: Journal) -> Scan:
    """Look at every line of the input, and write errors for those that can never run.

    Of the lines with one custom_id, one is run: the one that the output has an answer to, else the first. The others
    are an error each.

    Raises:
      OSError: the input cannot be read, or the output not written.
    """
    result = Scan(Path(path))
    before = journal.lines
    claimed: set[str] = set()
    deferred = Scan(result.path)  # may be most of the file, so offsets only here as well
    seen: Counter[str] = Counter()

    def fail(custom_id: str | None, key: str, code: str, message: str) -> None:
        line_id = anonymous_id(key, seen[key])
        seen[key] += 1
        if line_id in journal.errors:
            result.done += 1
        else:
            journal.add(error_line(line_id, custom_id, code, message))
            result.errors += 1

    def take(offset: int, line: Line, custom_id: str) -> None:
        if custom_id in claimed:
            what = f"custom_id {custom_id!r} occurs again; give every line its own"
            fail(custom_id, duplicate_key(custom_id), "duplicate_custom_id", what)
            return
        claimed.add(custom_id)
        if journal.answers.get(custom_id) == line.line_id:
            result.done += 1
        elif isinstance(line, BatchRequest):
            result.todo.append(offset)
        else:
            journal.add(error_line(line.line_id, custom_id, line.code, line.message))
            result.errors += 1

    for offset, data in _lines(result.path):
        result.rows += 1
        line = parse_line(data)
        if line.custom_id is None:
            assert isinstance(line, BadLine)
            fail(None, line.key, line.code, line.message)
        elif journal.answers.get(line.custom_id, line.line_id) != line.line_id:
            deferred.todo.append(offset)  # another line may be the one that was answered
        else:
            take(offset, line, line.custom_id)
    for offset, line in zip(deferred.todo, deferred.requests(), strict=True):
        if line.custom_id is not None:  # else the file has changed meanwhile; the next run says so
            take(offset, line, line.custom_id)
    journal.flush()
    result.stale = before - result.done
    return result


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and content of each line that is not blank."""
    with open(path, "rb") as file:
        while True:
            offset = file.tell()
            data = _line(file)
            if not data:
                return
            if trimmed(data):
                yield offset, data


def _line(file: BinaryIO) -> bytes:
    """The next line; of one that is too long the beginning, which is too long as well."""
    data = file.readline(MAX_LINE_BYTES + 2)
    rest = data
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(MAX_LINE_BYTES)
    return data
