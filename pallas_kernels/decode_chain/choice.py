"""Top-k choice of up to 8 rows inside a Mosaic GPU kernel, written for the lanes of one warpgroup.

Each warp takes every fourth row; a lane holds every 32nd expert. A key has the order of the bf16 logit in its upper
half and falls with the expert id in its lower half, so one `redux.sync.max` finds the best expert left, ties to the
lower id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

from pallas_kernels.decode_chain.stages import ROWS

Value = Any  # of MLIR, whose stubs disagree with themselves
_LANES = 32
_LOG2_E = 1.4426950408889634


def i32(x: int) -> Value:
    """An int32 constant, given as a number of 32 bits of either sign."""
    return mgpu.utils.c(x - (1 << 32) if x >= 1 << 31 else x, ir.IntegerType.get_signless(32))


def _index(x: Value | int) -> Value:
    if isinstance(x, int):
        return mgpu.utils.c(x, ir.IndexType.get())
    return arith.index_castui(ir.IndexType.get(), x)


def _asm(ptx: str, result: str | None, constraints: str, *args: Value) -> Any:
    kind = ir.Type.parse("!llvm.void") if result is None else ir.Type.parse(result)
    return llvm.inline_asm(kind, list(args), ptx, constraints, has_side_effects=True)


def _ballot(bit: Value) -> Value:
    ptx = "{.reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"
    return _asm(ptx, "i32", "=r,r", bit)


def _exp(x: Value) -> Value:
    scaled = arith.mulf(x, mgpu.utils.c(_LOG2_E, ir.F32Type.get()))
    return _asm("ex2.approx.ftz.f32 $0, $1;", "f32", "=f,f", scaled)


def _popc(x: Value) -> Value:
    return _asm("popc.b32 $0, $1;", "i32", "=r,r", x)


def _equal(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def _less(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def _sum(values: Sequence[Value], add: Callable[[Value, Value], Value]) -> Value:
    total = values[0]
    for v in values[1:]:
        total = add(total, v)
    return total


def key(logit: Value, expert: Value) -> Value:
    """Key of a float32 logit, rounded to bf16, and an expert id (int32)."""
    short = ir.IntegerType.get_signless(16)
    word = ir.IntegerType.get_signless(32)
    bits = arith.extui(word, arith.bitcast(short, arith.truncf(ir.BF16Type.get(), logit)))
    negative = arith.cmpi(arith.CmpIPredicate.uge, bits, i32(0x8000))
    order = arith.xori(bits, arith.select(negative, i32(0xFFFF), i32(0x8000)))
    return arith.ori(arith.shli(order, i32(16)), arith.subi(i32(0xFFFF), expert))


def _logit(key: Value) -> Value:
    order = arith.shrui(key, i32(16))
    positive = arith.cmpi(arith.CmpIPredicate.uge, order, i32(0x8000))
    bits = arith.xori(order, arith.select(positive, i32(0x8000), i32(0xFFFF)))
    return arith.bitcast(ir.F32Type.get(), arith.shli(bits, i32(16)))


def scratch(E: int, top_k: int) -> tuple[Any, ...]:
    """Shared memory of `choose`: bit masks of the rows' experts, and the experts and weights chosen."""
    return (
        plgpu.SMEM((ROWS * E // _LANES,), jnp.int32),
        plgpu.SMEM((ROWS * top_k,), jnp.int32),
        plgpu.SMEM((ROWS * top_k,), jnp.float32),
    )


def choose(
    logits: Any,
    running: Any,
    plan: Any,
    weights: Any,
    scratch: tuple[Any, ...],
    *,
    E: int,
    top_k: int,
    normalise: bool,
) -> None:
    """Fill the slot list from logits; to be called by one whole warpgroup.

    Args:
      logits: float32 [parts * 8, more than E] in device memory, parts to be added; column E is the shared expert's gate
        before the sigmoid.
      running: int32 [8] in device memory; rows with 0 choose nothing.
      plan: int32 [1 + slots] in shared memory; receives the number of slots and each slot's expert id by rising id.
      weights: float32 [slots * 8] in shared memory; receives each slot's weight for each row, rounded to bf16.
      scratch: see `scratch`.
    """
    words = E // _LANES

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 7)
    def run(
        _: Any,
        logits: Any,
        running: Any,
        plan: Any,
        weights: Any,
        masks: Any,
        ids: Any,
        shares: Any,
    ) -> None:
        f32 = ir.F32Type.get()
        zero = mgpu.utils.c(0.0, f32)
        thread = arith.andi(mgpu.utils.thread_idx(), i32(127))
        lane, warp = arith.andi(thread, i32(31)), arith.shrui(thread, i32(5))
        parts = ir.MemRefType(logits.type).shape[0] // ROWS

        def logit(row: Value, column: Value) -> Value:
            values = [
                memref.load(logits, [_index(arith.addi(row, i32(p * ROWS))), _index(column)])
                for p in range(parts)
            ]
            return _sum(values, arith.addf)

        def runs(row: Value) -> Value:
            """Whether a row chooses; rows past the last one do not."""
            last = i32(ROWS - 1)
            here = memref.load(running, [_index(arith.minui(row, last))])
            return arith.andi(_less(i32(0), here), _less(row, i32(ROWS)))

        # Read early: all of it is under way while experts are chosen.
        rows = [arith.addi(warp, i32(r)) for r in range(0, ROWS, 4)]
        choosing = [runs(row) for row in rows]
        owner = arith.divui(thread, i32(top_k))
        owner_runs, thread_runs = runs(owner), runs(thread)
        shared = logit(arith.andi(thread, i32(ROWS - 1)), i32(E))

        def choose_for(row: Value) -> None:
            left = []
            for j in range(words):
                expert = arith.addi(lane, i32(j * _LANES))
                left.append(key(logit(row, expert), expert))
            every = list(left)
            chosen = [i32(0)] * words
            best = []
            for _k in range(top_k):
                most = nvvm.redux_sync(
                    _sum(left, arith.maxui), nvvm.ReductionKind.UMAX, i32(0xFFFFFFFF)
                )
                best.append(most)
                for j in range(words):
                    hit = _equal(left[j], most)
                    left[j] = arith.select(hit, i32(0), left[j])
                    chosen[j] = arith.select(hit, i32(1), chosen[j])
            top = _logit(best[0])
            raised = [_exp(arith.subf(_logit(b), top)) for b in best]
            if normalise:
                total = _sum(raised, arith.addf)
            else:
                mine = _sum([_exp(arith.subf(_logit(k), top)) for k in every], arith.addf)
                for step in (16, 8, 4, 2, 1):
                    mine = arith.addf(mine, mgpu.utils.shfl_bfly(mine, step))
                total = mine
            for k in range(top_k):
                at = [_index(arith.addi(arith.muli(row, i32(top_k)), i32(k)))]
                share = arith.truncf(ir.BF16Type.get(), arith.divf(raised[k], total))
                memref.store(arith.extf(f32, share), shares, at)
                expert = arith.subi(i32(0xFFFF), arith.andi(best[k], i32(0xFFFF)))
                memref.store(expert, ids, at)
            for j in range(words):
                bits = _ballot(chosen[j])
                memref.store(bits, masks, [_index(arith.addi(arith.muli(row, i32(words)), i32(j)))])

        for row, here in zip(rows, choosing, strict=True):
            with mgpu.utils.when(_less(lane, i32(words))):
                at = arith.addi(arith.muli(row, i32(words)), lane)
                memref.store(i32(0), masks, [_index(at)])
            with mgpu.utils.when(here):
                mgpu.utils.warp_barrier()
                choose_for(row)
        n_weights = ir.MemRefType(weights.type).shape[0]
        for start in range(0, n_weights, 128):
            place = arith.addi(thread, i32(start))
            with mgpu.utils.when(_less(place, i32(n_weights))):
                memref.store(zero, weights, [_index(place)])
        mgpu.utils.warpgroup_barrier()

        union = [
            _sum([memref.load(masks, [_index(row * words + j)]) for row in range(ROWS)], arith.ori)
            for j in range(words)
        ]
        first = [i32(1)]  # slot 0 is the shared expert
        for j in range(words):
            first.append(arith.addi(first[-1], _popc(union[j])))
        memref.store(first[-1], plan, [_index(0)])
        one = i32(1)
        below = arith.subi(arith.shli(one, lane), one)
        for j in range(words):
            slot = arith.addi(first[j], _popc(arith.andi(union[j], below)))
            bit = arith.andi(arith.shrui(union[j], lane), one)
            with mgpu.utils.when(_equal(bit, one)):
                memref.store(
                    arith.addi(lane, i32(j * _LANES)), plan, [_index(arith.addi(slot, one))]
                )
        with mgpu.utils.when(owner_runs):
            expert = memref.load(ids, [_index(thread)])
            group = arith.shrui(expert, i32(5))
            mask, place = union[0], first[0]
            for j in range(1, words):
                here = _equal(group, i32(j))
                mask = arith.select(here, union[j], mask)
                place = arith.select(here, first[j], place)
            before = arith.subi(arith.shli(one, arith.andi(expert, i32(31))), one)
            place = arith.addi(place, _popc(arith.andi(mask, before)))
            at = _index(arith.addi(arith.muli(place, i32(ROWS)), owner))
            memref.store(memref.load(shares, [_index(thread)]), weights, [at])
        with mgpu.utils.when(thread_runs):
            bf16 = ir.BF16Type.get()
            gate = arith.extf(f32, arith.truncf(bf16, shared))
            unit = mgpu.utils.c(1.0, f32)
            gate = arith.divf(unit, arith.addf(unit, _exp(arith.negf(gate))))
            rounded = arith.extf(f32, arith.truncf(bf16, gate))
            memref.store(rounded, weights, [_index(thread)])

    run(logits, running, plan, weights, *scratch)
