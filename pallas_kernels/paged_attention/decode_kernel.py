"""Paged attention of few new tokens a row (decode, verification) on Hopper, in Pallas Mosaic GPU.

Flash-decoding: the pages of a row and KV head are cut into chunks, which are shared out to a fixed set of thread
blocks, and a second kernel merges the chunks of each row. A block takes chunks that follow each other; queries of the
same row and head it prepares once. The product is taken transposed: keys (then channels) are the tall side of the
matrix instruction and the few queries its narrow side,

    S^T [64 keys, R] = K_page [64, D] @ Q^T [D, R]        O^T [D, R] = V_page^T [D, 64] @ P^T [64, R]

with R the queries of one KV head (heads of the group times new tokens), padded to a multiple of 8.

How a row is cut depends on its own length and on static shapes only, and chunks are summed in their order: a row's
result does not depend on its neighbours, nor on which block computes what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import not_hopper
from pallas_kernels.mosaic import lines, read, store

BLOCKS = 132
"""Thread blocks of the main kernel: one per multiprocessor of an H100 or H200."""
PAGES = 2
"""Pages of a chunk of a short context. Of one page they are where this leaves blocks without any: more to merge takes
as long as is won."""
PAGE = 64
HEAD_DIM = 256
ROTARY = 64
MOST_ROWS = 16
MOST_TOKENS = 16
MOST_GROUP = 8
MOST_QUERIES = 32
"""Queries of one block: the accumulators of more do not fit the registers."""
_SHARED_BYTES = 223 * 1024
"""Of a block, beside barriers and what the compiler takes for sums across warps."""
_LOG2E = math.log2(math.e)
_LOWEST = -1e30
_TILE = plgpu.Layout.WGMMA
_TURNED = plgpu.Layout.WGMMA_TRANSPOSED
_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_ROW = plgpu.Layout.WGMMA.reduce(1)


def unsupported(
    *, rows: int, tokens: int, heads: int, dtype: Any, k_pages: Any, block_tables: Any
) -> str | None:
    """Why the kernel cannot be built for arguments of these shapes and dtypes, or None."""
    K, P, D = k_pages.shape[2:]
    if dtype != jnp.bfloat16 or k_pages.dtype != jnp.bfloat16:
        return f"the decode kernel takes bfloat16, not {dtype} on pages of {k_pages.dtype}"
    if (P, D) != (PAGE, HEAD_DIM):
        return f"the decode kernel takes pages of {PAGE} tokens and {HEAD_DIM} channels, not {P} and {D}"
    if not 1 <= tokens <= MOST_TOKENS:
        return f"the decode kernel takes 1 to {MOST_TOKENS} new tokens a row, not {tokens}"
    if not 1 <= rows <= MOST_ROWS:
        return f"the decode kernel takes 1 to {MOST_ROWS} rows, not {rows}"
    if heads % K or heads // K > MOST_GROUP:
        return (
            f"the decode kernel takes up to {MOST_GROUP} query heads a KV head, not {heads} / {K}"
        )
    if block_tables.shape[1] < 1:
        return "the decode kernel takes block tables of at least one page"
    return None


def unavailable(**arguments: Any) -> str | None:
    """Why the kernel cannot run on these arguments (see `unsupported`) and the default device, or None."""
    return unsupported(**arguments) or not_hopper()


def chunk_count(pages: Any, *, rows: int, kv_heads: int, table: int) -> Any:
    """Chunks of a row that has `pages` pages, as equal as pages allow; Python integers or traced ones.

    Multiples of what gives the blocks as much to do if all rows are equal, since a block that has one chunk more than
    the others is waited for: so many that a chunk has `PAGES` or less, but no more than give the blocks to one row
    alone, or than there are pages. Long contexts have more, of a length that keeps uneven rows balanced.
    """
    once = max(1, BLOCKS // (rows * kv_heads))
    alone = max(once, BLOCKS // kv_heads // once * once)
    longest = max(16, -(-table // 64))
    least, most = (min, max) if isinstance(pages, int) else (jnp.minimum, jnp.maximum)
    count = least(_over(pages, PAGES * once) * once, alone)
    return least(most(count, _over(pages, longest)), pages)


def _over(x: Any, by: Any) -> Any:
    """Rounded up, of what is not negative: half the instructions of `//`."""
    return -(-x // by) if isinstance(x, int) else jax.lax.div(x + (by - 1), jnp.int32(by))


def _divmod(x: Any, by: Any) -> tuple[Any, Any]:
    """Quotient and remainder of what is not negative."""
    by = jnp.broadcast_to(jnp.int32(by), x.shape)
    return jax.lax.div(x, by), jax.lax.rem(x, by)


class Item(NamedTuple):
    """What a block does at one time: a chunk of a row for one KV head. A line of `chunk_lines`, int32."""

    row: Any
    head: Any
    query_block: Any
    chunk: Any
    page: Any
    """First page, counted from the row's first."""
    where: Any
    """Its place in the planes."""
    pages: Any
    start: Any
    """Position of the row's first query."""
    tokens: Any
    """Of the row, up to its last query."""
    last: Any
    """1 for the last chunk of the row."""
    appends: Any
    """1 where the block does the last chunk of this row and KV head too."""
    items: Any
    """How many the block does."""


