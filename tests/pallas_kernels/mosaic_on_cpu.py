"""Stands in for what Mosaic's interpreter does not know: products with a register operand, layouts, register carries.

Importing this changes `plgpu` for the whole process, so it is for subprocesses only. Accumulators become shared memory
and products plain dots; index arithmetic, copies, barriers and everything else are interpreted as they stand.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_run_scoped = pl.run_scoped


class _Accumulator:
    def __init__(self, shape, dtype, start=None):
        self.shape, self.dtype, self.start = shape, dtype, start

    @staticmethod
    def init(array):
        return _Accumulator(array.shape, array.dtype, array)


def _scoped(body, *types_, **named):
    if not any(isinstance(t, _Accumulator) for t in types_):
        return _run_scoped(body, *types_, **named)

    def with_start(*refs):
        for t, ref in zip(types_, refs, strict=True):
            ref[...] = jnp.zeros(t.shape, t.dtype) if t.start is None else t.start
        return body(*refs)

    return _run_scoped(with_start, *(plgpu.SMEM(t.shape, t.dtype) for t in types_))


def _run_state(body):
    def run(starts):
        def inner(*refs):
            body(refs)
            return tuple(ref[...] for ref in refs)

        return _scoped(inner, *starts)

    return run


def _wgmma(acc, a, b):
    acc[...] += jnp.dot(a[...].astype(jnp.float32), b[...].astype(jnp.float32))


def replace() -> None:
    """Make `plgpu` and `pl` such that the interpreter can run a kernel written with them."""
    pl.run_scoped, pl.run_state = _scoped, _run_state
    plgpu.ACC = _Accumulator
    plgpu.wgmma = _wgmma
    plgpu.wgmma_accumulator_load = lambda acc, wait_n=0: acc[...]
    plgpu.layout_cast = lambda x, layout: x
    plgpu.broadcasted_iota = lambda dtype, shape, dim, layout=None: jax.lax.broadcasted_iota(
        dtype, shape, dim
    )
