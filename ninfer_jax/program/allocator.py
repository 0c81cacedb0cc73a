"""Pages, StateImage slots and lanes for running requests, reserved in full at admission.

This is the smallest thing that can stand behind the engine: a request holds all it may ever need from admission to its
end, so no step can run short. The planner takes its place with the same three verbs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ninfer_jax.config import PAGE_TOKENS, Limits


@dataclass(frozen=True)
class Lease:
    """What one running sequence holds."""

    lane: int
    """Row in the decode batch, 0..C-1."""
    slot: int
    """StateImage slot, 1..C + H (0 is null)."""
    block_table: np.ndarray
    """int32 [L]: physical pages in logical order, padded with the null page."""
    pages: int
    """How many entries of the table are real."""


class Allocator:
    """Free lists of lanes, slots and pages. `allocated + available = capacity` holds in each at all times.

    Args:
      limits: sizes of the pools.
      page_order: the physical ids 1..M in the order in which they are handed out; any permutation works (KV-12).
    """

    def __init__(self, limits: Limits, page_order: np.ndarray | None = None) -> None:
        order = np.arange(1, limits.pages + 1) if page_order is None else page_order
        if sorted(order.tolist()) != list(range(1, limits.pages + 1)):
            raise ValueError("page_order must be a permutation of 1..M")
        self._blocks = limits.blocks
        self._lanes = list(range(limits.max_concurrency))[::-1]
        self._slots = list(range(1, limits.slots + 1))[::-1]
        self._pages: list[int] = order.tolist()[::-1]

    @property
    def available(self) -> tuple[int, int, int]:
        """Free lanes, slots and pages."""
        return len(self._lanes), len(self._slots), len(self._pages)

    def can_admit(self, sequences: int, tokens: int) -> bool:
        """Whether `sequences` leases of `tokens` tokens each fit at once."""
        return sequences <= min(len(self._lanes), len(self._slots)) and sequences * pages_for(
            tokens
        ) <= len(self._pages)

    def admit(self, tokens: int) -> Lease:
        """Take a lane, a slot and the pages for `tokens` tokens; `can_admit` must have said yes."""
        count = pages_for(tokens)
        table = np.zeros(self._blocks, np.int32)
        table[:count] = [self._pages.pop() for _ in range(count)]
        return Lease(self._lanes.pop(), self._slots.pop(), table, count)

    def release(self, lease: Lease) -> None:
        """Give back everything a lease holds."""
        self._lanes.append(lease.lane)
        self._slots.append(lease.slot)
        self._pages.extend(lease.block_table[: lease.pages].tolist()[::-1])


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)
