"""The output file as a journal: what is done stays done, whatever happens to the process.

Lines are appended in groups, one write and one fsync each. A crash can leave a torn last line, which the next run cuts
off. A lock on the file keeps a second run out; the system lets go of it when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from ninfer_jax.errors import InputError

GROUP_LINES = 64
"""Lines after which a group is written."""
GROUP_SECONDS = 1.0
"""Age of a group's first line after which it is written."""

_BEGINNING = b'{"id": "batch_'
"""How every line begins: a torn piece of anything else is not ours to cut off."""


class Journal:
    """An output file that is open for this run alone."""

    def __init__(self, path: str | Path) -> None:
        """Open or create the file, and learn what it holds.

        Raises:
          InputError: another run has it, it holds something that is no output of a batch, or is no file.
          OSError: it cannot be opened.
        """
        self.path = Path(path)
        self.answers: dict[str, str] = {}
        """The `id` of the newest line of each custom_id."""
        self.errors: set[str] = set()
        """The `id`s of error lines that answer no custom_id of their own."""
        self.lines = 0
        """Complete lines."""
        self.cut_bytes = 0
        """Bytes of a torn last line that were cut off."""
        self._broken = False
        self._group: list[bytes] = []
        self._since = 0.0
        new = not self.path.exists()
        if not new and not stat.S_ISREG(self.path.stat().st_mode):
            # A pipe or device would be read without end, and keeps nothing.
            raise InputError(f"{self.path} is no file; what is done is found again in a file only")
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self._read()
            if new:
                _sync_folder(self.path.parent)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if not self._broken:
                self.flush()
        finally:
            os.close(self._file)

    def add(self, line: dict[str, Any]) -> None:
        """Take a line; it is safe after the next `flush`. Raises OSError if it has to be written and cannot."""
        if not self._group:
            self._since = time.monotonic()
        self._group.append(json.dumps(line).encode() + b"\n")
        self.tick()

    def tick(self) -> None:
        """Write the group if it is large or old enough."""
        full = len(self._group) >= GROUP_LINES
        if full or (self._group and time.monotonic() - self._since >= GROUP_SECONDS):
            self.flush()

    def flush(self) -> None:
        """Write what there is, and wait until it is on the disk."""
        if not self._group:
            return
        data = memoryview(b"".join(self._group))
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:  # a disk that is full, say
            self._broken = True  # the file may end in a torn line, so nothing may follow
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.lines += len(self._group)
        self._group.clear()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{self.path} is the output of another run that goes on; wait for it, or give another output"
            ) from None

    def _read(self) -> None:
        good = 0
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self._cut(good, line)
                    return
                self._learn(number, line)
                good += len(line)

    def _learn(self, number: int, line: bytes) -> None:
        try:
            value = json.loads(line)
            line_id, custom_id = value["id"], value["custom_id"]
            known = line_id.startswith("batch_err_") or (
                line_id.startswith("batch_req_") and isinstance(custom_id, str)
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            known = False
        if not known:
            raise InputError(
                f"line {number} of {self.path} is no output of a batch; give another output, or remove that line"
            )
        if line_id.startswith("batch_err_"):
            self.errors.add(line_id)
        else:
            self.answers[custom_id] = line_id
        self.lines += 1

    def _cut(self, end: int, torn: bytes) -> None:
        written = torn.rstrip(b"\0")  # a loss of power can leave zeros in place of what was written
        ours = written.startswith(_BEGINNING) or _BEGINNING.startswith(written)
        if not ours:
            raise InputError(
                f"{self.path} ends in a line that is no output of a batch; give another output"
            )
        os.ftruncate(self._file, end)
        os.fsync(self._file)
        self.cut_bytes = len(torn)


def _sync_folder(path: Path) -> None:
    """Make a new file's name as safe as its contents."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
