"""Time of decode attention on this device, one JSON line a shape.

Run as `python -m pallas_kernels.paged_attention.decode_bench [shape ...]`. The calls of one measurement depend on each
other, run in one executable and walk over more pages than the L2 cache holds.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.api import attention_decode, paged_attention
from pallas_kernels.paged_attention.decode_shapes import SHAPES, DecodeShape, random_arguments

_WALK_BYTES = 150_000_000
"""Keys and values that one pass over the layers reads at least: 2.5 times the L2 cache of an H200."""
_SCALE = 1 / 16


def _seconds(run: Any, carry: Any, calls: int, repeats: int = 5) -> float:
    """Median time of a call; `run` does `calls` of them and takes its own result."""
    carry = jax.block_until_ready(run(run(carry)))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(4):
            carry = run(carry)
        jax.block_until_ready(carry)
        times.append((time.perf_counter() - start) / (4 * calls))
    return float(np.median(times))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of adding one to 1 GB."""
    x = jnp.ones((256, 1024, 1024), jnp.float32)
    return 2 * x.nbytes / _seconds(jax.jit(lambda x: x + 1, donate_argnums=0), x, 1)


def measure(shape: DecodeShape, implementation: Any, *, fused: bool) -> float:
    """Seconds a step takes."""
    layers = max(2, -(-_WALK_BYTES // shape.bytes_moved))
    values = random_arguments(shape, jax.random.key(0), fused=fused, layers=layers)
    pools = values.pop("k_pages"), values.pop("v_pages")
    x = values.pop("qkv" if fused else "q")
    del values["layer"]

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carry: Any, values: Any) -> Any:
        def layer(carry: Any, layer: Any) -> Any:
            x, k_pages, v_pages = carry
            if fused:
                k, v = jax.new_ref(k_pages), jax.new_ref(v_pages)
                out = attention_decode(
                    x,
                    k_pages=k,
                    v_pages=v,
                    layer=layer,
                    **values,
                    scale=_SCALE,
                    eps=1e-6,
                    implementation=implementation,
                )
                k_pages, v_pages = jax.freeze(k), jax.freeze(v)
                x = x.at[:, : out.shape[1]].add(0.01 * out)
            else:
                out = paged_attention(
                    x,
                    k_pages,
                    v_pages,
                    layer,
                    **values,
                    scale=_SCALE,
                    implementation=implementation,
                )
                x = (x + 0.01 * out).astype(x.dtype)
            return (x, k_pages, v_pages), None

        return jax.lax.scan(layer, carry, jnp.arange(layers))[0]

    return _seconds(lambda carry: run(carry, values), (x, *pools), layers)


def main(names: list[str]) -> None:
    device = jax.devices()[0]
    rate = copy_bandwidth()
    for name in names or list(SHAPES):
        for implementation in ("reference", "pallas"):
            shape = SHAPES[name]
            fused = shape.T == 1
            seconds = measure(shape, implementation, fused=fused)
            record = {
                "op": "attention_decode" if fused else "paged_attention",
                "shape": name,
                "implementation": implementation,
                "device": device.device_kind,
                "jax": jax.__version__,
                "us": round(seconds * 1e6, 2),
                "GB/s": round(shape.bytes_moved / seconds / 1e9, 1),
                "share_of_copy": round(shape.bytes_moved / seconds / rate, 3),
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
