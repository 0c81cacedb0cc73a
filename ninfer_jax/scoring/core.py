"""The device's side of scoring: one unit, of a few shapes, and the shapes themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.config import PAGE_TOKENS
from ninfer_jax.models.qwen3_5 import layers, trunk
from ninfer_jax.models.qwen3_5.params import TextParameters
from ninfer_jax.models.qwen3_5.state import DeviceState

VOCAB_CHUNK = 2048
"""Vocabulary entries whose logits exist at the same time."""
MAX_ROWS = 16
"""Most rows of a unit, and most contexts held at the same time."""
WINDOW_PAGES = 16
"""Pages a row that the temporary pool has at least room for; longer rows run fewer at a time."""


@dataclass(frozen=True)
class Shapes:
    """The closed set of shapes of scoring units, and the size of the temporary state."""

    buckets: tuple[int, ...]
    """Token counts of the units, ascending."""
    unit_tokens: int
    """Rows times tokens of the large units."""
    blocks: int
    """L: logical blocks of one sequence."""
    pages: int
    """Pages of the temporary Main pool, the null page not counted."""

    @property
    def slots(self) -> int:
        """StateImage slots: of the contexts held, then of the rows that run; the null slot not counted."""
        return 2 * MAX_ROWS

    def rows(self, bucket: int) -> int:
        """B of the unit for a bucket: fixed, so that no result depends on how many rows there are."""
        return max(1, min(MAX_ROWS, self.unit_tokens // bucket))


def shapes(max_context: int, prefill_chunk: int) -> Shapes:
    """Shapes for sequences of `max_context` tokens, with units of at most `prefill_chunk` tokens a row."""
    blocks = -(-max_context // PAGE_TOKENS)
    chunk = min(prefill_chunk, blocks * PAGE_TOKENS)
    # Doubling, so that a chunk is never padded to more than twice its length, short continuations apart.
    doubling = {PAGE_TOKENS << i for i in range(chunk.bit_length()) if PAGE_TOKENS << i < chunk}
    buckets = {16, *doubling, chunk}
    # Beside the contexts, one row needs a copy of the page in which its context ends.
    pages = max(blocks + 1, MAX_ROWS * min(blocks, WINDOW_PAGES))
    return Shapes(tuple(sorted(buckets)), 2 * chunk, blocks, pages)


@flax.struct.dataclass
class ScorePlan:
    """A chunk of each of B rows. A row that does not run has length 0, slots 0 and a table of null pages."""

    tokens: Int[Any, "B T"]
    targets: Int[Any, "B T"]
    """The token after each, whose log-probability is asked for; -1 where none is."""
    starts: Int[Any, " B"]
    lengths: Int[Any, " B"]
    block_tables: Int[Any, "B L"]
    read_slots: Int[Any, " B"]
    write_slots: Int[Any, " B"]
    copy_from: Int[Any, " B"]
    """A page to copy before the chunk runs, the one in which a shared context ends; 0: none."""
    copy_to: Int[Any, " B"]


@flax.struct.dataclass
class Scored:
    """Results of a unit; meaningless where there was no target."""

    logprobs: Float[Array, "B T"]
    greedy: Bool[Array, "B T"]


def score(
    config: Qwen3_5Config, params: TextParameters, state: DeviceState, plan: ScorePlan
) -> tuple[DeviceState, Scored]:
    """Run a chunk of each row and score its targets. The state is donated by the caller."""
    kv = state.kv
    copied = replace(
        kv,
        k=kv.k.at[:, plan.copy_to].set(kv.k[:, plan.copy_from]),
        v=kv.v.at[:, plan.copy_to].set(kv.v[:, plan.copy_from]),
    )
    state, hidden = trunk.prefill(
        config,
        params,
        replace(state, kv=copied),
        plan.tokens,
        plan.starts,
        plan.lengths,
        plan.block_tables,
        plan.write_slots,
        plan.read_slots,
    )
    B, T, H = hidden.shape

    def scored() -> tuple[Array, Array]:
        head = params.embed if params.lm_head is None else params.lm_head
        return token_scores(head, hidden.reshape(B * T, H), plan.targets.reshape(B * T))

    def nothing() -> tuple[Array, Array]:
        return jnp.zeros((B * T,), jnp.float32), jnp.zeros((B * T,), bool)

    # Chunks of contexts have no targets, and most of what a short chunk costs is the head.
    logprobs, greedy = jax.lax.cond(jnp.any(plan.targets >= 0), scored, nothing)
    return state, Scored(logprobs.reshape(B, T), greedy.reshape(B, T))


def token_scores(
    head: Float[Array, "V H"], hidden: Float[Array, "R H"], targets: Int[Array, " R"]
) -> tuple[Float[Array, " R"], Bool[Array, " R"]]:
    """Log-probabilities of targets and whether they are the most probable tokens, the lowest id winning.

    Logits exist for `VOCAB_CHUNK` entries at a time, float32: never [R, V].
    """
    R, V = hidden.shape[0], head.shape[0]
    size = min(VOCAB_CHUNK, V)
    column = jnp.arange(size, dtype=jnp.int32)

    def one_chunk(
        carry: tuple[Array, Array, Array, Array], first: Array
    ) -> tuple[tuple[Array, Array, Array, Array], None]:
        peak, total, best, chosen = carry
        # The last chunk is moved back to end with the vocabulary; what it repeats is masked.
        begin = jnp.minimum(first, V - size)
        part = jax.lax.dynamic_slice_in_dim(head, begin, size)
        ids = begin + column
        fresh = (ids >= first)[None]
        logits = jnp.where(fresh, layers.project(hidden, part), -jnp.inf)
        top = jnp.max(logits, axis=-1)
        new_peak = jnp.maximum(peak, top)
        weight = jnp.sum(jnp.exp(logits - new_peak[:, None]), axis=-1)
        here = fresh & (ids[None] == targets[:, None])
        chosen = chosen + jnp.sum(jnp.where(here, logits, 0.0), axis=-1)
        best = jnp.where(top > peak, ids[jnp.argmax(logits, axis=-1)], best)
        return (new_peak, total * jnp.exp(peak - new_peak) + weight, best, chosen), None

    empty = (
        jnp.full((R,), jnp.finfo(jnp.float32).min, jnp.float32),
        jnp.zeros((R,), jnp.float32),
        jnp.full((R,), -1, jnp.int32),
        jnp.zeros((R,), jnp.float32),
    )
    firsts = jnp.arange(0, V, size, dtype=jnp.int32)
    (peak, total, best, chosen), _ = jax.lax.scan(one_chunk, empty, firsts)
    return chosen - peak - jnp.log(total), best == targets
