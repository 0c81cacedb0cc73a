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

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import not_hopper
from pallas_kernels.mosaic import read

BLOCKS = 132
"""Thread blocks of the main kernel: one per multiprocessor of an H100 or H200."""
PAGE = 64
HEAD_DIM = 256
ROTARY = 64
MOST_ROWS = 16
MOST_TOKENS = 16
MOST_GROUP = 8
MOST_QUERIES = 32
"""Queries of one block: the accumulators of more do not fit the registers."""
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
    sizes = {"rows": rows, "kv_heads": kv_heads, "table": table}
    return max(-(-n // chunk_pages(n, **sizes)) for n in range(1, table + 1))


@dataclasses.dataclass(frozen=True)
class _Work:
    """The list of chunks of all rows, as scalars inside the kernel."""

    tokens: Sequence[Any]
    size: Sequence[Any]
    count: Sequence[Any]
    ends: Sequence[Any]
    blocks: int

    @staticmethod
    def of(starts_ref: Any, lengths_ref: Any, *, kv_heads: int, blocks: int, table: int) -> _Work:
        tokens, sizes, counts, ends = [], [], [], []
        end = jnp.int32(0)
        rows = lengths_ref.shape[0]
        for b in range(rows):
            n = lengths_ref[b]
            used = jnp.where(n > 0, starts_ref[b] + n, 0)
            pages = (used + (PAGE - 1)) // PAGE
            size = chunk_pages(pages, rows=rows, kv_heads=kv_heads * blocks, table=table)
            count = (pages + size - 1) // size
            end = end + count * (kv_heads * blocks)
            tokens.append(used)
            sizes.append(size)
            counts.append(count)
            ends.append(end)
        return _Work(tokens, sizes, counts, ends, blocks)

    def item(self, i: Any) -> tuple[Any, ...]:
        """Row, KV head, block of queries, chunk, first page, pages, tokens of the row, whether its last chunk."""
        b, first = jnp.int32(0), jnp.int32(0)
        tokens, size, count = self.tokens[0], self.size[0], self.count[0]
        for r in range(1, len(self.ends)):
            later = i >= self.ends[r - 1]
            b = jnp.where(later, r, b)
            first = jnp.where(later, self.ends[r - 1], first)
            tokens = jnp.where(later, self.tokens[r], tokens)
            size = jnp.where(later, self.size[r], size)
            count = jnp.where(later, self.count[r], count)
        # Blocks of queries that read the same pages come together, so that the second finds them in the cache.
        local, block = _divmod(i - first, self.blocks)
        head = local // count
        chunk = local - head * count
        page = chunk * size
        n = jnp.minimum(size, (tokens + (PAGE - 1)) // PAGE - page)
        return b, head, block, chunk, page, n, tokens, chunk == count - 1


def _divmod(x: Any, by: int) -> tuple[Any, Any]:
    return (x, jnp.int32(0)) if by == 1 else (x // by, jax.lax.rem(x, by))


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
    blocks: int,
    tokens: int,
    group: int,
    table: int,
    rows: int,
    dtype: Any,
    scale: float,
    eps: float | None,
    stages: int,
    interpret: Any,
) -> tuple[Float[Array, "BKQ C R D"], Float[Array, "BKQ C R"]]:
    """Normalised output and base-2 log of the weights' sum of each chunk. Unused chunks stay unwritten.

    With `eps`, the operands are a raw projection and what turns it into queries, keys and values; the new key and
    value enter the last chunk directly and are written to their page. Otherwise the queries are ready.
    """
    fused = eps is not None
    causal = blocks * tokens > 1
    B, K, Q, R, D, P = rows, kv_heads, blocks, queries, HEAD_DIM, PAGE
    C = most_chunks(rows=B, kv_heads=K * Q, table=table)
    factor = scale * _LOG2E
    epsilon = 0.0 if eps is None else eps
    parts = range(0, D, ROTARY)

    def body(*refs: Any) -> None:
        if fused:
            (
                qkv_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, k_ref, v_ref,
                layer_ref, tables_ref, starts_ref, lengths_ref, out_ref, lse_ref,
                q_smem, kv_smem, p_smem, q_full, full, empty, angles_smem, swap_smem,
            ) = refs  # fmt: skip
        else:
            (
                q_ref, k_ref, v_ref,
                layer_ref, tables_ref, starts_ref, lengths_ref, out_ref, lse_ref,
                q_smem, kv_smem, p_smem, q_full, full, empty,
            ) = refs  # fmt: skip
        block = jax.lax.axis_index("block")
        thread = jax.lax.axis_index("wg")
        work = _Work.of(starts_ref, lengths_ref, kv_heads=K, blocks=Q, table=table)
        mine = jnp.maximum((work.ends[-1] - block + (BLOCKS - 1)) // BLOCKS, 0)
        layer = layer_ref[0]

        @pl.when(thread == 1)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def one_item(j: Any, tick: Any) -> Any:
                b, head, _, _, page, n, _, _ = work.item(block + j * BLOCKS)

                def one_page(x: Any, tick: Any) -> Any:
                    where = (layer, tables_ref[b, page + x], head)
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

        def normalise(x: Any, weight_ref: Any) -> list[Any]:
            """Zero-centred RMS norm of each column of [D, R], then rope; rounded where the layer rounds."""
            rate = jax.lax.rsqrt(jnp.sum(x * x, axis=0) * (1 / D) + epsilon)
            w = _load_row(weight_ref, (layer,)).astype(jnp.float32)
            y = rounded(x * _down(rate, D) * _across(w + 1.0, R))
            out = [plgpu.layout_cast(y[c : c + ROTARY], _TILE) for c in parts]
            # Rows j and j + 32 change places: written twice, read from the middle.
            half = ROTARY // 2
            swap_smem[pl.ds(0, ROTARY)] = out[0]
            swap_smem[pl.ds(ROTARY, ROTARY)] = out[0]
            other = plgpu.layout_cast(swap_smem[pl.ds(half, ROTARY)], _TILE)
            cos = plgpu.layout_cast(angles_smem[0], _ROW)
            sin = plgpu.layout_cast(angles_smem[1], _ROW)
            turned = rounded(other * rounded(_across(sin, R)))
            turned = jnp.where(_iota((ROTARY, R), 0) < half, -turned, turned)
            out[0] = rounded(rounded(out[0] * rounded(_across(cos, R))) + turned)
            return out

        def rounded(x: Any) -> Any:
            return x.astype(dtype).astype(jnp.float32)

        def prepare(b: Any, head: Any, used: Any, last: Any) -> tuple[Any, Any, Any]:
            """Raw projection to queries in `q_smem`; and what the new token brings to the softmax of this chunk."""
            for row, ref in ((0, cos_ref), (1, sin_ref)):
                for half in range(0, ROTARY, ROTARY // 2):
                    plgpu.copy_gmem_to_smem(
                        ref.at[b], angles_smem.at[row, pl.ds(half, ROTARY // 2)], q_full
                    )
            at_k = K * group * 2 + head
            at_v = at_k + K
            k = _load_row(qkv_ref, (b, at_k // 2, jax.lax.rem(at_k, 2)))
            v = _load_row(qkv_ref, (b, at_v // 2, jax.lax.rem(at_v, 2)))
            q = plgpu.layout_cast(jnp.zeros((D, R), jnp.float32), _TILE)
            for r in range(group):
                x = _load_row(qkv_ref, (b, head * group + r, 0))
                q = jnp.where(_iota((D, R), 1) == r, _across(x.astype(jnp.float32), R), q)
            plgpu.barrier_wait(q_full)
            k = normalise(_across(k.astype(jnp.float32), R), k_norm_ref)
            q = normalise(q, q_norm_ref)
            for c, x in zip(parts, q, strict=True):
                q_smem.at[:, pl.ds(c, ROTARY)].transpose((1, 0))[...] = plgpu.layout_cast(
                    x.astype(dtype), _TURNED
                )
            plgpu.commit_smem()
            products = sum(x * y for x, y in zip(q[1:], k[1:], strict=True)) + q[0] * k[0]
            score = jnp.sum(products, axis=0) * factor

            @pl.when(last)
            def _append() -> None:
                # The same page may be on its way to shared memory: this column is masked there, whatever it holds.
                at = used - 1
                where = (layer, tables_ref[b, at // PAGE], head, jax.lax.rem(at, PAGE))
                for c, x in zip(parts, k, strict=True):
                    # All columns are equal.
                    k_ref[(*where, pl.ds(c, ROTARY))] = jnp.max(x, axis=1).astype(dtype)
                v_ref[where] = v

            mine = last.astype(jnp.float32)
            return (
                _across(v.astype(jnp.float32), R) * mine,
                score * mine + (1 - mine) * _LOWEST,
                jnp.where(_iota((P, R), 0) == 0, 1.0, 0.0) * mine,
            )

        @pl.when(thread == 0)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")

            def one_item(j: Any, tick: Any) -> Any:
                b, head, part, chunk, page, n, used, last = work.item(block + j * BLOCKS)
                bk = (b * K + head) * Q + part
                if fused:
                    acc, peak, total = prepare(b, head, used, last)
                    readable = used - 1
                else:
                    plgpu.copy_gmem_to_smem(q_ref.at[bk], q_smem, q_full)
                    plgpu.barrier_wait(q_full)
                    acc = jnp.zeros((D, R), jnp.float32)
                    peak = jnp.full((R,), _LOWEST, jnp.float32)
                    total = jnp.zeros((P, R), jnp.float32)
                    readable = used
                start = starts_ref[b] + part * tokens

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

                    first = (page + x) * P
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
                tick, acc, peak, total = jax.lax.fori_loop(0, n, one_page, carry)
                total = jnp.sum(total, axis=0)
                safe = jnp.where(total > 0, total, 1.0)
                lse_ref[bk, chunk] = jnp.where(total > 0, peak + jnp.log2(safe), _LOWEST)
                out = (acc / _down(safe, D)).astype(dtype)
                # The queries are done with: their place serves to turn the result around.
                q_smem.transpose((1, 0))[...] = plgpu.layout_cast(out, _TURNED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_smem, out_ref.at[bk, chunk])
                plgpu.wait_smem_to_gmem(0)
                return tick

            jax.lax.fori_loop(0, mine, one_item, jnp.int32(0))

    angles = 2 * (ROTARY // (ROTARY // 2))
    scratch = [
        plgpu.SMEM((R, D), dtype),
        plgpu.SMEM((stages, P, D), dtype),
        plgpu.SMEM((R, P), dtype),
        plgpu.Barrier(num_arrivals=angles if fused else 1),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
    ]
    if fused:
        scratch += [
            plgpu.SMEM((2, ROTARY), jnp.float32),
            plgpu.SMEM((2 * ROTARY, R), jnp.float32),
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
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    qkv: Float[Array, "rows heads two D"] | None,
    *,
    tokens: int,
    block_tokens: int,
    kv_heads: int,
    group: int,
    table: int,
    interpret: Any,
) -> Float[Array, "B_T_N D"]:
    """Weighted sum of each row's chunks in their order; zeros for a row without any. With `qkv`, gated by it."""
    B, T, K, G = starts.shape[0], tokens, kv_heads, group
    C, D = partials.shape[1], partials.shape[3]
    N, Q = K * G, -(-T // block_tokens)
    rows = B if qkv is None else qkv.shape[0]
    together = min(C, 16)

    def body(*refs: Any) -> None:
        part_ref, lse_ref, starts_ref, lengths_ref, *gate_ref, out_ref = refs
        row = jax.lax.axis_index("row")
        b, rest = row // (T * N), jax.lax.rem(row, T * N)
        t, head = rest // N, jax.lax.rem(rest, N)
        part, t = (jnp.int32(0), t) if Q == 1 else _divmod(t, block_tokens)
        bk = (b * K + head // G) * Q + part
        r = t * G + jax.lax.rem(head, G)
        gate = None
        if gate_ref:
            # Ahead of the loop, so that its latency passes with that of the rest.
            gate = gate_ref[0][b, head, 1].astype(jnp.float32)
            gate = (1 / (1 + jnp.exp2(gate * -_LOG2E))).astype(out_ref.dtype)
        n = lengths_ref[b]
        pages = (jnp.where(n > 0, starts_ref[b] + n, 0) + (PAGE - 1)) // PAGE
        size = chunk_pages(pages, rows=B, kv_heads=K * Q, table=table)
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
        out = (acc * (1 / jnp.where(total > 0, total, 1.0))).astype(out_ref.dtype)
        if gate is not None:
            out = out * gate
        out_ref[row] = out

    operands = [partials, lse, starts, lengths, *([] if qkv is None else [qkv])]
    return plgpu.kernel(
        body,
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
    stages: int = 6,
    interpret: Any = None,
) -> Float[Array, "B T N D"]:
    """See `api.paged_attention`.

    `stages` pages of keys or values are in flight or in use at a time (32 KiB each).
    """
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
    partials, lse = _chunks_kernel(
        (grouped, k_pages, v_pages, layer.reshape(1), block_tables, starts, lengths),
        kv_heads=K, queries=R, blocks=Q, tokens=t, group=G, table=L, rows=B, dtype=q.dtype,
        scale=scale, eps=None, stages=stages, interpret=interpret,
    )  # fmt: skip
    return _merge_kernel(
        partials, lse, starts, lengths, None,
        tokens=T, block_tokens=t, kv_heads=K, group=G, table=L, interpret=interpret,
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
    stages: int = 6,
    interpret: Any = None,
) -> Float[Array, "R N_D"]:
    """See `api.attention_decode`, and `paged_attention` above for `stages`."""
    B, (rows, M) = starts.shape[0], qkv.shape
    L, K, D = block_tables.shape[1], k_pages.shape[2], k_pages.shape[4]
    N = (M // D - 2 * K) // 2
    G = N // K
    R = -(-G // 8) * 8
    heads = qkv.reshape(rows, N + K, 2, D)
    partials, lse = _chunks_kernel(
        (
            heads, q_norm, k_norm, cos, sin, k_pages, v_pages,
            layer.reshape(1), block_tables, starts, lengths,
        ),
        kv_heads=K, queries=R, blocks=1, tokens=1, group=G, table=L, rows=B, dtype=qkv.dtype,
        scale=scale, eps=eps, stages=stages, interpret=interpret,
    )  # fmt: skip
    return _merge_kernel(
        partials, lse, starts, lengths, heads,
        tokens=1, block_tokens=1, kv_heads=K, group=G, table=L, interpret=interpret,
    ).reshape(rows, N * D)  # fmt: skip
