"""Attention of a prefill chunk over paged keys and values: Pallas Mosaic GPU, Hopper, bfloat16.

One thread block computes 64 tokens of two query heads that share a KV head: a warpgroup a head, and a third warpgroup
that fetches pages by TMA through the block table. Both heads end at the same causal bound, read the same pages from
shared memory, and a chunk of 64 tokens already fills a tile. The online softmax follows FlashAttention-3 (arXiv
2407.08608): the scores of the next page are computed while the softmax of the last one runs.

Pages are visited from the last to the first. So masked pages come first, with nothing accumulated yet.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

ROWS = 64
"""Tokens of a tile: the rows of one warpgroup's matrix instruction."""
PAGE = 64
HEAD_DIM = 256
_STAGES = 2
"""Pages of keys (and as many of values) in shared memory at once: 2 x 2 x 32 KB beside 64 KB of queries."""
_HEADS = 2
_PRODUCER = 2
_LOWEST_PEAK = -1e30
"""Start of the running maximum: finite, so that a page without any visible key leaves weights of zero, not NaN."""


def unavailable(
    q: jax.Array | jax.ShapeDtypeStruct, k_pages: jax.Array | jax.ShapeDtypeStruct
) -> str | None:
    """Why the kernel cannot take these shapes, or None where it can."""
    if q.dtype != jnp.bfloat16 or k_pages.dtype != jnp.bfloat16:
        return f"the kernel is for bfloat16, got {q.dtype} queries and {k_pages.dtype} pages"
    if k_pages.shape[3:] != (PAGE, HEAD_DIM):
        return f"the kernel is for pages of {PAGE} x {HEAD_DIM}, got {k_pages.shape[3:]}"
    if (q.shape[2] // k_pages.shape[2]) % _HEADS:
        return f"the kernel takes the heads of a group in pairs, got {q.shape[2]} / {k_pages.shape[2]}"
    return None


def paged_attention(
    q: Float[Array, "B T N D"],
    k_pages: Float[Array, "A X K P D"],
    v_pages: Float[Array, "A X K P D"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B L"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    scale: float,
    *,
    turns: bool = True,
) -> Float[Array, "B T N D"]:
    """See `api.paged_attention`.

    Args:
      turns: let the two heads issue their products in turn, so that one's softmax runs under the other's products.
    """
    B, T, N, D = q.shape
    A, X, K, P = k_pages.shape[:4]
    G = N // K
    pairs = G // _HEADS
    tiles = -(-T // ROWS)
    # Rows of one long matrix: a page of a KV head is 64 consecutive rows.
    k_rows = k_pages.reshape(A * X * K * P, D)
    v_rows = v_pages.reshape(A * X * K * P, D)
    scalars = (jnp.asarray(layer, jnp.int32).reshape(1), block_tables, starts, lengths)
    log2_scale = scale * math.log2(math.e)

    def body(
        layer_ref, tables_ref, starts_ref, lengths_ref, q_ref, k_ref, v_ref, out_ref,
        q_smem, k_smem, v_smem, q_full, k_full, v_full, k_free, v_free, turn,
    ):  # fmt: skip
        wg = jax.lax.axis_index("wg")
        # Pairs of one KV head run side by side, so that L2 serves the pages; the longest tiles start first.
        index = jax.lax.axis_index("tile")
        pair = index % pairs
        index = index // pairs
        first = (tiles - 1 - index % tiles) * ROWS
        index = index // tiles
        kv_head = index % K
        row = index // K

        start, length = starts_ref[row], lengths_ref[row]
        visible = start + jnp.minimum(first + ROWS, length)
        visible = jnp.where(first < length, visible, 0)
        # A tile without any real query visits one page, wholly masked, and writes zeros.
        steps = jnp.maximum((visible + PAGE - 1) // PAGE, 1)
        unmasked = jnp.minimum(start + first + 1, visible) // PAGE

        @pl.when(wg == _PRODUCER)
        def _fetch():
            plgpu.set_max_registers(24, action="decrease")
            base = layer_ref[0] * X

            def rows_of(page):
                return pl.ds(((base + page) * K + kv_head) * PAGE, PAGE)

            def load_k(i, page):
                slot = i % _STAGES
                pl.when(i >= _STAGES)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                plgpu.copy_gmem_to_smem(k_ref.at[rows_of(page)], k_smem.at[slot], k_full.at[slot])

            def load_v(i, page):
                slot = i % _STAGES
                pl.when(i >= _STAGES)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                plgpu.copy_gmem_to_smem(v_ref.at[rows_of(page)], v_smem.at[slot], v_full.at[slot])

            page = tables_ref[row, steps - 1]
            load_k(jnp.int32(0), page)

            def step(i, page):
                following = tables_ref[row, steps - 1 - i]
                load_k(i, following)
                load_v(i - 1, page)
                return following

            page = jax.lax.fori_loop(1, steps, step, page)
            load_v(steps - 1, page)

        @pl.when(wg != _PRODUCER)
        def _attend():
            plgpu.set_max_registers(240, action="increase")
            head = kv_head * G + pair * _HEADS + wg
            tile = (row, pl.ds(first, ROWS), head)
            queries = q_smem.at[wg]
            plgpu.copy_gmem_to_smem(q_ref.at[tile], queries, q_full.at[wg])
            last = steps * PAGE - PAGE

            def my_turn():
                if turns:
                    plgpu.barrier_wait(turn.at[wg])

            def your_turn():
                if turns:
                    plgpu.barrier_arrive(turn.at[1 - wg])

            if turns:
                pl.when(wg == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def masked_scores(scores, column):
                shape = (ROWS, PAGE)
                query = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
                key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                seen = (key + column <= query + (start + first)) & (key + column < visible)
                return jnp.where(seen, scores, -jnp.inf)

            def softmax(scores, peak, total):
                new_peak = jnp.maximum(peak, scores.max(axis=1) * log2_scale)
                shrink = jnp.exp2(peak - new_peak)
                weights = jnp.exp2(
                    scores * log2_scale - jax.lax.broadcast_in_dim(new_peak, scores.shape, [0])
                )
                total = total * shrink + weights.sum(axis=1)
                return new_peak, total, shrink, weights.astype(jnp.bfloat16)

            def attend(out_acc):
                plgpu.barrier_wait(q_full.at[wg])
                plgpu.barrier_wait(k_full.at[0])
                my_turn()

                def first_scores(acc):
                    plgpu.wgmma(acc, queries, k_smem.at[0].transpose((1, 0)))
                    your_turn()
                    return acc[...]

                scores = pl.run_scoped(first_scores, plgpu.ACC((ROWS, PAGE), jnp.float32))
                plgpu.barrier_arrive(k_free.at[0])
                peak = plgpu.layout_cast(
                    jnp.full((ROWS,), _LOWEST_PEAK, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
                )
                total = plgpu.layout_cast(
                    jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1)
                )
                peak, total, _, weights = softmax(masked_scores(scores, last), peak, total)

                # Columns that nobody has written may hold NaN, and zero times NaN is NaN. Both warpgroups store the
                # same bytes, so it does not matter which is first.
                plgpu.barrier_wait(v_full.at[0])

                @pl.when(start + length < steps * PAGE)
                def _clean():
                    shape = (PAGE, HEAD_DIM)
                    key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
                    values = plgpu.layout_cast(v_smem[0], plgpu.Layout.WGMMA)
                    written = key + last < visible
                    v_smem[0] = jnp.where(written, values, jnp.zeros_like(values))
                    plgpu.commit_smem()

                def step(i, carry, masked):
                    peak, total, weights = carry
                    k_slot, v_slot = i % _STAGES, (i - 1) % _STAGES
                    plgpu.barrier_wait(k_full.at[k_slot])
                    pl.when(i > 1)(lambda: plgpu.barrier_wait(v_full.at[v_slot]))
                    my_turn()

                    def issue(acc):
                        plgpu.wgmma(acc, queries, k_smem.at[k_slot].transpose((1, 0)))
                        plgpu.wgmma(out_acc, weights, v_smem.at[v_slot])
                        your_turn()
                        return plgpu.wgmma_accumulator_load(acc, wait_n=1)

                    scores = pl.run_scoped(issue, plgpu.ACC((ROWS, PAGE), jnp.float32))
                    plgpu.barrier_arrive(k_free.at[k_slot])
                    if masked:
                        scores = masked_scores(scores, last - i * PAGE)
                    peak, total, shrink, weights = softmax(scores, peak, total)
                    out = out_acc[...]
                    plgpu.barrier_arrive(v_free.at[v_slot])
                    out_acc[...] = out * jax.lax.broadcast_in_dim(shrink, out.shape, [0])
                    return peak, total, weights

                border = jnp.maximum(steps - unmasked, 1)
                carry = (peak, total, weights)
                carry = jax.lax.fori_loop(1, border, functools.partial(step, masked=True), carry)
                carry = jax.lax.fori_loop(border, steps, functools.partial(step, masked=False), carry)
                peak, total, weights = carry
                slot = (steps - 1) % _STAGES
                pl.when(steps > 1)(lambda: plgpu.barrier_wait(v_full.at[slot]))
                plgpu.wgmma(out_acc, weights, v_smem.at[slot])
                return out_acc[...], total

            out, total = pl.run_scoped(attend, plgpu.ACC((ROWS, HEAD_DIM), jnp.float32))
            inverse = 1.0 / jnp.where(total > 0.0, total, 1.0)
            queries[...] = (out * jax.lax.broadcast_in_dim(inverse, out.shape, [0])).astype(
                jnp.bfloat16
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries, out_ref.at[tile])
            plgpu.wait_smem_to_gmem(0)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def smem(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            smem(_HEADS, ROWS, HEAD_DIM),
            smem(_STAGES, PAGE, HEAD_DIM),
            smem(_STAGES, PAGE, HEAD_DIM),
            plgpu.Barrier(num_barriers=_HEADS),
            plgpu.Barrier(num_barriers=_STAGES),
            plgpu.Barrier(num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=_HEADS, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=_HEADS, num_barriers=_STAGES),
            plgpu.Barrier(num_barriers=_HEADS),
        ],
        grid=(B * K * tiles * pairs,),
        grid_names=("tile",),
        num_threads=_HEADS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*scalars, q, k_rows, v_rows)
