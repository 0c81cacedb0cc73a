"""The training loop of both stages: optimiser, orbax checkpoints, one JSON line of metrics an interval."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

Params = Any
Loss = Callable[[Params, jax.Array, Any], tuple[jax.Array, dict[str, jax.Array]]]
"""`loss(params, key, data) -> (loss, metrics)`; the key chooses the batch out of the data."""


@dataclass(frozen=True)
class Recipe:
    """How long and how fast.

    Muon (Jordan et al. 2024) moves the matrices, its step scaled to AdamW's size, AdamW everything else. The learning
    rate rises over `warmup` steps and falls along a cosine to a hundredth at the last step.
    """

    steps: int
    peak: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    log_every: int = 20
    evaluate_every: int = 500
    save_every: int = 1000

    def schedule(self) -> optax.Schedule:
        """Learning rate of a step."""
        return optax.warmup_cosine_decay_schedule(
            0.0, self.peak, min(self.warmup, self.steps // 2), self.steps, 0.01 * self.peak
        )

    def optimiser(self, learning_rate: jax.Array) -> optax.GradientTransformation:
        """One step's transformation. The rate is an argument, so that the compiled step fits runs of any length."""
        muon = optax.contrib.muon(
            learning_rate,
            weight_decay=self.weight_decay,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_matrices,
        )
        return optax.chain(optax.clip_by_global_norm(self.clip), muon)


def _matrices(params: Params) -> Any:
    """Which leaves Muon moves: matrices [..., out, in], one for each layer; not embeddings, norms or convolutions."""

    def numbers(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        name = path[-1].name
        if not ("proj" in name or name == "fc") or leaf.ndim < 2:
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 1, leaf.ndim - 2)

    return jax.tree_util.tree_map_with_path(numbers, params)


def train(
    recipe: Recipe,
    params: Params,
    loss: Loss,
    data: Any,
    out: Path,
    evaluate: Callable[[Params], dict[str, float]] | None = None,
) -> Params:
    """Train to the recipe's last step, from the latest checkpoint under `out` if there is one.

    Every step's batch depends only on the seed and the step, so a resumed run sees what an uninterrupted one would.
    Metrics go to `out/metrics.jsonl`; a resumed run appends.
    """
    schedule = recipe.schedule()
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    out.mkdir(parents=True, exist_ok=True)
    with ocp.CheckpointManager((out / "checkpoints").absolute(), options=options) as manager:
        # A copy: steps take their state donated, and the caller's arrays are the caller's.
        state = (jax.tree.map(jnp.copy, params), recipe.optimiser(jnp.zeros(())).init(params))
        first = manager.latest_step() or 0
        if first:
            state = manager.restore(first, args=ocp.args.StandardRestore(state))
        key = jax.random.key(recipe.seed)

        def step(
            state: Any, number: jax.Array, rate: jax.Array, data: Any
        ) -> tuple[Any, dict[str, jax.Array]]:
            params, moments = state
            gradient = jax.value_and_grad(loss, has_aux=True)
            (value, metrics), grads = gradient(params, jax.random.fold_in(key, number), data)
            updates, moments = recipe.optimiser(rate).update(grads, moments, params)
            metrics = metrics | {"loss": value, "gradient_norm": optax.tree.norm(grads)}
            return (optax.apply_updates(params, updates), moments), metrics

        step = jax.jit(step, donate_argnums=0)
        with (out / "metrics.jsonl").open("a") as log:
            started, since = time.monotonic(), first
            for number in range(first, recipe.steps):
                state, metrics = step(state, jnp.asarray(number), schedule(number), data)
                done = number + 1
                if done % recipe.log_every == 0 or done == recipe.steps:
                    line: dict[str, Any] = {"step": done}
                    line |= {name: round(float(v), 5) for name, v in metrics.items()}
                    now = time.monotonic()
                    line["steps_per_second"] = round((done - since) / (now - started), 3)
                    line["learning_rate"] = float(schedule(done))
                    if evaluate and (done % recipe.evaluate_every == 0 or done == recipe.steps):
                        line |= evaluate(state[0])
                    print(json.dumps(line), file=log, flush=True)
                    print(json.dumps(line), flush=True)
                    started, since = time.monotonic(), done
                if done % recipe.save_every == 0 or done == recipe.steps:
                    manager.save(done, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return state[0]
