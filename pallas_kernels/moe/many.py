"""Routed experts of many tokens: grouped matmuls over pairs sorted by expert, in Mosaic GPU (Hopper, bf16).

Pairs of one expert lie together, each expert's first row at a multiple of 8 (a copy of the tensor memory unit starts at
a tile of its shared memory layout). A tile is up to 128 pairs of one expert; blocks are persistent and take (tile,
columns) in turn, neighbours sharing an expert's weights through the L2 cache.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import not_hopper
from pallas_kernels.moe.reference import GATHER_TOKENS

PAIRS = 128
"""Rows of a tile, in two halves, one a compute warpgroup."""
COLUMNS = 128
"""Columns of a compute warpgroup's accumulator; there are two of them (gate and up, or left and right)."""
N_SMS = 132
"""Blocks of a call, one for each multiprocessor of an H100 or H200."""
_HALF = PAIRS // 2
_K = 64
_ALIGN = 8
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_LOADS = 2  # the warpgroup that copies; 0 and 1 compute


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Pairs laid out by expert.

    Attributes:
      source: int32 [R], the token of each row (of some token, where a row is padding).
      row: int32 [n * k], the row of each pair.
      tiles: int32 [3 * N + 1]: expert, first row and number of rows of each tile, then the number of tiles in use.
    """

    source: jax.Array
    row: jax.Array
    tiles: jax.Array


def unavailable(x: Any, down: Any) -> str | None:
    """Why the kernel cannot run here on tokens [n, H] and weights [M, E, H, width], or None."""
    return not_hopper() or unfit(x, down)


def unfit(x: Any, down: Any) -> str | None:
    """Why the kernel cannot be built for such arguments on any device, or None."""
    n, (H, width) = x.shape[0], down.shape[2:]
    if x.dtype != jnp.bfloat16:
        return f"dtype is {x.dtype}, not bfloat16"
    if n <= GATHER_TOKENS:
        return f"{n} tokens are not more than {GATHER_TOKENS}"
    if H % (2 * COLUMNS) or width % COLUMNS:
        return f"H={H} must be a multiple of {2 * COLUMNS} and the width {width} of {COLUMNS}"
    return None


def _transposed(ref: Any) -> Any:
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def _first_above(ends: jax.Array, at: jax.Array) -> jax.Array:
    """First index whose end is above `at`, or the last. Compares with all: a binary search is a loop of launches."""
    found = jnp.searchsorted(ends, at, side="right", method="compare_all")
    return jnp.minimum(found.astype(jnp.int32), ends.shape[0] - 1)


def group(experts: jax.Array, E: int) -> Groups:
    """Lay out the pairs of `experts` [n, k]."""
    n, k = experts.shape
    pairs = n * k
    flat = experts.reshape(pairs).astype(jnp.uint32)
    # One key sort of distinct words: faster than sorting indices by expert.
    if E * pairs >= 1 << 32:
        raise ValueError(f"{pairs} pairs of {E} experts do not fit 32 bits")
    ordered = jnp.sort(flat * jnp.uint32(pairs) + jnp.arange(pairs, dtype=jnp.uint32))
    order = (ordered % jnp.uint32(pairs)).astype(jnp.int32)
    of = (ordered // jnp.uint32(pairs)).astype(jnp.int32)
    ids = jnp.arange(E + 1, dtype=jnp.int32)
    begin = jnp.searchsorted(of, ids, method="compare_all").astype(jnp.int32)
    count = begin[1:] - begin[:-1]
    padded = (count + _ALIGN - 1) // _ALIGN * _ALIGN
    end = jnp.cumsum(padded).astype(jnp.int32)
    start = end - padded
    rows = -(-(pairs + E * (_ALIGN - 1)) // _ALIGN) * _ALIGN + PAIRS
    place = jnp.arange(rows, dtype=jnp.int32)
    owner = _first_above(end, place)
    index = jnp.minimum(place - start[owner], count[owner] - 1) + begin[owner]
    source = order[jnp.clip(index, 0, pairs - 1)] // k
    row = (
        jnp.zeros((pairs,), jnp.int32)
        .at[order]
        .set(jnp.arange(pairs, dtype=jnp.int32) - begin[of] + start[of], unique_indices=True)
    )
    used = (count + PAIRS - 1) // PAIRS
    last = jnp.cumsum(used).astype(jnp.int32)
    most = pairs // PAIRS + E
    tile = jnp.arange(most, dtype=jnp.int32)
    expert = _first_above(last, tile)
    within = (tile - (last - used)[expert]) * PAIRS
    size = jnp.clip(padded[expert] - within, 0, PAIRS)
    first = jnp.clip(start[expert] + within, 0, rows - PAIRS)
    groups = Groups(source, row, jnp.concatenate([expert, first, size, last[-1:]]))
    # Else the arithmetic of a row's place is fused into gathers and done again for every element of the row.
    return jax.lax.optimization_barrier(groups)


def _body(
    layer_gmem: Any,
    tiles: Any,
    x: Any,
    weights: Any,
    out: Any,
    x_smem: Any,
    w_smem: Any,
    out_smem: Any,
    full: Any,
    empty: Any,
    *,
    E: int,
    n_rows: int,
    halves: tuple[int, int],
    gated: bool,
    stages: int,
    n_sms: int,
) -> None:
    """One grouped product. `n_rows` are an expert's weight rows, `halves` where the two accumulators' rows begin."""
    n_steps = x.shape[1] // _K
    step_columns = COLUMNS if gated else 2 * COLUMNS
    n_columns = out.shape[1] // step_columns
    n_tiles = (tiles.shape[0] - 1) // 3
    sm = jax.lax.axis_index("sm")
    thread = jax.lax.axis_index("wg")
    total = tiles[3 * n_tiles] * n_columns
    mine = jax.lax.div(total - sm + (n_sms - 1), n_sms)

    def place(t: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = sm + t * n_sms
        return jax.lax.div(at, n_columns), jax.lax.rem(at, n_columns)

    @pl.when(thread == _LOADS)
    def _loads() -> None:
        layer = layer_gmem[0]

        def one(t: jax.Array, _: None) -> None:
            tile, column = place(t)
            expert, first = tiles[tile], pl.multiple_of(tiles[n_tiles + tile], _ALIGN)
            base = (layer * E + expert) * n_rows + column * step_columns

            def step(s: jax.Array, _: None) -> None:
                count = t * n_steps + s
                stage = jax.lax.rem(count, stages)
                plgpu.barrier_wait(empty.at[stage])
                k = pl.ds(pl.multiple_of(s * _K, _K), _K)
                plgpu.copy_gmem_to_smem(
                    x.at[pl.ds(first, PAIRS), k], x_smem.at[stage], full.at[stage]
                )
                for i, offset in enumerate(halves):
                    rows = pl.ds(pl.multiple_of(base + offset, COLUMNS), COLUMNS)
                    plgpu.copy_gmem_to_smem(
                        weights.at[rows, k], w_smem.at[stage, i], full.at[stage]
                    )

            jax.lax.fori_loop(0, n_steps, step, None)

        jax.lax.fori_loop(0, mine, one, None)
        for stage in range(stages):  # so that no barrier is left with a phase nobody saw
            plgpu.barrier_wait(empty.at[stage])

    @pl.when(thread != _LOADS)
    def _products() -> None:
        for stage in range(stages):
            plgpu.barrier_arrive(empty.at[stage])
        my_rows = pl.ds(pl.multiple_of(thread * _HALF, _HALF), _HALF)

        def one(t: jax.Array, _: None) -> None:
            tile, column = place(t)
            first, size = tiles[n_tiles + tile], tiles[2 * n_tiles + tile]

            def product(left: Any, right: Any) -> tuple[jax.Array, jax.Array]:
                def step(s: jax.Array, _: None) -> None:
                    count = t * n_steps + s
                    stage = jax.lax.rem(count, stages)
                    plgpu.barrier_wait(full.at[stage])
                    rows = x_smem.at[stage, my_rows]
                    plgpu.wgmma(left, rows, _transposed(w_smem.at[stage, 0]))
                    plgpu.wgmma(right, rows, _transposed(w_smem.at[stage, 1]))
                    plgpu.wgmma_wait(2)  # the step before is done

                    @pl.when(s > 0)
                    def _release() -> None:
                        plgpu.barrier_arrive(empty.at[jax.lax.rem(count + stages - 1, stages)])

                jax.lax.fori_loop(0, n_steps, step, None)
                values = left[...], right[...]
                plgpu.barrier_arrive(empty.at[jax.lax.rem(t * n_steps + n_steps - 1, stages)])
                return values

            acc = plgpu.ACC((_HALF, COLUMNS), jnp.float32)
            left, right = pl.run_scoped(product, acc, acc)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if gated:
                value = left / (1 + jnp.exp(-left)) * right
                out_smem[thread, 0] = value.astype(jnp.bfloat16)
            else:
                out_smem[thread, 0] = left.astype(jnp.bfloat16)
                out_smem[thread, 1] = right.astype(jnp.bfloat16)
            plgpu.commit_smem()
            # The rows of this half, in pieces of powers of two: past the group's end lie another's rows.
            left_over = jnp.clip(size - thread * _HALF, 0, _HALF)
            for i in range(1 if gated else 2):
                columns = pl.ds(
                    pl.multiple_of(column * step_columns + i * COLUMNS, COLUMNS), COLUMNS
                )

                @pl.when(left_over == _HALF)
                def _whole(i: int = i, columns: Any = columns) -> None:
                    to = pl.ds(pl.multiple_of(first + thread * _HALF, _ALIGN), _HALF)
                    plgpu.copy_smem_to_gmem(out_smem.at[thread, i], out.at[to, columns])

                piece = _HALF // 2
                while piece >= _ALIGN:
                    done = left_over // (2 * piece) * (2 * piece)

                    @pl.when((left_over & piece) != 0)
                    def _piece(
                        i: int = i, columns: Any = columns, piece: int = piece, done: Any = done
                    ) -> None:
                        source = pl.ds(pl.multiple_of(done, _ALIGN), piece)
                        start = pl.multiple_of(first + thread * _HALF + done, _ALIGN)
                        plgpu.copy_smem_to_gmem(
                            out_smem.at[thread, i, source], out.at[pl.ds(start, piece), columns]
                        )

                    piece //= 2

        jax.lax.fori_loop(0, mine, one, None)
        plgpu.wait_smem_to_gmem(0)


def _product(
    layer: jax.Array, groups: Groups, x: jax.Array, weights: jax.Array, *, gated: bool
) -> jax.Array:
    """Rows [R, K] against their experts' weights [M, E, N, K]: [R, N], or silu(first half) * second half."""
    M, E, N, K = weights.shape
    width = N // 2 if gated else N
    n_sms = N_SMS
    stages = 4 if gated else 3  # what shared memory has room for
    return plgpu.kernel(
        functools.partial(
            _body,
            E=E,
            n_rows=N,
            halves=(0, N // 2) if gated else (0, COLUMNS),
            gated=gated,
            stages=stages,
            n_sms=n_sms,
        ),
        out_type=jax.ShapeDtypeStruct((x.shape[0], width), jnp.bfloat16),
        scratch_types=(
            plgpu.SMEM((stages, PAIRS, _K), jnp.bfloat16, transforms=_SWIZZLED),
            plgpu.SMEM((stages, 2, COLUMNS, _K), jnp.bfloat16, transforms=_SWIZZLED),
            plgpu.SMEM((2, 1 if gated else 2, _HALF, COLUMNS), jnp.bfloat16, transforms=_SWIZZLED),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ),
        grid=(n_sms,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(layer.reshape(1), groups.tiles, x, weights.reshape(M * E * N, K))


def experts_of_many(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    layer: jax.Array,
) -> jax.Array:
    """Routed experts (not the shared one) of [n, H] tokens.

    Args:
      x: [n, H] bf16.
      weights, experts: [n, k], of `reference.route`.
      gate_up, down: [M, E, 2 * width, H] and [M, E, H, width], all layers.
      layer: int32 scalar.

    Returns:
      [n, H] bf16.
    """
    n, k = experts.shape
    groups = group(experts, gate_up.shape[1])
    hidden = _product(layer, groups, x[groups.source], gate_up, gated=True)
    y = _product(layer, groups, hidden, down, gated=False)
    y = y[groups.row].reshape(n, k, -1).astype(jnp.float32)
    return jnp.sum(y * weights.astype(jnp.float32)[:, :, None], axis=1).astype(x.dtype)
