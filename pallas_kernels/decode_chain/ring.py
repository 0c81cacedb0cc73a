"""What a thread block of a chain loads ahead in shared memory, and the counters on which blocks wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_chain.stages import HALF, ROWS, TILE


@dataclass(frozen=True)
class Counters:
    """In global memory, zero when a call begins."""

    semaphores: Any

    def wait(self, counter: Any, count: Any) -> None:
        at = self.semaphores.at[counter]
        plgpu.semaphore_wait(at, count, decrement=False, memory_scope="gpu")

    def signal(self, counter: Any) -> None:
        plgpu.semaphore_signal(self.semaphores.at[counter], 1, memory_scope="gpu")


@dataclass(frozen=True)
class Ring:
    """Steps of two [64, 128] pieces of weights, and what they are multiplied with.

    One warpgroup loads and another multiplies. Each counts the steps since the kernel began, which gives their places.

    Args:
      depth: steps that are loaded ahead.
      window: steps whose weights are under way at once.
      weights, rows: bfloat16 [depth, 2, 64, 128] and [depth, 8, 256] in shared memory.
      filled, emptied: barriers, one a place; a place is filled when all of `filled` say so, the first one of its
        weights and the second one of its rows.
    """

    depth: int
    window: int
    weights: Any
    rows: Any
    filled: tuple[Any, ...]
    emptied: Any

    @staticmethod
    def scratch(depth: int) -> list[Any]:
        swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return [
            plgpu.SMEM((depth, 2, TILE, HALF), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((depth, ROWS, 2 * HALF), jnp.bfloat16, transforms=swizzled),
            plgpu.Barrier(num_arrivals=2, num_barriers=depth),
            plgpu.Barrier(num_barriers=depth),
            plgpu.Barrier(num_barriers=depth),
        ]

    def load(
        self,
        begin: Any,
        end: Any,
        issued: Any,
        weights: Callable[[Any, int, Any, Any], None],
        rows: Callable[[Any], Any],
        width: int,
        ready: Callable[[], None],
    ) -> Any:
        """Load the steps from `begin` to before `end`; returns how many the ring has seen then.

        Args:
          issued: steps that the ring has seen before.
          weights: (step, half, place in shared memory, barrier) begins to copy half of a step's weights.
          rows: what a step is multiplied with, [8, width] in global memory.
          ready: waits until it is there.
        """

        weights_filled, rows_filled = self.filled

        def weights_of(n: Any) -> None:
            count = issued + n
            slot, landed = (
                jax.lax.rem(count, self.depth),
                jax.lax.rem(count - self.window, self.depth),
            )
            pl.when(count >= self.depth)(lambda: plgpu.barrier_wait(self.emptied.at[slot]))
            pl.when(count >= self.window)(lambda: plgpu.barrier_wait(weights_filled.at[landed]))
            for half in range(2):
                weights(begin + n, half, self.weights.at[slot, half], weights_filled.at[slot])

        def rows_of(n: Any) -> None:
            slot = jax.lax.rem(issued + n, self.depth)
            place = self.rows.at[slot, :, pl.ds(0, width)]
            plgpu.copy_gmem_to_smem(rows(begin + n), place, rows_filled.at[slot])

        ahead = jnp.minimum(end - begin, self.depth)
        pl.loop(0, ahead)(weights_of)
        ready()
        pl.loop(0, ahead)(rows_of)

        @pl.loop(ahead, end - begin)
        def _(n: Any) -> None:
            weights_of(n)
            rows_of(n)

        return issued + end - begin

    def multiply(self, done: Any, steps: Any, sums: int, name: str) -> tuple[jax.Array, ...]:
        """Sums [64, 8] over steps, at least one, after `done` others.

        With one sum the halves of the weights are neighbours along K; with two, each has its own and both go with the
        same 128 columns of the rows.
        """

        def run(*accs: Any) -> tuple[jax.Array, ...]:
            def one(n: Any, _: Any) -> None:
                slot = jax.lax.rem(done + n, self.depth)
                with jax.named_scope(f"wait for a step of {name}"):
                    for barrier in self.filled:
                        plgpu.barrier_wait(barrier.at[slot])
                for half in range(2):
                    k = 0 if sums == 2 else half * HALF
                    x = self.rows.at[slot, :, pl.ds(k, HALF)].transpose((1, 0))
                    plgpu.wgmma(accs[half % sums], self.weights.at[slot, half], x)
                # The products of the step before have ended once only this one's are under way.
                plgpu.wgmma_wait(2)
                before = jax.lax.rem(done + n + self.depth - 1, self.depth)
                pl.when(n > 0)(lambda: plgpu.barrier_arrive(self.emptied.at[before]))

            jax.lax.fori_loop(0, steps, one, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.emptied.at[jax.lax.rem(done + steps - 1, self.depth)])
            return tuple(acc[...] for acc in accs)

        return pl.run_scoped(run, *(plgpu.ACC((TILE, ROWS), jnp.float32),) * sums)
