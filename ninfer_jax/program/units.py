"""Units: functions that change device memory, `unit(params, state, plan) -> (state', result)`, the state donated."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.config import PAGE_TOKENS
from ninfer_jax.models.qwen3_5 import streamed, trunk
from ninfer_jax.models.qwen3_5.params import TextParameters
from ninfer_jax.models.qwen3_5.state import DeviceState
from ninfer_jax.program import sampler
from ninfer_jax.program.plans import (
    DecodePlan,
    PrefillPlan,
    PromptLogprobs,
    Sampled,
    SamplerState,
    SamplingRows,
)


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
        plan.write_slot[None],
        plan.read_slot[None],
    )
    return state, hidden[0]


def decode(
    config: Qwen3_5Config,
    params: TextParameters,
    state: DeviceState,
    sampled: Int[Array, " C"],
    plan: DecodePlan,
) -> tuple[DeviceState, Float[Array, "C V"]]:
    """Run one token a row; returns float32 logits. `sampled` is what each row sampled last, still on the device."""
    tokens = jnp.where(plan.forced >= 0, plan.forced, sampled)
    rows = (tokens, plan.positions, plan.block_tables, plan.write_slots, plan.read_slots)
    if streamed.fits(config, params, len(tokens)):
        return streamed.decode(config, params, state, *rows)
    state, hidden = trunk.decode(config, params, state, *rows)
    return state, trunk.logits(params, hidden)


def prompt_logprobs(
    params: TextParameters, hidden: Float[Array, "T H"], targets: Int[Array, " T"]
) -> PromptLogprobs:
    """Score given tokens, half a page's worth at a time, so that [T, V] is never stored."""
    T, H = hidden.shape
    blocks = (hidden.reshape(-1, PAGE_TOKENS // 2, H), targets.reshape(-1, PAGE_TOKENS // 2))
    scored = jax.lax.map(
        lambda b: sampler.log_probabilities(trunk.logits(params, b[0]), b[1]), blocks
    )
    flat = {name: x.reshape(T, *x.shape[2:]) for name, x in scored.items()}
    return PromptLogprobs(**flat)


def sample_greedy(
    logits: Float[Array, "C V"], sampled: Int[Array, " C"], counted: Bool[Array, " C"]
) -> tuple[Int[Array, " C"], Bool[Array, " C"]]:
    """Sampling for batches in which every row is greedy without penalties, bias or log-probabilities.

    Rows that are not `counted` keep the token they sampled last.
    """
    tokens, healthy = sampler.greedy(logits)
    return jnp.where(counted, tokens, sampled), healthy


def sample(
    state: SamplerState,
    logits: Float[Array, "C V"],
    sampled: Int[Array, " C"],
    counted: Bool[Array, " C"],
    rows: SamplingRows,
    positions: Int[Array, " C"],
) -> tuple[SamplerState, Sampled]:
    """Sampling with every row's own parameters; rows that are not `counted` keep their last token and their counts."""
    state, result = sampler.sample(state, logits, rows, positions, counted)
    return state, replace(result, tokens=jnp.where(counted, result.tokens, sampled))
