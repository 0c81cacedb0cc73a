"""Time of chains on this device, one JSON line a shape: `python -m pallas_kernels.decode_chain.bench [shape ...]`.

The calls of one measurement run in one executable, each on what the one before gave, and walk over more weights than
the L2 cache holds. Cutting the next input out of the last result is a small kernel of its own, and counts as well.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode_chain import kernel
from pallas_kernels.decode_chain.api import chain
from pallas_kernels.decode_chain.shapes import SHAPES, Shape, random_inputs, random_weights
from pallas_kernels.decode_chain.stages import Product
from pallas_kernels.measuring import (
    copy_bandwidth,
    device_seconds,
    last_timeline,
    report_bytes,
)

_WALK_BYTES = 200_000_000
"""Weights that one pass over the layers reads at least: over 3 times the L2 cache of an H200."""
_CALLS = 16


def following(shape: Shape, result: jax.Array) -> jax.Array | None:
    """First input of the next call, so that every result is needed."""
    enters = shape.stages[0]
    if not isinstance(enters, Product):
        return None
    # What is past the end of a short result stands at its start.
    used = jnp.tile(result, (1, -(-enters.width // result.shape[1])))[:, : enters.width]
    return used.astype(jnp.bfloat16)


def layers_to_walk(shape: Shape) -> int:
    return max(2, -(-_WALK_BYTES // shape.bytes_moved))


def measure(shape: Shape, implementation: Any) -> float:
    """Seconds that one chain takes."""
    layers = layers_to_walk(shape)
    weights = random_weights(shape, layers)
    calls = max(_CALLS, layers)

    @jax.jit
    def one(carry: Any, weights: Any, index: jax.Array) -> Any:
        args = (shape.stages, *carry[:2], weights, index, shape.running)
        result, residual = chain(*args, implementation=implementation)
        return following(shape, result), residual, result

    @jax.jit
    def run(carry: Any, weights: Any) -> Any:
        for i in range(calls):
            carry = one(carry, weights, shape.indices(i % layers))
        return carry

    again = lambda carry: run(carry, weights)  # noqa: E731
    return device_seconds(again, (*random_inputs(shape), None)) / calls


def trace(shape: Shape, folder: str) -> None:
    """Leave a timeline of a call that finds its code, but not its weights, in the caches."""
    layers = layers_to_walk(shape)
    weights, (first, residual) = random_weights(shape, layers), random_inputs(shape)
    # The timeline takes shared memory from the ring.
    run = jax.jit(lambda *args: kernel.chain(shape.stages, *args, depth=5, traces=folder))
    again = lambda i: run(first, residual, weights, shape.indices(i % layers), shape.running)  # noqa: E731
    last_timeline(folder, again)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", help=f"some of: {', '.join(SHAPES)}")
    parser.add_argument("--implementations", nargs="*", default=["pallas", "reference"])
    parser.add_argument("--traces", metavar="DIR", help="leave timelines for Perfetto, no times")
    options = parser.parse_args()
    names = options.shapes or list(SHAPES)
    if options.traces:
        for name in names:
            trace(SHAPES[name], f"{options.traces}/{name.replace('/', '_').replace(' ', '_')}")
        return
    rate = copy_bandwidth()
    for name in names:
        for implementation in options.implementations:
            shape = SHAPES[name]
            taken = measure(shape, implementation)
            report_bytes("decode_chain", name, implementation, taken, shape.bytes_moved, rate)


if __name__ == "__main__":
    main()
