"""The program: device memory, the closed set of executables, and the calls that run them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.config import Limits
from ninfer_jax.models.model import Model
from ninfer_jax.models.qwen3_5.state import PAGE_TOKENS, new_device_state
from ninfer_jax.program import sampler, units
from ninfer_jax.program.allocator import Lease
from ninfer_jax.program.sampler import Sampled, SamplingRows


class Program:
    """Owns every mutable device array of one model (OWN-06, OWN-11).

    All executables are compiled by the constructor and called ahead-of-time compiled, so nothing can compile later
    (CAP-21). State is donated to each call and replaced by its result (OWN-08); no call reads a result on the host, so
    a unit can be launched before the last one's tokens are read.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self.limits = limits
        config = model.config
        self._params = model.params
        self._state = new_device_state(
            config,
            pages=limits.pages,
            slots=limits.max_concurrency,
            dtype=jnp.dtype(limits.dtype),
        )
        rows = limits.max_concurrency
        self._sampler = sampler.new_sampler_state(rows, config.vocab_size)
        self._sampled = jnp.zeros((rows,), jnp.int32)
        self._vocab = config.vocab_size
        self._compile(config)

    def prefill(self, tokens: np.ndarray, start: int, lease: Lease) -> jax.Array:
        """Run one chunk of a prompt; `tokens` int32, at most the largest bucket.

        Returns:
          Final-norm hidden states [bucket, H], on the device; rows past the chunk are meaningless.
        """
        bucket = self._bucket(len(tokens))
        padded = np.zeros(bucket, np.int32)
        padded[: len(tokens)] = tokens
        plan = units.PrefillPlan(
            tokens=padded,
            start=np.int32(start),
            length=np.int32(len(tokens)),
            block_table=lease.block_table,
            slot=np.int32(lease.slot),
        )
        self._state, hidden = self._prefill[bucket](self._params, self._state, plan)
        return hidden

    def prompt_logprobs(self, hidden: jax.Array, targets: np.ndarray) -> units.PromptLogprobs:
        """Log-probabilities of `targets` (int32) given the hidden states before them; results stay on the device."""
        bucket = hidden.shape[0]
        padded = np.zeros(bucket, np.int32)
        padded[: len(targets)] = targets
        return self._prompt_logprobs[bucket](self._params, hidden, padded)

    def fork(self, source: Lease, target: Lease, tokens: int) -> None:
        """Copy the first `tokens` tokens' position from one lease to another."""
        count = -(-tokens // PAGE_TOKENS)
        pages = [
            np.where(np.arange(self.limits.blocks) < count, x.block_table, 0)
            for x in (source, target)
        ]
        plan = units.ForkPlan(
            source_slot=np.int32(source.slot),
            target_slot=np.int32(target.slot),
            source_pages=pages[0].astype(np.int32),
            target_pages=pages[1].astype(np.int32),
        )
        self._state = self._fork(self._state, plan)

    def install_row(
        self, lane: int, *, counts: np.ndarray, prompt: np.ndarray, bias: np.ndarray
    ) -> None:
        """Set what sampling remembers of a lane: int32 counts, bool prompt mask, float32 bias, each [V]."""
        self._sampler = self._install_row(self._sampler, np.int32(lane), counts, prompt, bias)

    def decode(self, plan: units.DecodePlan) -> jax.Array:
        """Run one token a row. Returns logits [C, V] on the device, to be given to one of the samplers."""
        self._state, logits = self._decode(self._params, self._state, self._sampled, plan)
        return logits

    def sample_greedy(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Greedy tokens [C] and health [C], still on the device."""
        self._sampled, healthy = self._sample_greedy(logits)
        return self._sampled, healthy

    def sample(self, logits: jax.Array, rows: SamplingRows, positions: np.ndarray) -> Sampled:
        """Sample every row with its own parameters; results stay on the device."""
        self._sampler, sampled = self._sample(self._sampler, logits, rows, positions)
        self._sampled = sampled.tokens
        return sampled

    def put(self, tree: Any) -> Any:
        """Host arrays to the device, for plans that are used by many steps."""
        return jax.device_put(tree)

    def memory(self) -> dict[str, int]:
        """Bytes held on the device, by use."""
        size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
        return {
            "weights": size(self._params),
            "kv": size(self._state.kv),
            "state_images": size(self._state.images),
            "sampler": size(self._sampler),
        }

    def _bucket(self, tokens: int) -> int:
        return next(b for b in self.limits.chunk_buckets if b >= tokens)

    def _compile(self, config: Any) -> None:
        rows, blocks, vocab = self.limits.max_concurrency, self.limits.blocks, self._vocab
        dtype = jnp.dtype(self.limits.dtype)
        i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        u32 = partial(jax.ShapeDtypeStruct, dtype=jnp.uint32)
        flag = partial(jax.ShapeDtypeStruct, dtype=jnp.bool_)

        def build(unit: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
            return jax.jit(unit, donate_argnums=donate).lower(*args).compile()

        params, state = self._params, self._state
        self._prefill, self._prompt_logprobs = {}, {}
        for T in self.limits.chunk_buckets:
            plan = units.PrefillPlan(
                tokens=i32((T,)),
                start=i32(()),
                length=i32(()),
                block_table=i32((blocks,)),
                slot=i32(()),
            )
            self._prefill[T] = build(
                partial(units.prefill, config), params, state, plan, donate=(1,)
            )
            hidden = jax.ShapeDtypeStruct((T, config.hidden_size), dtype)
            self._prompt_logprobs[T] = build(units.prompt_logprobs, params, hidden, i32((T,)))
        decode_plan = units.DecodePlan(
            forced=i32((rows,)),
            positions=i32((rows,)),
            block_tables=i32((rows, blocks)),
            slots=i32((rows,)),
        )
        self._decode = build(
            partial(units.decode, config), params, state, self._sampled, decode_plan, donate=(1,)
        )
        fork_plan = units.ForkPlan(
            source_slot=i32(()),
            target_slot=i32(()),
            source_pages=i32((blocks,)),
            target_pages=i32((blocks,)),
        )
        self._fork = build(units.fork, state, fork_plan, donate=(0,))
        logits = f32((rows, vocab))
        self._sample_greedy = build(units.sample_greedy, logits)
        sampling = SamplingRows(
            temperature=f32((rows,)),
            top_k=i32((rows,)),
            top_p=f32((rows,)),
            min_p=f32((rows,)),
            presence_penalty=f32((rows,)),
            frequency_penalty=f32((rows,)),
            repetition_penalty=f32((rows,)),
            seed=u32((rows, 2)),
        )
        self._sample = build(
            sampler.sample, self._sampler, logits, sampling, i32((rows,)), donate=(0,)
        )
        self._install_row = build(
            sampler.install_row,
            self._sampler,
            i32(()),
            i32((vocab,)),
            flag((vocab,)),
            f32((vocab,)),
            donate=(0,),
        )
