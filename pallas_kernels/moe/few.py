"""A sparse layer of up to 8 tokens in one Mosaic GPU kernel (Hopper, bf16).

Memory bound: every chosen expert's weights are read once, whoever chose it. The chosen experts are listed in slots, the
shared expert first and the others by rising id, so a token sums its own experts in one order whatever its neighbours
chose: what the others add to it is exact zeros.

0. The router: a block computes parts of the logits of 8 experts into device memory; then every block lists the slots
   for itself (`choice`).
1. hidden = weight * silu(gate x) * (up x): a block owns 8 gate and 8 up rows of every `ways`-th slot and stacks up to 8
   slots of them into the 64 rows of a `wgmma`, whose 8 columns are the tokens.
2. down @ hidden: a block owns 64 output rows and a 128 wide part of the hidden width and runs over all slots; the
   caller adds the parts.

Blocks meet at counters in device memory between the phases. Two rings of 16 KB entries stream the weights of all
phases, so that loads of the next go on while one ends: gate rows and even slots of phase 2 go through one, up rows and
odd slots through the other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.moe import choice
from pallas_kernels.moe.choice import ROWS, Value
from pallas_kernels.mosaic import fence_copy_engine, timeline

CHUNK = 128
"""Columns of a weight tile."""
STACK = 8
"""Slots a phase 1 product stacks, 8 rows of each."""
_TILE = STACK * ROWS
_SHARED_MEMORY = 227 << 10
_SHARE = STACK // 2
"""Arrivals of one of the two loaders of a ring at each of its entries."""
_CONSUMER, _ACTIVATIONS, _LOAD = range(3)
"""Warpgroups; from `_LOAD` on four loaders of weights, as one that issues all copies is slower than the memory."""
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def slots(top_k: int) -> int:
    """Most slots a call can need: the shared expert and `top_k` of each row."""
    return 1 + ROWS * top_k


def blocks(H: int, width: int) -> int:
    """Thread blocks of a call; all must be resident at once."""
    return (H // _TILE) * (width // CHUNK)


def ring(H: int) -> int:
    """Entries of each of the two weight rings: what shared memory has room for beside the tokens."""
    return min(6, (_SHARED_MEMORY - 2 * ROWS * H - (8 << 10)) // (4 * _TILE * CHUNK))


def router_splits(E: int, H: int, width: int) -> int:
    """Parts of the hidden width that the router's product is cut into, a block each; 0 if the blocks are too few."""
    most = min(4, blocks(H, width) // (E // ROWS))
    return most if most < 3 else most - most % 2


def _transposed(ref: Any) -> Any:
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def _scalar(x: Any) -> Value:
    return x.registers.item()


def _as_index(x: Any) -> Value:
    return arith.index_cast(ir.IndexType.get(), _scalar(x))


def _index(x: int) -> Value:
    return mgpu.utils.c(x, ir.IndexType.get())


def _load_weights(weights: Any, first: jax.Array, ways: int, n_slots: int) -> jax.Array:
    """Weights [64, 8] of the stacked slots' rows, from [slots * 8] in shared memory."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((_TILE, ROWS), jnp.float32, plgpu.Layout.WGMMA),
    )
    def load(_: Any, ref: Any, first: Any) -> Any:
        first_slot = _as_index(first)
        like = mgpu.FragmentedArray.splat(
            mgpu.utils.c(0.0, ir.F32Type.get()), (_TILE, ROWS), mgpu.WGMMA_LAYOUT
        )

        def one(_: Value, at: tuple[Value, ...]) -> Value:
            stacked = arith.muli(arith.divui(at[0], _index(ROWS)), _index(ways))
            slot = arith.minui(arith.addi(first_slot, stacked), _index(n_slots - 1))
            return memref.load(ref, [arith.addi(arith.muli(slot, _index(ROWS)), at[1])])

        return like.foreach(one, create_array=True)

    return load(weights, first)


def _store_logits(value: jax.Array, logits: Any, row: jax.Array, first: jax.Array) -> None:
    """Store the first 8 rows (experts from `first`) of [64, 8] as columns of `logits`, tokens from `row`."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 2)
    )
    def store(_: Any, value: Any, ref: Any, row: Any, first: Any) -> None:
        first_row, start = _as_index(row), _as_index(first)

        def one(v: Value, at: tuple[Value, ...]) -> None:
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, at[0], _index(ROWS))):
                memref.store(v, ref, [arith.addi(first_row, at[1]), arith.addi(start, at[0])])

        value.foreach(one)

    store(value, logits, row, first)


