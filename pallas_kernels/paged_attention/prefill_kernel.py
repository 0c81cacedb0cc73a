"""Attention of a prefill chunk over paged keys and values: Pallas Mosaic GPU, Hopper, bfloat16.

One thread block computes 64 tokens of two query heads that share a KV head: a warpgroup a head, and a third warpgroup
that fetches pages by TMA through the block table. Both heads end at the same causal bound, read the same pages from
shared memory, and a chunk of 64 tokens already fills a tile. The softmax is online in float32 (FlashAttention-3, arXiv
2407.08608): while one head takes the softmax of a page, the other keeps the tensor cores busy.

Pages are visited from the last to the first, so that masked pages come first, with nothing accumulated yet. A row's
result depends on its own pages' contents, start and length alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import not_hopper

PAGE = 64
HEAD_DIM = 256
_ROWS = 64
"""Tokens of a tile: the rows of one warpgroup's matrix instruction."""
_HEADS = 2
_FETCHER = _HEADS
_STAGES = 2
"""Pages of keys (and as many of values) in shared memory: 2 x 2 x 32 KB beside 64 KB of queries."""
_FEWEST = 32
"""Queries a row under which most of a tile would be padding."""
_LOWEST_PEAK = -1e30
"""Start of the running maximum: finite, so that a page without any visible key leaves weights of zero, not NaN."""


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
    return not_hopper()


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
    interpret: bool = False,
) -> Float[Array, "B T N D"]:
    """See `api.paged_attention`. Has no derivative.

    Args:
      interpret: for Mosaic's interpreter, which knows neither products with a factor in registers nor stores to an
        accumulator: accumulate in shared memory instead.
    """
    B, T, N, D = q.shape
    A, X, K, P = k_pages.shape[:4]
    G = N // K
    pairs = G // _HEADS
    tiles = -(-T // _ROWS)
    log2_scale = scale * math.log2(math.e)

    def laid_out(x: jax.Array, layout: Any) -> jax.Array:
        return x if interpret else plgpu.layout_cast(x, layout)

    def indices(shape: tuple[int, ...], axis: int) -> jax.Array:
        return laid_out(jax.lax.broadcasted_iota(jnp.int32, shape, axis), plgpu.Layout.WGMMA)

    def per_query(value: float) -> jax.Array:
        return laid_out(jnp.full((_ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

    def accumulate(f: Callable[[Any], Any], shape: tuple[int, int], stand_in: Any) -> Any:
        """f(accumulator), an accumulator of zeros."""
        if not interpret:
            return pl.run_scoped(f, plgpu.ACC(shape, jnp.float32))
        stand_in[...] = jnp.zeros(shape, jnp.float32)
        return f(stand_in)

    def multiply(acc: Any, a: Any, b: Any, transposed: bool = False) -> None:
        if interpret:
            factor = b[...].T if transposed else b[...]
            acc[...] += jnp.dot(a[...], factor, preferred_element_type=jnp.float32)
        else:
            plgpu.wgmma(acc, a, b.transpose((1, 0)) if transposed else b)

    def paged_attention_prefill(
        layer_ref: Any,
        tables_ref: Any,
        starts_ref: Any,
        lengths_ref: Any,
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        out_ref: Any,
        q_smem: Any,
        k_smem: Any,
        v_smem: Any,
        q_full: Any,
        k_full: Any,
        v_full: Any,
        k_free: Any,
        v_free: Any,
        *stand_ins: Any,
    ) -> None:
        wg = jax.lax.axis_index("wg")
        # Pairs of one KV head run side by side, so that L2 serves the pages; the longest tiles start first.
        index = jax.lax.axis_index("tile")
        pair, index = jax.lax.rem(index, pairs), jax.lax.div(index, pairs)
        kv_head, index = jax.lax.rem(index, K), jax.lax.div(index, K)
        row, index = jax.lax.rem(index, B), jax.lax.div(index, B)
        first = (tiles - 1 - index) * _ROWS

        start, length = starts_ref[row], lengths_ref[row]
        visible = jnp.where(first < length, start + jnp.minimum(first + _ROWS, length), 0)
        # A tile without any real query visits one page, wholly masked, and writes zeros.
        steps = jnp.maximum(jax.lax.div(visible + PAGE - 1, PAGE), 1)
        unmasked = jax.lax.div(jnp.minimum(start + first + 1, visible), PAGE)

        @pl.when(wg == _FETCHER)
        def _fetch() -> None:
            plgpu.set_max_registers(24, action="decrease")
            base = layer_ref[0] * X

            def load(
                i: jax.Array, page: jax.Array, source: Any, target: Any, full: Any, free: Any
            ) -> None:
                slot = jax.lax.rem(i, _STAGES)
                pl.when(i >= _STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
                rows = pl.ds(((base + page) * K + kv_head) * PAGE, PAGE)
                plgpu.copy_gmem_to_smem(source.at[rows], target.at[slot], full.at[slot])

            def step(i: jax.Array, page: jax.Array) -> jax.Array:
                following = tables_ref[row, steps - 1 - i]
                load(i, following, k_ref, k_smem, k_full, k_free)
                load(i - 1, page, v_ref, v_smem, v_full, v_free)
                return following

            page = tables_ref[row, steps - 1]
            load(jnp.int32(0), page, k_ref, k_smem, k_full, k_free)
            page = jax.lax.fori_loop(1, steps, step, page)
            load(steps - 1, page, v_ref, v_smem, v_full, v_free)

        @pl.when(wg != _FETCHER)
        def _attend() -> None:
            plgpu.set_max_registers(240, action="increase")
            tile = (row, pl.ds(first, _ROWS), kv_head * G + pair * _HEADS + wg)
            queries = q_smem.at[wg]
            scores_stand_in, out_stand_in = [ref.at[wg] for ref in stand_ins] or (None, None)
            plgpu.copy_gmem_to_smem(q_ref.at[tile], queries, q_full.at[wg])
            last = (steps - 1) * PAGE

            def release(free: Any, i: jax.Array) -> None:
                slot = jax.lax.rem(i, _STAGES)
                pl.when(i + _STAGES < steps)(lambda: plgpu.barrier_arrive(free.at[slot]))

            def scores_of(i: jax.Array) -> jax.Array:
                slot = jax.lax.rem(i, _STAGES)
                plgpu.barrier_wait(k_full.at[slot])

                def product(acc: Any) -> jax.Array:
                    multiply(acc, queries, k_smem.at[slot], transposed=True)
                    return acc[...]

                scores = accumulate(product, (_ROWS, PAGE), scores_stand_in)
                release(k_free, i)
                return scores

            def mask(scores: jax.Array, column: jax.Array) -> jax.Array:
                query, key = indices(scores.shape, 0), indices(scores.shape, 1) + column
                return jnp.where(
                    (key <= query + (start + first)) & (key < visible), scores, -jnp.inf
                )

            def softmax(
                scores: jax.Array, peak: jax.Array, total: jax.Array
            ) -> tuple[jax.Array, ...]:
                new_peak = jnp.maximum(peak, scores.max(axis=1) * log2_scale)
                shrink = jnp.exp2(peak - new_peak)
                new_peaks = jax.lax.broadcast_in_dim(new_peak, scores.shape, [0])
                weights = jnp.exp2(scores * log2_scale - new_peaks)
                total = total * shrink + weights.sum(axis=1)
                return new_peak, total, shrink, weights.astype(jnp.bfloat16)

            def attend(acc: Any) -> tuple[jax.Array, jax.Array]:
                plgpu.barrier_wait(q_full.at[wg])
                scores = mask(scores_of(jnp.int32(0)), last)
                peak, total, _, weights = softmax(scores, per_query(_LOWEST_PEAK), per_query(0.0))

                # Columns that nobody has written may hold NaN, and zero times NaN is NaN. Both warpgroups store the
                # same bytes, so it does not matter which is first.
                plgpu.barrier_wait(v_full.at[0])

                @pl.when(start + length < steps * PAGE)
                def _clean() -> None:
                    values = laid_out(v_smem[0], plgpu.Layout.WGMMA)
                    written = indices(values.shape, 0) + last < visible
                    v_smem[0] = jnp.where(written, values, jnp.zeros_like(values))
                    plgpu.commit_smem()

                def step(
                    i: jax.Array, carry: tuple[jax.Array, ...], masked: bool
                ) -> tuple[jax.Array, ...]:
                    peak, total, weights = carry
                    slot = jax.lax.rem(i - 1, _STAGES)
                    pl.when(i > 1)(lambda: plgpu.barrier_wait(v_full.at[slot]))
                    multiply(acc, weights, v_smem.at[slot])
                    out = acc[...]
                    release(v_free, i - 1)
                    scores = scores_of(i)
                    if masked:
                        scores = mask(scores, last - i * PAGE)
                    peak, total, shrink, weights = softmax(scores, peak, total)
                    acc[...] = out * jax.lax.broadcast_in_dim(shrink, out.shape, [0])
                    return peak, total, weights

                border = jnp.maximum(steps - unmasked, 1)
                carry = (peak, total, weights)
                carry = jax.lax.fori_loop(1, border, functools.partial(step, masked=True), carry)
                carry = jax.lax.fori_loop(
                    border, steps, functools.partial(step, masked=False), carry
                )
                _, total, weights = carry
                slot = jax.lax.rem(steps - 1, _STAGES)
                pl.when(steps > 1)(lambda: plgpu.barrier_wait(v_full.at[slot]))
                multiply(acc, weights, v_smem.at[slot])
                return acc[...], total

            out, total = accumulate(attend, (_ROWS, HEAD_DIM), out_stand_in)
            inverse = 1.0 / jnp.where(total > 0.0, total, 1.0)
            out = out * jax.lax.broadcast_in_dim(inverse, out.shape, [0])
            queries[...] = out.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries, out_ref.at[tile])
            plgpu.wait_smem_to_gmem(0)

    def smem(*shape: int) -> Any:
        tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled)

    stand_ins = [
        plgpu.SMEM((_HEADS, _ROWS, width), jnp.float32)
        for width in ((PAGE, HEAD_DIM) if interpret else ())
    ]
    kernel = plgpu.kernel(
        paged_attention_prefill,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            smem(_HEADS, _ROWS, HEAD_DIM),
            smem(_STAGES, PAGE, HEAD_DIM),
            smem(_STAGES, PAGE, HEAD_DIM),
            plgpu.Barrier(num_barriers=_HEADS),
            plgpu.Barrier(num_barriers=_STAGES),
            plgpu.Barrier(num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=_HEADS, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=_HEADS, num_barriers=_STAGES),
            *stand_ins,
        ],
        grid=(B * K * tiles * pairs,),
        grid_names=("tile",),
        num_threads=_HEADS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    return kernel(
        jnp.asarray(layer, jnp.int32).reshape(1),
        block_tables,
        starts,
        lengths,
        q,
        # Rows of one long matrix: a page of a KV head is 64 consecutive rows.
        k_pages.reshape(A * X * K * P, D),
        v_pages.reshape(A * X * K * P, D),
    )
