"""Sampling on the device (numeric_formats, Sampling): penalties, truncation, a stateless draw, log-probabilities.

A draw depends on (seed, logical position, purpose) alone, never on the row, the batch or the schedule (UN-11).
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from ninfer_jax.program.plans import SamplerState, SamplingRows, TokenLogprobs

MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities can be asked for."""
CANDIDATES = 128
"""Most probable tokens that truncation looks at before it sorts the whole vocabulary."""
_RUN = 16
"""Values of which `largest` looks at the maximum first."""


class Purpose(IntEnum):
    """What a random number is for; part of its key."""

    PREFILL = 0
    DECODE = 1
    SPECULATIVE_ACCEPT = 2
    CORRECTION = 3
    BONUS = 4
    DRAFT = 5


def new_sampler_state(rows: int, vocab: int) -> SamplerState:
    return SamplerState(
        counts=jnp.zeros((rows, vocab), jnp.int32),
        prompt=jnp.zeros((rows, vocab), bool),
        bias=jnp.zeros((rows, vocab), jnp.float32),
    )


def install_row(
    state: SamplerState,
    row: Int[Array, ""],
    counts: Int[Array, " V"],
    prompt: Bool[Array, " V"],
    bias: Float[Array, " V"],
) -> SamplerState:
    """Set what sampling remembers of one row."""
    return SamplerState(
        counts=state.counts.at[row].set(counts),
        prompt=state.prompt.at[row].set(prompt),
        bias=state.bias.at[row].set(bias),
    )


