"""Time of the fused decode step on this device, one JSON line a shape.

Run as `python -m pallas_kernels.gated_delta.decode_bench [shape ...]`. The calls of one measurement depend on each
other through the pools, run in one executable and walk over more state than the L2 cache holds.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta.api import gated_delta_decode
from pallas_kernels.gated_delta.decode_shapes import SHAPES, DecodeShape, random_arguments
from pallas_kernels.measuring import copy_bandwidth, device_seconds, report_bytes

_WALK_BYTES = 150_000_000
"""State that one pass over the layers reads at least: 2.5 times the L2 cache of an H200."""
_CALLS = 48
"""Calls of one executable at least, so that its first one does not count."""


def measure(shape: DecodeShape, implementation: Any) -> float:
    """Seconds a step takes."""
    layers = max(shape.G, -(-_WALK_BYTES // (shape.B * shape.nv * shape.d**2 * 4)))
    calls = max(layers, _CALLS)
    shape = dataclasses.replace(shape, G=layers, S=shape.B + 1)
    values = random_arguments(shape, jax.random.key(0))
    pools = values.pop("window"), values.pop("recurrent")
    del values["layer"]
    values["continues"] = values["continues"].astype(jnp.int32)

    @jax.jit
    def step(pools: Any, values: Any, layer: Any) -> Any:
        window, recurrent = (jax.new_ref(p) for p in pools)
        out = gated_delta_decode(
            **values,
            layer=layer,
            window=window,
            recurrent=recurrent,
            eps=1e-6,
            implementation=implementation,
        )
        return (jax.freeze(window), jax.freeze(recurrent)), out

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pools: Any, values: Any) -> Any:
        outs = []
        for call in range(calls):
            pools, out = step(pools, values, jnp.int32(call % layers))
            outs.append(out)
        return pools, outs

    again = lambda carry: run(carry[0], values)  # noqa: E731
    return device_seconds(again, (pools, None)) / calls


def main(names: list[str]) -> None:
    rate = copy_bandwidth()
    for name in names or list(SHAPES):
        for implementation in ("reference", "pallas"):
            taken, moved = measure(SHAPES[name], implementation), SHAPES[name].bytes_moved
            report_bytes("gated_delta_decode", name, implementation, taken, moved, rate)


if __name__ == "__main__":
    main(sys.argv[1:])
