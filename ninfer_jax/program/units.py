"""Units: functions that change device memory, `unit(params, state, plan) -> (state', result)`, the state donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.config import PAGE_TOKENS
from ninfer_jax.models.qwen3_5 import streamed, trunk
from ninfer_jax.models.qwen3_5.params import SeparateLayers, TextParameters
from ninfer_jax.models.qwen3_5.state import DeviceState
from ninfer_jax.program import sampler
from ninfer_jax.program.plans import (
    Decoded,
    DecodePlan,
    PrefillPlan,
    SamplerState,
    SamplingRows,
    TokenLogprobs,
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
    params: TextParameters | SeparateLayers,
    state: DeviceState,
    plan: DecodePlan,
    logits: Float[Array, "C V"],
    sampled: Int[Array, "two C"],
) -> tuple[DeviceState, DecodePlan, Decoded]:
    """Run one token a row and sample greedily: a step of greedy rows is this one launch.

    A second executable without the argmax would not pay: it reads the logits once, and lowering a deep model takes
    seconds. What a launched graph finds in another place than last time has to be updated in it, so all that can stay
    in its place is donated: the plan, which becomes the one that follows (`DecodePlan.following`), for a next step that
    needs nothing from the host, and the logits of the last step, of which only the memory is wanted. XLA keeps values
    of every layer where the logits will be.

    Args:
      sampled: tokens and health of the last step (`Decoded.sampled`).

    Returns:
      State and plan for the next step, and the results.
    """
    del logits
    tokens = jnp.where(plan.forced >= 0, plan.forced, sampled[0])
    rows = (plan.positions, plan.block_tables, plan.write_slots, plan.read_slots)
    if isinstance(params, TextParameters) and not streamed.unfit(config, params, len(tokens)):
        state, logits = streamed.decode(config, params, state, tokens, *rows)
    else:
        state, hidden = trunk.decode(config, params, state, tokens, *rows)
        logits = trunk.logits(params, hidden)
    greedy, healthy = sampler.greedy(logits)
    kept = jnp.where(plan.counted > 0, greedy, sampled[0])
    sampled = jnp.stack([kept, healthy.astype(jnp.int32)])
    return state, plan.following(), Decoded(logits, sampled)


def prompt_logprobs(
    params: TextParameters, hidden: Float[Array, "T H"], targets: Int[Array, " T"]
) -> TokenLogprobs:
    """Score given tokens, half a page's worth at a time, so that [T, V] is never stored."""
    T, H = hidden.shape
    blocks = (hidden.reshape(-1, PAGE_TOKENS // 2, H), targets.reshape(-1, PAGE_TOKENS // 2))
    scored = jax.lax.map(
        lambda b: sampler.log_probabilities(trunk.logits(params, b[0]), b[1]), blocks
    )
    return jax.tree.map(lambda x: x.reshape(T, *x.shape[2:]), scored)


def sample_plain(
    logits: Float[Array, "C V"],
    sampled: Int[Array, "two C"],
    following: DecodePlan,
    rows: SamplingRows,
) -> Int[Array, "two C"]:
    """Sampling where no row has penalties, bias or truncation: only temperature and seed count.

    `following` and the arrays before it are what `decode` gave. Equal to `sample` bit for bit, so a row does not notice
    which of them its neighbours call for (UN-11). Nothing is counted: who has penalties is never here.

    Returns:
      `sampled` for the next step.
    """
    drawn = sampler.draw(logits, rows, following.positions)
    drawing = (following.sampled > 0) & (rows.temperature > 0)
    return jnp.stack([jnp.where(drawing, drawn, sampled[0]), sampled[1]])


def sample(
    state: SamplerState,
    logits: Float[Array, "C V"],
    sampled: Int[Array, "two C"],
    following: DecodePlan,
    rows: SamplingRows,
) -> tuple[SamplerState, Int[Array, "two C"]]:
    """Sampling after `decode` with all of every row's parameters; returns what `sample_plain` does after its state.

    Rows that are not counted keep their last token and their counts.
    """
    sampling = following.sampled > 0
    state, tokens = sampler.sample(state, logits, rows, following.positions, sampling)
    return state, jnp.stack([jnp.where(sampling, tokens, sampled[0]), sampled[1]])


def token_logprobs(logits: Float[Array, "C V"], sampled: Int[Array, "two C"]) -> TokenLogprobs:
    """Log-probabilities of what was sampled."""
    return sampler.log_probabilities(logits, sampled[0])