def greedy(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """The most probable token of each row (lowest id wins), and whether the row was healthy.

    Healthy is a row without NaN and +inf, and with at least one finite value. NaN counts as the largest.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    # One pass: `jnp.argmax` leaves the largest value to be looked up, in a kernel of its own.
    nothing = np.float32(-np.inf), np.int32(logits.shape[1])
    largest, tokens = jax.lax.reduce((logits, ids), nothing, _larger, (1,))
    return tokens, jnp.isfinite(largest)


def _larger(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Of two values with their ids, as `jnp.argmax` sees them: NaN is the largest, of equals the lower id wins."""
    (x, i), (y, j) = a, b
    larger = (x > y) | jnp.isnan(x)
    return jnp.where(larger, x, y), jnp.where(larger | ((x == y) & (i < j)), i, j)


def sample(
    state: SamplerState,
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    positions: Int[Array, " B"],
    counted: Bool[Array, " B"] | None = None,
) -> tuple[SamplerState, Int[Array, " B"]]:
    """Draw one token a row and count it.

    Args:
      state: counts of what each row generated so far.
      logits: float32 logits of the model.
      rows: sampling parameters.
      positions: logical position of the token being drawn (its index in prompt plus output).
      counted: rows whose token counts; None: all.
    """
    adjusted = adjust(state, logits, rows)
    drawn = draw(adjusted, rows, positions, truncate(adjusted, rows))
    tokens = jnp.where(rows.temperature > 0, drawn, greedy(adjusted)[0])
    one = jnp.ones_like(tokens) if counted is None else counted.astype(jnp.int32)
    counts = state.counts.at[jnp.arange(tokens.shape[0]), tokens].add(one)
    return replace(state, counts=counts), tokens


def draw(
    adjusted: Float[Array, "B V"],
    rows: SamplingRows,
    positions: Int[Array, " B"],
    keep: Bool[Array, "B V"] | None = None,
) -> Int[Array, " B"]:
    """One token a row from the softmax of `adjusted / temperature` over what `keep` names (None: everything).

    The largest of the logits with Gumbel noise added is such a draw. A temperature of 0 is taken as 1.
    """
    noise = jax.vmap(partial(_gumbel, vocab=adjusted.shape[-1]))(rows.seed, positions)
    warm = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    noisy = adjusted / warm + noise
    if keep is not None:
        noisy = jnp.where(keep, noisy, -jnp.inf)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def log_probabilities(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> TokenLogprobs:
    """Log-probability and rank of the tokens, and the `MAX_LOGPROBS` most probable ones, of the raw distribution."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    top_logprobs, top_ids = largest(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    return TokenLogprobs(
        logprob=chosen[:, 0],
        rank=1 + jnp.sum(logprobs > chosen, axis=-1).astype(jnp.int32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def largest(x: Float[Array, "B V"], count: int) -> tuple[Float[Array, "B n"], Int[Array, "B n"]]:
    """`lax.top_k` of rows without NaN, for a large V of which few are wanted, without sorting all of it.

    The `count` largest values stand in the `count` runs whose maxima are largest, the lower id winning in both: each of
    those runs holds a value that comes before everything in the others. The maxima are chosen in the same way, so what
    is sorted stays small: a sort of 8,192 values takes an H200 more than three times as long as one of 1,024.
    """
    B, V = x.shape
    runs = -(-V // _RUN)
    if runs <= 2 * count:
        values, ids = jax.lax.top_k(x, count)
        return values, ids
    split = jnp.pad(x, ((0, 0), (0, runs * _RUN - V)), constant_values=-jnp.inf)
    split = split.reshape(B, runs, _RUN)
    _, chosen = largest(jnp.max(split, axis=-1), count)
    chosen = jnp.sort(chosen, axis=-1)  # ids of equal values rise with their place
    kept = jnp.take_along_axis(split, chosen[:, :, None], axis=1)
    values, place = jax.lax.top_k(kept.reshape(B, count * _RUN), count)
    ids = jnp.take_along_axis(chosen, place // _RUN, axis=1) * _RUN + place % _RUN
    return values, ids.astype(jnp.int32)


def adjust(
    state: SamplerState, logits: Float[Array, "B V"], rows: SamplingRows
) -> Float[Array, "B V"]:
    """Bias, then repetition, frequency and presence penalty, in vLLM's order."""
    adjusted = logits + state.bias
    repetition = jnp.where(state.prompt | (state.counts > 0), rows.repetition_penalty[:, None], 1.0)
    adjusted = jnp.where(adjusted > 0, adjusted / repetition, adjusted * repetition)
    adjusted -= rows.frequency_penalty[:, None] * state.counts.astype(jnp.float32)
    return adjusted - rows.presence_penalty[:, None] * (state.counts > 0).astype(jnp.float32)


def truncate(adjusted: Float[Array, "B V"], rows: SamplingRows) -> Bool[Array, "B V"]:
    """Which tokens top-k, top-p and min-p keep; ties go to the lower id. At least one token stays.

    A row whose top-k is at most `CANDIDATES`, or that has none and keeps fewer, is decided among its most probable
    tokens; for others the whole vocabulary is sorted. Which of the two decides a row depends on that row alone.
    """
    limited = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    limited &= rows.temperature > 0
    adjusted = jnp.where(adjusted == 0, 0.0, adjusted)  # top_k puts -0.0 behind 0.0
    every = jnp.ones(adjusted.shape, bool)

    def some() -> Array:
        kept, settled = _among_candidates(adjusted, rows)
        unsettled = limited & ~settled
        kept = jax.lax.cond(
            jnp.any(unsettled),
            lambda: jnp.where(unsettled[:, None], _among_all(adjusted, rows), kept),
            lambda: kept,
        )
        return jnp.where(limited[:, None], kept, every)

    return jax.lax.cond(jnp.any(limited), some, lambda: every)


def _among_candidates(
    adjusted: Float[Array, "B V"], rows: SamplingRows
) -> tuple[Bool[Array, "B V"], Bool[Array, " B"]]:
    """What is kept where no more than the candidates are, and of which rows that is known."""
    vocab = adjusted.shape[-1]
    count = min(CANDIDATES, vocab)
    value, order = largest(adjusted, count)
    kept = _kept(value, rows, of_all=jnp.sum(_weights(adjusted, value[:, :1], rows), axis=-1))
    settled = jnp.where(rows.top_k > 0, rows.top_k <= count, ~jnp.all(kept, axis=-1))
    return _prefix(adjusted, value, order, kept), settled | (count == vocab)


def _among_all(adjusted: Float[Array, "B V"], rows: SamplingRows) -> Bool[Array, "B V"]:
    """What is kept, whatever the rules."""
    order = jnp.argsort(-adjusted, axis=-1, stable=True).astype(jnp.int32)
    value = jnp.take_along_axis(adjusted, order, axis=-1)
    return _prefix(adjusted, value, order, _kept(value, rows))


def _weights(
    x: Float[Array, "B n"], top: Float[Array, "B 1"], rows: SamplingRows
) -> Float[Array, "B n"]:
    """Probabilities, relative to the largest."""
    warm = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    return jnp.exp((x - top) / warm)


def _kept(
    value: Float[Array, "B n"], rows: SamplingRows, of_all: Float[Array, " B"] | None = None
) -> Bool[Array, "B n"]:
    """Which of the n largest values, in descending order, no rule drops.

    `of_all` is the weight of the whole vocabulary where this is a part of it. What a top-k of more than n tokens keeps
    can't be told from these.
    """
    n = value.shape[-1]
    top_k = jnp.where(rows.top_k > 0, rows.top_k, n)[:, None]
    in_k = jnp.arange(n)[None, :] < top_k
    weight = jnp.where(in_k, _weights(value, value[:, :1], rows), 0.0)
    total = jnp.sum(weight, axis=-1)
    if of_all is not None:
        total = jnp.where(rows.top_k > 0, total, of_all)
    total = total[:, None]
    before = jnp.cumsum(weight, axis=-1) - weight
    top_p = rows.top_p[:, None]
    # top_p = 1 keeps everything even where rounding makes the running sum reach the total early.
    in_p = (top_p >= 1) | (before < top_p * total)
    return in_k & in_p & (weight >= rows.min_p[:, None])


def _prefix(
    adjusted: Float[Array, "B V"],
    value: Float[Array, "B n"],
    order: Int[Array, "B n"],
    kept: Bool[Array, "B n"],
) -> Bool[Array, "B V"]:
    """All rules keep a prefix of the descending order, so the shortest one decides: tokens up to its last."""
    length = jnp.where(jnp.all(kept, axis=-1), kept.shape[-1], jnp.argmin(kept, axis=-1))
    last = jnp.maximum(length - 1, 0)[:, None]
    lowest = jnp.take_along_axis(value, last, axis=-1)
    its_id = jnp.take_along_axis(order, last, axis=-1)
    early = jnp.arange(adjusted.shape[-1])[None, :] <= its_id
    return (adjusted > lowest) | ((adjusted == lowest) & early)


def _gumbel(
    seed: UInt[Array, " two"], position: Int[Array, ""], *, vocab: int
) -> Float[Array, " V"]:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, position), int(Purpose.DECODE))
    return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")
