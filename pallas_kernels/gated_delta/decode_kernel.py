"""The fused decode step of Gated DeltaNet for Hopper: one token of each row, state and window updated in place.

Work is split as (row, key head, part): the value heads that share a key head, and the pieces of dv of each, form one
cluster. Every block computes the short convolution of its own 3 * 128 channels; a column of the state needs nothing
from another column, so a piece works alone until the norm over dv. The convolution windows of q and k are read by all
parts of a cluster and written by its first one after a cluster barrier.

A column's sum over dk is taken in one order that depends on `_COLUMNS` alone, whatever the number of rows or pieces.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_D = 128
"""dk = dv of every published model."""
_TAPS = 4
_L2_EPS = 1e-6
_WHOLE: Any = ((),) if jax.__version_info__ < (0, 11) else ()
"""`plgpu.load` wants an index before jax 0.11 and none after."""
_MOST_PARTS = 8
"""Blocks of the largest cluster that every Hopper device takes."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How one call is laid out on the device.

    columns: columns of dv a warpgroup works on; fixes the order of the sums over dk.
    pieces: blocks that share one value head.
    tma: the state comes through shared memory instead of straight into registers.
    pdl: start before the previous kernel has ended (programmatic dependent launch).
    in_cluster: the parts of a key head form a cluster. If not, the caller writes the windows of q and k.
    """

    columns: int = 64
    pieces: int = 1
    tma: bool = False
    pdl: bool = False
    in_cluster: bool = True

    @property
    def warpgroups(self) -> int:
        return _D // (self.columns * self.pieces)


def unavailable(qkvz: Any, conv: Any, window: Any, recurrent: Any) -> str | None:
    """Why the kernel cannot run on these arguments and the default device, or None."""
    if (reason := unsupported(qkvz, conv, window, recurrent)) is not None:
        return reason
    if jax.default_backend() != "gpu":
        return "it needs a GPU"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return None if capability == "9.0" else f"it needs compute capability 9.0, not {capability}"


def unsupported(qkvz: Any, conv: Any, window: Any, recurrent: Any) -> str | None:
    """Why the kernel cannot be built for arguments of these shapes and dtypes, or None."""
    if not qkvz.dtype == conv.dtype == window.dtype == jnp.bfloat16:
        return "it takes bfloat16 activations, filters and windows"
    if recurrent.dtype != jnp.float32:
        return f"it takes a float32 state, not {recurrent.dtype}"
    nv, dk, dv = recurrent.shape[-3:]
    if (dk, dv) != (_D, _D):
        return f"it takes heads of {_D} channels, not {dk} and {dv}"
    if conv.shape[2] != _TAPS:
        return f"it takes a convolution of {_TAPS} taps, not {conv.shape[2]}"
    nk = (conv.shape[1] - nv * _D) // (2 * _D)
    if nk < 1 or nv % nk or nv // nk > _MOST_PARTS:
        return f"it takes 1 to {_MOST_PARTS} value heads a key head, not {nv} / {nk}"
    return None


def _state_layout(columns: int) -> Any:
    """A [128, columns] tile: a warp has a quarter of the columns, a thread 4 of them in every (32 / across)th row."""
    across = columns // 16
    down = 32 // across
    return plgpu.Layout.TILED(
        plgpu.Tiling(((down, columns), (down, 4 * across), (4,))),
        warp_dims=(-4,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def _taps_layout() -> Any:
    """A [128, 4] tile: one row a thread."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((128, 4), (32, 4))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
    )


