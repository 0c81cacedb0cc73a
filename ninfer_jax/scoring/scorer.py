"""The scorer of a model: its executables, and jobs one after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from tqdm import tqdm

from ninfer_jax.errors import CapacityError, EngineFailure, NumericError
from ninfer_jax.models.model import Model
from ninfer_jax.models.qwen3_5.state import DeviceState, new_device_state
from ninfer_jax.program import compiler, executables, startup
from ninfer_jax.program.executables import Unit
from ninfer_jax.scoring import core
from ninfer_jax.scoring.core import Scored, ScorePlan
from ninfer_jax.scoring.job import Job, Result
from ninfer_jax.scoring.windows import Span

CLOSED = "the engine is closed and scores no more; load it again"


class Scorer:
    """Scores sequences with a state that exists only while a job runs (SC-01).

    Any thread may call it; jobs take turns. A unit is made when it is first needed, or all of them by `prepare`; on
    accelerators they are kept on disk (`executables`).
    """

    def __init__(self, model: Model, *, max_context: int, prefill_chunk: int) -> None:
        """Fixes the shapes; allocates and compiles nothing.

        Args:
          model: parameters on one device.
          max_context: S: most tokens that the model may run on in one sequence.
          prefill_chunk: largest unit, tokens a row.
        """
        self.max_context = max_context
        self._model = model
        self._shapes = core.shapes(max_context, prefill_chunk)
        self._units: dict[int, Compiled] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._counted = {"jobs": 0, "sequences": 0, "scored_tokens": 0, "computed_tokens": 0}

    def prepare(self) -> None:
        """Compile every unit and run each once, so that nothing compiles later.

        Raises:
          CapacityError: the device has no room for the temporary state.
        """
        with self._lock:
            self._units = self._compiled(*reversed(self._shapes.buckets))
            state = self._new_state()
            for bucket, unit in self._units.items():
                state, _ = unit(self._model.params, state, self._plan(bucket))
            jax.block_until_ready(state)

    def run(
        self, spans: Sequence[Span], *, use_tqdm: bool = False, share: bool = True
    ) -> list[Result]:
        """Score sequences, serially with every other job; results in their order.

        Args:
          spans: sequences of at most `max_context` inputs.
          use_tqdm: show progress on stderr.
          share: False computes a shared context again for each sequence; the numbers are the same.

        Raises:
          CapacityError: the device has no room for the temporary state.
          EngineFailure: the scorer is closed.
          NumericError: the model's output for a sequence is not finite.
        """
        with self._lock, tqdm(total=len(spans), desc="Scoring", disable=not use_tqdm) as bar:
            self._require_open()
            if not spans:
                return []
            state = [self._new_state()]

            def launch(bucket: int, plan: ScorePlan) -> Scored:
                self._require_open()
                if bucket not in self._units:
                    self._units |= self._compiled(bucket)
                state[0], scored = self._units[bucket](self._model.params, state[0], plan)
                return scored

            job = Job(self._shapes, launch)
            results = job.run(spans, bar.update, share=share)
            self._counted["jobs"] += 1
            self._counted["sequences"] += len(spans)
            self._counted["scored_tokens"] += sum(len(r.logprobs) for r in results)
            self._counted["computed_tokens"] += job.computed
        _require_finite(results, spans)
        return results

    def stats(self) -> dict[str, int]:
        """Counters since the start. Shared contexts count once in `computed_tokens`."""
        return dict(self._counted)

    def memory(self) -> dict[str, int]:
        """Bytes by use: `weights`; `kv` and `state_images`, which exist only while a job runs; and as far as the
        compiler tells, code and largest temporary memory of what is compiled so far."""
        self._require_open()
        state = jax.eval_shape(self._fresh)
        out = {
            "weights": _bytes(self._model.params),
            "kv": _bytes(state.kv),
            "state_images": _bytes(state.images),
        }
        units = list(self._units.values())
        costs = [cost for unit in units if (cost := unit.memory_analysis()) is not None]
        if costs:
            out["executables"] = sum(c.generated_code_size_in_bytes for c in costs)
            out["workspace"] = max(c.temp_size_in_bytes for c in costs)
        return out

    def close(self) -> None:
        """End a running job at its next unit and let everything go; later jobs fail."""
        self._closed.set()
        with self._lock:
            self._units.clear()

    @property
    def _device(self) -> jax.Device:
        (device,) = self._model.params.embed.devices()
        return device

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise EngineFailure(CLOSED)

    def _fresh(self) -> DeviceState:
        return new_device_state(
            self._model.config,
            pages=self._shapes.pages,
            slots=self._shapes.slots,
            dtype=self._model.params.embed.dtype,
        )

    def _new_state(self) -> DeviceState:
        try:
            return jax.device_put(self._fresh(), self._device)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            needed = _bytes(jax.eval_shape(self._fresh))
            raise CapacityError(
                f"the device has no room for {needed} B of temporary scoring state; lower max_context, or load the "
                'model with purpose="scoring", which holds nothing else'
            ) from error

    def _compiled(self, *buckets: int) -> dict[int, Compiled]:
        """Executables, the one that takes longest first."""
        config = self._model.config
        score = jax.jit(partial(core.score, config), donate_argnums=1)
        given = self._model.params, jax.eval_shape(self._fresh)
        units = {f"score/{b}": Unit(score, (*given, self._plan(b))) for b in buckets}
        options = compiler.OPTIONS.get(self._device.platform, {})
        kept = startup.keep_executables()
        made = executables.compiled(units, self._device, options, config, kept)
        return dict(zip(buckets, made.values(), strict=True))

    def _plan(self, bucket: int) -> ScorePlan:
        """Null rows."""
        B, L = self._shapes.rows(bucket), self._shapes.blocks
        zeros = np.zeros(B, np.int32)
        tokens, tables = np.zeros((B, bucket), np.int32), np.zeros((B, L), np.int32)
        return ScorePlan(tokens, tokens, zeros, zeros, tables, zeros, zeros, zeros, zeros)


def _require_finite(results: list[Result], spans: Sequence[Span]) -> None:
    for index, (result, span) in enumerate(zip(results, spans, strict=True)):
        bad = np.flatnonzero(~np.isfinite(result.logprobs))
        if bad.size:
            raise NumericError(
                f"the model's output for token {span.first + int(bad[0])} of sequence {index} is not finite; its "
                'weights are broken, or overflow in this dtype: try dtype="float32"'
            )


def _bytes(tree: object) -> int:
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
