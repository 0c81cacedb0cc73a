"""Speed of prefill attention: one JSON line a shape.

`python -m pallas_kernels.paged_attention.prefill_bench [name ...]`

The rate counts the causal products exactly: 4 N D operations for each pair of a query and a key in its sight.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.measuring import report
from pallas_kernels.paged_attention import prefill_kernel
from pallas_kernels.paged_attention.prefill_shapes import SHAPES, PrefillShape

_PAGE, _D, _TABLE = prefill_kernel.PAGE, prefill_kernel.HEAD_DIM, 512


def seconds(f: Callable[..., jax.Array], *args: jax.Array, repeats: int) -> float:
    """Least wall time of three runs over the repetitions inside one run."""
    f(*args).block_until_ready()
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        f(*args).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return best / repeats


def matmul_rate() -> float:
    """TFLOP/s of a large bfloat16 product through XLA, the ceiling of this run."""
    M, K, N = 8192, 5120, 17_408
    a = jax.random.normal(jax.random.key(0), (M, K), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (K, N), jnp.bfloat16)
    c = jax.random.normal(jax.random.key(2), (N, K), jnp.bfloat16)
    run = jax.jit(lambda a, b, c: jax.lax.fori_loop(0, 5, lambda _, x: ((x @ b) @ c) * 1e-4, a))
    return 4 * M * K * N / seconds(run, a, b, c, repeats=5) / 1e12


def operations(shape: PrefillShape) -> float:
    """Floating-point operations of the products that the causal mask leaves."""
    pairs = shape.T * shape.start + shape.T * (shape.T + 1) / 2
    return 4 * shape.B * shape.N * _D * pairs


def measure(shape: PrefillShape, repeats: int = 6) -> float:
    """Seconds of one call. Two layers take turns, and each call takes the last one's output as queries."""
    B, T, N, K, start = shape
    used = -(-(start + T) // _PAGE)
    X = B * used + 1
    rng = np.random.default_rng(0)
    tables = np.zeros((B, max(_TABLE, used)), np.int32)
    tables[:, :used] = (rng.permutation(X - 1) + 1).reshape(B, used)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (B, T, N, _D), jnp.bfloat16)
    k, v = (jax.random.normal(key, (2, X, K, _PAGE, _D), jnp.bfloat16) for key in keys[1:])

    @jax.jit
    def run(q: Array, k: Array, v: Array, tables: Array, starts: Array, lengths: Array) -> Array:
        def call(i: Array, q: Array) -> Array:
            return prefill_kernel.paged_attention(q, k, v, i % 2, tables, starts, lengths, _D**-0.5)

        return jax.lax.fori_loop(0, repeats, call, q)

    rows = (jnp.full((B,), start, jnp.int32), jnp.full((B,), T, jnp.int32))
    return seconds(run, q, k, v, jnp.asarray(tables), *rows, repeats=repeats)


def main(names: list[str]) -> None:
    """Measure the named shapes, or all."""
    rate = matmul_rate()
    for name in names or SHAPES:
        taken = measure(SHAPES[name])
        achieved = operations(SHAPES[name]) / taken / 1e12
        report(
            "paged_attention prefill",
            name,
            us=round(taken * 1e6, 1),
            tflops=round(achieved, 1),
            share_of_matmul=round(achieved / rate, 3),
            matmul_tflops=round(rate, 1),
        )


if __name__ == "__main__":
    main(sys.argv[1:])