def _store_hidden(
    value: jax.Array, hidden: Any, first: jax.Array, valid: jax.Array, column: jax.Array, ways: int
) -> None:
    """Scatter [64, 8] (slot and row, token) into rows (slot, token) of `hidden`, from `column`."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3)
    )
    def store(_: Any, value: Any, ref: Any, first: Any, valid: Any, column: Any) -> None:
        first_slot, n_valid, start = _as_index(first), _as_index(valid), _as_index(column)

        def one(v: Value, at: tuple[Value, ...]) -> None:
            stacked = arith.divui(at[0], _index(ROWS))
            slot = arith.addi(first_slot, arith.muli(stacked, _index(ways)))
            row = arith.addi(arith.muli(slot, _index(ROWS)), at[1])
            col = arith.addi(start, arith.remui(at[0], _index(ROWS)))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, stacked, n_valid)):
                memref.store(v, ref, [row, col])

        value.foreach(one)

    store(value, hidden, first, valid, column)


def _store_transposed(value: jax.Array, out: Any, column: jax.Array) -> None:
    """Store [64, 8] as columns of `out` [8, n] from `column`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def store(_: Any, value: Any, ref: Any, column: Any) -> None:
        start = _as_index(column)

        def one(v: Value, at: tuple[Value, ...]) -> None:
            memref.store(v, ref, [at[1], arith.addi(start, at[0])])

        value.foreach(one)

    store(value, out, column)


