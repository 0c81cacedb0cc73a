"""Compare this runtime with Hugging Face's outputs stored in a checkpoint folder's golden.npz.

    python -m scripts.parity DIR [DIR ...]

Prints a table of comparisons in float32 and exits with 1 if one misses its limit.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import ninfer_jax as nj
from ninfer_jax.config import PAGE_TOKENS
from ninfer_jax.models.qwen3_5 import trunk
from ninfer_jax.models.qwen3_5.state import new_device_state

LOGITS = 1e-3
"""Limit on the difference of float32 logits; Hugging Face's own chunked prefill moves them by 2e-4."""
STATES = 1e-4
"""Limit on the difference of states, keys and values, relative to the largest magnitude."""


@dataclass(frozen=True)
class Check:
    """One comparison: a measured number that must not exceed its limit."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # False for NaN


def compare(folder: Path, *, logits: float = LOGITS, states: float = STATES) -> Iterator[Check]:
    """All comparisons that the folder's golden.npz allows, in float32."""
    golden = np.load(folder / "golden.npz")
    # As small as the prompts allow: most of the time goes into compiling.
    engine = nj.load(folder, dtype="float32", max_concurrency=1, prefill_chunk=64)
    model = engine.model
    ids = golden["input_ids"].astype(np.int32)

    plain = np.asarray(jax.jit(nj.forward)(model, ids))
    yield from _logits("forward", plain, golden["logits"], logits)

    _, outputs = jax.jit(partial(trunk.forward_with_layers, model.config))(model.params, ids)
    layers = np.asarray(outputs)
    for i, layer in enumerate(layers):
        if f"layer_{i}" in golden:
            yield Check(f"output of layer {i}", _relative(layer, golden[f"layer_{i}"]), states)

    chunks, state, table = _prefill(model, ids[0])
    yield from _logits("chunked prefill", chunks, golden["logits"][0], logits)
    yield from _states(model, golden, state, table, ids.shape[1], states)

    for suffix in ("", "_2"):
        if f"greedy_tokens{suffix}" not in golden:
            continue
        wanted = golden[f"greedy_tokens{suffix}"].reshape(-1).tolist()
        params = nj.SamplingParams(temperature=0, max_tokens=len(wanted), ignore_eos=True)
        prompt = golden[f"input_ids{suffix}"].reshape(-1).tolist()
        got = engine.generate(prompt, params)[0].outputs[0].token_ids
        wrong = sum(a != b for a, b in zip(got, wanted, strict=True))
        yield Check(f"wrong greedy tokens{suffix} of {len(wanted)}", wrong, 0)


def _prefill(model: nj.Model, ids: np.ndarray) -> tuple[np.ndarray, trunk.DeviceState, np.ndarray]:
    """Prefill in uneven chunks over pages in random order, next to a slot that is not the first."""
    pages = -(-len(ids) // PAGE_TOKENS)
    order = np.random.default_rng(0).permutation(2 * pages)[:pages] + 1
    state = new_device_state(model.config, pages=2 * pages, slots=3, dtype=jnp.float32)
    run = jax.jit(partial(trunk.prefill, model.config), donate_argnums=1)
    head = jax.jit(trunk.logits)
    table, slot = order.astype(np.int32)[None], np.array([2], np.int32)
    out, start = [], 0
    for size in itertools.cycle((100, 1, 37, 128)):
        if start == len(ids):
            break
        chunk = ids[start : start + size]
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(chunk)] = chunk
        where = (np.array([start], np.int32), np.array([len(chunk)], np.int32), table, slot)
        state, hidden = run(model.params, state, padded, *where)
        out.append(np.asarray(head(model.params, hidden))[0, : len(chunk)])
        start += len(chunk)
    return np.concatenate(out), state, table[0]


def _states(
    model: nj.Model,
    golden: np.lib.npyio.NpzFile,
    state: trunk.DeviceState,
    table: np.ndarray,
    length: int,
    limit: float,
) -> Iterator[Check]:
    kinds = model.config.layer_types
    for layer, kind in enumerate(kinds):
        index = kinds[:layer].count(kind)
        if f"recurrent_state_{layer}" in golden:
            mine = np.asarray(state.images.recurrent[2, index])
            wanted = golden[f"recurrent_state_{layer}"][0]
            yield Check(f"recurrent state of layer {layer}", _relative(mine, wanted), limit)
            window = np.asarray(state.images.window[2, index]).T
            wanted = golden[f"conv_state_{layer}"][0, :, 1:]
            yield Check(f"conv state of layer {layer}", _relative(window, wanted), limit)
        if f"key_{layer}" in golden:
            for name, plane in (("key", state.kv.k), ("value", state.kv.v)):
                pages = np.asarray(plane[index])[table]  # [L, K, P, D]
                mine = np.moveaxis(pages, 1, 0).reshape(pages.shape[1], -1, pages.shape[3])
                wanted = golden[f"{name}_{layer}"][0]
                error = _relative(mine[:, :length], wanted)
                yield Check(f"{name} of layer {layer}", error, limit)


def _logits(name: str, mine: np.ndarray, wanted: np.ndarray, limit: float) -> Iterator[Check]:
    yield Check(f"{name}: logits", float(np.abs(mine - wanted).max()), limit)
    wrong = int((mine.argmax(-1) != wanted.argmax(-1)).sum())
    yield Check(f"{name}: wrong argmax of {wanted[..., 0].size}", wrong, 0)


def _relative(mine: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(mine - wanted).max() / np.abs(wanted).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    missed = 0
    for folder in parser.parse_args().folders:
        print(folder)
        for check in compare(folder):
            missed += not check.passed
            verdict = "ok" if check.passed else "MISS"
            print(f"  {check.name:40} {check.value:10.2e}  limit {check.limit:8.0e}  {verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
