"""The host mirror of the block tables: which page holds which block of a lane (KV-24)."""

from __future__ import annotations

import jax
import numpy as np

from ninfer_jax.config import PAGE_TOKENS, Limits
from ninfer_jax.errors import EngineFailure
from planner.world import PublishTable


class BlockTables:
    """int32 [C, L], a row a lane. Rows are replaced, never written: a launched unit may still read them (KV-33)."""

    def __init__(self, limits: Limits) -> None:
        self._blocks, self._pages = limits.blocks, limits.pages
        self._null = np.zeros(limits.blocks, np.int32)
        self._rows = [self._null] * limits.max_concurrency
        self._lanes: frozenset[int] | None = None
        self._batch = jax.device_put(np.stack(self._rows))

    def publish(self, command: PublishTable) -> None:
        """Replace the tail of a lane's row from block `start` on.

        Raises:
          EngineFailure: a page or block that does not exist.
        """
        end = command.start + len(command.pages)
        if not (
            0 <= command.lane < len(self._rows)
            and command.start >= 0
            and end <= self._blocks
            and all(1 <= page <= self._pages for page in command.pages)
        ):
            raise EngineFailure(
                f"{command}: there are {len(self._rows)} lanes, {self._blocks} blocks and pages 1..{self._pages}"
            )
        row = self._null.copy()
        row[: command.start] = self._rows[command.lane][: command.start]
        row[command.start : end] = command.pages
        self._rows[command.lane] = row
        self._lanes = None

    def row(self, lane: int) -> np.ndarray:
        """One lane's row."""
        return self._rows[lane]

    def rows(self, lanes: frozenset[int]) -> jax.Array:
        """All rows, null except those of `lanes`; the same device array as long as nothing changes."""
        if lanes != self._lanes:
            chosen = [r if lane in lanes else self._null for lane, r in enumerate(self._rows)]
            self._batch, self._lanes = jax.device_put(np.stack(chosen)), lanes
        return self._batch

    def require_mapped(self, lane: int, start: int, length: int) -> None:
        """Raise EngineFailure unless every position to be written has a page: without one it would vanish silently."""
        blocks = slice(start // PAGE_TOKENS, -(-(start + length) // PAGE_TOKENS))
        if not (0 <= lane < len(self._rows) and start >= 0 and length > 0) or not (
            blocks.stop <= self._blocks and self._rows[lane][blocks].all()
        ):
            raise EngineFailure(
                f"lane {lane} has no pages for positions {start}..{start + length - 1}"
            )
