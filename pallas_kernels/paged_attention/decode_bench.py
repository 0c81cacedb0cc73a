"""Time of decode attention on this device, one JSON line a shape.

Run as `python -m pallas_kernels.paged_attention.decode_bench [shape ...]`. The calls of one measurement depend on each
other, run in one executable and walk over more pages than the L2 cache holds. The time is the device's own: that of the
two kernels, or of all that XLA makes of the reference.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.measuring import (
    copy_bandwidth,
    device_seconds,
    kernel_seconds,
    report_bytes,
)
from pallas_kernels.paged_attention.api import attention_decode, paged_attention
from pallas_kernels.paged_attention.decode_shapes import SHAPES, DecodeShape, random_arguments

_WALK_BYTES = 150_000_000
"""Keys and values that one pass over the layers reads at least: 2.5 times the L2 cache of an H200."""
_SCALE = 1 / 16


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

    again = lambda carry: run(carry, values)  # noqa: E731
    if implementation == "pallas":
        return kernel_seconds(again, (x, *pools), "paged_attention") / layers
    return device_seconds(again, (x, *pools)) / layers


def main(names: list[str]) -> None:
    rate = copy_bandwidth()
    for name in names or list(SHAPES):
        for implementation in ("reference", "pallas"):
            shape = SHAPES[name]
            op = "attention_decode" if shape.T == 1 else "paged_attention"
            taken = measure(shape, implementation, fused=shape.T == 1)
            report_bytes(op, name, implementation, taken, shape.bytes_moved, rate)


if __name__ == "__main__":
    main(sys.argv[1:])
