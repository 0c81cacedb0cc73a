"""The program: device memory, the closed set of executables, and the calls that run them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.config import Limits
from ninfer_jax.errors import EngineFailure
from ninfer_jax.models.model import Model
from ninfer_jax.models.qwen3_5 import streamed
from ninfer_jax.models.qwen3_5.params import SeparateLayers, TextParameters, separate
from ninfer_jax.models.qwen3_5.state import new_device_state
from ninfer_jax.program import apart, compiler, executables, sampler, units
from ninfer_jax.program.apart import Apart
from ninfer_jax.program.executables import Unit
from ninfer_jax.program.plans import (
    Decoded,
    DecodePlan,
    PrefillPlan,
    SamplingRows,
    TokenLogprobs,
)
from ninfer_jax.program.tables import BlockTables
from ninfer_jax.program.transfers import Transfer, Transfers
from planner.world import DecodeRow, PublishTable, RunDecode, RunPrefill, RunTransfer

LARGE_BYTES = 64 << 20
"""Weights from which on a model is large on CPU. A step of one runs layer by layer (see `SeparateLayers`): what a loop
copies of smaller models stays in the cache, and it compiles in a tenth of the time. Prefill of a smaller one runs apart
from the state (see `apart`)."""
_LOG = logging.getLogger("ninfer_jax")


class Program:
    """Owns every mutable device array of one model, and the Host arena (OWN-06, OWN-11).

    All executables are compiled by the constructor and called ahead-of-time compiled, so nothing can compile later
    (CAP-21). State is donated to each call and replaced by its result (OWN-08); no call reads a result on the host, so
    a unit can be launched before the last one's tokens are read. Commands are carried out in the order of the calls.

    Host arrays are given to units by value: what a launched unit may still read is never changed (KV-33).

    Args:
      model: its parameters stay where they are.
      limits: see `startup.resolve`.
      kept: folder of executables to load, and to keep new ones in (see `executables`); None: all are compiled.

    Raises:
      CapacityError: no room for the Host arena.
    """

    def __init__(self, model: Model, limits: Limits, kept: Path | None = None) -> None:
        self.limits = limits
        config = model.config
        (self._device,) = model.params.embed.devices()
        before = _bytes_in_use(self._device)
        self._params: TextParameters = model.params
        self._step_params: TextParameters | SeparateLayers = model.params
        on_cpu, large = self._device.platform == "cpu", _size(model.params) >= LARGE_BYTES
        if on_cpu and large:
            self._step_params = separate(config, model.params)
        self._state = new_device_state(
            config, pages=limits.pages, slots=limits.slots, dtype=jnp.dtype(limits.dtype)
        )
        rows = limits.max_concurrency
        self._sampler = sampler.new_sampler_state(rows, config.vocab_size)
        self._sampled = jnp.zeros((2, rows), jnp.int32)
        self._logits = jnp.zeros((rows, config.vocab_size), jnp.float32)
        following = DecodePlan.null(rows, limits.blocks)
        self._closed = False
        self._following = following, self.put(following)
        """The plan that most likely comes next, on the host and on the device."""
        self._tables = BlockTables(limits)
        self._vocab = config.vocab_size
        self._transfers = Transfers(limits.layout, self._state, self._device)
        self._apart = Apart(config, limits) if on_cpu and not large and apart.fits(limits) else None
        """Where prefill units run; None: on the pools."""
        self._compile(config, kept)
        self._run_each_unit_once()
        after = _bytes_in_use(self._device)
        self._memory = self._summary(before, after)

    def publish_table(self, command: PublishTable) -> None:
        """Map blocks of a lane to pages (KV-24). Units launched before go on with what was published then (KV-33)."""
        self._require_open()
        self._tables.publish(command)

    def prefill(self, command: RunPrefill, tokens: np.ndarray) -> jax.Array:
        """Run one chunk of a prompt: `command.length` tokens, int32, at most the largest bucket.

        Returns:
          Final-norm hidden states [bucket, H], on the device; rows past the chunk are meaningless.
        """
        self._require_open()
        if len(tokens) != command.length:
            raise EngineFailure(f"{command} came with {len(tokens)} tokens")
        self._require_slots(command, command.read_slot, command.write_slot)
        self._tables.require_mapped(command.lane, command.start, command.length)
        bucket = self._bucket(command.length)
        padded = np.zeros(bucket, np.int32)
        padded[: len(tokens)] = tokens
        plan = PrefillPlan(
            tokens=padded,
            start=np.int32(command.start),
            length=np.int32(command.length),
            block_table=self._tables.row(command.lane),
            read_slot=np.int32(command.read_slot),
            write_slot=np.int32(command.write_slot),
        )
        return self._prefill(plan)

    def _prefill(self, plan: PrefillPlan) -> jax.Array:
        args = (self._params, self._state, plan)
        if self._apart is not None:
            self._state, hidden = self._apart.prefill(self._units, *args)
        else:
            self._state, hidden = self._units[f"prefill/{len(plan.tokens)}"](*args)
        return hidden

    def prompt_logprobs(self, hidden: jax.Array, targets: np.ndarray) -> TokenLogprobs:
        """Log-probabilities of `targets` (int32) given the hidden states before them; results stay on the device."""
        self._require_open()
        bucket = hidden.shape[0]
        padded = np.zeros(bucket, np.int32)
        padded[: len(targets)] = targets
        return self._units[f"prompt_logprobs/{bucket}"](self._params, hidden, padded)

    def decode(self, command: RunDecode) -> Decoded:
        """Run one token of each row of the command, in its lane; other lanes run as null rows.

        Returns:
          float32 logits [C, V] and greedy tokens, not read yet. Lanes that did not run, or ran as replay, keep what
          they sampled last. Until the next `decode`, which takes their memory, the logits may be given to a sampler,
          whose tokens count then.
        """
        self._require_open()
        plan = DecodePlan.null(self.limits.max_concurrency, self.limits.blocks)
        forced, positions, counted = plan.forced, plan.positions, plan.counted
        read_slots, write_slots, tables = plan.read_slots, plan.write_slots, plan.block_tables
        for row in command.rows:
            lane = row.lane
            self._require_slots(row, row.read_slot, row.write_slot)
            self._tables.require_mapped(lane, row.position, 1)
            if write_slots[lane]:
                raise EngineFailure(f"{command} names a lane twice")
            forced[lane], positions[lane] = row.token, row.position
            read_slots[lane], write_slots[lane] = row.read_slot, row.write_slot
            counted[lane] = not row.replay
            tables[lane] = self._tables.row(lane)
        expected, on_device = self._following
        plan.sampled[:] = expected.sampled  # what it is, whatever rows run now

        # A launch waits for its copies to the device, so none is made of what is there already.
        changed = {
            field: getattr(plan, field)
            for field in ("rows", "block_tables")
            if not np.array_equal(getattr(plan, field), getattr(expected, field))
        }
        if changed:
            on_device = on_device.replace(**self.put(changed))
        self._state, on_device, decoded = self._units["decode"](
            self._step_params, self._state, on_device, self._logits, self._sampled
        )
        self._following = plan.following(), on_device
        self._logits, self._sampled = decoded
        return decoded

    def sample_plain(self, logits: jax.Array, rows: SamplingRows) -> jax.Array:
        """Sample after `decode` where no row asks for more than temperature and seed: the draws of `sample`, for less.

        Returns:
          int32 [2, C], see `Decoded.sampled`.
        """
        self._require_open()
        self._sampled = self._units["sample_plain"](logits, self._sampled, self._following[1], rows)
        return self._sampled

    def sample(self, logits: jax.Array, rows: SamplingRows) -> jax.Array:
        """Sample after `decode` with all of every row's own parameters, and count it; returns the same."""
        self._require_open()
        self._sampler, self._sampled = self._units["sample"](
            self._sampler, logits, self._sampled, self._following[1], rows
        )
        return self._sampled

    def token_logprobs(self, logits: jax.Array) -> TokenLogprobs:
        """Log-probabilities of the tokens that were sampled last, [C], on the device."""
        self._require_open()
        return self._units["token_logprobs"](logits, self._sampled)

    def install_row(
        self, lane: int, *, counts: np.ndarray, prompt: np.ndarray, bias: np.ndarray
    ) -> None:
        """Set what sampling remembers of a lane: int32 counts, bool prompt mask, float32 bias, each [V]."""
        self._require_open()
        marks = (counts.copy(), prompt.copy(), bias.copy())
        self._sampler = self._units["install_row"](self._sampler, np.int32(lane), *marks)

    def start_transfer(self, command: RunTransfer) -> Transfer:
        """Launch a copy batch (see `transfers`); the caller asks the result whether it is ready, then completes it.

        Raises:
          EngineFailure: the batch is malformed; nothing was launched.
        """
        self._require_open()
        self._state, transfer = self._transfers.start(self._state, command)
        return transfer

    def put(self, tree: Any) -> Any:
        """Host arrays to the device, for plans that are used by many steps; the arrays are copied."""
        self._require_open()
        return jax.device_put(jax.tree.map(np.array, tree), self._device)

    def memory(self) -> dict[str, int]:
        """Bytes by use, and what start-up measured.

        On the device: `weights`, `kv`, `state_images`, `sampler` (and logits, tokens and plan of the last step), and of
        the executables their code and the largest temporary memory of one (`executables`, `workspace`), as far as the
        platform's compiler tells. Prefill that runs apart adds its scratches to that, and runs two at a time.
        On the host: `host_arena`, of which only what was used takes memory.
        `runtime_reservation_bytes` is B(M), the explicit backing. Where the device counts its memory there are also
        `startup_retained_bytes`, used before this program but not by weights, and `preparation_growth_bytes`, what
        allocating, compiling and running each unit once added (CAP-19). There is no calibration program to report on.
        """
        self._require_open()
        return dict(self._memory)

    def close(self) -> None:
        """End transfers under way and give all memory back; every later call but this one fails."""
        if self._closed:
            return
        self._closed = True
        self._transfers.close()
        if self._apart is not None:
            self._apart.close()
        del self._state, self._sampler, self._sampled, self._logits, self._following
        del self._units, self._params, self._step_params, self._transfers

    def _require_open(self) -> None:
        if self._closed:
            raise EngineFailure("this program is closed; load the model again")

    def _require_slots(self, command: RunPrefill | DecodeRow, *slots: int) -> None:
        """A wrong id would be silent corruption."""
        if min(slots) < 1 or max(slots) > self.limits.slots:
            raise EngineFailure(f"{command}: slots are 1..{self.limits.slots}")

    def _bucket(self, tokens: int) -> int:
        return next(b for b in self.limits.chunk_buckets if b >= tokens)

    def _compile(self, config: Qwen3_5Config, kept: Path | None) -> None:
        rows, blocks, vocab = self.limits.max_concurrency, self.limits.blocks, self._vocab
        i32, f32 = partial(_array, jnp.int32), partial(_array, jnp.float32)
        params, state = self._params, self._state
        logits = self._logits
        wanted: dict[str, Unit] = {}

        def want(
            name: str, unit: Callable[..., Any], *args: Any, donate: int | tuple[int, ...] = ()
        ) -> None:
            wanted[name] = Unit(
                jax.jit(unit, donate_argnums=donate, keep_unused=donate != ()), args
            )

        if self._device.platform == "gpu" and (why := streamed.unfit(config, params, rows)):
            _LOG.warning("decode runs without fused kernels: %s", why)
        # The unit that takes longest comes first: it compiles while others are lowered.
        decode, plan = partial(units.decode, config), self._following[0]
        step = (self._step_params, state, plan, logits, self._sampled)
        want("decode", decode, *step, donate=(1, 2, 3))
        for T in self.limits.chunk_buckets:
            chunk = PrefillPlan(
                tokens=i32(T),
                start=i32(),
                length=i32(),
                block_table=i32(blocks),
                read_slot=i32(),
                write_slot=i32(),
            )
            prefilled = state if self._apart is None else self._apart.scratch
            want(f"prefill/{T}", partial(units.prefill, config), params, prefilled, chunk, donate=1)
            hidden = _array(params.embed.dtype, T, config.hidden_size)
            want(f"prompt_logprobs/{T}", units.prompt_logprobs, params, hidden, i32(T))
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
        drawn = (logits, self._sampled, plan, sampling)
        want("sample_plain", units.sample_plain, *drawn)
        want("sample", units.sample, self._sampler, *drawn, donate=0)
        want("token_logprobs", units.token_logprobs, logits, self._sampled)
        marks = (i32(), i32(vocab), _array(jnp.bool_, vocab), f32(vocab))
        want("install_row", sampler.install_row, self._sampler, *marks, donate=0)
        wanted |= self._transfers.units(state)
        if self._apart is not None:
            wanted |= self._apart.units(state)
        options = compiler.OPTIONS.get(self._device.platform, {})
        depends_on = (config, self.limits.layout, self.limits.dtype)
        self._units = executables.compiled(wanted, self._device, options, depends_on, kept)

    def _run_each_unit_once(self) -> None:
        """Verify the inputs of every executable on null rows, before the first request (CAP-21)."""
        rows, blocks, vocab = self.limits.max_concurrency, self.limits.blocks, self._vocab
        null = np.int32(0)
        for T in self.limits.chunk_buckets:
            table = np.zeros(blocks, np.int32)
            plan = PrefillPlan(np.zeros(T, np.int32), null, null, table, null, null)
            hidden = self._prefill(plan)
            self.prompt_logprobs(hidden, np.zeros(T, np.int32))
        if self._apart is not None:  # which has a unit of its own for chunks that continue
            self._prefill(replace(plan, start=np.int32(1)))
        logits = self.decode(RunDecode(0, ())).logits
        zeros = np.zeros(rows, np.float32)
        ones, none = np.ones(rows, np.float32), np.zeros(rows, np.int32)
        seed = np.zeros((rows, 2), np.uint32)
        sampling = SamplingRows(zeros, none, ones, zeros, zeros, zeros, ones, seed)
        self.sample_plain(logits, sampling)
        self.sample(logits, sampling)
        self.token_logprobs(logits)
        for lane in range(rows):
            self.install_row(
                lane,
                counts=np.zeros(vocab, np.int32),
                prompt=np.zeros(vocab, bool),
                bias=np.zeros(vocab, np.float32),
            )
        self._state = self._transfers.install(self._units, self._state)
        jax.block_until_ready(self._state)

    def _summary(self, before: int | None, after: int | None) -> dict[str, int]:
        weights = _size(self._params)
        out = {
            "weights": weights,
            "kv": _size(self._state.kv),
            "state_images": _size(self._state.images),
            "sampler": _size((self._sampler, self._logits, self._sampled, self._following[1])),
            "host_arena": self.limits.layout.host_bytes,
            "runtime_reservation_bytes": self.limits.reservation_bytes,
        }
        costs = [c for unit in self._units.values() if (c := unit.memory_analysis()) is not None]
        if costs:
            out["executables"] = sum(c.generated_code_size_in_bytes for c in costs)
            scratches = 0 if self._apart is None else self._apart.nbytes
            out["workspace"] = max(c.temp_size_in_bytes for c in costs) + scratches
        if before is not None and after is not None:
            out["startup_retained_bytes"] = before - weights
            out["preparation_growth_bytes"] = after - before
        return out


def _size(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _bytes_in_use(device: jax.Device) -> int | None:
    return (device.memory_stats() or {}).get("bytes_in_use")


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
