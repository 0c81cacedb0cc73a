"""The trees that go into and come out of units.

Plans hold small arrays of fixed shapes; page ids, slots, positions and seeds are inputs and never enter the compile key
(CAP-22). They are filled with host arrays, or with shapes to compile for.
"""

from __future__ import annotations

from typing import Any

import flax.struct
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
    """One token for each of C rows. A row that does not run has slots 0, position 0 and a table of null pages."""

    forced: Int[Any, " C"]
    """Token to run, or -1 for the token the row sampled last."""
    positions: Int[Any, " C"]
    """Position of the token that runs."""
    block_tables: Int[Any, "C L"]
    read_slots: Int[Any, " C"]
    write_slots: Int[Any, " C"]


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
class Sampled:
    """One sampled token a row, with log-probabilities of the raw model distribution."""

    tokens: Int[Array, " B"]
    healthy: Bool[Array, " B"]
    """False where the logits held a NaN or no finite value; the token is then meaningless."""
    logprob: Float[Array, " B"]
    rank: Int[Array, " B"]
    """1 for the most probable token."""
    top_ids: Int[Array, "B n"]
    top_logprobs: Float[Array, "B n"]


@flax.struct.dataclass
class PromptLogprobs:
    """Log-probability of each given token after the hidden state before it, and the most probable ones."""

    logprob: Float[Array, " T"]
    rank: Int[Array, " T"]
    top_ids: Int[Array, "T n"]
    top_logprobs: Float[Array, "T n"]