def _everywhere_layout(size: int = _D) -> Any:
    """A vector that every warp holds whole."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((size,), (size // 32,))),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _softplus(x: jax.Array) -> jax.Array:
    """`log(1 + exp(x))`, accurate where the result is small, as log1p is."""
    u = jnp.exp(jnp.minimum(x, -x))
    one_plus = 1.0 + u
    exact = one_plus == 1.0
    log1p = jnp.log(one_plus) * (u / jnp.where(exact, 1.0, one_plus - 1.0))
    return jnp.maximum(x, 0.0) + jnp.where(exact, u, log1p)


def gated_delta_decode(
    qkvz: jax.Array,
    ba: jax.Array,
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
    tuning: Tuning = Tuning(),
    interpret: Any = False,
) -> jax.Array:
    """See `api.gated_delta_decode`."""
    B = qkvz.shape[0]
    nv = dt_bias.shape[1]
    nk = (conv.shape[1] - nv * _D) // (2 * _D)
    r = nv // nk
    N, pieces, groups = tuning.columns, tuning.pieces, tuning.warpgroups
    parts = r * pieces
    cluster = tuning.in_cluster and parts > 1
    tile = _state_layout(N)
    taps_layout, everywhere = _taps_layout(), _everywhere_layout()
    down, across = tile.reduce(1), tile.reduce(0)
    channel = taps_layout.reduce(1)

    # The interpreter knows no layouts, and plain reads only.
    def cast(x: jax.Array, layout: Any) -> jax.Array:
        return x if interpret else plgpu.layout_cast(x, layout)

    def load(ref: Any, layout: Any) -> jax.Array:
        if interpret:
            return ref[...]
        return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)

    def body(
        layer_ref: Any,
        read_ref: Any,
        write_ref: Any,
        continues_ref: Any,
        qkvz_ref: Any,
        ba_ref: Any,
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
                state = load(here, tile)
            bias, log_rate = dt_bias_ref[layer, head], a_log_ref[layer, head]
            weight = load(norm_ref.at[layer], everywhere)
            if tuning.pdl:
                plgpu.griddepcontrol_wait()

            # All loads come before the first barrier, so that they are under way together.
            b, a = ba_ref[row, head], ba_ref[row, nv + head]
            z = load(qkvz_ref.at[row, pl.ds((2 * nk + nv + head) * _D, _D)], everywhere)
            blocks = []
            for i in range(-(-3 // groups)):
                block = jnp.minimum(wg + i * groups, 2)  # q, k or v of this head
                first = jnp.where(block == 2, 2 * nk * _D + head * _D, block * (nk * _D) + key * _D)
                channels = pl.ds(first, _D)
                filters = load(conv_ref.at[layer, channels], taps_layout)
                raw = [
                    load(window_ref.at[read, layer, j, channels], channel) for j in range(_TAPS - 1)
                ]
                raw.append(load(qkvz_ref.at[row, channels], channel))
                blocks.append((block, first, wg + i * groups <= 2, filters, raw))

            tap = cast(jax.lax.broadcasted_iota(jnp.int32, (_D, _TAPS), 1), taps_layout)
            convolved = []
            for block, first, valid, filters, raw in blocks:
                raw = [carried(x) for x in raw[:-1]] + raw[-1:]
                total = jnp.zeros((_D,), jnp.float32)
                for j in range(_TAPS):
                    chosen = jnp.where(tap == j, filters.astype(jnp.float32), 0.0)
                    total += raw[j].astype(jnp.float32) * jnp.sum(chosen, axis=1)
                y = _rounded(total)
                y = y / (1.0 + jnp.exp(-jnp.maximum(y, -80.0)))
                mixed[block] = _rounded(y)
                convolved.append((block, first, valid, raw[1:]))
            sync_block()
            if cluster:
                plgpu.barrier_arrive(cluster_barrier)

            # Gates of this head, the same value in every element.
            def spread(x: jax.Array) -> jax.Array:
                return cast(jnp.broadcast_to(x.astype(jnp.float32), (N,)), across)

            beta = _rounded(1.0 / (1.0 + jnp.exp(-spread(b))))
            step = _softplus(spread(a) + spread(bias))
            decay = jnp.exp(-jnp.exp(spread(log_rate)) * step)

            q = cast(mixed[0], down)
            k = cast(mixed[1], down)
            v = cast(mixed[2, pl.ds(column, N)], across)
            q = q * (jax.lax.rsqrt(jnp.broadcast_to(jnp.sum(q * q), (_D,)) + _L2_EPS) * _D**-0.5)
            k = k * jax.lax.rsqrt(jnp.broadcast_to(jnp.sum(k * k), (_D,)) + _L2_EPS)
            qk = jnp.broadcast_to(jnp.sum(q * k), (N,))

            def columns(x: jax.Array) -> jax.Array:  # [N] -> [128, N]
                return jax.lax.broadcast_in_dim(x, (_D, N), (1,))

            def rows(x: jax.Array) -> jax.Array:  # [128] -> [128, N]
                return jax.lax.broadcast_in_dim(x, (_D, N), (0,))

            if tuning.tma:
                plgpu.barrier_wait(arrived.at[wg])
                state = cast(staged[wg], tile)
            decayed = carried(state) * columns(decay)
            recalled = jnp.sum(rows(k) * decayed, axis=0)
            queried = jnp.sum(rows(q) * decayed, axis=0)
            delta = beta * (v - recalled)
            new = decayed + rows(k) * columns(delta)
            # q^T (M + k delta^T) = q^T M + (q . k) delta: no second pass over the state.
            o = queried + qk * delta

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
                    for j in range(_TAPS - 1):
                        window_ref[write, layer, j, pl.ds(first, _D)] = raw[j]

            if pieces > 1:
                sync_cluster()
            else:
                sync_block()

            @pl.when((wg == 0) & (piece == 0))
            def _norm() -> None:
                width = N * groups
                for other in range(pieces if pieces > 1 else 0):
                    theirs = plgpu.cluster_ref(mine, {"part": part + other})
                    outputs[pl.ds(other * width, width)] = load(theirs, _everywhere_layout(width))
                x = cast(outputs[...], everywhere)
                gate = z.astype(jnp.float32)
                mean = jnp.broadcast_to(jnp.sum(x * x), (_D,)) * (1.0 / _D)
                normed = _rounded(x * jax.lax.rsqrt(mean + eps))
                gated = normed * weight * (gate / (1.0 + jnp.exp(-gate)))
                out_ref[row, pl.ds(head * _D, _D)] = gated.astype(jnp.bfloat16)

            if pieces > 1:
                sync_cluster()  # shared memory must be there for as long as others read it
            if tuning.tma:
                plgpu.wait_smem_to_gmem(0)

        @pl.when(write == 0)
        def _null() -> None:
            @pl.when((wg == 0) & (piece == 0))
            def _zero() -> None:
                zero = cast(jnp.zeros((_D,), jnp.bfloat16), everywhere)
                out_ref[row, pl.ds(head * _D, _D)] = zero

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
        plgpu.SMEM((3, _D), jnp.float32),
        plgpu.SMEM((_D,), jnp.float32),
        plgpu.SMEM((N * groups,), jnp.float32) if pieces > 1 else None,
        plgpu.SMEM((groups, _D, N), jnp.float32) if tuning.tma else None,
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
        out_type=jax.ShapeDtypeStruct((B, nv * _D), jnp.bfloat16),
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
        qkvz,
        ba,
        conv,
        dt_bias,
        a_log,
        norm,
        window,
        recurrent,
    )
