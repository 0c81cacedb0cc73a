"""What kernels in Pallas Mosaic GPU share."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

_WHOLE: Any = ((),) if jax.__version_info__ < (0, 11) else ()
"""`plgpu.load` wants an index before jax 0.11 and none after."""


def read(ref: Any, layout: Any) -> Any:
    """From memory to registers in a layout, one small access a thread where the layout asks for it."""
    return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)


def fence_copy_engine() -> None:
    """Order this thread's ordinary accesses to memory with those of the copy engine, before and after."""

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [], "fence.proxy.async;", "", has_side_effects=True
        )

    fence()


def prefetch_rows(ref: Any, row: jax.Array, count: int) -> None:
    """Bring `count` rows of a contiguous array in device memory, from `row` on, into the L2 cache; waits for nothing.

    For one whole warpgroup, whose threads take a piece of 4 KiB each in turn: few requests, each of one stretch, where
    tiles of a matrix are many short ones. Rows are a multiple of 16 bytes; all asked for must exist.
    """
    row_bytes = math.prod(ref.shape[1:]) * ref.dtype.itemsize
    total, piece, threads = count * row_bytes, 4096, 128

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def run(_: Any, ref: Any, row: Any) -> None:
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))

        def const(x: int, kind: Any = i32) -> Any:
            return mgpu.utils.c(x, kind)

        first = arith.muli(arith.extui(i64, row.registers.item()), const(row_bytes, i64))
        base = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), first)
        thread = arith.andi(mgpu.utils.thread_idx(), const(threads - 1))
        for start in range(0, -(-total // piece), threads):
            at = arith.muli(arith.addi(thread, const(start)), const(piece))
            left = arith.subi(const(total), at)
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.sgt, left, const(0))):
                address = arith.addi(base, arith.extui(i64, at))
                size = arith.minsi(left, const(piece))
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [address, size],
                    "cp.async.bulk.prefetch.L2.global [$0], $1;",
                    "l,r",
                    has_side_effects=True,
                )

    run(ref, row)
