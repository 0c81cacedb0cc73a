"""The program: device memory, the closed set of executables, and the calls that run them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.config import Limits
from ninfer_jax.models.model import Model
from ninfer_jax.models.qwen3_5.state import new_device_state
from ninfer_jax.program import sampler, units
from ninfer_jax.program.allocator import Lease, pages_for
from ninfer_jax.program.plans import (
    DecodePlan,
    ForkPlan,
    PrefillPlan,
    PromptLogprobs,
    Sampled,
    SamplingRows,
)

# XLA's older CPU code for fusions is 10 to 40% faster on these units and compiles faster; jax 0.11 no longer has it.
_CPU_OPTIONS = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}


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
        plan = PrefillPlan(
            tokens=padded,
            start=np.int32(start),
            length=np.int32(len(tokens)),
            block_table=lease.block_table,
            slot=np.int32(lease.slot),
        )
        self._state, hidden = self._units[f"prefill/{bucket}"](self._params, self._state, plan)
        return hidden

    def prompt_logprobs(self, hidden: jax.Array, targets: np.ndarray) -> PromptLogprobs:
        """Log-probabilities of `targets` (int32) given the hidden states before them; results stay on the device."""
        bucket = hidden.shape[0]
        padded = np.zeros(bucket, np.int32)
        padded[: len(targets)] = targets
        return self._units[f"prompt_logprobs/{bucket}"](self._params, hidden, padded)

    def fork(self, source: Lease, target: Lease, tokens: int) -> None:
        """Copy the first `tokens` tokens' position from one lease to another."""
        count = pages_for(tokens)
        pages = [
            np.where(np.arange(self.limits.blocks) < count, x.block_table, 0)
            for x in (source, target)
        ]
        plan = ForkPlan(
            source_slot=np.int32(source.slot),
            target_slot=np.int32(target.slot),
            source_pages=pages[0].astype(np.int32),
            target_pages=pages[1].astype(np.int32),
        )
        self._state = self._units["fork"](self._state, plan)

    def install_row(
        self, lane: int, *, counts: np.ndarray, prompt: np.ndarray, bias: np.ndarray
    ) -> None:
        """Set what sampling remembers of a lane: int32 counts, bool prompt mask, float32 bias, each [V]."""
        self._sampler = self._units["install_row"](
            self._sampler, np.int32(lane), counts, prompt, bias
        )

    def decode(self, plan: DecodePlan) -> jax.Array:
        """Run one token a row. Returns logits [C, V] on the device, to be given to one of the samplers."""
        self._state, logits = self._units["decode"](self._params, self._state, self._sampled, plan)
        return logits

    def sample_greedy(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Greedy tokens [C] and health [C], still on the device."""
        self._sampled, healthy = self._units["sample_greedy"](logits)
        return self._sampled, healthy

    def sample(self, logits: jax.Array, rows: SamplingRows, positions: np.ndarray) -> Sampled:
        """Sample every row with its own parameters; results stay on the device."""
        self._sampler, sampled = self._units["sample"](self._sampler, logits, rows, positions)
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

    def _compile(self, config: Qwen3_5Config) -> None:
        rows, blocks, vocab = self.limits.max_concurrency, self.limits.blocks, self._vocab
        i32, f32 = partial(_array, jnp.int32), partial(_array, jnp.float32)
        params, state = self._params, self._state
        logits = f32(rows, vocab)
        lowered: dict[str, Lowered] = {}

        def lower(
            name: str, unit: Callable[..., Any], *args: Any, donate: int | None = None
        ) -> None:
            donated = () if donate is None else donate
            lowered[name] = jax.jit(unit, donate_argnums=donated).lower(*args)

        for T in self.limits.chunk_buckets:
            chunk = PrefillPlan(
                tokens=i32(T), start=i32(), length=i32(), block_table=i32(blocks), slot=i32()
            )
            lower(f"prefill/{T}", partial(units.prefill, config), params, state, chunk, donate=1)
            hidden = _array(params.embed.dtype, T, config.hidden_size)
            lower(f"prompt_logprobs/{T}", units.prompt_logprobs, params, hidden, i32(T))
        step = DecodePlan(
            forced=i32(rows), positions=i32(rows), block_tables=i32(rows, blocks), slots=i32(rows)
        )
        decode = partial(units.decode, config)
        lower("decode", decode, params, state, self._sampled, step, donate=1)
        copy = ForkPlan(
            source_slot=i32(), target_slot=i32(), source_pages=i32(blocks), target_pages=i32(blocks)
        )
        lower("fork", units.fork, state, copy, donate=0)
        lower("sample_greedy", units.sample_greedy, logits)
        sampling = SamplingRows(
            temperature=f32(rows),
            top_k=i32(rows),
            top_p=f32(rows),
            min_p=f32(rows),
            presence_penalty=f32(rows),
            frequency_penalty=f32(rows),
            repetition_penalty=f32(rows),
            seed=_array(jnp.uint32, rows, 2),
        )
        lower("sample", sampler.sample, self._sampler, logits, sampling, i32(rows), donate=0)
        marks = (i32(), i32(vocab), _array(jnp.bool_, vocab), f32(vocab))
        lower("install_row", sampler.install_row, self._sampler, *marks, donate=0)
        (device,) = self._sampled.devices()
        options = _CPU_OPTIONS if device.platform == "cpu" else {}
        # Compilation releases the interpreter lock; the largest units come first.
        with ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda unit: unit.compile(options), lowered.values())
            self._units = dict(zip(lowered, compiled, strict=True))


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