def _body(
    layer_gmem: Any,
    x: Any,
    router: Any,
    shared_gate: Any,
    experts_gate_up: Any,
    experts_down: Any,
    shared_gate_up: Any,
    shared_down: Any,
    out: Any,
    hidden: Any,
    logits: Any,
    gates: Any,
    x_smem: Any,
    ring: Any,
    full: Any,
    empty: Any,
    x_full: Any,
    h_full: Any,
    h_empty: Any,
    planned: Any,
    plan: Any,
    weights: Any,
    *choice_scratch: Any,
    rows: int,
    E: int,
    H: int,
    width: int,
    top_k: int,
    normalise: bool,
    ring_size: int,
) -> None:
    n_chunks = H // CHUNK
    parts = width // CHUNK
    groups = width // ROWS
    n_slots = slots(top_k)
    n_blocks = blocks(H, width)
    ways = n_blocks // groups
    splits = router_splits(E, H, width)
    router_chunks = n_chunks // splits
    routers = E // ROWS * splits  # blocks that compute logits
    block = jax.lax.axis_index("block")
    thread = jax.lax.axis_index("wg")
    way, group = jax.lax.rem(block, ways), jax.lax.div(block, ways)
    part, tile = jax.lax.rem(block, parts), jax.lax.div(block, parts)
    part_columns = pl.ds(pl.multiple_of(part * CHUNK, CHUNK), CHUNK)
    routed = pl.get_global(plgpu.SemaphoreType.REGULAR)
    met = pl.get_global(plgpu.SemaphoreType.REGULAR)
    entries_of_router = jnp.where(block < routers, router_chunks, 0).astype(jnp.int32)
    router_first = jax.lax.rem(block, splits) * router_chunks
    router_expert = jax.lax.div(block, splits) * ROWS

    def before_stacks(half: Any) -> jax.Array:
        """Entries of a ring that the router took."""
        return jnp.where(half == 0, entries_of_router, 0)

    def place(half: Any, count: jax.Array) -> jax.Array:
        """Where the entry stands that a ring fills after `count` others since the choice."""
        return half * ring_size + jax.lax.rem(before_stacks(half) + count, ring_size)

    def my_stacks() -> tuple[jax.Array, jax.Array, jax.Array]:
        """Slots in use, and how many slots and stacks of them are this block's."""
        n = plan[0]
        mine = jax.lax.div(n - way + (ways - 1), ways)
        return n, mine, jax.lax.div(mine + (STACK - 1), STACK)

    def load(half: int, part_of_stack: int) -> None:
        """One loader: its half of every entry of one ring, so that nobody gets ahead of it by more than the ring."""
        layer = layer_gmem[0]
        stacked = range(part_of_stack * _SHARE, (part_of_stack + 1) * _SHARE)

        def fill(count: jax.Array, copy: Any) -> None:
            entry = half * ring_size + jax.lax.rem(count, ring_size)
            pl.when(count >= ring_size)(lambda: plgpu.barrier_wait(empty.at[entry]))
            copy(entry)

        def arrive(entry: jax.Array, times: int) -> None:
            for _arrival in range(times):
                plgpu.barrier_arrive(full.at[entry])

        def router_chunk(c: jax.Array, _: None) -> None:
            def copy(entry: jax.Array) -> None:
                if part_of_stack == 0:
                    first = pl.multiple_of(layer * E + router_expert, ROWS)
                    start = pl.multiple_of((router_first + c) * CHUNK, CHUNK)
                    plgpu.copy_gmem_to_smem(
                        router.at[pl.ds(first, ROWS), pl.ds(start, CHUNK)],
                        ring.at[entry, pl.ds(0, ROWS)],
                        full.at[entry],
                    )
                arrive(entry, _SHARE - (part_of_stack == 0))

            fill(c, copy)

        if half == 0:
            jax.lax.fori_loop(0, entries_of_router, router_chunk, None)

        # The memory idles while experts are chosen: fetch what needs no choice.
        if part_of_stack == 0:

            @pl.when(way == 0)
            def _gate_up() -> None:
                start = pl.multiple_of(layer * (2 * width) + half * width + group * ROWS, ROWS)
                for c in range(n_chunks):
                    plgpu.async_prefetch(
                        shared_gate_up.at[pl.ds(start, ROWS), pl.ds(c * CHUNK, CHUNK)]
                    )

            if half == 0:
                start = pl.multiple_of(layer * H + tile * _TILE, _TILE)
                plgpu.async_prefetch(shared_down.at[pl.ds(start, _TILE), part_columns])

        plgpu.barrier_wait(planned)
        n, mine, stacks = my_stacks()
        offset = half * width + group * ROWS

        def stack(b: jax.Array, count: jax.Array) -> jax.Array:
            valid = jnp.minimum(STACK, mine - b * STACK)
            first = way + b * (STACK * ways)
            experts = {j: plan[1 + jnp.minimum(first + ways * j, n_slots - 1)] for j in stacked}

            def chunk(c: jax.Array, count: jax.Array) -> jax.Array:
                columns = pl.ds(pl.multiple_of(c * CHUNK, CHUNK), CHUNK)

                def copy(entry: jax.Array) -> None:
                    for j in stacked:

                        def tile_of(ref: Any, base: jax.Array, j: int = j) -> None:
                            start = pl.multiple_of(base * (2 * width) + offset, ROWS)
                            plgpu.copy_gmem_to_smem(
                                ref.at[pl.ds(start, ROWS), columns],
                                ring.at[entry, pl.ds(j * ROWS, ROWS)],
                                full.at[entry],
                            )

                        def routed(j: int = j, tile_of: Any = tile_of) -> None:
                            tile_of(experts_gate_up, layer * E + experts[j])

                        if j == 0:  # the shared expert is nowhere else

                            @pl.when(first == 0)
                            def _shared(tile_of: Any = tile_of) -> None:
                                tile_of(shared_gate_up, layer)

                            pl.when(first > 0)(routed)
                        else:
                            pl.when(j < valid)(routed)
                            pl.when(j >= valid)(functools.partial(arrive, entry, 1))

                fill(count, copy)
                return count + 1

            return jax.lax.fori_loop(0, n_chunks, chunk, count)

        count = jax.lax.fori_loop(0, stacks, stack, before_stacks(half))
        rows_here = _TILE // 2

        def slot(i: jax.Array, count: jax.Array) -> jax.Array:
            s = 2 * i + half

            def copy(entry: jax.Array) -> None:
                def tile_of(ref: Any, base: jax.Array) -> None:
                    start = base * H + tile * _TILE + part_of_stack * rows_here
                    plgpu.copy_gmem_to_smem(
                        ref.at[pl.ds(pl.multiple_of(start, rows_here), rows_here), part_columns],
                        ring.at[entry, pl.ds(part_of_stack * rows_here, rows_here)],
                        full.at[entry],
                    )

                @pl.when(s == 0)
                def _shared() -> None:
                    tile_of(shared_down, layer)

                @pl.when(s > 0)
                def _routed() -> None:
                    tile_of(experts_down, layer * E + plan[1 + s])

                arrive(entry, _SHARE - 1)

            fill(count, copy)
            return count + 1

        jax.lax.fori_loop(0, jax.lax.div(n + (1 - half), 2), slot, count)

    for half in range(2):
        for part_of_stack in range(2):
            role = _LOAD + 2 * half + part_of_stack
            pl.when(thread == role)(functools.partial(load, half, part_of_stack))

    @pl.when(thread == _ACTIVATIONS)
    def _activations() -> None:
        for c in range(n_chunks):
            plgpu.copy_gmem_to_smem(x.at[:, pl.ds(c * CHUNK, CHUNK)], x_smem.at[c], x_full)

        @pl.when(block >= n_blocks - rows)
        def _gate() -> None:
            row = n_blocks - 1 - block
            gate = shared_gate[layer_gmem[0]].astype(jnp.float32)
            gates[row] = jnp.sum(x[row].astype(jnp.float32) * gate)
            plgpu.semaphore_signal(routed, memory_scope="gpu")

        with jax.named_scope("wait for logits"):
            plgpu.semaphore_wait(routed, routers + rows, decrement=False, memory_scope="gpu")
        with jax.named_scope("choose"):
            choice.choose(
                logits,
                gates,
                plan,
                weights,
                choice_scratch,
                rows=rows,
                E=E,
                top_k=top_k,
                normalise=normalise,
            )
        plgpu.barrier_arrive(planned)
        with jax.named_scope("wait for hidden"):
            plgpu.semaphore_wait(met, n_blocks, decrement=False, memory_scope="gpu")
        fence_copy_engine()

        def slot(s: jax.Array, _: None) -> None:
            entry = jax.lax.rem(s, n_chunks)
            pl.when(s >= n_chunks)(lambda: plgpu.barrier_wait(h_empty.at[entry]))
            slot_rows = pl.ds(pl.multiple_of(s * ROWS, ROWS), ROWS)
            plgpu.copy_gmem_to_smem(
                hidden.at[slot_rows, part_columns], x_smem.at[entry], h_full.at[entry]
            )

        jax.lax.fori_loop(0, plan[0], slot, None)

    @pl.when(thread == _CONSUMER)
    def _consumer() -> None:
        plgpu.barrier_wait(x_full)

        @pl.when(block < routers)
        def _router() -> None:
            def product(acc: Any) -> jax.Array:
                def chunk(c: jax.Array, _: None) -> None:
                    entry = jax.lax.rem(c, ring_size)
                    plgpu.barrier_wait(full.at[entry])
                    plgpu.wgmma(acc, ring.at[entry], _transposed(x_smem.at[router_first + c]))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[entry])

                jax.lax.fori_loop(0, router_chunks, chunk, None)
                return acc[...]

            with jax.named_scope("router"):
                value = pl.run_scoped(product, plgpu.ACC((_TILE, ROWS), jnp.float32))
            _store_logits(value, logits, jax.lax.rem(block, splits) * ROWS, router_expert)
            plgpu.semaphore_signal(routed, memory_scope="gpu")

        plgpu.barrier_wait(planned)
        n, mine, stacks = my_stacks()

        def stack(b: jax.Array, count: jax.Array) -> jax.Array:
            first = way + b * (STACK * ways)
            valid = jnp.minimum(STACK, mine - b * STACK)
            share = _load_weights(weights, first, ways, n_slots)

            def products(gate_acc: Any, up_acc: Any) -> tuple[jax.Array, jax.Array]:
                def chunk(c: jax.Array, count: jax.Array) -> jax.Array:
                    tokens = _transposed(x_smem.at[c])
                    for half, acc in enumerate((gate_acc, up_acc)):
                        entry = place(half, count)
                        plgpu.barrier_wait(full.at[entry])
                        plgpu.wgmma(acc, ring.at[entry], tokens)
                    plgpu.wgmma_wait(2)  # the chunk before is done

                    @pl.when(c > 0)
                    def _() -> None:
                        release(count - 1)

                    return count + 1

                def release(count: jax.Array) -> None:
                    for half in range(2):
                        plgpu.barrier_arrive(empty.at[place(half, count)])

                end = jax.lax.fori_loop(0, n_chunks, chunk, count)
                values = gate_acc[...], up_acc[...]
                release(end - 1)
                return values

            gate, up = pl.run_scoped(
                products,
                plgpu.ACC((_TILE, ROWS), jnp.float32),
                plgpu.ACC((_TILE, ROWS), jnp.float32),
            )
            value = gate / (1 + jnp.exp(-gate)) * up * share
            # A product with zero would let an overflow of an unchosen expert through as NaN.
            value = jnp.where(share != 0, value, 0.0).astype(jnp.bfloat16)
            _store_hidden(value, hidden, first, valid, group * ROWS, ways)
            return count + n_chunks

        with jax.named_scope("gate and up"):
            count = jax.lax.fori_loop(0, stacks, stack, jnp.int32(0))
        fence_copy_engine()
        plgpu.semaphore_signal(met, memory_scope="gpu")

        def place_of(s: jax.Array) -> jax.Array:
            return place(jax.lax.rem(s, 2), count + jax.lax.div(s, 2))

        def sums(acc: Any) -> jax.Array:
            def slot(s: jax.Array, _: None) -> None:
                entry, h_entry = place_of(s), jax.lax.rem(s, n_chunks)
                plgpu.barrier_wait(full.at[entry])
                plgpu.barrier_wait(h_full.at[h_entry])
                plgpu.wgmma(acc, ring.at[entry], _transposed(x_smem.at[h_entry]))
                plgpu.wgmma_wait(1)  # the slot before is done

                @pl.when(s > 0)
                def _release() -> None:
                    plgpu.barrier_arrive(empty.at[place_of(s - 1)])
                    plgpu.barrier_arrive(h_empty.at[jax.lax.rem(s - 1, n_chunks)])

            jax.lax.fori_loop(0, n, slot, None)
            return acc[...]

        with jax.named_scope("down"):
            total = pl.run_scoped(sums, plgpu.ACC((_TILE, ROWS), jnp.float32))
        _store_transposed(total, out.at[part], tile * _TILE)


