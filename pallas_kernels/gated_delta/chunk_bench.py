"""Time of the chunked gated delta rule on this device, one JSON line a shape.

Run as `python -m pallas_kernels.gated_delta.chunk_bench [shape ...]`. The calls of one measurement depend on each other
through the state and run in one executable.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax

from pallas_kernels.gated_delta.api import gated_delta_chunked_fused
from pallas_kernels.gated_delta.chunk_shapes import SHAPES, ChunkShape, random_arguments
from pallas_kernels.measuring import report, seconds

_CALLS = 20


def measure(shape: ChunkShape, implementation: Any) -> float:
    """Seconds a call takes."""
    values = jax.device_put(random_arguments(shape))

    @jax.jit
    def run(values: Any) -> Any:
        def once(state: Any, _: Any) -> Any:
            out, state, _ = gated_delta_chunked_fused(
                **values | {"state": state}, implementation=implementation
            )
            return state, out[0, 0, 0, 0]

        return jax.lax.scan(once, values["state"], None, length=_CALLS)

    return seconds(run, values) / _CALLS


@functools.cache
def matmul_rate() -> float:
    """Operations a second of a bfloat16 product of 8192 x 8192 matrices."""
    x = jax.random.normal(jax.random.key(0), (8192, 8192), jax.numpy.bfloat16)

    @jax.jit
    def run(x: Any) -> Any:
        step = lambda y, _: ((y @ x) * 0.01, None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=_CALLS)[0]

    return 2 * 8192**3 * _CALLS / seconds(run, x)


def main(names: list[str]) -> None:
    for name in names or SHAPES:
        shape = SHAPES[name]
        for implementation in ("pallas", "reference"):
            taken = measure(shape, implementation)
            report(
                "gated_delta_chunked_fused",
                name,
                implementation=implementation,
                ms=round(taken * 1e3, 4),
                tflops=round(shape.flops / taken / 1e12, 1),
                share_of_matmul_rate=round(shape.flops / taken / matmul_rate(), 3),
                gb_per_s=round(shape.bytes_moved / taken / 1e9),
            )


if __name__ == "__main__":
    main(sys.argv[1:])
