"""Verification of several drafted tokens a row for Hopper: the decode step T times over a state kept in registers.

The pools are only read. What later rebuilds the state at any accepted length is written out token by token: the unit
key, delta (what the token writes along it) and the decay.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.kernel_parts import (
    COLUMNS,
    TAPS,
    D,
    Layouts,
    delta_step,
    gated_norm,
    gates,
    short_conv,
    unit,
)
from pallas_kernels.gated_delta.reference import Records
from pallas_kernels.mosaic import store


def gated_delta_verify(
    projected: jax.Array,
    conv: jax.Array,
    dt_bias: jax.Array,
    a_log: jax.Array,
    norm: jax.Array,
    layer: jax.Array,
    window: Any,
    recurrent: Any,
    read_slots: jax.Array,
    continues: jax.Array,
    *,
    eps: float,
    interpret: Any = False,
) -> tuple[jax.Array, Records]:
    """See `api.gated_delta_verify`."""
    B, T = projected.shape[:2]
    nv = dt_bias.shape[1]
    nk = (conv.shape[1] - nv * D) // (2 * D)
    r = nv // nk
    gates_at = (2 * nk + 2 * nv) * D
    N, groups = COLUMNS, D // COLUMNS
    layouts = Layouts(N, interpret)
    load = layouts.load

    def body(
        layer_ref: Any,
        read_ref: Any,
        continues_ref: Any,
        projected_ref: Any,
        conv_ref: Any,
        dt_bias_ref: Any,
        a_log_ref: Any,
        norm_ref: Any,
        window_ref: Any,
        state_ref: Any,
        out_ref: Any,
        k_ref: Any,
        delta_ref: Any,
        decay_ref: Any,
        mixed: Any,
        outputs: Any,
        raw_gates: Any,
        barrier: Any,
    ) -> None:
        row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        wg = jax.lax.axis_index("wg")
        key, column = head // r, wg * N
        layer, read, continues = layer_ref[0], read_ref[row], continues_ref[row]

        def sync() -> None:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        def carried(x: jax.Array) -> jax.Array:
            """`x`, or zeros where the row starts here."""
            kept = jnp.broadcast_to(continues, x.shape) != 0
            return jnp.where(kept, x, jnp.zeros_like(x))

        state = load(state_ref.at[read, layer, head, :, pl.ds(column, N)], layouts.tile)
        bias, log_rate = dt_bias_ref[layer, head], a_log_ref[layer, head]
        weight = load(norm_ref.at[layer], layouts.everywhere())

        # All loads come before the first barrier, so that they are under way together.
        scalars = [
            [projected_ref[row, t, gates_at + i * nv + head] for i in (0, 1)] for t in range(T)
        ]
        mine = [jnp.minimum(wg + i * groups, T - 1) for i in range(-(-T // groups))]
        z_channels = pl.ds((2 * nk + nv + head) * D, D)
        z = [load(projected_ref.at[row, t, z_channels], layouts.everywhere()) for t in mine]
        blocks = []
        for i in range(-(-3 // groups)):
            block = jnp.minimum(wg + i * groups, 2)  # q, k or v of this head
            first = jnp.where(block == 2, 2 * nk * D + head * D, block * (nk * D) + key * D)
            channels = pl.ds(first, D)
            filters = load(conv_ref.at[layer, channels], layouts.taps)
            old = [
                load(window_ref.at[read, layer, j, channels], layouts.channel)
                for j in range(TAPS - 1)
            ]
            new = [load(projected_ref.at[row, t, channels], layouts.channel) for t in range(T)]
            blocks.append((block, filters, old, new))

        for t, (b, a) in enumerate(scalars):
            raw_gates[0, t], raw_gates[1, t] = b.astype(jnp.float32), a.astype(jnp.float32)
        for block, filters, old, new in blocks:
            inputs = [carried(x) for x in old] + new
            taps = layouts.filters(filters)
            for t in range(T):
                mixed[t, block] = short_conv(inputs[t : t + TAPS], taps)
        sync()

        def token(t: jax.Array, state: jax.Array) -> jax.Array:
            raw = (raw_gates[0, t], raw_gates[1, t], bias, log_rate)
            beta, decay = gates(*(layouts.spread(x) for x in raw))
            q = unit(layouts.cast(mixed[t, 0], layouts.down)) * D**-0.5
            k = unit(layouts.cast(mixed[t, 1], layouts.down))
            v = layouts.cast(mixed[t, 2, pl.ds(column, N)], layouts.across)
            state, o, delta = delta_step(layouts, state, q, k, v, beta, decay)
            outputs[t, pl.ds(column, N)] = o
            store(delta_ref.at[row, t, head, pl.ds(column, N)], delta)

            @pl.when(wg == 0)
            def _decay() -> None:
                # A maximum across warps goes through shared memory that the warpgroups of a block have in common.
                decay_ref[row, t, head] = jnp.max(decay)

            @pl.when((wg == 0) & (head % r == 0))
            def _key() -> None:
                store(k_ref.at[row, t, key], k)

            return layouts.cast(state, layouts.tile)

        jax.lax.fori_loop(0, T, token, carried(state))
        sync()
        for at, gate in zip(mine, z, strict=True):
            x = layouts.cast(outputs[at], layouts.everywhere())
            store(out_ref.at[row, at, pl.ds(head * D, D)], gated_norm(x, gate, weight, eps))

    def scoped(*refs: Any) -> None:
        pl.run_scoped(
            lambda *scratch: body(*refs, *scratch),
            plgpu.SMEM((T, 3, D), jnp.float32),
            plgpu.SMEM((T, D), jnp.float32),
            plgpu.SMEM((2, T), jnp.float32),
            plgpu.Barrier(num_arrivals=groups),
            collective_axes="wg",
        )

    run = pl.kernel(
        scoped,
        out_type=(
            jax.ShapeDtypeStruct((B, T, nv * D), jnp.bfloat16),
            jax.ShapeDtypeStruct((B, T, nk, D), jnp.float32),
            jax.ShapeDtypeStruct((B, T, nv, D), jnp.float32),
            jax.ShapeDtypeStruct((B, T, nv), jnp.float32),
        ),
        mesh=plgpu.Mesh(
            grid=(B, nv), grid_names=("row", "head"), num_threads=groups, thread_name="wg"
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        name="gated_delta_verify",
    )
    out, *records = run(
        layer.reshape(1),
        read_slots,
        continues.astype(jnp.int32),
        projected,
        conv,
        dt_bias,
        a_log,
        norm,
        window,
        recurrent,
    )
    return out, Records(*records)
