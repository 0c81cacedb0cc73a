"""Units in flight: launched on the device, results not read yet."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from ninfer_jax.engine.request import Sequence
from ninfer_jax.program import readback
from ninfer_jax.program.plans import TokenLogprobs
from planner.world import DecodeRow


@dataclass(frozen=True, slots=True)
class Readings:
    """A decode unit's results on the host, by lane."""

    tokens: list[int]
    healthy: list[int]
    logprobs: TokenLogprobs | None
    """If a row asked for them."""


@dataclass(frozen=True, slots=True)
class DecodeFlight:
    """A decode unit. `sampled` is None where every row replays: nothing is sampled then (PR-06)."""

    unit: int
    cycle: int
    rows: tuple[DecodeRow, ...]
    sampled: jax.Array | None = None
    """int32 [2, C]: tokens and health."""
    logprobs: TokenLogprobs | None = None

    def read(self) -> Readings:
        """Wait for the results."""
        if self.sampled is None:
            return Readings([], [], None)
        tokens, healthy = readback.read(self.sampled).tolist()
        return Readings(tokens, healthy, jax.tree.map(readback.read, self.logprobs))


@dataclass(frozen=True, slots=True)
class PrefillFlight:
    """A prefill unit: nothing to read but what a caller wants to know about its prompt."""

    unit: int
    cycle: int
    ticket: int
    hidden: jax.Array
    sequence: Sequence | None = None
    """Whose prompt is scored."""
    targets: np.ndarray | None = None
    scored: TokenLogprobs | None = None


Flight = DecodeFlight | PrefillFlight
