"""Paged attention of few new tokens a row (decode, verification) on Hopper, in Pallas Mosaic GPU.

Flash-decoding: the pages of a row and KV head are cut into chunks, a fixed set of thread blocks works through all
chunks of all rows, and a second kernel merges the chunks of each row. The product is taken transposed: keys (then
channels) are the tall side of the matrix instruction and the few queries its narrow side,

    S^T [64 keys, R] = K_page [64, D] @ Q^T [D, R]        O^T [D, R] = V_page^T [D, 64] @ P^T [64, R]

with R the queries of one KV head (heads of the group times new tokens), padded to a multiple of 8.

How a row is cut depends on its own length and on static shapes only, and chunks are summed in their order: a row's
result does not depend on its neighbours, nor on which block computes what.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCKS = 132
"""Thread blocks of the main kernel: one per multiprocessor of an H100 or H200."""
PAGE = 64
HEAD_DIM = 256
_LOG2E = math.log2(math.e)
_LOWEST = -1e30
P_LAYOUT = plgpu.Layout.WGMMA_TRANSPOSED
_WARPGROUP = plgpu.LoweringSemantics.Warpgroup


def chunk_pages(pages: Any, *, rows: int, kv_heads: int, table: int) -> Any:
    """Pages of one chunk of a row that has `pages` pages; Python integers or traced ones.

    Short contexts are cut so that the chunks of equal rows fill the blocks once; long ones into pieces of a
    length that keeps uneven rows balanced.
    """
    once = max(1, BLOCKS // (rows * kv_heads))
    longest = max(16, -(-table // 64))
    even = (pages + (once - 1)) // once
    if isinstance(pages, int):
        return max(1, min(even, longest))
    return jnp.clip(even, 1, longest)


def most_chunks(*, rows: int, kv_heads: int, table: int) -> int:
    """Most chunks that a row can have."""
    sizes = dict(rows=rows, kv_heads=kv_heads, table=table)
    return max(-(-n // chunk_pages(n, **sizes)) for n in range(1, table + 1))


def paged_attention_partials(
    q: Float[Array, "BK R D"],
    k_pages: Any,
    v_pages: Any,
    layer: Int[Array, ""],
    block_tables: Int[Array, "B L"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    group: int,
    stages: int = 6,
    interpret: Any = None,
) -> tuple[Float[Array, "BK C R D"], Float[Array, "BK C R"]]:
    """Normalised output and base-2 log of the weights' sum of each chunk. Unused chunks stay unwritten."""
    B, L = block_tables.shape
    BK, R, D = q.shape
    K = BK // B
    P = PAGE
    C = most_chunks(rows=B, kv_heads=K, table=L)
    dtype = q.dtype
    factor = scale * _LOG2E

    def plan(tables_ref: Any, starts_ref: Any, lengths_ref: Any) -> Any:
        """Per row: used tokens, pages a chunk, chunks, and the first item after the row's own."""
        del tables_ref
        used, size, count, ends = [], [], [], []
        end = jnp.int32(0)
        for b in range(B):
            n = lengths_ref[b]
            tokens = jnp.where(n > 0, starts_ref[b] + n, 0)
            pages = (tokens + (P - 1)) // P
            c = chunk_pages(pages, rows=B, kv_heads=K, table=L)
            s = (pages + c - 1) // c
            end = end + s * K
            used.append(tokens)
            size.append(c)
            count.append(s)
            ends.append(end)
        return used, size, count, ends

    def item(i: Any, rows: Any) -> Any:
        """Row, KV head, chunk, first page, pages and used tokens of work item `i`."""
        used, size, count, ends = rows
        b, first = jnp.int32(0), jnp.int32(0)
        tokens, c, s = used[0], size[0], count[0]
        for r in range(1, B):
            later = i >= ends[r - 1]
            b = jnp.where(later, r, b)
            first = jnp.where(later, ends[r - 1], first)
            tokens = jnp.where(later, used[r], tokens)
            c = jnp.where(later, size[r], c)
            s = jnp.where(later, count[r], s)
        local = i - first
        head = local // s
        chunk = local - head * s
        page = chunk * c
        n = jnp.minimum(c, (tokens + (P - 1)) // P - page)
        return b, head, chunk, page, n, tokens

    def body(
        q_ref: Any, k_ref: Any, v_ref: Any, layer_ref: Any, tables_ref: Any, starts_ref: Any,
        lengths_ref: Any, out_ref: Any, lse_ref: Any,
        q_smem: Any, kv_smem: Any, p_smem: Any, q_full: Any, full: Any, empty: Any,
    ) -> None:  # fmt: skip
        block = jax.lax.axis_index("block")
        thread = jax.lax.axis_index("wg")
        rows = plan(tables_ref, starts_ref, lengths_ref)
        total = rows[3][-1]
        mine = jnp.maximum((total - block + (BLOCKS - 1)) // BLOCKS, 0)

        @pl.when(thread == 1)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")
            layer_index = layer_ref[0]

            def one_item(j: Any, tick: Any) -> Any:
                b, head, _, page, n, _ = item(block + j * BLOCKS, rows)

                def one_page(x: Any, tick: Any) -> Any:
                    where = (layer_index, tables_ref[b, page + x], head)
                    for pages, step in ((k_ref, 0), (v_ref, 1)):
                        slot = jax.lax.rem(tick + step, stages)

                        @pl.when(tick + step >= stages)
                        def _wait(slot: Any = slot) -> None:
                            plgpu.barrier_wait(empty.at[slot])

                        plgpu.copy_gmem_to_smem(pages.at[where], kv_smem.at[slot], full.at[slot])
                    return tick + 2

                return jax.lax.fori_loop(0, n, one_page, tick)

            ticks = jax.lax.fori_loop(0, mine, one_item, jnp.int32(0))
            # Every arrival is waited for, so that the barriers end in a known phase.
            for slot in range(stages):

                @pl.when(ticks > slot)
                def _drain(slot: int = slot) -> None:
                    plgpu.barrier_wait(empty.at[slot])

        @pl.when(thread == 0)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")

            def one_item(j: Any, tick: Any) -> Any:
                b, head, chunk, page, n, tokens = item(block + j * BLOCKS, rows)
                start = starts_ref[b]
                bk = b * K + head
                plgpu.copy_gmem_to_smem(q_ref.at[bk], q_smem, q_full)
                plgpu.barrier_wait(q_full)

                def one_page(x: Any, carry: Any) -> Any:
                    tick, acc, peak, total = carry
                    k_slot = jax.lax.rem(tick, stages)
                    v_slot = jax.lax.rem(tick + 1, stages)

                    def scores(acc_ref: Any) -> Any:
                        plgpu.wgmma(acc_ref, kv_smem.at[k_slot], q_smem.transpose((1, 0)))
                        return plgpu.layout_cast(acc_ref[...], plgpu.Layout.WGMMA)

                    plgpu.barrier_wait(full.at[k_slot])
                    s = pl.run_scoped(scores, plgpu.ACC((P, R), jnp.float32))
                    plgpu.barrier_arrive(empty.at[k_slot])

                    first = (page + x) * P
                    key = plgpu.broadcasted_iota(
                        jnp.int32, (P, R), 0, layout=plgpu.Layout.WGMMA
                    )
                    query = plgpu.broadcasted_iota(
                        jnp.int32, (P, R), 1, layout=plgpu.Layout.WGMMA
                    )
                    seen = key <= query // group + (start - first)
                    s = jnp.where(seen & (key < tokens - first), s * factor, -jnp.inf)
                    new_peak = jnp.maximum(peak, jnp.max(s, axis=0))
                    shrink = jnp.exp2(peak - new_peak)
                    weight = jnp.exp2(s - jax.lax.broadcast_in_dim(new_peak, (P, R), [1]))
                    total = total * jax.lax.broadcast_in_dim(shrink, (P, R), [1]) + weight
                    p_smem.transpose((1, 0))[...] = plgpu.layout_cast(
                        weight.astype(dtype), P_LAYOUT
                    )
                    plgpu.barrier_wait(full.at[v_slot])

                    @pl.when(tokens - first < P)
                    def _clear() -> None:
                        # Weights of unused columns are zero, but zero times what stands there may be NaN.
                        for c in range(0, D, 64):
                            part = kv_smem.at[v_slot, :, pl.ds(c, 64)]
                            token = plgpu.broadcasted_iota(
                                jnp.int32, (P, 64), 0, layout=plgpu.Layout.WGMMA
                            )
                            value = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
                            part[...] = jnp.where(
                                token < tokens - first, value, jnp.zeros_like(value)
                            )

                    plgpu.commit_smem()

                    def values(acc_ref: Any) -> Any:
                        plgpu.wgmma(
                            acc_ref,
                            kv_smem.at[v_slot].transpose((1, 0)),
                            p_smem.transpose((1, 0)),
                        )
                        return plgpu.layout_cast(acc_ref[...], plgpu.Layout.WGMMA)

                    acc = acc * jax.lax.broadcast_in_dim(shrink, (D, R), [1])
                    acc = acc + pl.run_scoped(values, plgpu.ACC((D, R), jnp.float32))
                    plgpu.barrier_arrive(empty.at[v_slot])
                    return tick + 2, acc, new_peak, total

                column = plgpu.Layout.WGMMA.reduce(0)
                carry = (
                    tick,
                    plgpu.layout_cast(jnp.zeros((D, R), jnp.float32), plgpu.Layout.WGMMA),
                    plgpu.layout_cast(jnp.full((R,), _LOWEST, jnp.float32), column),
                    plgpu.layout_cast(jnp.zeros((P, R), jnp.float32), plgpu.Layout.WGMMA),
                )
                tick, acc, peak, total = jax.lax.fori_loop(0, n, one_page, carry)
                total = jnp.sum(total, axis=0)
                safe = jnp.where(total > 0, total, 1.0)
                lse_ref[bk, chunk] = jnp.where(total > 0, peak + jnp.log2(safe), _LOWEST)
                out = (acc / jax.lax.broadcast_in_dim(safe, (D, R), [1])).astype(dtype)
                # The queries are done with: their place serves to turn the result around.
                q_smem.transpose((1, 0))[...] = plgpu.layout_cast(out, P_LAYOUT)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_smem, out_ref.at[bk, chunk])
                plgpu.wait_smem_to_gmem(0)
                return tick

            jax.lax.fori_loop(0, mine, one_item, jnp.int32(0))

    call = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((BK, C, R, D), dtype),
            jax.ShapeDtypeStruct((BK, C, R), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((R, D), dtype),
            plgpu.SMEM((stages, P, D), dtype),
            plgpu.SMEM((R, P), dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=_WARPGROUP
        ),
        interpret=interpret,
    )
    return call(
        q, k_pages, v_pages, layer.reshape(1), block_tables, starts, lengths
    )


def merge_chunks(
    partials: Float[Array, "BK C R D"],
    lse: Float[Array, "BK C R"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    tokens: int,
    group: int,
    table: int,
    interpret: Any = None,
) -> Float[Array, "B T N D"]:
    """Weighted sum of each row's chunks in their order; zeros for a row without any."""
    B, T, G = starts.shape[0], tokens, group
    BK, C, _, D = partials.shape
    K = BK // B
    N = K * G
    together = min(C, 16)

    def body(part_ref: Any, lse_ref: Any, starts_ref: Any, lengths_ref: Any, out_ref: Any) -> None:
        row = jax.lax.axis_index("row")
        b, rest = row // (T * N), jax.lax.rem(row, T * N)
        t, head = rest // N, jax.lax.rem(rest, N)
        bk = b * K + head // G
        r = t * G + jax.lax.rem(head, G)
        n = lengths_ref[b]
        pages = (jnp.where(n > 0, starts_ref[b] + n, 0) + (PAGE - 1)) // PAGE
        size = chunk_pages(pages, rows=B, kv_heads=K, table=table)
        count = (pages + size - 1) // size

        def step(i: Any, carry: Any) -> Any:
            peak, total, acc = carry
            first = i * together
            logs, values = [], []
            for c in range(together):
                chunk = jnp.minimum(first + c, count - 1)
                there = first + c < count
                logs.append(jnp.where(there, lse_ref[bk, chunk, r], 2 * _LOWEST))
                values.append(part_ref[bk, chunk, r])
            new_peak = peak
            for log in logs:
                new_peak = jnp.maximum(new_peak, log)
            shrink = jnp.exp2(peak - new_peak)
            total, acc = total * shrink, acc * shrink
            for log, value in zip(logs, values, strict=True):
                w = jnp.exp2(log - new_peak)
                total = total + w
                acc = acc + w * value.astype(jnp.float32)
            return new_peak, total, acc

        start = (jnp.float32(_LOWEST), jnp.float32(0), jnp.zeros((D,), jnp.float32))
        steps = (count + (together - 1)) // together
        _, total, acc = jax.lax.fori_loop(0, steps, step, start)
        out_ref[row] = (acc * (1 / jnp.where(total > 0, total, 1.0))).astype(out_ref.dtype)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B * T * N, D), partials.dtype),
        grid=(B * T * N,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=_WARPGROUP),
        interpret=interpret,
    )(partials, lse, starts, lengths)
    return out.reshape(B, T, N, D)


def paged_attention(
    q: Float[Array, "B T N D"],
    k_pages: Any,
    v_pages: Any,
    layer: Int[Array, ""],
    block_tables: Int[Array, "B L"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    interpret: Any = None,
) -> Float[Array, "B T N D"]:
    B, T, N, D = q.shape
    K = k_pages.shape[2]
    G = N // K
    R = -(-G * T // 8) * 8
    grouped = jnp.moveaxis(q.reshape(B, T, K, G, D), 1, 2).reshape(B * K, T * G, D)
    grouped = jnp.pad(grouped, [(0, 0), (0, R - T * G), (0, 0)])
    out, lse = paged_attention_partials(
        grouped, k_pages, v_pages, layer, block_tables, starts, lengths,
        scale=scale, group=G, interpret=interpret,
    )  # fmt: skip
    return merge_chunks(
        out, lse, starts, lengths,
        tokens=T, group=G, table=block_tables.shape[1], interpret=interpret,
    )  # fmt: skip
