"""The host mirror of the block tables: which page holds which block of a lane (KV-24)."""

from __future__ import annotations

import numpy as np

from ninfer_jax.config import PAGE_TOKENS, Limits
from ninfer_jax.errors import EngineFailure
from planner.world import PublishTable


class BlockTables:
    """int32 [C, L], a row a lane. Plans hold copies, which a launched unit may still read (KV-33)."""

    def __init__(self, limits: Limits) -> None:
        self._pages = limits.pages
        self._rows = np.zeros((limits.max_concurrency, limits.blocks), np.int32)

    def publish(self, command: PublishTable) -> None:
        """Replace the tail of a lane's row from block `start` on.

        Raises:
          EngineFailure: a page or block that does not exist.
        """
        end = command.start + len(command.pages)
        if not (
            0 <= command.lane < len(self._rows)
            and command.start >= 0
            and end <= self._rows.shape[1]
            and all(1 <= page <= self._pages for page in command.pages)
        ):
            raise EngineFailure(
                f"{command}: there are {len(self._rows)} lanes, {self._rows.shape[1]} blocks and pages "
                f"1..{self._pages}"
            )
        row = self._rows[command.lane]
        row[command.start : end] = command.pages
        row[end:] = 0

    def row(self, lane: int) -> np.ndarray:
        """A copy of one lane's row."""
        return self._rows[lane].copy()

    def require_mapped(self, lane: int, start: int, length: int) -> None:
        """Raise EngineFailure unless every position to be written has a page: without one it would vanish silently."""
        first, end = start // PAGE_TOKENS, -(-(start + length) // PAGE_TOKENS)
        if not (0 <= lane < len(self._rows) and start >= 0 and length > 0) or not (
            end <= self._rows.shape[1]
            and np.count_nonzero(self._rows[lane, first:end]) == end - first
        ):
            raise EngineFailure(
                f"lane {lane} has no pages for positions {start}..{start + length - 1}"
            )
