"""The fused decode step of Gated DeltaNet for Hopper: one token of each row, state and window updated in place.

Work is split as (row, key head, part). Many rows have one part: a block takes all value heads of a key head. It starts
the copies of all their states into shared memory, convolves and computes gates meanwhile, and then updates head after
head and sends each back. Where at most half of the rows run, the blocks of the others help: they take some of the heads
of a row that runs. Whoever helps has read the windows of q and k before they are written, which a counter tells.

Few rows have more parts, which form a cluster: the value heads that share a key head, or halves of dv of each. A column
of the state needs nothing from another column, so a half works alone until the norm over dv. The convolution windows of
q and k are read by all parts of a cluster and written by its first one after a cluster barrier.

Sums over dk are taken in one order, whatever the number of rows or parts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import multiprocessors
from pallas_kernels.gated_delta.kernel_parts import (
    COLUMNS,
    MOST_PARTS,
    TAPS,
    D,
    Layouts,
    delta_step,
    gated_norm,
    gates,
    short_conv,
    unit,
)
from pallas_kernels.mosaic import lines, store

_MOST_STAGED = 3
"""Heads whose states fit shared memory together."""


def choose_parts(B: int, nk: int, r: int) -> int:
    """Blocks that share a key head, for r value heads a key head. Measured on an H200 with B of 1 and 8 only.

    Returns:
      1 where that gives half of the 132 multiprocessors a block; else 2 r, or r where a cluster has no room for more.
    """
    if B * nk >= 64 and r <= _MOST_STAGED:
        return 1
    return 2 * r if 2 * r <= MOST_PARTS else r


def head_lines(
    read_slots: jax.Array, write_slots: jax.Array, continues: jax.Array, heads: int, help: bool
) -> jax.Array:
    """What the blocks of each row do, for any key head of `heads` value heads.

    A row that runs (one with a write slot other than 0) has its own blocks. With `help` the blocks of other rows go
    round the rows that run, until each head of these has a block.

    Returns:
      int32 [B, 7], a line for the blocks of each row: the row they work for; its slot to read, slot to write (0: they
      do nothing) and whether it continues; the first head they take, how many further on the next one is, and how many.
    """
    B = len(write_slots)
    own = jnp.arange(B, dtype=jnp.int32)
    own_runs, continues = write_slots != 0, continues.astype(jnp.int32)
    if not help:
        first, one = 1 - own_runs.astype(jnp.int32), jnp.ones_like(own)
        return lines([own, read_slots, write_slots, continues, first, one, heads * one])
    # Row by row, without sums and sorts over rows: XLA makes one small kernel of it, for all layers of a step.
    runs = [write_slots[b] != 0 for b in range(B)]
    running = jnp.maximum(sum(x.astype(jnp.int32) for x in runs), 1)
    idle_before = sum(((own > b) & ~x).astype(jnp.int32) for b, x in enumerate(runs))
    stride = jnp.clip(jax.lax.div(B, running), 1, heads)
    turn, nth = jax.lax.div(idle_before, running), jax.lax.rem(idle_before, running)
    first = jnp.where(own_runs, 0, 1 + turn)
    row, read, write, goes_on = own, read_slots, jnp.zeros_like(own), continues
    rank = jnp.int32(0)  # of row b among those that run
    for b, b_runs in enumerate(runs):
        works_for = jnp.where(own_runs, own == b, (rank == nth) & b_runs)
        row = jnp.where(works_for, b, row)
        read = jnp.where(works_for, read_slots[b], read)
        write = jnp.where(works_for & (first < stride), write_slots[b], write)
        goes_on = jnp.where(works_for, continues[b], goes_on)
        rank += b_runs.astype(jnp.int32)
    count = jax.lax.div(heads - first + stride - 1, stride)
    return lines([row, read, write, goes_on, first, jnp.broadcast_to(stride, (B,)), count])


def gated_delta_decode(
    projected: jax.Array,
    conv: jax.Array,
    dt_bias: jax.Array,
    a_log: jax.Array,
    norm: jax.Array,
    layer: jax.Array,
    window: Any,
    recurrent: Any,
    read_slots: jax.Array,
    write_slots: jax.Array,
    continues: jax.Array,
    *,
    eps: float,
    parts: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `api.gated_delta_decode`; `parts` is 1, r or 2 r, and changes no bit of the result."""
    B = read_slots.shape[0]
    nv = dt_bias.shape[1]
    nk = (conv.shape[1] - nv * D) // (2 * D)
    r = nv // nk
    gates_at = (2 * nk + 2 * nv) * D
    parts = parts or choose_parts(B, nk, r)
    # Of a block: its value heads, whether it has half of one, and its warpgroups.
    whole = parts == 1
    heads, pieces = r if whole else 1, max(1, parts // r)
    N, groups = COLUMNS, D // (COLUMNS * pieces)
    # The interpreter has no clusters: there the windows of q and k stay as they are if value heads share them.
    cluster = parts > 1 and not interpret
    # Nor has it counters in device memory. At most half of the blocks wait for others, which must have room to run.
    helped = whole and r > 1 and B * nk // 2 < multiprocessors() and not interpret
    layouts = Layouts(N, interpret)
    load = layouts.load

    def body(
        layer_ref: Any,
        work_ref: Any,
        projected_ref: Any,
        conv_ref: Any,
        dt_bias_ref: Any,
        a_log_ref: Any,
        norm_ref: Any,
        window_ref: Any,
        state_ref: Any,
        out_ref: Any,
        mixed: Any,
        raw_gates: Any,
        outputs: Any,
        mine: Any,
        staged: Any,
        arrived: Any,
        block_barrier: Any,
        cluster_barrier: Any,
    ) -> None:
        own, key = jax.lax.axis_index("row"), jax.lax.axis_index("key")
        part = jax.lax.axis_index("part") if parts > 1 else 0
        wg = jax.lax.axis_index("wg")
        layer = layer_ref[0]
        row, read, write, continues, first_of_row, stride, count = (
            work_ref[own, i] for i in range(7)
        )
        piece = part % pieces
        own_head = key * r + part // pieces
        first_head = own_head + first_of_row
        column = (piece * groups + wg) * N
        owns = first_of_row == 0
        if helped:
            readers = pl.get_global(plgpu.SemaphoreType.REGULAR((B * nk,))).at[row * nk + key]

        def head_of(i: Any) -> Any:
            """Where it has fewer heads than it has room for, the last one again."""
            return first_head + jnp.minimum(i, count - 1) * stride

        def mine_of(count: int) -> list[Any]:
            """Which of `count` things this warpgroup does; where they are too few, the last one again."""
            return [jnp.minimum(wg + i * groups, count - 1) for i in range(-(-count // groups))]

        def sync_block() -> None:
            if groups > 1:
                plgpu.barrier_arrive(block_barrier)
                plgpu.barrier_wait(block_barrier)

        def sync_cluster() -> None:
            plgpu.barrier_arrive(cluster_barrier)
            plgpu.barrier_wait(cluster_barrier)

        @pl.when(write != 0)
        def _run() -> None:
            def carried(x: jax.Array) -> jax.Array:
                """`x`, or zeros where the row starts here."""
                kept = jnp.broadcast_to(continues, x.shape) != 0
                return jnp.where(kept, x, jnp.zeros_like(x))

            def tile_of(slot: Any, i: Any) -> Any:
                return state_ref.at[slot, layer, head_of(i), :, pl.ds(column, N)]

            # All loads come before the first barrier, so that they are under way together.
            weight = load(norm_ref.at[layer], layouts.everywhere())
            scalars = [
                (
                    projected_ref[row, gates_at + head_of(i)],
                    projected_ref[row, gates_at + nv + head_of(i)],
                    dt_bias_ref[layer, head_of(i)],
                    a_log_ref[layer, head_of(i)],
                )
                for i in range(heads)
            ]
            normed = mine_of(heads)
            z = [
                load(
                    projected_ref.at[row, pl.ds((2 * nk + nv + head_of(i)) * D, D)],
                    layouts.everywhere(),
                )
                for i in normed
            ]
            blocks = []
            for block in mine_of(2 + heads):  # q, k, or v of a head
                first = jnp.where(block < 2, block * nk + key, 2 * nk + head_of(block - 2)) * D
                channels = pl.ds(first, D)
                filters = load(conv_ref.at[layer, channels], layouts.taps)
                raw = [
                    load(window_ref.at[read, layer, j, channels], layouts.channel)
                    for j in range(TAPS - 1)
                ]
                raw.append(load(projected_ref.at[row, channels], layouts.channel))
                blocks.append((block, first, filters, raw))

            # States come last: the others would wait in a queue behind them, and all computing waits for the others.
            def stage(i: Any, _: Any) -> None:
                arrival = arrived.at[i * groups + wg]
                plgpu.copy_gmem_to_smem(tile_of(read, i), staged.at[i, wg], arrival)

            if whole:
                jax.lax.fori_loop(0, count, stage, None)
            loaded: Any = None if whole else load(tile_of(read, 0), layouts.tile)

            convolved = []
            for block, first, filters, raw in blocks:
                raw = [carried(x) for x in raw[:-1]] + raw[-1:]
                mixed[block] = short_conv(raw, layouts.filters(filters))
                convolved.append((block, first, raw[1:]))
            for i, values in enumerate(scalars):
                for j, x in enumerate(values):
                    raw_gates[i, j] = x.astype(jnp.float32)
            sync_block()

            # Windows of q and k are read: this is told now and waited for when the heads are done.
            if cluster:
                plgpu.barrier_arrive(cluster_barrier)
            elif helped:

                @pl.when(~owns & (wg == 0))
                def _have_read() -> None:
                    plgpu.semaphore_signal(readers, 1, memory_scope="gpu")

            q = unit(layouts.cast(mixed[0], layouts.down)) * D**-0.5
            k = unit(layouts.cast(mixed[1], layouts.down))

            def update(i: Any, _: Any) -> None:
                """The step of one head."""
                beta, decay = gates(*(layouts.spread(raw_gates[i, j]) for j in range(4)))
                v = layouts.cast(mixed[2 + i, pl.ds(column, N)], layouts.across)
                state = loaded
                if whole:
                    plgpu.barrier_wait(arrived.at[i * groups + wg])
                    state = layouts.cast(staged[i, wg], layouts.tile)
                new, o, _ = delta_step(layouts, carried(state), q, k, v, beta, decay)
                if whole:
                    staged[i, wg] = new
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(staged.at[i, wg], tile_of(write, i))
                (outputs.at[i] if pieces == 1 else mine)[pl.ds(wg * N, N)] = o
                if not whole:
                    tile_of(write, i)[...] = new

            if whole:
                jax.lax.fori_loop(0, count, update, None)
            else:
                update(0, None)

            if cluster:
                plgpu.barrier_wait(cluster_barrier)
            elif helped:

                @pl.when(owns & (stride > 1))
                def _all_have_read() -> None:
                    plgpu.semaphore_wait(readers, stride - 1, decrement=False, memory_scope="gpu")

            for i, (block, first, raw) in enumerate(convolved):
                owned = wg + i * groups < 2 + count
                if helped:
                    owned &= (block >= 2) | owns
                elif not whole:
                    # q and k belong to the cluster's first part, v to the first piece of its head.
                    owned &= jnp.where(block < 2, part if cluster else 1, piece) == 0

                @pl.when(owned)
                def _write(first: Any = first, raw: Any = raw) -> None:
                    for j in range(TAPS - 1):
                        store(window_ref.at[write, layer, j, pl.ds(first, D)], raw[j])

            if pieces > 1:
                sync_cluster()
            else:
                sync_block()

            for i, (at, gate) in enumerate(zip(normed, z, strict=True)):

                @pl.when((wg + i * groups < count) & (piece == 0))
                def _norm(at: Any = at, gate: Any = gate) -> None:
                    width = N * groups
                    for other in range(pieces if pieces > 1 else 0):
                        theirs = plgpu.cluster_ref(mine, {"part": part + other})
                        both = layouts.everywhere(width)
                        outputs[0, pl.ds(other * width, width)] = load(theirs, both)
                    x = layouts.cast(outputs[at], layouts.everywhere())
                    channels = pl.ds(head_of(at) * D, D)
                    store(out_ref.at[row, channels], gated_norm(x, gate, weight, eps))

            if pieces > 1:
                sync_cluster()  # shared memory must be there for as long as others read it
            if whole:
                # So must shared memory be here; what is under way to device memory ends with the kernel.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(((write == 0) | ~owns) & (wg == 0) & (piece == 0))
        def _null() -> None:
            zero = layouts.cast(jnp.zeros((D,), jnp.bfloat16), layouts.everywhere())
            for i in range(heads):
                store(out_ref.at[own, pl.ds((own_head + i) * D, D)], zero)

    where: dict[str, Any]
    if cluster:
        where = {
            "grid": (B, nk),
            "grid_names": ("row", "key"),
            "cluster": (parts,),
            "cluster_names": ("part",),
        }
    elif whole:
        where = {"grid": (B, nk), "grid_names": ("row", "key")}
    else:
        where = {"grid": (B, nk, parts), "grid_names": ("row", "key", "part")}
    scratch = [
        plgpu.SMEM((2 + heads, D), jnp.float32),
        plgpu.SMEM((heads, 4), jnp.float32),
        plgpu.SMEM((heads, D), jnp.float32),
        plgpu.SMEM((N * groups,), jnp.float32) if pieces > 1 else None,
        plgpu.SMEM((heads, groups, D, N), jnp.float32) if whole else None,
        plgpu.Barrier(num_barriers=heads * groups) if whole else None,
        plgpu.Barrier(num_arrivals=groups) if groups > 1 else None,
        plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=groups) if cluster else None,
    ]

    def scoped(*refs: Any) -> None:
        used = [s for s in scratch if s is not None]

        def with_scratch(*scratch_refs: Any) -> None:
            given = iter(scratch_refs)
            body(*refs, *(None if s is None else next(given) for s in scratch))

        pl.run_scoped(with_scratch, *used, collective_axes="wg")

    # Not `plgpu.kernel`: its vmap rule does not let Refs through.
    run = pl.kernel(
        scoped,
        out_type=jax.ShapeDtypeStruct((projected.shape[0], nv * D), jnp.bfloat16),
        mesh=plgpu.Mesh(num_threads=groups, thread_name="wg", **where),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        name="gated_delta_decode",
    )
    return run(
        layer.reshape(1),
        head_lines(read_slots, write_slots, continues, heads, helped),
        projected,
        conv,
        dt_bias,
        a_log,
        norm,
        window,
        recurrent,
    )
