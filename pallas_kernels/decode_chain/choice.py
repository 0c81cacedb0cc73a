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


def _i32(x: int) -> Value:
    """An int32 constant, given as a number of 32 bits of either sign."""
    return mgpu.utils.c(x - (1 << 32) if x >= 1 << 31 else x, ir.IntegerType.get_signless(32))


def index(x: Value | int) -> Value:
    """An index, of a constant or an int32."""
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


def _of_lane(x: Value, lane: int) -> Value:
    return _asm(f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;", "i32", "=r,r", x)


def _popc(x: Value) -> Value:
    return _asm("popc.b32 $0, $1;", "i32", "=r,r", x)


def _equal(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def less(a: Value, b: Value) -> Value:
    """Unsigned a < b."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def _sum(values: Sequence[Value], add: Callable[[Value, Value], Value]) -> Value:
    total = values[0]
    for v in values[1:]:
        total = add(total, v)
    return total


def _key(logit: Value, expert: Value) -> Value:
    """Key of a float32 logit, rounded to bf16, and an expert id (int32)."""
    short = ir.IntegerType.get_signless(16)
    word = ir.IntegerType.get_signless(32)
    bits = arith.extui(word, arith.bitcast(short, arith.truncf(ir.BF16Type.get(), logit)))
    negative = arith.cmpi(arith.CmpIPredicate.uge, bits, _i32(0x8000))
    order = arith.xori(bits, arith.select(negative, _i32(0xFFFF), _i32(0x8000)))
    return arith.ori(arith.shli(order, _i32(16)), arith.subi(_i32(0xFFFF), expert))


def _logit(key: Value) -> Value:
    order = arith.shrui(key, _i32(16))
    positive = arith.cmpi(arith.CmpIPredicate.uge, order, _i32(0x8000))
    bits = arith.xori(order, arith.select(positive, _i32(0x8000), _i32(0xFFFF)))
    return arith.bitcast(ir.F32Type.get(), arith.shli(bits, _i32(16)))


def scratch(E: int, top_k: int) -> tuple[Any, ...]:
    """Shared memory: which rows run, bit masks of the rows' experts, the experts' keys and weights."""
    return (
        plgpu.SMEM((ROWS,), jnp.int32),
        plgpu.SMEM((ROWS * E // _LANES,), jnp.int32),
        plgpu.SMEM((ROWS * top_k,), jnp.int32),
        plgpu.SMEM((ROWS * top_k,), jnp.float32),
    )


def prepare(running: Any, weights: Any, scratch: tuple[Any, ...]) -> None:
    """What `choose` needs no logits for; to be called before by the same warpgroup.

    Args:
      running: int32 [8] in device memory.
      weights, scratch: see `choose`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def run(_: Any, running: Any, weights: Any, runs: Any) -> None:
        thread = arith.andi(mgpu.utils.thread_idx(), _i32(127))
        with mgpu.utils.when(less(thread, _i32(ROWS))):
            memref.store(memref.load(running, [index(thread)]), runs, [index(thread)])
        count = ir.MemRefType(weights.type).shape[0]
        for start in range(0, count, 128):
            place = arith.addi(thread, _i32(start))
            with mgpu.utils.when(less(place, _i32(count))):
                memref.store(mgpu.utils.c(0.0, ir.F32Type.get()), weights, [index(place)])
        mgpu.utils.warpgroup_barrier()

    run(running, weights, scratch[0])


def choose(
    logits: Any,
    plan: Any,
    weights: Any,
    scratch: tuple[Any, ...],
    *,
    E: int,
    top_k: int,
    normalise: bool,
) -> None:
    """Fill the slot list from logits, after `prepare`; to be called by one whole warpgroup.

    Args:
      logits: float32 [parts * 8, more than E] in device memory, parts to be added; column E is the shared expert's gate
        before the sigmoid.
      plan: int32 [1 + slots] in shared memory; receives the number of slots and each slot's expert id by rising id.
      weights: float32 [slots * 8] in shared memory; receives each slot's weight for each row, rounded to bf16.
      scratch: see `scratch`; rows that do not run choose nothing.
    """
    words = E // _LANES

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 7)
    def run(
        _: Any,
        logits: Any,
        plan: Any,
        weights: Any,
        running: Any,
        masks: Any,
        keys: Any,
        shares: Any,
    ) -> None:
        f32, bf16 = ir.F32Type.get(), ir.BF16Type.get()
        zero, one = mgpu.utils.c(0.0, f32), _i32(1)
        thread = arith.andi(mgpu.utils.thread_idx(), _i32(127))
        lane, warp = arith.andi(thread, _i32(31)), arith.shrui(thread, _i32(5))
        parts = ir.MemRefType(logits.type).shape[0] // ROWS

        def logit(row: Value, column: Value) -> Value:
            values = [
                memref.load(logits, [index(arith.addi(row, _i32(p * ROWS))), index(column)])
                for p in range(parts)
            ]
            return _sum(values, arith.addf)

        def runs(row: Value) -> Value:
            """Whether a row runs; rows past the last one do not."""
            here = memref.load(running, [index(arith.minui(row, _i32(ROWS - 1)))])
            return arith.andi(less(_i32(0), here), less(row, _i32(ROWS)))

        def raised(key: Value, top: Value) -> Value:
            return _exp(arith.subf(_logit(key), _logit(top)))

        def over_lanes(x: Value) -> Value:
            for step in (16, 8, 4, 2, 1):
                x = arith.addf(x, mgpu.utils.shfl_bfly(x, step))
            return x

        # Read early: it is under way while experts are chosen.
        shared = logit(arith.andi(thread, _i32(ROWS - 1)), _i32(E))

        def choose_for(row: Value) -> None:
            experts = [arith.addi(lane, _i32(j * _LANES)) for j in range(words)]
            every = [_key(logit(row, expert), expert) for expert in experts]
            first = arith.muli(row, _i32(top_k))

            left = every
            for k in range(top_k):
                best = nvvm.redux_sync(
                    _sum(left, arith.maxui), nvvm.ReductionKind.UMAX, _i32(0xFFFFFFFF)
                )
                memref.store(best, keys, [index(arith.addi(first, _i32(k)))])
                left = [arith.select(_equal(here, best), _i32(0), here) for here in left]
            for j, here in enumerate(left):  # no key is 0
                bits = _ballot(arith.extui(ir.IntegerType.get_signless(32), _equal(here, _i32(0))))
                at = arith.addi(arith.muli(row, _i32(words)), _i32(j))
                memref.store(bits, masks, [index(at)])
            mgpu.utils.warp_barrier()
            mine = index(arith.addi(first, arith.minui(lane, _i32(top_k - 1))))
            top = memref.load(keys, [index(first)])
            share = raised(memref.load(keys, [mine]), top)
            chosen = less(lane, _i32(top_k))
            if normalise:
                total = over_lanes(arith.select(chosen, share, zero))
            else:
                total = over_lanes(_sum([raised(key, top) for key in every], arith.addf))
            share = arith.extf(f32, arith.truncf(bf16, arith.divf(share, total)))
            with mgpu.utils.when(chosen):
                memref.store(share, shares, [mine])

        for r in range(0, ROWS, 4):
            row = arith.addi(warp, _i32(r))
            with mgpu.utils.when(less(lane, _i32(words))):
                at = arith.addi(arith.muli(row, _i32(words)), lane)
                memref.store(_i32(0), masks, [index(at)])
            with mgpu.utils.when(runs(row)):
                mgpu.utils.warp_barrier()
                choose_for(row)
        mgpu.utils.warpgroup_barrier()

        # A lane joins the rows of its word, then tells the others.
        word = arith.minui(lane, _i32(words - 1))
        of_rows = [
            memref.load(masks, [index(arith.addi(word, _i32(row * words)))]) for row in range(ROWS)
        ]
        joined = _sum(of_rows, arith.ori)
        union = [_of_lane(joined, j) for j in range(words)]
        first = [one]  # slot 0 is the shared expert
        for j in range(words):
            first.append(arith.addi(first[-1], _popc(union[j])))
        memref.store(first[-1], plan, [index(0)])
        below = arith.subi(arith.shli(one, lane), one)
        for j in range(words):
            slot = arith.addi(first[j], _popc(arith.andi(union[j], below)))
            bit = arith.andi(arith.shrui(union[j], lane), one)
            with mgpu.utils.when(_equal(bit, one)):
                memref.store(
                    arith.addi(lane, _i32(j * _LANES)), plan, [index(arith.addi(slot, one))]
                )
        owner = arith.divui(thread, _i32(top_k))
        with mgpu.utils.when(runs(owner)):
            best = memref.load(keys, [index(thread)])
            expert = arith.subi(_i32(0xFFFF), arith.andi(best, _i32(0xFFFF)))
            group = arith.shrui(expert, _i32(5))
            mask, place = union[0], first[0]
            for j in range(1, words):
                here = _equal(group, _i32(j))
                mask = arith.select(here, union[j], mask)
                place = arith.select(here, first[j], place)
            before = arith.subi(arith.shli(one, arith.andi(expert, _i32(31))), one)
            place = arith.addi(place, _popc(arith.andi(mask, before)))
            at = index(arith.addi(arith.muli(place, _i32(ROWS)), owner))
            memref.store(memref.load(shares, [index(thread)]), weights, [at])
        with mgpu.utils.when(runs(thread)):
            gate = arith.extf(f32, arith.truncf(bf16, shared))
            unit = mgpu.utils.c(1.0, f32)
            gate = arith.divf(unit, arith.addf(unit, _exp(arith.negf(gate))))
            rounded = arith.extf(f32, arith.truncf(bf16, gate))
            memref.store(rounded, weights, [index(thread)])

    run(logits, plan, weights, *scratch)