def experts_of_few(
    x: jax.Array,
    router: jax.Array,
    shared_gate: jax.Array,
    experts_gate_up: jax.Array,
    experts_down: jax.Array,
    shared_gate_up: jax.Array,
    shared_down: jax.Array,
    layer: jax.Array,
    *,
    rows: int,
    top_k: int,
    normalise: bool,
    traces: str = "",
) -> jax.Array:
    """Routing, the chosen experts and the shared expert of up to 8 rows.

    Args:
      x: [8, H] bf16; only the first `rows` rows count.
      router, shared_gate: [M, E, H] and [M, 1, H], all layers.
      experts_gate_up, experts_down: [M, E, 2 * width, H] and [M, E, H, width].
      shared_gate_up, shared_down: [M, 2 * width, H] and [M, H, width].
      layer: int32 scalar.
      traces: folder for a timeline of each call, see `mosaic.timeline`.

    Returns:
      [width / 128, 8, H] float32: parts of the output, to be summed over the first axis.
    """
    M, E, H, width = experts_down.shape
    n_slots, n_chunks, ring_size = slots(top_k), H // CHUNK, ring(H)
    call = plgpu.kernel(
        functools.partial(
            _body,
            rows=rows,
            E=E,
            H=H,
            width=width,
            top_k=top_k,
            normalise=normalise,
            ring_size=ring_size,
        ),
        out_type=(
            jax.ShapeDtypeStruct((width // CHUNK, ROWS, H), jnp.float32),
            jax.ShapeDtypeStruct((n_slots * ROWS, width), jnp.bfloat16),
            jax.ShapeDtypeStruct((router_splits(E, H, width) * ROWS, E), jnp.float32),
            jax.ShapeDtypeStruct((ROWS,), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((n_chunks, ROWS, CHUNK), jnp.bfloat16, transforms=_SWIZZLED),
            plgpu.SMEM((2 * ring_size, _TILE, CHUNK), jnp.bfloat16, transforms=_SWIZZLED),
            plgpu.Barrier(num_arrivals=STACK, num_barriers=2 * ring_size),
            plgpu.Barrier(num_arrivals=1, num_barriers=2 * ring_size),
            plgpu.Barrier(num_arrivals=n_chunks),
            plgpu.Barrier(num_arrivals=1, num_barriers=n_chunks),
            plgpu.Barrier(num_arrivals=1, num_barriers=n_chunks),
            plgpu.Barrier(num_arrivals=1),
            plgpu.SMEM((1 + n_slots,), jnp.int32),
            plgpu.SMEM((n_slots * ROWS,), jnp.float32),
            *choice.scratch(E, top_k),
        ),
        grid=(blocks(H, width),),
        grid_names=("block",),
        num_threads=_LOAD + 4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **timeline(traces)
        ),
    )
    parts, *_ = call(
        layer.reshape(1),
        x,
        router.reshape(M * E, H),
        shared_gate.reshape(M, H),
        experts_gate_up.reshape(M * E * 2 * width, H),
        experts_down.reshape(M * E * H, width),
        shared_gate_up.reshape(M * 2 * width, H),
        shared_down.reshape(M * H, width),
    )
    return parts
