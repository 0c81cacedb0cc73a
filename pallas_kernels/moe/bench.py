"""Time sparse layers on a GPU, one JSON line a shape: `python -m pallas_kernels.moe.bench`.

Figures count the routed experts' arithmetic, and compare with one large matmul in the same run. For few tokens see the
bench of `decode_chain`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.measuring import report, seconds
from pallas_kernels.moe import sparse_layer
from pallas_kernels.moe.shapes import SHAPES, Shape

_LAYERS = 3  # rotated, so that no expert is still in the L2 cache
_STEPS = 6


def weights(shape: Shape) -> tuple[jax.Array, ...]:
    """Random weights of `_LAYERS` layers, in the order `sparse_layer` takes them."""
    E, H, width = shape.E, shape.H, shape.width
    sizes = ((E, H), (1, H), (E, 2 * width, H), (E, H, width), (2 * width, H), (H, width))

    @functools.partial(jax.jit, static_argnums=0)
    def make(size: tuple[int, ...], key: jax.Array) -> jax.Array:
        def one(key: jax.Array) -> jax.Array:
            return jax.random.normal(key, size, jnp.bfloat16) * jnp.bfloat16(size[-1] ** -0.5)

        # One layer at a time: random bits take several times the memory of what they become.
        return jax.lax.map(one, jax.random.split(key, _LAYERS))

    keys = jax.random.split(jax.random.key(0), len(sizes))
    return tuple(make(size, key) for size, key in zip(sizes, keys, strict=True))


def layers_in_turn(shape: Shape, implementation: Any, steps: int) -> Callable[..., jax.Array]:
    """Jitted layers one after the other, each on the normed output of the one before."""

    layer: Any = functools.partial(
        sparse_layer, top_k=shape.top_k, normalise=True, implementation=implementation
    )

    @jax.jit
    def run(x: jax.Array, *stack: jax.Array) -> jax.Array:
        def step(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            y = layer(x, *stack, i % _LAYERS)
            z = x.astype(jnp.float32) + y.astype(jnp.float32)
            z = z * jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + 1e-6)
            return z.astype(x.dtype), None

        return jax.lax.scan(step, x, jnp.arange(steps, dtype=jnp.int32))[0]

    return run


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="35B-A3B")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096])
    parser.add_argument("--implementations", nargs="*", default=["pallas", "reference"])
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    stack = weights(shape)
    a, b = jnp.ones((8192, 5120), jnp.bfloat16), jnp.ones((5120, 17408), jnp.bfloat16)
    product = 2 * 8192 * 5120 * 17408 / seconds(jax.jit(jnp.matmul), a, b) / 1e12
    del a, b
    for n in options.tokens:
        x = jax.random.normal(jax.random.key(n), (n, shape.H), jnp.bfloat16)
        for implementation in options.implementations:
            taken = seconds(layers_in_turn(shape, implementation, _STEPS), x, *stack) / _STEPS
            work = 6 * shape.H * shape.width * n * shape.top_k
            line = {
                "tokens": n,
                "implementation": implementation,
                "us": round(taken * 1e6, 1),
                "TFLOP/s": round(work / taken / 1e12, 1),
                "share": round(work / taken / 1e12 / product, 3),
                "matmul TFLOP/s": round(product),
            }
            report("sparse_layer", options.shape, **line)


if __name__ == "__main__":
    main()
