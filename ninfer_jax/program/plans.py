"""The trees that go into and come out of units.

Plans hold small arrays of fixed shapes; page ids, slots, positions and seeds are inputs and never enter the compile key
(CAP-22). They are filled with host arrays, or with shapes to compile for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt


@flax.struct.dataclass
class PrefillPlan:
    """One chunk of one request's prompt."""

    tokens: Int[Any, " T"]
    start: Int[Any, ""]
    length: Int[Any, ""]
    block_table: Int[Any, " L"]
    read_slot: Int[Any, ""]
    """Where the state comes from; another slot than `write_slot` only in the first unit after a fork (ST-08)."""
    write_slot: Int[Any, ""]


@flax.struct.dataclass
class DecodePlan:
    """One token for each of C rows. A row that does not run is all zeros but for `sampled`: null slots and a table of
    null pages.

    Two arguments of int32, which a step turns in place into those of the plan that follows: the kernels of a launched
    graph read them where they lay before.
    """

    rows: Int[Any, "six C"]
    """The properties below, in their order: views on the host, which may be written to."""
    block_tables: Int[Any, "C L"]
    """Pages of each row (KV-24)."""

    @property
    def forced(self) -> Int[Any, " C"]:
        """Token to run, or -1 for the token the row sampled last."""
        return self.rows[0]

    @property
    def positions(self) -> Int[Any, " C"]:
        """Position of the token that runs; what is sampled stands one further."""
        return self.rows[1]

    @property
    def read_slots(self) -> Int[Any, " C"]:
        """Slot that each row continues from."""
        return self.rows[2]

    @property
    def write_slots(self) -> Int[Any, " C"]:
        """Slot that each row's new state goes to."""
        return self.rows[3]

    @property
    def counted(self) -> Int[Any, " C"]:
        """1 for rows that sample; the others, null or replayed, keep what they sampled last (PR-06)."""
        return self.rows[4]

    @property
    def sampled(self) -> Int[Any, " C"]:
        """`counted` of the plan before: for the samplers, which run after a step and take the plan that follows it."""
        return self.rows[5]

    @classmethod
    def null(cls, rows: int, blocks: int) -> DecodePlan:
        """A plan on the host in which no row runs."""
        return cls(np.zeros((6, rows), np.int32), np.zeros((rows, blocks), np.int32))

    def following(self) -> DecodePlan:
        """The plan of the same rows one position on: with what they sample now, from the slots they write, counted.

        The same on the host and traced: a step also gives the plan that most likely comes next, on the device.
        """
        write = self.write_slots
        runs = (write > 0).astype(np.int32)
        rows = [-runs, self.positions + runs, write, write, runs, self.counted]
        stack = np.stack if isinstance(self.rows, np.ndarray) else jnp.stack
        return DecodePlan(stack(rows), self.block_tables)


class Decoded(NamedTuple):
    """Results of a decode step, for the host."""

    logits: Float[Array, "C V"]
    """float32; the next step takes their memory."""
    sampled: Int[Array, "two C"]
    """The token each row sampled last, greedily if in this step, and whether this step's logits were healthy: 0 where
    they held a NaN or no finite value, and the token is meaningless. The samplers return the same of their draws."""


@flax.struct.dataclass
class SamplerState:
    """What sampling remembers of each row, over the whole vocabulary."""

    counts: Int[Array, "B V"]
    """How often each token was generated so far, the prompt not counted."""
    prompt: Bool[Array, "B V"]
    """Tokens of the prompt, for the repetition penalty."""
    bias: Float[Array, "B V"]
    """Added to the logits first: `logit_bias`, and -inf for stop tokens while `min_tokens` forbids them."""


@flax.struct.dataclass
class SamplingRows:
    """Sampling parameters of each row; `numeric_formats` gives their exact meaning."""

    temperature: Float[Any, " B"]
    """0 is greedy."""
    top_k: Int[Any, " B"]
    """0 keeps all."""
    top_p: Float[Any, " B"]
    min_p: Float[Any, " B"]
    presence_penalty: Float[Any, " B"]
    frequency_penalty: Float[Any, " B"]
    repetition_penalty: Float[Any, " B"]
    seed: UInt[Any, "B two"]
    """High and low word of the 64-bit seed."""


@flax.struct.dataclass
class TokenLogprobs:
    """Log-probability of each of T tokens, and the most probable ones, in the raw distribution of the model."""

    logprob: Float[Array, " T"]
    rank: Int[Array, " T"]
    """1 for the most probable token."""
    top_ids: Int[Array, "T n"]
    top_logprobs: Float[Array, "T n"]
