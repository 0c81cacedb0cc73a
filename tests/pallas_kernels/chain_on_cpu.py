"""Runs one chain in Mosaic's interpreter against the reference. For a subprocess; a second run may hang.

The interpreter has no counters in global memory, and runs the blocks of a grid one after the other, where a chain would
wait for ever. Here counters are Python's, behind a primitive that stands where the interpreter looks for inline code,
and the blocks are those of one cluster, which do run at the same time. Fences are nothing.
"""

import collections
import os
import sys
import threading

# A callback that blocks holds a thread of the CPU client, which has as many as there are cores.
os.environ["NPROC"] = os.environ["PJRT_NPROC"] = "64"

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback, core
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret, shared_memory
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_chain import Norm, Product, kernel, reference

counts, waited, changed = collections.Counter(), set(), threading.Condition()
counter_p = core.Primitive("counter")
counter_p.multiple_results = True


@counter_p.def_effectful_abstract_eval
def _(index, count, *, wait):
    return [], {gpu_core._memory_effect}


def run_counter(token, index, count, *, wait):
    index, count = int(index), int(count)
    with changed:
        if wait:
            waited.add(index)
            assert changed.wait_for(lambda: counts[index] >= count, timeout=15), (
                index,
                count,
                dict(counts),
            )
        else:
            counts[index] += count
            changed.notify_all()
    return np.int32(token)


def interpret_counter(self, eqn, token, get_invals):
    def run(*args):
        return run_counter(*args, wait=eqn.params["wait"])

    token = callback.io_callback(run, jax.ShapeDtypeStruct((), jnp.int32), token, *get_invals())
    return token, []


class Counters:
    """In the place of a reference to semaphores."""

    at = property(lambda self: self)

    def __getitem__(self, index):
        return index


def semaphore_wait(index, count, *, decrement, memory_scope):
    assert not decrement
    counter_p.bind(jnp.int32(index), jnp.int32(count), wait=True)


def semaphore_signal(index, count, *, memory_scope):
    counter_p.bind(jnp.int32(index), jnp.int32(count), wait=False)


real_kernel, real_deallocate = plgpu.kernel, shared_memory.Barrier.deallocate


def kernel_of_one_cluster(body, *, grid, grid_names, **rest):
    return real_kernel(body, cluster=grid, cluster_names=grid_names, **rest)


def deallocate(barrier):
    """The interpreter wants every arrival to be seen; nobody reuses the last slots of the ring, which harms nothing."""
    with barrier.cv:
        if barrier.ref_count == 1:  # the last thread to leave; others may still wait
            seen = barrier.last_observed_phase_by_thread
            for thread in seen:
                assert 0 <= barrier.phase - seen[thread] <= 1
                seen[thread] = barrier.phase
        real_deallocate(barrier)


shared_memory.Barrier.deallocate = deallocate
primitives.inline_mgpu_p = counter_p
jaxpr_interpret.JaxprInterpreter._interpret_inline_mgpu_p = interpret_counter
kernel.pl.get_global = lambda what: Counters()
plgpu.semaphore_wait, plgpu.semaphore_signal = semaphore_wait, semaphore_signal
plgpu.kernel = kernel_of_one_cluster
kernel.fence_copy_engine = lambda: None


def error(got, want):
    got, want = (np.asarray(np.asarray(x, np.float32), np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def random(rng, stages, H):
    bf16 = lambda *s: jnp.asarray(rng.standard_normal(s, np.float32), jnp.bfloat16)  # noqa: E731
    first = bf16(8, stages[0].width) if isinstance(stages[0], Product) else None
    weights = []
    for stage in stages:
        own = []
        if isinstance(stage, Product):
            scale = jnp.bfloat16(stage.width**-0.5)
            own.append(bf16(2, stage.rows, stage.width) * scale)
        if isinstance(stage, Norm) or stage.kind == "add":
            own.append(bf16(2, H) * jnp.bfloat16(0.3))
        weights.append(tuple(own))
    layers = jnp.asarray(rng.integers(0, 2, sum(map(len, weights))), jnp.int32)
    return first, bf16(H, 8), tuple(weights), layers


def main(name):
    rng = np.random.default_rng(0)
    eps = 1e-6
    cases = {
        "tail": (
            (
                Product(512, 1536, "add", eps=eps),
                Product(1024, 512, "swiglu"),
                Product(512, 512, "add", eps=eps),
                Product(200, 512, "rows", jnp.float32),
            ),
            5,
        ),
        "enter": ((Norm(eps), Product(328, 512, "rows")), 3),
        # The last two tiles overlap, and both are cut.
        "overlap": ((Product(104, 2048, "rows"),), 3),
    }
    stages, blocks = cases[name]
    args = random(rng, stages, 512)
    want = reference.chain(stages, *args)
    got = kernel.chain(stages, *args, blocks=blocks, interpret=InterpretGPUParams())
    got = jax.block_until_ready(got)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert error(a, b) < 6e-3, (name, error(a, b))
    # Whoever is waited for has signalled, nobody signals for nothing, and what is counted is right.
    at = 0
    for i, stage in enumerate(stages):
        last = i + 1 == len(stages)
        if isinstance(stage, Norm) or stage.kind == "add":
            assert counts[at] == 512 // 64
        else:
            assert counts[at] == (0 if last else blocks)
        at += 1
        if isinstance(stage, Product):
            shared = [0] * blocks
            for tile in range(stage.tiles):
                shared[stage.owner(tile, blocks)] += stage.sharers(tile, blocks)
            assert [counts[at + block] for block in range(blocks)] == shared
            at += blocks + stage.ordered(blocks)
    assert all(counts[i] for i in waited)
    assert at == max(counts) + 1 or not stages[-1].ordered(blocks)
    print("ok", name, dict(counts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
