"""The fused decode step of Gated DeltaNet for Hopper: one token of each row, state and window updated in place.

Work is split as (row, key head, part): the value heads that share a key head, and the pieces of dv of each, form one
cluster. Every block computes the short convolution of its own 3 * 128 channels; a column of the state needs nothing
from another column, so a piece works alone until the norm over dv. The convolution windows of q and k are read by all
parts of a cluster and written by its first one after a cluster barrier.

Sums over dk are taken in one order, whatever the number of rows or pieces.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How one call is laid out on the device; every choice does the same operations in the same order.

    pieces: blocks that share one value head, 1 or 2.
    tma: the state comes through shared memory instead of straight into registers.
    """

    pieces: int = 1
    tma: bool = False


def choose(B: int, nk: int, nv: int) -> Tuning:
    """What was fastest on an H200 (132 multiprocessors): pieces where whole heads leave half of it idle, else TMA."""
    if B * nv <= 64 and 2 * (nv // nk) <= MOST_PARTS:
        return Tuning(pieces=2)
    return Tuning(tma=True)


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
    tuning: Tuning | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `api.gated_delta_decode`."""
    B = read_slots.shape[0]
    nv = dt_bias.shape[1]
    nk = (conv.shape[1] - nv * D) // (2 * D)
    r = nv // nk
    gates_at = (2 * nk + 2 * nv) * D
    tuning = tuning or choose(B, nk, nv)
    N, pieces = COLUMNS, tuning.pieces
    groups, parts = D // (N * pieces), r * pieces
    # The interpreter has no clusters: there the windows of q and k stay as they are if value heads share them.
    cluster = parts > 1 and not interpret
    layouts = Layouts(N, interpret)
    load = layouts.load

    def body(
        layer_ref: Any,
        read_ref: Any,
        write_ref: Any,
        continues_ref: Any,
        projected_ref: Any,
        conv_ref: Any,
        dt_bias_ref: Any,
        a_log_ref: Any,
        norm_ref: Any,
        window_ref: Any,
        state_ref: Any,
        out_ref: Any,
        mixed: Any,
        outputs: Any,
        mine: Any,
        staged: Any,
        arrived: Any,
        block_barrier: Any,
        cluster_barrier: Any,
    ) -> None:
        row, key = jax.lax.axis_index("row"), jax.lax.axis_index("key")
        part = jax.lax.axis_index("part") if parts > 1 else 0
        wg = jax.lax.axis_index("wg")
        head, piece = key * r + part // pieces, part % pieces
        column = (piece * groups + wg) * N
        layer, read, write = layer_ref[0], read_ref[row], write_ref[row]
        continues = continues_ref[row]

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

            here = state_ref.at[read, layer, head, :, pl.ds(column, N)]
            if tuning.tma:
                plgpu.copy_gmem_to_smem(here, staged.at[wg], arrived.at[wg])
            else:
                state = load(here, layouts.tile)
            bias, log_rate = dt_bias_ref[layer, head], a_log_ref[layer, head]
            weight = load(norm_ref.at[layer], layouts.everywhere())

            # All loads come before the first barrier, so that they are under way together.
            b, a = (projected_ref[row, gates_at + i * nv + head] for i in (0, 1))
            z_channels = pl.ds((2 * nk + nv + head) * D, D)
            z = load(projected_ref.at[row, z_channels], layouts.everywhere())
            blocks = []
            for i in range(-(-3 // groups)):
                block = jnp.minimum(wg + i * groups, 2)  # q, k or v of this head
                first = jnp.where(block == 2, 2 * nk * D + head * D, block * (nk * D) + key * D)
                channels = pl.ds(first, D)
                filters = load(conv_ref.at[layer, channels], layouts.taps)
                raw = [
                    load(window_ref.at[read, layer, j, channels], layouts.channel)
                    for j in range(TAPS - 1)
                ]
                raw.append(load(projected_ref.at[row, channels], layouts.channel))
                blocks.append((block, first, wg + i * groups <= 2, filters, raw))

            convolved = []
            for block, first, valid, filters, raw in blocks:
                raw = [carried(x) for x in raw[:-1]] + raw[-1:]
                mixed[block] = short_conv(raw, layouts.filters(filters))
                convolved.append((block, first, valid, raw[1:]))
            sync_block()
            if cluster:
                plgpu.barrier_arrive(cluster_barrier)

            beta, decay = gates(*(layouts.spread(x) for x in (b, a, bias, log_rate)))
            q = unit(layouts.cast(mixed[0], layouts.down)) * D**-0.5
            k = unit(layouts.cast(mixed[1], layouts.down))
            v = layouts.cast(mixed[2, pl.ds(column, N)], layouts.across)
            if tuning.tma:
                plgpu.barrier_wait(arrived.at[wg])
                state = layouts.cast(staged[wg], layouts.tile)
            new, o, _ = delta_step(layouts, carried(state), q, k, v, beta, decay)

            there = state_ref.at[write, layer, head, :, pl.ds(column, N)]
            (outputs if pieces == 1 else mine)[pl.ds(wg * N, N)] = o
            if tuning.tma:
                staged[wg] = new
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staged.at[wg], there)
            else:
                there[...] = new

            if cluster:
                plgpu.barrier_wait(cluster_barrier)
            for block, first, valid, raw in convolved:
                # q and k belong to the cluster's first part, v to the first piece of its head.
                owned = valid & (block == 2) if r > 1 and not cluster else valid
                if cluster:
                    owned &= jnp.where(block == 2, piece, part) == 0

                @pl.when(owned)
                def _write(first: Any = first, raw: Any = raw) -> None:
                    for j in range(TAPS - 1):
                        window_ref[write, layer, j, pl.ds(first, D)] = raw[j]

            if pieces > 1:
                sync_cluster()
            else:
                sync_block()

            @pl.when((wg == 0) & (piece == 0))
            def _norm() -> None:
                width = N * groups
                for other in range(pieces if pieces > 1 else 0):
                    theirs = plgpu.cluster_ref(mine, {"part": part + other})
                    outputs[pl.ds(other * width, width)] = load(theirs, layouts.everywhere(width))
                x = layouts.cast(outputs[...], layouts.everywhere())
                out_ref[row, pl.ds(head * D, D)] = gated_norm(x, z, weight, eps)

            if pieces > 1:
                sync_cluster()  # shared memory must be there for as long as others read it
            if tuning.tma:
                plgpu.wait_smem_to_gmem(0)

        @pl.when(write == 0)
        def _null() -> None:
            @pl.when((wg == 0) & (piece == 0))
            def _zero() -> None:
                zero = layouts.cast(jnp.zeros((D,), jnp.bfloat16), layouts.everywhere())
                out_ref[row, pl.ds(head * D, D)] = zero

    where: dict[str, Any]
    if cluster:
        where = {
            "grid": (B, nk),
            "grid_names": ("row", "key"),
            "cluster": (parts,),
            "cluster_names": ("part",),
        }
    elif parts == 1:
        where = {"grid": (B, nk), "grid_names": ("row", "key")}
    else:
        where = {"grid": (B, nk, parts), "grid_names": ("row", "key", "part")}
    scratch = [
        plgpu.SMEM((3, D), jnp.float32),
        plgpu.SMEM((D,), jnp.float32),
        plgpu.SMEM((N * groups,), jnp.float32) if pieces > 1 else None,
        plgpu.SMEM((groups, D, N), jnp.float32) if tuning.tma else None,
        plgpu.Barrier(num_barriers=groups) if tuning.tma else None,
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
        read_slots,
        write_slots,
        continues.astype(jnp.int32),
        projected,
        conv,
        dt_bias,
        a_log,
        norm,
        window,
        recurrent,
    )
