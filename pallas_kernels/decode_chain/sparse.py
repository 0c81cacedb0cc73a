"""What a thread block of a chain does of a sparse layer; `stages.Experts` tells how the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.decode_chain import choice
from pallas_kernels.decode_chain.choice import Value, index, less
from pallas_kernels.decode_chain.ring import Counters, Ring
from pallas_kernels.decode_chain.stages import HALF, ROWS, TILE, Experts
from pallas_kernels.mosaic import fence_copy_engine

LOADERS = 4
"""Warpgroups that load gate and up projections: one that issues so many small copies is slower than the memory."""
STACK = 8
"""Slots that one product stacks, 8 rows of each."""

_SPLAT = plgpu.Layout.WG_SPLAT


@dataclass(frozen=True)
class Weights:
    """A stack in global memory, and the layer that is read."""

    stack: Any
    layer: Any

    def at(self, row: Any, rows: int, columns: Any) -> Any:
        return self.stack.at[self.layer, pl.ds(row, rows), columns]


@dataclass(frozen=True)
class SparseLayer:
    """The share of one thread block.

    One warpgroup calls `prepare`, `route`, `gate_and_up` and then multiplies the steps that `down` gives; another calls
    `load_router`, `load_stacks` and `load_down`, and the other loaders `load_stacks` only.

    Args:
      stage, block, blocks: what is computed, and this block among all.
      ring, counters: see there.
      weights: in the order of `Experts`, experts lying one under the other; without the norm.
      x: [8, H], the stream that the norm has not scaled yet; `ready` waits until it is there.
      running: int32 [8] in global memory.
      logits, hidden: float32 [splits * 8, groups * 8] and bfloat16 [parts, 8, slots * 128] in global memory, shared by
        all blocks.
      routed, met: counters of the blocks that have given their logits and their part of `hidden`.
      filled, emptied: barriers of the ring where it holds gate and up projections.
      listed, hidden_given: barriers: the slots are listed; this block has given its part of `hidden`.
      plan, shares, lists: see `choice.choose`; in shared memory.
    """

    stage: Experts
    block: Any
    blocks: int
    ring: Ring
    counters: Counters
    weights: tuple[Weights, ...]
    x: Any
    ready: Callable[[], None]
    running: Any
    logits: Any
    hidden: Any
    routed: Any
    met: Any
    filled: Any
    emptied: Any
    listed: Any
    hidden_given: Any
    plan: Any
    shares: Any
    lists: tuple[Any, ...]

    @staticmethod
    def scratch(stage: Experts, depth: int) -> list[Any]:
        """Barriers and shared memory, from `filled` on."""
        return [
            plgpu.Barrier(num_arrivals=2 * STACK + 1, num_barriers=depth),
            plgpu.Barrier(num_barriers=depth),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.SMEM((1 + stage.slots,), jnp.int32),
            plgpu.SMEM((stage.slots * ROWS,), jnp.float32),
            *choice.scratch(stage.experts, stage.top_k),
        ]

    @property
    def splits(self) -> int:
        return self.stage.splits(self.blocks)

    @property
    def ways(self) -> int:
        return self.stage.ways(self.blocks)

    @property
    def router_steps(self) -> int:
        """Steps of a block that computes logits."""
        return self.stage.hidden // (2 * HALF) // self.splits

    def own_slots(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The first of this block's slots (it has every `ways`-th), how many it has, and in how many stacks."""
        way = jnp.where(
            self.block < self.stage.groups * self.ways,
            jax.lax.rem(self.block, self.ways),
            self.plan[0],
        )
        mine = (self.plan[0] - way + self.ways - 1) // self.ways
        return way, mine, (mine + STACK - 1) // STACK

    def prepare(self) -> None:
        """What can be done as the kernel begins; for who calls `route`."""
        choice.prepare(self.running, self.shares, self.lists)

    def load_router(self, issued: Any) -> Any:
        router, gate, *_ = self.weights
        groups = self.stage.router_groups
        group, split = self.block // self.splits, self.block % self.splits
        first = split * self.router_steps * (2 * HALF)

        def weights(step: Any, half: int, place: Any, filled: Any) -> None:
            columns = pl.ds(first + (2 * step + half) * HALF, HALF)

            def copy(source: Weights, row: Any) -> None:
                to = place.at[pl.ds(0, ROWS)]
                plgpu.copy_gmem_to_smem(source.at(row, ROWS, columns), to, filled)

            pl.when(group < groups - 1)(lambda: copy(router, group * ROWS))
            pl.when(group == groups - 1)(lambda: copy(gate, 0))

        def rows(step: Any) -> Any:
            return self.x.at[:, pl.ds(first + step * (2 * HALF), 2 * HALF)]

        end = jnp.where(group < groups, self.router_steps, 0)
        return self.ring.load(0, end, issued, weights, rows, 2 * HALF, self.ready)

    def load_stacks(self, loader: int) -> None:
        """What one of the loaders copies of the gate and up projections: one of both, half of the slots of a stack.

        The first one also copies x.
        """
        _, _, routed, _, shared, _ = self.weights
        half, low = loader // 2, loader % 2 * (STACK // 2)
        stacked = range(low, low + STACK // 2)
        row = half * self.stage.width + self.block // self.ways * ROWS
        plgpu.barrier_wait(self.listed)
        way, mine, stacks = self.own_slots()

        def stack(b: Any, count: Any) -> Any:
            first, valid = way + b * (STACK * self.ways), mine - b * STACK
            last = self.stage.slots - 1
            ids = {j: self.plan[1 + jnp.minimum(first + self.ways * j, last)] for j in stacked}

            def chunk(c: Any, count: Any) -> Any:
                slot, columns = jax.lax.rem(count, self.ring.depth), pl.ds(c * HALF, HALF)
                filled = self.filled.at[slot]
                pl.when(count >= self.ring.depth)(lambda: plgpu.barrier_wait(self.emptied.at[slot]))

                def copy(j: int, source: Weights, expert: Any) -> None:
                    place = self.ring.weights.at[slot, half, pl.ds(j * ROWS, ROWS)]
                    piece = source.at(expert * (2 * self.stage.width) + row, ROWS, columns)
                    plgpu.copy_gmem_to_smem(piece, place, filled)

                for j in stacked:
                    if j == 0:  # slot 0, the shared expert, is nowhere else
                        pl.when(first == 0)(partial(copy, j, shared, 0))
                        pl.when(first > 0)(partial(copy, j, routed, ids[j]))
                    else:
                        pl.when(j < valid)(partial(copy, j, routed, ids[j]))
                        pl.when(j >= valid)(lambda: plgpu.barrier_arrive(filled))
                if loader == 0:
                    place = self.ring.rows.at[slot, :, pl.ds(0, HALF)]
                    plgpu.copy_gmem_to_smem(self.x.at[:, columns], place, filled)
                return count + 1

            return jax.lax.fori_loop(0, self.stage.hidden // HALF, chunk, count)

        jax.lax.fori_loop(0, stacks, stack, jnp.int32(0))

    def load_down(self, issued: Any) -> Any:
        _, _, _, routed, _, shared = self.weights
        plgpu.barrier_wait(self.hidden_given)
        down = self.stage.down(self.plan[0])
        begin, end = down.span(self.block, self.blocks)
        row, part = down.row(self.block // self.stage.parts), self.block % self.stage.parts
        columns = pl.ds(part * HALF, HALF)

        def weights(step: Any, half: int, place: Any, filled: Any) -> None:
            # Of an odd number of slots the last is taken twice, the second time with zeros.
            slot = jnp.minimum(2 * (step - begin) + half, self.plan[0] - 1)

            def copy(source: Weights, expert: Any) -> None:
                piece = source.at(expert * self.stage.hidden + row, TILE, columns)
                plgpu.copy_gmem_to_smem(piece, place, filled)

            pl.when(slot == 0)(lambda: copy(shared, 0))
            pl.when(slot > 0)(lambda: copy(routed, self.plan[1 + slot]))

        def rows(step: Any) -> Any:
            return self.hidden.at[part, :, pl.ds((step - begin) * (2 * HALF), 2 * HALF)]

        def ready() -> None:
            with jax.named_scope("wait for hidden"):
                self.counters.wait(self.met, self.stage.groups * self.ways)
                fence_copy_engine()

        return self.ring.load(begin, end, issued, weights, rows, 2 * HALF, ready)

    def route(self, done: Any, scale: jax.Array) -> Any:
        """Compute this block's part of the logits and list the slots; returns the steps done then.

        scale: [64, 8], 1 / rms of each row in a column.
        """
        routers = self.stage.router_groups * self.splits

        @pl.when(self.block < routers)
        def _logits() -> None:
            with jax.named_scope("router"):
                (value,) = self.ring.multiply(done, self.router_steps, 1, "the router")
                row, first = self.block % self.splits * ROWS, self.block // self.splits * ROWS
                _store_logits(value * scale, self.logits, row, first)
                self.counters.signal(self.routed)

        with jax.named_scope("wait for logits"):
            self.counters.wait(self.routed, routers)
        with jax.named_scope("choose"):
            choice.choose(
                self.logits,
                self.plan,
                self.shares,
                self.lists,
                E=self.stage.experts,
                top_k=self.stage.top_k,
                normalise=self.stage.normalise,
            )
        plgpu.barrier_arrive(self.listed)
        plgpu.barrier_wait(self.listed)
        return done + jnp.where(self.block < routers, self.router_steps, 0)

    def gate_and_up(self, scale: jax.Array) -> None:
        """Compute this block's part of `hidden`, for all slots."""
        way, mine, stacks = self.own_slots()
        channel = self.block // self.ways * ROWS
        hidden, column = self.hidden.at[channel // HALF], channel % HALF
        ring = replace(self.ring, filled=(self.filled,), emptied=self.emptied)
        chunks = self.stage.hidden // HALF

        def stack(b: Any, _: None) -> None:
            first, valid = way + b * (STACK * self.ways), jnp.minimum(STACK, mine - b * STACK)
            share = _load_shares(self.shares, first, self.ways, self.stage.slots)
            gate, up = (r * scale for r in ring.multiply(b * chunks, chunks, 2, "gate and up"))
            value = gate / (1.0 + jnp.exp(-gate)) * up * share
            # A product with zero would let an overflow of an unchosen expert through as NaN.
            value = jnp.where(share != 0, value, 0.0).astype(jnp.bfloat16)
            _store_hidden(value, hidden, first, valid, column, self.ways)

        with jax.named_scope("gate and up"):
            jax.lax.fori_loop(0, stacks, stack, None)

        @pl.when(self.block < self.stage.groups * self.ways)
        def _give() -> None:
            @pl.when((way == 0) & (self.plan[0] % 2 == 1))
            def _nothing() -> None:
                zeros = jnp.zeros((TILE, ROWS), jnp.bfloat16)
                zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
                _store_hidden(zeros, hidden, self.plan[0], jnp.int32(1), column, self.ways)

            fence_copy_engine()
            self.counters.signal(self.met)

        plgpu.barrier_arrive(self.hidden_given)


def _as_index(x: Any) -> Value:
    return arith.index_cast(ir.IndexType.get(), x.registers.item())


def _load_shares(shares: Any, first: jax.Array, ways: int, slots: int) -> jax.Array:
    """Shares [64, 8] of the rows of 8 stacked slots, every `ways`-th from `first`, out of [slots * 8]."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SPLAT),
        return_type=plgpu.ShapeDtypeStruct((TILE, ROWS), jnp.float32, plgpu.Layout.WGMMA),
    )
    def load(_: Any, ref: Any, first: Any) -> Any:
        first_slot = _as_index(first)
        zero = mgpu.utils.c(0.0, ir.F32Type.get())
        like = mgpu.FragmentedArray.splat(zero, (TILE, ROWS), mgpu.WGMMA_LAYOUT)

        def one(_: Value, at: tuple[Value, ...]) -> Value:
            stacked = arith.muli(arith.divui(at[0], index(ROWS)), index(ways))
            slot = arith.minui(arith.addi(first_slot, stacked), index(slots - 1))
            return memref.load(ref, [arith.addi(arith.muli(slot, index(ROWS)), at[1])])

        return like.foreach(one, create_array=True)

    return load(shares, first)


def _store_logits(value: jax.Array, logits: Any, row: jax.Array, first: jax.Array) -> None:
    """Store the first 8 rows (experts from `first`) of [64, 8] as columns of `logits`, tokens from `row`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), _SPLAT, _SPLAT))
    def store(_: Any, value: Any, ref: Any, row: Any, first: Any) -> None:
        first_row, start = _as_index(row), _as_index(first)

        def one(v: Value, at: tuple[Value, ...]) -> None:
            with mgpu.utils.when(less(at[0], index(ROWS))):
                memref.store(v, ref, [arith.addi(first_row, at[1]), arith.addi(start, at[0])])

        value.foreach(one)

    store(value, logits, row, first)


def _store_hidden(
    value: jax.Array, hidden: Any, first: jax.Array, valid: jax.Array, column: jax.Array, ways: int
) -> None:
    """Store the first `valid` of 8 stacked slots of [64, 8], 8 channels each, into `hidden` [8, slots * 128].

    The slots are every `ways`-th from `first`, the channels begin at `column` of each slot.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), _SPLAT, _SPLAT, _SPLAT))
    def store(_: Any, value: Any, ref: Any, first: Any, valid: Any, column: Any) -> None:
        first_slot, n_valid, start = _as_index(first), _as_index(valid), _as_index(column)

        def one(v: Value, at: tuple[Value, ...]) -> None:
            stacked = arith.divui(at[0], index(ROWS))
            slot = arith.addi(first_slot, arith.muli(stacked, index(ways)))
            channel = arith.addi(start, arith.remui(at[0], index(ROWS)))
            with mgpu.utils.when(less(stacked, n_valid)):
                place = arith.addi(arith.muli(slot, index(HALF)), channel)
                memref.store(v, ref, [at[1], place])

        value.foreach(one)

    store(value, hidden, first, valid, column)
