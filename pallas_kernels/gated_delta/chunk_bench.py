"""Time of the chunked gated delta rule on this device, one JSON line a shape.

Run as `python -m pallas_kernels.gated_delta.chunk_bench [shape ...]`. The calls of one measurement depend on each other
through the state and run in one executable.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

import jax
import numpy as np

from pallas_kernels.gated_delta.api import gated_delta_chunked_fused
from pallas_kernels.gated_delta.chunk_shapes import SHAPES, ChunkShape, random_arguments

_CALLS = 20


def _seconds(run: Any, *args: Any, repeats: int = 5) -> float:
    """Median time of a call of the op; `run` makes `_CALLS` of them."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append((time.perf_counter() - start) / _CALLS)
    return float(np.median(times))


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

    return _seconds(run, values)


@functools.cache
def matmul_rate() -> float:
    """Operations a second of a bfloat16 product of 8192 x 8192 matrices."""
    x = jax.random.normal(jax.random.key(0), (8192, 8192), jax.numpy.bfloat16)

    @jax.jit
    def run(x: Any) -> Any:
        step = lambda y, _: ((y @ x) * 0.01, None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=_CALLS)[0]

    return 2 * 8192**3 / _seconds(run, x)


def main(names: list[str]) -> None:
    for name in names or SHAPES:
        shape = SHAPES[name]
        for implementation in ("pallas", "reference"):
            seconds = measure(shape, implementation)
            line = {
                "op": "gated_delta_chunked_fused",
                "implementation": implementation,
                "shape": name,
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "ms": round(seconds * 1e3, 4),
                "tflops": round(shape.flops / seconds / 1e12, 1),
                "share_of_matmul_rate": round(shape.flops / seconds / matmul_rate(), 3),
                "gb_per_s": round(shape.bytes_moved / seconds / 1e9),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
