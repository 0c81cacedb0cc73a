"""Time sparse layers on a GPU, one JSON line a shape: `python -m pallas_kernels.moe.bench`.

Decode figures count the bytes of the experts really chosen by random routing, and compare with a copy in the same run;
prefill figures count the routed experts' arithmetic, and compare with one large matmul in the same run.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.measuring import copy_bandwidth, last_timeline, report, seconds
from pallas_kernels.moe import few, reference, sparse_layer
from pallas_kernels.moe.shapes import SHAPES, Shape

_LAYERS = 3  # rotated, so that no expert is still in the L2 cache


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


def chain(shape: Shape, implementation: Any, steps: int) -> Callable[..., jax.Array]:
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


def distinct(shape: Shape, x: jax.Array, stack: tuple[jax.Array, ...]) -> float:
    """Mean number of distinct experts a layer chooses along the chain."""
    counts = []
    for i in range(8):
        _, experts = reference.route(
            reference.linear(x, stack[0][i % _LAYERS]), shape.top_k, normalise=True
        )
        counts.append(len(np.unique(np.asarray(experts))))
        x = chain(shape, "pallas", i + 1)(x, *stack) if i < 2 else jnp.roll(x, 1, axis=1)
    return float(np.mean(counts))


def trace(shape: Shape, rows: int, folder: str) -> None:
    """Leave a timeline of a call that finds its code, but not its weights, in the caches."""
    router, gate, *rest = weights(shape)
    run = jax.jit(
        functools.partial(
            few.experts_of_few, rows=rows, top_k=shape.top_k, normalise=True, traces=folder
        )
    )
    x = jax.random.normal(jax.random.key(rows), (few.ROWS, shape.H), jnp.bfloat16)
    last_timeline(folder, lambda i: run(x, router, gate, *rest, jnp.int32(i % _LAYERS)))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="35B-A3B")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2, 4, 8, 2048, 4096])
    parser.add_argument("--implementations", nargs="*", default=["pallas", "reference"])
    parser.add_argument("--traces", metavar="DIR", help="leave timelines for Perfetto, no times")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.traces:
        for n in (n for n in options.tokens if n <= few.ROWS):
            trace(shape, n, f"{options.traces}/{n}")
        return
    stack = weights(shape)
    copy = copy_bandwidth() / 1e12
    a, b = jnp.ones((8192, 5120), jnp.bfloat16), jnp.ones((5120, 17408), jnp.bfloat16)
    product = 2 * 8192 * 5120 * 17408 / seconds(jax.jit(jnp.matmul), a, b) / 1e12
    del a, b
    for n in options.tokens:
        x = jax.random.normal(jax.random.key(n), (n, shape.H), jnp.bfloat16)
        for implementation in options.implementations:
            few_tokens = n <= reference.GATHER_TOKENS
            steps = (60 if few_tokens else 6) if implementation == "pallas" else 6
            taken = seconds(chain(shape, implementation, steps), x, *stack) / steps
            line: dict[str, Any] = {
                "tokens": n,
                "implementation": implementation,
                "us": round(taken * 1e6, 1),
            }
            if few_tokens:
                chosen = distinct(shape, x, stack)
                size = (chosen + 1) * 6 * shape.H * shape.width + 2 * shape.E * shape.H
                line |= {
                    "experts": round(chosen, 1),
                    "TB/s": round(size / taken / 1e12, 3),
                    "share": round(size / taken / 1e12 / copy, 3),
                    "copy TB/s": round(copy, 2),
                }
            else:
                work = 6 * shape.H * shape.width * n * shape.top_k
                line |= {
                    "TFLOP/s": round(work / taken / 1e12, 1),
                    "share": round(work / taken / 1e12 / product, 3),
                    "matmul TFLOP/s": round(product),
                }
            report("sparse_layer", options.shape, **line)


if __name__ == "__main__":
    main()
