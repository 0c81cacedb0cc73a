"""Units: the jitted functions that change device memory, and the plans they take.

A unit is `unit(params, state, plan) -> (state', result)` with the state donated. Plans hold small arrays of fixed
shapes; page ids, slots, positions and seeds are inputs and never enter the compile key (CAP-22).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.models.qwen3_5 import trunk
from ninfer_jax.models.qwen3_5.params import TextParameters
from ninfer_jax.models.qwen3_5.state import PAGE_TOKENS, DeviceState
from ninfer_jax.program import sampler


@flax.struct.dataclass
class PrefillPlan:
    """One chunk of one request's prompt."""

    tokens: Int[Array, " T"]
    start: Int[Array, ""]
    length: Int[Array, ""]
    block_table: Int[Array, " L"]
    slot: Int[Array, ""]


@flax.struct.dataclass
class DecodePlan:
    """One token for each of C rows. A row that does not run has slot 0, position 0 and a table of null pages."""

    forced: Int[Array, " C"]
    """Token to run, or -1 for the token the row sampled last."""
    positions: Int[Array, " C"]
    """Position of the token that runs."""
    block_tables: Int[Array, "C L"]
    slots: Int[Array, " C"]


@flax.struct.dataclass
class ForkPlan:
    """Copy one request's position to another: its StateImage and the pages it has written."""

    source_slot: Int[Array, ""]
    target_slot: Int[Array, ""]
    source_pages: Int[Array, " L"]
    """Padded with the null page, in the target as well."""
    target_pages: Int[Array, " L"]


@flax.struct.dataclass
class PromptLogprobs:
    """Log-probability of each given token after the hidden state before it, and the most probable ones."""

    logprob: Float[Array, " T"]
    rank: Int[Array, " T"]
    top_ids: Int[Array, "T n"]
    top_logprobs: Float[Array, "T n"]


def prefill(
    config: Qwen3_5Config, params: TextParameters, state: DeviceState, plan: PrefillPlan
) -> tuple[DeviceState, Float[Array, "T H"]]:
    """Run a chunk; returns its final-norm hidden states."""
    state, hidden = trunk.prefill(
        config,
        params,
        state,
        plan.tokens[None],
        plan.start[None],
        plan.length[None],
        plan.block_table[None],
        plan.slot[None],
    )
    return state, hidden[0]


def decode(
    config: Qwen3_5Config,
    params: TextParameters,
    state: DeviceState,
    sampled: Int[Array, " C"],
    plan: DecodePlan,
) -> tuple[DeviceState, Float[Array, "C V"]]:
    """Run one token a row; returns float32 logits. `sampled` are the tokens of the step before, still on the device."""
    tokens = jnp.where(plan.forced >= 0, plan.forced, sampled)
    state, hidden = trunk.decode(
        config, params, state, tokens, plan.positions, plan.block_tables, plan.slots
    )
    return state, trunk.logits(params, hidden)


def fork(state: DeviceState, plan: ForkPlan) -> DeviceState:
    """Copy a position: image and pages."""
    images = jax.tree.map(lambda x: x.at[plan.target_slot].set(x[plan.source_slot]), state.images)
    kv = jax.tree.map(lambda x: x.at[:, plan.target_pages].set(x[:, plan.source_pages]), state.kv)
    return DeviceState(kv=kv, images=images)


def prompt_logprobs(
    params: TextParameters, hidden: Float[Array, "T H"], targets: Int[Array, " T"]
) -> PromptLogprobs:
    """Score given tokens, a page's worth at a time, so that [T, V] is never stored."""
    T, H = hidden.shape
    blocks = (hidden.reshape(-1, PAGE_TOKENS, H), targets.reshape(-1, PAGE_TOKENS))
    scored = jax.lax.map(
        lambda b: sampler.log_probabilities(trunk.logits(params, b[0]), b[1]), blocks
    )
    flat = {name: x.reshape(T, *x.shape[2:]) for name, x in scored.items()}
    return PromptLogprobs(**flat)


def sample_greedy(logits: Float[Array, "C V"]) -> tuple[Int[Array, " C"], Bool[Array, " C"]]:
    """Sampling for batches in which every row is greedy without penalties, bias or log-probabilities."""
    return sampler.greedy(logits)
