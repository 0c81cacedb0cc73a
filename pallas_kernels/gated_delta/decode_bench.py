"""Time of the fused decode step on this device, one JSON line a shape.

Run as `python -m pallas_kernels.gated_delta.decode_bench [shape ...]`. The calls of one measurement depend on each
other through the pools, run in one executable and walk over more state than the L2 cache holds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta.api import gated_delta_decode
from pallas_kernels.gated_delta.decode_shapes import SHAPES, DecodeShape, random_arguments

_WALK_BYTES = 150_000_000
"""State that one pass over the layers reads at least: 2.5 times the L2 cache of an H200."""


def _seconds(run: Any, carry: Any, calls: int, repeats: int = 5) -> float:
    """Median time of a call; `run` does `calls` of them and takes its own result."""
    carry = jax.block_until_ready(run(run(carry)))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(8):
            carry = run(carry)
        jax.block_until_ready(carry)
        times.append((time.perf_counter() - start) / (8 * calls))
    return float(np.median(times))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of adding one to 1 GB."""
    x = jnp.ones((256, 1024, 1024), jnp.float32)
    run = jax.jit(lambda x: x + 1, donate_argnums=0)
    return 2 * x.nbytes / _seconds(run, x, 1)


def measure(shape: DecodeShape, implementation: Any) -> float:
    """Seconds a step takes."""
    layers = max(shape.G, -(-_WALK_BYTES // (shape.B * shape.nv * shape.d**2 * 4)))
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
        for layer in range(layers):
            pools, out = step(pools, values, jnp.int32(layer))
            outs.append(out)
        return pools, outs

    return _seconds(lambda carry: run(carry[0], values), (pools, None), layers)


def main(names: list[str]) -> None:
    device = jax.devices()[0]
    rate = copy_bandwidth()
    for name in names or list(SHAPES):
        for implementation in ("reference", "pallas"):
            seconds = measure(SHAPES[name], implementation)
            achieved = SHAPES[name].bytes_moved / seconds
            record = {
                "op": "gated_delta_decode",
                "shape": name,
                "implementation": implementation,
                "device": device.device_kind,
                "jax": jax.__version__,
                "us": round(seconds * 1e6, 2),
                "GB/s": round(achieved / 1e9, 1),
                "share_of_copy": round(achieved / rate, 3),
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