def chunk_lines(
    block_tables: Int[Array, "B L"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    kv_heads: int,
    query_blocks: int,
) -> tuple[Int[Array, "blocks items fields"], Int[Array, " B"]]:
    """The items of each block, which follow each other in the list of all chunks of all rows; and chunks of each row.

    Made by XLA, once for all layers of a step: in the kernel it would take a third of the time of a short context.
    """
    B, L = block_tables.shape
    heads = kv_heads * query_blocks
    sizes = {"rows": B, "kv_heads": heads, "table": L}
    most = -(-B * heads * chunk_count(L, **sizes) // BLOCKS)
    tokens = jnp.where(lengths > 0, starts + lengths, 0)
    pages = _over(tokens, PAGE)
    chunks = chunk_count(pages, **sizes)
    ends = [chunks[0] * heads]
    for b in range(1, B):  # no sum over rows, which would be a kernel of its own
        ends.append(ends[-1] + chunks[b] * heads)
    share = _over(ends[-1], BLOCKS)
    block = jax.lax.broadcasted_iota(jnp.int32, (BLOCKS, most), 0)
    nth = jax.lax.broadcasted_iota(jnp.int32, (BLOCKS, most), 1)
    i = jnp.minimum(block * share + nth, ends[-1] - 1)
    end = jnp.minimum((block + 1) * share, ends[-1])

    row, first = jnp.zeros_like(i), jnp.zeros_like(i)
    of_rows = [tokens, pages, chunks, starts]
    of_item = [jnp.broadcast_to(x[0], i.shape) for x in of_rows]
    for b in range(1, B):
        later = i >= ends[b - 1]
        row, first = jnp.where(later, b, row), jnp.where(later, ends[b - 1], first)
        of_item = [jnp.where(later, x[b], m) for x, m in zip(of_rows, of_item, strict=True)]
    used, among, count, start = of_item
    count = jnp.maximum(count, 1)
    # Blocks of queries that read the same pages come together, so that the second finds them in the cache.
    local, query_block = _divmod(i - first, query_blocks)
    head, chunk = _divmod(local, count)
    page = jax.lax.div(chunk * among, count)
    item = Item(
        row=row,
        head=head,
        query_block=query_block,
        chunk=chunk,
        page=page,
        where=block_tables[row, jnp.clip(page, 0, L - 1)],
        pages=jax.lax.div((chunk + 1) * among, count) - page,
        start=start,
        tokens=used,
        last=chunk == count - 1,
        appends=i + (count - chunk) * query_blocks <= end,
        items=jnp.maximum(end - block * share, 0),
    )
    return lines(item), chunks


def _down(column: Any, rows: int) -> Any:
    """[R] -> [rows, R]."""
    return jax.lax.broadcast_in_dim(column, (rows, column.shape[0]), [1])


def _across(row: Any, columns: int) -> Any:
    """[n] -> [n, columns]."""
    return jax.lax.broadcast_in_dim(row, (row.shape[0], columns), [0])


def _load_row(ref: Any, index: tuple[Any, ...]) -> Any:
    """Channels of device memory, laid out like the tall side of a product."""
    return read(ref.at[index], _ROW)


def _iota(shape: tuple[int, int], axis: int) -> Any:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_TILE)


def _chunks_kernel(
    operands: Sequence[Any],
    *,
    kv_heads: int,
    queries: int,
    query_blocks: int,
    block_tokens: int,
    group: int,
    table: int,
    rows: int,
    dtype: Any,
    scale: float,
    eps: float | None,
    interpret: Any,
) -> tuple[Float[Array, "BKQ C R D"], Float[Array, "BKQ C R"]]:
    """Normalised output and base-2 log of the weights' sum of each chunk. Unused chunks stay unwritten.

    With `eps`, the operands are a raw projection and what turns it into queries, keys and values; the new key and
    value enter the last chunk directly and are written to their page. Otherwise the queries are ready.

    With the `group` queries of a KV head goes its key as one more column of [D, W], through the same norm and rope.
    """
    fused = eps is not None
    causal = query_blocks * block_tokens > 1
    B, K, Q, R, D, P = rows, kv_heads, query_blocks, queries, HEAD_DIM, PAGE
    C = chunk_count(table, rows=B, kv_heads=K * Q, table=table)
    factor = scale * _LOG2E
    epsilon = 0.0 if eps is None else eps
    parts = range(0, D, ROTARY)
    W = -(-(group + 1) // 8) * 8

    def body(*refs: Any) -> None:
        if fused:
            (
                qkv_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, k_ref, v_ref,
                layer_ref, tables_ref, work_ref, out_ref, lse_ref,
                q_smem, kv_smem, p_smem, out_smem, q_full, full, empty, swap_smem, score_smem, value_smem,
            ) = refs  # fmt: skip
        else:
            (
                q_ref, k_ref, v_ref,
                layer_ref, tables_ref, work_ref, out_ref, lse_ref,
                q_smem, kv_smem, p_smem, out_smem, q_full, full, empty,
            ) = refs  # fmt: skip
        block = jax.lax.axis_index("block")
        thread = jax.lax.axis_index("wg")
        layer = layer_ref[0]

        def item_of(j: Any) -> Item:
            return Item(*(work_ref[block, j, field] for field in range(len(Item._fields))))

        items = item_of(0).items

        @pl.when(thread == 1)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def one_item(j: Any, tick: Any) -> Any:
                item = item_of(j)

                def one_page(x: Any, carry: Any) -> Any:
                    tick, page = carry
                    where = (layer, page, item.head)
                    for pages, step in ((k_ref, 0), (v_ref, 1)):
                        slot = jax.lax.rem(tick + step, stages)

                        @pl.when(tick + step >= stages)
                        def _wait(slot: Any = slot) -> None:
                            plgpu.barrier_wait(empty.at[slot])

                        plgpu.copy_gmem_to_smem(pages.at[where], kv_smem.at[slot], full.at[slot])
                    following = jnp.minimum(item.page + x + 1, table - 1)
                    return tick + 2, tables_ref[item.row, following]

                return jax.lax.fori_loop(0, item.pages, one_page, (tick, item.where))[0]

            ticks = jax.lax.fori_loop(0, items, one_item, jnp.int32(0))
            # Every arrival is waited for, so that the barriers end in a known phase.
            for slot in range(stages):

                @pl.when(ticks > slot)
                def _drain(slot: int = slot) -> None:
                    plgpu.barrier_wait(empty.at[slot])

        def rounded(x: Any) -> Any:
            return x.astype(dtype).astype(jnp.float32)

        def prepare(item: Item) -> None:
            """Raw projection to queries in `q_smem`; and what the new token brings to the softmax of the last chunk."""
            # All loads come before the first barrier, so that they are under way together.
            b, at = item.row, item.tokens - 1
            at_k = K * group * 2 + item.head
            at_v = at_k + K
            k = _load_row(qkv_ref, (b, at_k // 2, jax.lax.rem(at_k, 2)))
            v = _load_row(qkv_ref, (b, at_v // 2, jax.lax.rem(at_v, 2)))
            q = [_load_row(qkv_ref, (b, item.head * group + r, 0)) for r in range(group)]
            w_q, w_k = (_load_row(ref, (layer,)) for ref in (q_norm_ref, k_norm_ref))
            cos, sin = (_load_row(ref, (b,)) for ref in (cos_ref, sin_ref))
            place = (tables_ref[b, at // PAGE], item.head, jax.lax.rem(at, PAGE))

            # Zero-centred RMS norm of each column; rounded where the layer rounds, as all that follows.
            x = plgpu.layout_cast(jnp.zeros((D, W), jnp.float32), _TILE)
            for r, row in enumerate([*q, k]):
                x = jnp.where(_iota((D, W), 1) == r, _across(row.astype(jnp.float32), W), x)
            rate = jax.lax.rsqrt(jnp.sum(x * x, axis=0) * (1 / D) + epsilon)
            w_q, w_k = (_across(w.astype(jnp.float32) + 1.0, W) for w in (w_q, w_k))
            x = rounded(x * _down(rate, D) * jnp.where(_iota((D, W), 1) == group, w_k, w_q))
            y = [plgpu.layout_cast(x[c : c + ROTARY], _TILE) for c in parts]

            # Rope: rows j and j + 32 change places, written twice and read from the middle; `sin` has their signs.
            half = ROTARY // 2
            swap_smem[pl.ds(0, ROTARY)] = y[0]
            swap_smem[pl.ds(ROTARY, ROTARY)] = y[0]
            other = plgpu.layout_cast(swap_smem[pl.ds(half, ROTARY)], _TILE)
            turned = rounded(other * rounded(_across(sin, W)))
            y[0] = rounded(rounded(y[0] * rounded(_across(cos, W))) + turned)

            is_key = _iota((ROTARY, W), 1) == group
            new = [jnp.sum(jnp.where(is_key, c, 0.0), axis=1) for c in y]
            y = [plgpu.layout_cast(c[:, :R], _TILE) for c in y]
            for c, x in zip(parts, y, strict=True):
                q_smem.at[:, pl.ds(c, ROTARY)].transpose((1, 0))[...] = plgpu.layout_cast(
                    x.astype(dtype), _TURNED
                )
            products = [x * _across(c, R) for x, c in zip(y, new, strict=True)]
            score_smem[...] = jnp.sum(sum(products[1:], products[0]), axis=0) * factor
            value_smem[...] = v
            plgpu.commit_smem()

            @pl.when(item.appends != 0)
            def _append() -> None:
                # The same page may be on its way to shared memory: this column is masked there, whatever it holds.
                for c, x in zip(parts, new, strict=True):
                    store(k_ref.at[(layer, *place, pl.ds(c, ROTARY))], x.astype(dtype))
                store(v_ref.at[(layer, *place)], v)

        @pl.when(thread == 0)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")

            def one_item(j: Any, carry: Any) -> Any:
                tick, before = carry
                item = item_of(j)
                bk = (item.row * K + item.head) * Q + item.query_block

                @pl.when(bk != before)
                def _queries() -> None:
                    if fused:
                        prepare(item)
                    else:
                        plgpu.copy_gmem_to_smem(q_ref.at[bk], q_smem, q_full)
                        plgpu.barrier_wait(q_full)

                if fused:
                    last = item.last.astype(jnp.float32)
                    value = plgpu.layout_cast(value_smem[...], _ROW).astype(jnp.float32)
                    score = plgpu.layout_cast(score_smem[...], _COLUMN)
                    acc = _across(value, R) * last
                    peak = score * last + (1 - last) * _LOWEST
                    total = jnp.where(_iota((P, R), 0) == 0, 1.0, 0.0) * last
                    readable = item.tokens - 1
                else:
                    acc = jnp.zeros((D, R), jnp.float32)
                    peak = jnp.full((R,), _LOWEST, jnp.float32)
                    total = jnp.zeros((P, R), jnp.float32)
                    readable = item.tokens
                start = item.start + item.query_block * block_tokens

                def one_page(x: Any, carry: Any) -> Any:
                    tick, acc, peak, total = carry
                    k_slot = jax.lax.rem(tick, stages)
                    v_slot = jax.lax.rem(tick + 1, stages)

                    def scores(acc_ref: Any) -> Any:
                        plgpu.wgmma(acc_ref, kv_smem.at[k_slot], q_smem.transpose((1, 0)))
                        return plgpu.layout_cast(acc_ref[...], _TILE)

                    plgpu.barrier_wait(full.at[k_slot])
                    s = pl.run_scoped(scores, plgpu.ACC((P, R), jnp.float32))
                    plgpu.barrier_arrive(empty.at[k_slot])

                    first = (item.page + x) * P
                    seen = _iota((P, R), 0) < readable - first
                    if causal:
                        position = jax.lax.div(_iota((P, R), 1), group) + (start - first)
                        seen = seen & (_iota((P, R), 0) <= position)
                    s = jnp.where(seen, s * factor, -jnp.inf)
                    new_peak = jnp.maximum(peak, jnp.max(s, axis=0))
                    shrink = jnp.exp2(peak - new_peak)
                    weight = jnp.exp2(s - _down(new_peak, P))
                    total = total * _down(shrink, P) + weight
                    p_smem.transpose((1, 0))[...] = plgpu.layout_cast(weight.astype(dtype), _TURNED)
                    plgpu.barrier_wait(full.at[v_slot])

                    @pl.when(readable - first < P)
                    def _clear() -> None:
                        # Weights of unused columns are zero, but zero times what stands there may be NaN.
                        for c in range(0, D, 64):
                            part = kv_smem.at[v_slot, :, pl.ds(c, 64)]
                            value = plgpu.layout_cast(part[...], _TILE)
                            there = _iota((P, 64), 0) < readable - first
                            part[...] = jnp.where(there, value, jnp.zeros_like(value))

                    plgpu.commit_smem()

                    def values(acc_ref: Any) -> Any:
                        plgpu.wgmma(
                            acc_ref,
                            kv_smem.at[v_slot].transpose((1, 0)),
                            p_smem.transpose((1, 0)),
                        )
                        return plgpu.layout_cast(acc_ref[...], _TILE)

                    acc = acc * _down(shrink, D)
                    acc = acc + pl.run_scoped(values, plgpu.ACC((D, R), jnp.float32))
                    plgpu.barrier_arrive(empty.at[v_slot])
                    return tick + 2, acc, new_peak, total

                carry = (
                    tick,
                    plgpu.layout_cast(acc, _TILE),
                    plgpu.layout_cast(peak, _COLUMN),
                    plgpu.layout_cast(total, _TILE),
                )
                tick, acc, peak, total = jax.lax.fori_loop(0, item.pages, one_page, carry)
                total = jnp.sum(total, axis=0)
                safe = jnp.where(total > 0, total, 1.0)
                log = jnp.where(total > 0, peak + jnp.log2(safe), _LOWEST)
                store(lse_ref.at[bk, item.chunk], log)
                out = (acc / _down(safe, D)).astype(dtype)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem.transpose((1, 0))[...] = plgpu.layout_cast(out, _TURNED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem, out_ref.at[bk, item.chunk])
                return tick, bk

            jax.lax.fori_loop(0, items, one_item, (jnp.int32(0), jnp.int32(-1)))
            # Shared memory must be there for as long as it is read; the copy itself ends with the kernel.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Pages of keys or values that are in flight or in use at a time, beside the rest of the scratch.
    rest = 2 * R * (2 * D + P) + fused * (8 * ROTARY * W + 4 * R + 2 * D)
    stages = min(6, (_SHARED_BYTES - rest) // (2 * P * D))
    scratch = [
        plgpu.SMEM((R, D), dtype),
        plgpu.SMEM((stages, P, D), dtype),
        plgpu.SMEM((R, P), dtype),
        plgpu.SMEM((R, D), dtype),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
    ]
    if fused:
        scratch += [
            plgpu.SMEM((2 * ROTARY, W), jnp.float32),
            plgpu.SMEM((R,), jnp.float32),
            plgpu.SMEM((D,), dtype),
        ]

    def with_scratch(*refs: Any) -> None:
        pl.run_scoped(lambda *more: body(*refs, *more), *scratch, collective_axes="wg")

    # Not `plgpu.kernel`: its vmap rule does not let Refs through.
    return pl.kernel(
        with_scratch,
        out_type=(
            jax.ShapeDtypeStruct((B * K * Q, C, R, D), dtype),
            jax.ShapeDtypeStruct((B * K * Q, C, R), jnp.float32),
        ),
        mesh=plgpu.Mesh(grid=(BLOCKS,), grid_names=("block",), num_threads=2, thread_name="wg"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )(*operands)


def _merge_kernel(
    partials: Float[Array, "BKQ C R D"],
    lse: Float[Array, "BKQ C R"],
    chunks: Int[Array, " B"],
    qkv: Float[Array, "rows heads two D"] | None,
    *,
    tokens: int,
    block_tokens: int,
    kv_heads: int,
    group: int,
    interpret: Any,
) -> Float[Array, "B_T_N D"]:
    """Weighted sum of each row's chunks in their order; zeros for a row without any. With `qkv`, gated by it."""
    B, T, K, G = chunks.shape[0], tokens, kv_heads, group
    C, D = partials.shape[1], partials.shape[3]
    N, Q = K * G, -(-T // block_tokens)
    rows = B if qkv is None else qkv.shape[0]
    together = min(C, 24)

    def paged_attention_merge(*refs: Any) -> None:
        part_ref, lse_ref, chunks_ref, *gate_ref, out_ref = refs
        row = jax.lax.axis_index("row")
        b, rest = row // (T * N), jax.lax.rem(row, T * N)
        t, head = rest // N, jax.lax.rem(rest, N)
        part = t // block_tokens if Q > 1 else 0
        t = t - part * block_tokens
        bk = (b * K + head // G) * Q + part
        r = t * G + jax.lax.rem(head, G)
        gate = None
        if gate_ref:
            # Ahead of the loop, so that its latency passes with that of the rest.
            gate = gate_ref[0][b, head, 1].astype(jnp.float32)
            gate = (1 / (1 + jnp.exp2(gate * -_LOG2E))).astype(out_ref.dtype)
        count = chunks_ref[b]

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
        steps = _over(count, together)
        _, total, acc = jax.lax.fori_loop(0, steps, step, start)
        out = (acc * (1 / jnp.where(total > 0, total, 1.0))).astype(out_ref.dtype)
        if gate is not None:
            out = out * gate
        store(out_ref.at[row], out)

    operands = [partials, lse, chunks, *([] if qkv is None else [qkv])]
    return plgpu.kernel(
        paged_attention_merge,
        out_type=jax.ShapeDtypeStruct((rows * T * N, D), partials.dtype),
        grid=(B * T * N,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )(*operands)


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
    """See `api.paged_attention`."""
    B, T, N, D = q.shape
    L, K = block_tables.shape[1], k_pages.shape[2]
    G = N // K
    # More than `MOST_QUERIES` come in blocks of whole tokens, each of which reads the pages again.
    Q = -(-T // (MOST_QUERIES // G))
    t = -(-T // Q)
    R = -(-G * t // 8) * 8
    grouped = jnp.pad(q, [(0, 0), (0, Q * t - T), (0, 0), (0, 0)]).reshape(B, Q, t, K, G, D)
    grouped = jnp.transpose(grouped, (0, 3, 1, 2, 4, 5)).reshape(B * K * Q, t * G, D)
    grouped = jnp.pad(grouped, [(0, 0), (0, R - t * G), (0, 0)])
    work, chunks = chunk_lines(block_tables, starts, lengths, kv_heads=K, query_blocks=Q)
    partials, lse = _chunks_kernel(
        (grouped, k_pages, v_pages, layer.reshape(1), block_tables, work),
        kv_heads=K, queries=R, query_blocks=Q, block_tokens=t, group=G, table=L, rows=B, dtype=q.dtype,
        scale=scale, eps=None, interpret=interpret,
    )  # fmt: skip
    return _merge_kernel(
        partials, lse, chunks, None,
        tokens=T, block_tokens=t, kv_heads=K, group=G, interpret=interpret,
    ).reshape(B, T, N, D)  # fmt: skip


def attention_decode(
    qkv: Float[Array, "R M"],
    q_norm: Float[Array, "A D"],
    k_norm: Float[Array, "A D"],
    cos: Float[Array, "B half"],
    sin: Float[Array, "B half"],
    k_pages: Any,
    v_pages: Any,
    layer: Int[Array, ""],
    block_tables: Int[Array, "B L"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    eps: float,
    interpret: Any = None,
) -> Float[Array, "R N_D"]:
    """See `api.attention_decode`."""
    B, (rows, M) = starts.shape[0], qkv.shape
    L, K, D = block_tables.shape[1], k_pages.shape[2], k_pages.shape[4]
    N = (M // D - 2 * K) // 2
    G = N // K
    R = -(-G // 8) * 8
    heads = qkv.reshape(rows, N + K, 2, D)
    cos = jnp.tile(cos, 2)
    sin = jnp.tile(sin, 2) * jnp.where(jnp.arange(ROTARY) < ROTARY // 2, -1.0, 1.0)[None]
    work, chunks = chunk_lines(block_tables, starts, lengths, kv_heads=K, query_blocks=1)
    partials, lse = _chunks_kernel(
        (
            heads, q_norm, k_norm, cos, sin, k_pages, v_pages,
            layer.reshape(1), block_tables, work,
        ),
        kv_heads=K, queries=R, query_blocks=1, block_tokens=1, group=G, table=L, rows=B, dtype=qkv.dtype,
        scale=scale, eps=eps, interpret=interpret,
    )  # fmt: skip
    return _merge_kernel(
        partials, lse, chunks, heads,
        tokens=1, block_tokens=1, kv_heads=K, group=G, interpret=interpret,
    ).reshape(rows, N * D)  # fmt: skip
