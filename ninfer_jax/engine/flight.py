"""Units in flight: launched on the device, results not read yet."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from ninfer_jax.engine.request import Sequence
from ninfer_jax.program.plans import PromptLogprobs, Sampled
from planner.world import DecodeRow


@dataclass(frozen=True, slots=True)
class Readings:
    """A decode unit's results on the host, by lane."""

    tokens: list[int]
    healthy: list[bool]
    details: Sampled | None
    """Log-probabilities, if a row asked for them."""


@dataclass(frozen=True, slots=True)
class DecodeFlight:
    """A decode unit. `tokens` is None where every row replays: nothing is sampled then (PR-06)."""

    unit: int
    cycle: int
    rows: tuple[DecodeRow, ...]
    tokens: jax.Array | None = None
    healthy: jax.Array | None = None
    sampled: Sampled | None = None
    """The full sampler's results, if log-probabilities are wanted."""

    def start_reading(self) -> None:
        """Let the results travel to the host as soon as they exist."""
        for array in (self.tokens, self.healthy):
            if array is not None:
                array.copy_to_host_async()

    def read(self) -> Readings:
        """Wait for the results."""
        if self.tokens is None or self.healthy is None:
            return Readings([], [], None)
        return Readings(
            np.asarray(self.tokens).tolist(),
            np.asarray(self.healthy).tolist(),
            None if self.sampled is None else jax.device_get(self.sampled),
        )


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
    scored: PromptLogprobs | None = None


Flight = DecodeFlight | PrefillFlight
