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
_HEADS = 2
_FEWEST = 32
"""Queries a row under which most of a tile would be padding."""
_PRODUCER = 2
_LOWEST_PEAK = -1e30
"""Start of the running maximum: finite, so that a page without any visible key leaves weights of zero, not NaN."""


def on_hopper() -> bool:
    """Whether the default device is a GPU of compute capability 9.0."""
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", None) == "9.0"


def unavailable(
    q: jax.Array | jax.ShapeDtypeStruct, k_pages: jax.Array | jax.ShapeDtypeStruct
) -> str | None:
    """Why the kernel cannot run at these shapes on the default device, or None where it can."""
    heads = (q.shape[2], k_pages.shape[2])
    if q.dtype != jnp.bfloat16 or k_pages.dtype != jnp.bfloat16:
        return f"the prefill kernel is for bfloat16, got {q.dtype} on {k_pages.dtype} pages"
    if k_pages.shape[3:] != (PAGE, HEAD_DIM):
        return f"the prefill kernel is for pages of {PAGE} x {HEAD_DIM}, got {k_pages.shape[3:]}"
    if q.shape[1] < _FEWEST:
        return f"the prefill kernel is for at least {_FEWEST} queries a row, got {q.shape[1]}"
    if heads[0] // heads[1] % _HEADS:
        return f"the prefill kernel takes a KV head's query heads in pairs, got {heads}"
    if not on_hopper():
        return "the prefill kernel needs a GPU of compute capability 9.0"
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
    block: int = 64,
    order: str = "apart",
    turns: bool = False,
    cluster: int = 1,
    interpret: bool = False,
) -> Float[Array, "B T N D"]:
    """See `api.paged_attention`.

    Args:
      block: keys of one step, 64 or 128.
      overlap: issue the scores of a step before the values of the last one, and take the softmax meanwhile.
      cluster: 2: neighbouring tiles share their pages by TMA multicast.
      turns: let the two heads issue their products in turn, so that one's softmax runs under the other's products.
    """
    B, T, N, D = q.shape
    A, X, K, P = k_pages.shape[:4]
    G = N // K
    pairs = G // _HEADS
    tiles = -(-T // (ROWS * cluster))
    stages = 2 * PAGE // block
    pages = block // PAGE
    L = block_tables.shape[1]
    # Rows of one long matrix: a page of a KV head is 64 consecutive rows.
    k_rows = k_pages.reshape(A * X * K * P, D)
    v_rows = v_pages.reshape(A * X * K * P, D)

    def multiply(acc, a, b, transposed=False):
        if interpret:
            factor = b[...].T if transposed else b[...]
            acc[...] += jnp.dot(a[...], factor, preferred_element_type=jnp.float32)
        else:
            plgpu.wgmma(acc, a, b.transpose((1, 0)) if transposed else b)

    def laid_out(x, layout):
        return x if interpret else plgpu.layout_cast(x, layout)

    def indices(shape, axis):
        return laid_out(jax.lax.broadcasted_iota(jnp.int32, shape, axis), plgpu.Layout.WGMMA)

    def accumulate(f, shape, stand_in):
        if not interpret:
            return pl.run_scoped(f, plgpu.ACC(shape, jnp.float32))
        stand_in[...] = jnp.zeros(shape, jnp.float32)
        return f(stand_in)

    scalars = (jnp.asarray(layer, jnp.int32).reshape(1), block_tables, starts, lengths)
    log2_scale = scale * math.log2(math.e)

    def body(
        layer_ref, tables_ref, starts_ref, lengths_ref, q_ref, k_ref, v_ref, out_ref,
        q_smem, k_smem, v_smem, q_full, k_full, v_full, k_free, v_free, turn, done,
        *emulated,
    ):  # fmt: skip
        wg = jax.lax.axis_index("wg")
        # Pairs of one KV head run side by side, so that L2 serves the pages; the longest tiles start first.
        index = jax.lax.axis_index("tile")
        pair, index = jax.lax.rem(index, pairs), jax.lax.div(index, pairs)
        kv_head, index = jax.lax.rem(index, K), jax.lax.div(index, K)
        row, index = jax.lax.rem(index, B), jax.lax.div(index, B)
        lowest = (tiles - 1 - index) * (ROWS * cluster)
        first = lowest + (jax.lax.axis_index("cluster") * ROWS if cluster > 1 else 0)

        start, length = starts_ref[row], lengths_ref[row]
        visible = start + jnp.minimum(first + ROWS, length)
        visible = jnp.where(first < length, visible, 0)
        # A tile without any real query visits masked keys only, and writes zeros. Tiles of a cluster go together.
        together = start + jnp.minimum(lowest + ROWS * cluster, length)
        together = jnp.where(lowest < length, together, 0)
        steps = jnp.maximum((together + block - 1) // block, 1)
        unmasked = jnp.minimum(start + first + 1, visible) // block

        @pl.when(wg == _PRODUCER)
        def _fetch():
            plgpu.set_max_registers(24, action="decrease")
            base = layer_ref[0] * X
            shared = "cluster" if cluster > 1 else None

            def load(i, ids, source, target, full, free):
                slot = jax.lax.rem(i, stages)
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                for n, page in enumerate(ids):
                    rows = pl.ds(((base + page) * K + kv_head) * PAGE, PAGE)
                    plgpu.copy_gmem_to_smem(
                        source.at[rows],
                        target.at[slot, pl.ds(n * PAGE, PAGE)],
                        full.at[slot],
                        collective_axes=shared,
                    )

            def ids_of(i):
                first_page = (steps - 1 - i) * pages
                return tuple(
                    tables_ref[row, jnp.minimum(first_page + n, L - 1)] for n in range(pages)
                )

            ids = ids_of(jnp.int32(0))
            load(jnp.int32(0), ids, k_ref, k_smem, k_full, k_free)

            def step(i, ids):
                following = ids_of(i)
                load(i, following, k_ref, k_smem, k_full, k_free)
                load(i - 1, ids, v_ref, v_smem, v_full, v_free)
                return following

            ids = jax.lax.fori_loop(1, steps, step, ids)
            load(steps - 1, ids, v_ref, v_smem, v_full, v_free)

        @pl.when(wg != _PRODUCER)
        def _attend():
            plgpu.set_max_registers(240, action="increase")
            head = kv_head * G + pair * _HEADS + wg
            tile = (row, pl.ds(first, ROWS), head)
            queries = q_smem.at[wg]
            stand_in = [ref.at[wg] for ref in emulated] or [None, None]
            plgpu.copy_gmem_to_smem(q_ref.at[tile], queries, q_full.at[wg])
            last = (steps - 1) * block

            def release(free, i):
                # Nobody waits for the last ones, and a block of the cluster may be gone by then.
                slot = jax.lax.rem(i, stages)
                if cluster == 1 and not interpret:
                    return plgpu.barrier_arrive(free.at[slot])
                pl.when(i + stages < steps)(lambda: plgpu.barrier_arrive(free.at[slot]))

            def my_turn():
                if turns:
                    plgpu.barrier_wait(turn.at[wg])

            def your_turn():
                if turns:
                    plgpu.barrier_arrive(turn.at[1 - wg])

            if turns:
                pl.when(wg == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def masked_scores(scores, column):
                shape = (ROWS, block)
                query = indices(shape, 0)
                key = indices(shape, 1)
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
                    multiply(acc, queries, k_smem.at[0], transposed=True)
                    your_turn()
                    return acc[...]

                scores = accumulate(first_scores, (ROWS, block), stand_in[0])
                release(k_free, jnp.int32(0))
                peak = laid_out(
                    jnp.full((ROWS,), _LOWEST_PEAK, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
                )
                total = laid_out(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
                peak, total, _, weights = softmax(masked_scores(scores, last), peak, total)

                # Columns that nobody has written may hold NaN, and zero times NaN is NaN. Both warpgroups store the
                # same bytes, so it does not matter which is first.
                plgpu.barrier_wait(v_full.at[0])

                @pl.when(start + length < steps * block)
                def _clean():
                    shape = (block, HEAD_DIM)
                    key = indices(shape, 0)
                    values = laid_out(v_smem[0], plgpu.Layout.WGMMA)
                    written = key + last < visible
                    v_smem[0] = jnp.where(written, values, jnp.zeros_like(values))
                    plgpu.commit_smem()

                def step(i, carry, masked):
                    peak, total, weights = carry
                    k_slot, v_slot = jax.lax.rem(i, stages), jax.lax.rem(i - 1, stages)
                    values = v_smem.at[v_slot]

                    def wait_for_values():
                        pl.when(i > 1)(lambda: plgpu.barrier_wait(v_full.at[v_slot]))

                    wait_for_values()
                    if order == "apart":
                        my_turn()
                        multiply(out_acc, weights, values)
                        out = out_acc[...]
                        release(v_free, i - 1)
                        plgpu.barrier_wait(k_full.at[k_slot])
                    else:
                        plgpu.barrier_wait(k_full.at[k_slot])
                        my_turn()

                    def issue(acc):
                        if order == "chained":
                            multiply(out_acc, weights, values)
                        multiply(acc, queries, k_smem.at[k_slot], transposed=True)
                        if order == "overlap":
                            multiply(out_acc, weights, values)
                        your_turn()
                        if interpret:
                            return acc[...]
                        return plgpu.wgmma_accumulator_load(acc, wait_n=int(order == "overlap"))

                    scores = accumulate(issue, (ROWS, block), stand_in[0])
                    release(k_free, i)
                    if order == "chained":
                        out = out_acc[...]
                        release(v_free, i - 1)
                    if masked:
                        scores = masked_scores(scores, last - i * block)
                    peak, total, shrink, weights = softmax(scores, peak, total)
                    if order == "overlap":
                        out = out_acc[...]
                        release(v_free, i - 1)
                    out_acc[...] = out * jax.lax.broadcast_in_dim(shrink, out.shape, [0])
                    return peak, total, weights

                border = jnp.maximum(steps - unmasked, 1)
                carry = (peak, total, weights)
                carry = jax.lax.fori_loop(1, border, functools.partial(step, masked=True), carry)
                carry = jax.lax.fori_loop(
                    border, steps, functools.partial(step, masked=False), carry
                )
                peak, total, weights = carry
                slot = jax.lax.rem(steps - 1, stages)
                pl.when(steps > 1)(lambda: plgpu.barrier_wait(v_full.at[slot]))
                multiply(out_acc, weights, v_smem.at[slot])
                return out_acc[...], total

            out, total = accumulate(attend, (ROWS, HEAD_DIM), stand_in[1])
            inverse = 1.0 / jnp.where(total > 0.0, total, 1.0)
            queries[...] = (out * jax.lax.broadcast_in_dim(inverse, out.shape, [0])).astype(
                jnp.bfloat16
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries, out_ref.at[tile])
            plgpu.wait_smem_to_gmem(0)
            if cluster > 1:
                plgpu.barrier_arrive(done)
                plgpu.barrier_wait(done)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def smem(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled)

    def barrier(count, arrivals=1):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    def freed():
        if cluster == 1:
            return barrier(stages, _HEADS)
        return plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=_HEADS, num_barriers=stages
        )

    together = {"cluster": (cluster,), "cluster_names": ("cluster",)} if cluster > 1 else {}
    # The interpreter knows neither products with a factor in registers nor stores to an accumulator.
    widths = (block, HEAD_DIM) if interpret else ()
    stand_ins = [plgpu.SMEM((_HEADS, ROWS, width), jnp.float32) for width in widths]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            smem(_HEADS, ROWS, HEAD_DIM),
            smem(stages, block, HEAD_DIM),
            smem(stages, block, HEAD_DIM),
            barrier(_HEADS),
            barrier(stages, pages),
            barrier(stages, pages),
            freed(),
            freed(),
            barrier(_HEADS),
            plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=_HEADS)
            if cluster > 1
            else barrier(1),
            *stand_ins,
        ],
        grid=(B * K * tiles * pairs,),
        grid_names=("tile",),
        num_threads=_HEADS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **together,
    )(*scalars, q, k_rows, v_rows)
