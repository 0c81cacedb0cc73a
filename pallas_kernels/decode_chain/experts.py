"""Registers to and from memory of the sparse layer of a chain: what whole-array code cannot say."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.decode_chain.choice import Value
from pallas_kernels.decode_chain.stages import HALF, ROWS, TILE

_SPLAT = plgpu.Layout.WG_SPLAT


def _as_index(x: Any) -> Value:
    return arith.index_cast(ir.IndexType.get(), x.registers.item())


def _index(x: int) -> Value:
    return mgpu.utils.c(x, ir.IndexType.get())


def _less(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def load_shares(shares: Any, first: jax.Array, ways: int, slots: int) -> jax.Array:
    """Shares [64, 8] of the rows of 8 stacked slots, every `ways`-th from `first`, out of [slots * 8]."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SPLAT),
        return_type=plgpu.ShapeDtypeStruct((TILE, ROWS), jnp.float32, plgpu.Layout.WGMMA),
    )
    def load(_: Any, ref: Any, first: Any) -> Any:
        first_slot = _as_index(first)
        zero = mgpu.utils.c(0.0, ir.F32Type.get())
        like = mgpu.FragmentedArray.splat(zero, (TILE, ROWS), mgpu.WGMMA_LAYOUT)

        def one(_: Value, at: tuple[Value, ...]) -> Value:
            stacked = arith.muli(arith.divui(at[0], _index(ROWS)), _index(ways))
            slot = arith.minui(arith.addi(first_slot, stacked), _index(slots - 1))
            return memref.load(ref, [arith.addi(arith.muli(slot, _index(ROWS)), at[1])])

        return like.foreach(one, create_array=True)

    return load(shares, first)


def store_logits(value: jax.Array, logits: Any, row: jax.Array, first: jax.Array) -> None:
    """Store the first 8 rows (experts from `first`) of [64, 8] as columns of `logits`, tokens from `row`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), _SPLAT, _SPLAT))
    def store(_: Any, value: Any, ref: Any, row: Any, first: Any) -> None:
        first_row, start = _as_index(row), _as_index(first)

        def one(v: Value, at: tuple[Value, ...]) -> None:
            with mgpu.utils.when(_less(at[0], _index(ROWS))):
                memref.store(v, ref, [arith.addi(first_row, at[1]), arith.addi(start, at[0])])

        value.foreach(one)

    store(value, logits, row, first)


def store_hidden(
    value: jax.Array, hidden: Any, first: jax.Array, valid: jax.Array, column: jax.Array, ways: int
) -> None:
    """Store the first `valid` of 8 stacked slots of [64, 8], 8 channels each, into `hidden` [8, slots * 128].

    The slots are every `ways`-th from `first`, the channels begin at `column` of each slot.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), _SPLAT, _SPLAT, _SPLAT))
    def store(_: Any, value: Any, ref: Any, first: Any, valid: Any, column: Any) -> None:
        first_slot, n_valid, start = _as_index(first), _as_index(valid), _as_index(column)

        def one(v: Value, at: tuple[Value, ...]) -> None:
            stacked = arith.divui(at[0], _index(ROWS))
            slot = arith.addi(first_slot, arith.muli(stacked, _index(ways)))
            channel = arith.addi(start, arith.remui(at[0], _index(ROWS)))
            with mgpu.utils.when(_less(stacked, n_valid)):
                place = arith.addi(arith.muli(slot, _index(HALF)), channel)
                memref.store(v, ref, [at[1], place])

        value.foreach(one)

    store(value, hidden, first, valid, column)
