"""The products between two mixers of a decode step as one kernel: Pallas Mosaic GPU for Hopper.

With at most 8 rows a matrix product is a read of its weights, and a step is as fast as the weights stream. Separate
kernels leave the memory idle at each boundary: launch, first loads, last stragglers. Here one block a multiprocessor
stays for a whole chain of products; one warpgroup keeps a ring of weight tiles in flight through the copy engine, and
runs ahead of what other blocks still compute, since weights depend on nothing; the other multiplies and waits for other
blocks on counters in global memory.

- Tiles of 64 weight rows are the M side of `wgmma`, the rows of x its N side of 8.
- All blocks must be resident at once: one block a multiprocessor, at most as many as there are.
- The tiles x steps of K of a product are cut into equal runs, one a block, so that all blocks end together. A tile that
  several blocks share is summed in the order of K by the block that begins it; the others reach it first in their runs.
- A signal to other blocks orders all that the multiprocessor has under way before it, loads of the copy engine as well:
  timelines show signals that wait 7 us, until the whole ring is full. So few steps of the ring are under way at once,
  which is enough to keep the memory busy, and the loads of a stage begin when the block has signalled all it has of the
  stage before: it waits a microsecond for what everybody would wait for.
- A column of a `wgmma` result depends on its own row of x alone, and the order of summation on shapes alone: a row's
  bits do not depend on its neighbours.
- The RMS norm is split: who adds to the residual stream also multiplies it by (1 + weight) and stores sums of squares,
  and the product that reads it scales its result. Scaling a row after the product differs from before it by rounding.
- Weights are taken as the whole stack [L, M, K] and a layer index, so a loop over layers copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_chain import choice
from pallas_kernels.decode_chain.experts import load_shares, store_hidden, store_logits
from pallas_kernels.decode_chain.stages import (
    HALF,
    ROWS,
    TILE,
    Down,
    Experts,
    Product,
    Result,
    Stage,
    adds,
    multiprocessors,
)
from pallas_kernels.mosaic import fence_copy_engine, read, timeline

STACK = 8
"""Slots of experts that one product stacks, 8 rows of each."""
_LOADERS = 4
"""Warpgroups that load experts: one that issues so many small copies is slower than the memory."""


def chain(
    stages: tuple[Stage, ...],
    first: jax.Array,
    residual: jax.Array,
    weights: tuple[tuple[jax.Array, ...], ...],
    layers: jax.Array,
    running: jax.Array | None = None,
    *,
    blocks: int | None = None,
    depth: int = 6,
    window: int = 2,
    traces: str = "",
    interpret: Any = None,
) -> Result:
    """See `api.chain`, whose arguments have been checked.

    Args:
      blocks: thread blocks, at most the multiprocessors of the device; None: as many.
      depth: steps that are loaded ahead; each takes 36 KiB of shared memory.
      window: steps whose weights are under way at once.
      traces: folder for a timeline of each call, see `mosaic.timeline`.
      interpret: parameters of Mosaic's interpreter, to run without a GPU.
    """
    blocks = blocks or multiprocessors()
    H = residual.shape[0]
    chunks = H // TILE
    f32, bf16, wgmma = jnp.float32, jnp.bfloat16, plgpu.Layout.WGMMA

    # Everything a stage writes is an output of the kernel: global memory that all blocks see.
    out_types: list[Any] = []

    def new(shape: tuple[int, ...], dtype: Any) -> int:
        out_types.append(jax.ShapeDtypeStruct(shape, dtype))
        return len(out_types) - 1

    places: list[dict[str, int]] = []
    counters = stacks = 0
    for stage, own in zip(stages, weights, strict=True):
        at: dict[str, int] = {"done": counters, "stack": stacks}
        counters += 1
        stacks += len(own)
        if isinstance(stage, Experts):
            gates = stage.router_groups * ROWS
            pairs = 2 * stage.down(stage.slots).steps
            at |= {
                "logits": new((stage.splits(blocks) * ROWS, gates), f32),
                "hidden": new((stage.parts, ROWS, pairs * HALF), bf16),
                "shared": new((blocks, 1, TILE, ROWS), f32),
                "given": counters,
                "routed": counters + blocks,
                "met": counters + blocks + 1,
            }
            counters += blocks + 2
        if adds(stage):
            at |= {
                "norm": stacks - 1,
                "residual": new((H, ROWS), bf16),
                "normed": new((ROWS, H), bf16),
                "squares": new((128, ROWS), f32),
            }
        elif isinstance(stage, Product):
            at["result"] = new((ROWS, stage.outputs), stage.dtype)
        if isinstance(stage, Product):
            at |= {
                "shared": new((blocks, stage.pieces, TILE, ROWS), f32),
                "given": counters,
            }
            counters += blocks
            if stage.ordered(blocks):
                at["order"] = counters
                counters += 1
        places.append(at)

    def body(*refs: Any) -> None:
        first_ref, residual_ref, layers_ref, running_ref, *rest = refs
        weight_refs, rest = rest[:stacks], rest[stacks:]
        outs, scratch = rest[: len(out_types)], rest[len(out_types) :]
        w_smem, x_smem, w_filled, x_filled, emptied, signalled, *of_experts = scratch
        sems = pl.get_global(plgpu.SemaphoreType.REGULAR((counters,)))
        block, role = jax.lax.axis_index("block"), jax.lax.axis_index("role")

        def wait(counter: Any, count: Any) -> None:
            plgpu.semaphore_wait(sems.at[counter], count, decrement=False, memory_scope="gpu")

        def signal(counter: Any) -> None:
            plgpu.semaphore_signal(sems.at[counter], 1, memory_scope="gpu")

        def source(i: int) -> tuple[Any, int | None, int]:
            """What a product reads, and which counter says that it is there."""
            if i == 0:
                return first_ref, None, 0
            before, at = stages[i - 1], places[i - 1]
            if adds(before):
                return outs[at["normed"]], at["done"], chunks
            return outs[at["result"]], at["done"], blocks

        def stream(
            begin: Any, end: Any, issued: Any, weights: Any, rows: Any, width: int, ready: Any
        ) -> Any:
            """Load the steps from `begin` to before `end` through the ring.

            weights: (step, half, slot) copies half of a step's weights. rows: step to its part of x [8, width].
            ready: waits for x, once.
            """

            def weights_of(n: Any) -> None:
                count = issued + n
                slot, landed = jax.lax.rem(count, depth), jax.lax.rem(count - window, depth)
                pl.when(count >= depth)(lambda: plgpu.barrier_wait(emptied.at[slot]))
                pl.when(count >= window)(lambda: plgpu.barrier_wait(w_filled.at[landed]))
                for half in range(2):
                    weights(begin + n, half, slot)

            def rows_of(n: Any) -> None:
                slot = jax.lax.rem(issued + n, depth)
                place = x_smem.at[slot, :, pl.ds(0, width)]
                plgpu.copy_gmem_to_smem(rows(begin + n), place, x_filled.at[slot])

            ahead = jnp.minimum(end - begin, depth)
            pl.loop(0, ahead)(weights_of)
            ready()
            pl.loop(0, ahead)(rows_of)

            @pl.loop(ahead, end - begin)
            def _(n: Any) -> None:
                weights_of(n)
                rows_of(n)

            return issued + end - begin

        def source_is_there(i: int) -> Callable[[], None]:
            _, counter, count = source(i)

            def ready() -> None:
                if counter is not None:
                    with jax.named_scope(f"wait for x of {i}"):
                        wait(counter, count)
                        fence_copy_engine()

            return ready

        def load(i: int, stage: Product, issued: Any) -> Any:
            weight, layer = weight_refs[places[i]["stack"]], layers_ref[places[i]["stack"]]
            x, _, _ = source(i)
            steps = stage.steps

            def weights(step: Any, half: int, slot: Any) -> None:
                row = stage.row(step // steps)
                k = step % steps * stage.step
                if stage.kind == "swiglu":
                    row += half * stage.outputs
                else:
                    k += half * HALF
                piece = weight.at[layer, pl.ds(row, TILE), pl.ds(k, HALF)]
                plgpu.copy_gmem_to_smem(piece, w_smem.at[slot, half], w_filled.at[slot])

            def rows(step: Any) -> Any:
                return x.at[:, pl.ds(step % steps * stage.step, stage.step)]

            span = stage.span(block, blocks)
            return stream(*span, issued, weights, rows, stage.step, source_is_there(i))

        def scale_of(i: int) -> Any:
            """1 / rms of each row, where the product reads a normed stream."""
            if i == 0 or not adds(stages[i - 1]):
                return None
            wait(places[i - 1]["done"], chunks)
            sums = outs[places[i - 1]["squares"]]
            total: Any = None
            for low in (0, TILE):
                part = read(sums.at[pl.ds(low, TILE)], wgmma)
                index = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=wgmma)
                part = jnp.sum(jnp.where(index + low < chunks, part, 0.0), axis=0)
                total = part if total is None else total + part
            scale = jax.lax.rsqrt(total / H + float(stages[i - 1].eps))
            return jax.lax.broadcast_in_dim(scale, (TILE, ROWS), (1,))

        def stream_before(i: int) -> Any:
            before = [outs[at["residual"]] for at in places[:i] if "residual" in at]
            return before[-1] if before else residual_ref

        def add(i: int, tile: Any, total: Callable[[], Any]) -> None:
            """Add to 64 channels of the stream and prepare their norm."""
            at, rows = places[i], pl.ds(tile * TILE, TILE)
            norm = at["norm"]
            x = read(stream_before(i).at[rows], wgmma).astype(f32)
            weight = read(weight_refs[norm].at[layers_ref[norm], rows], wgmma.reduce(1))
            weight = jax.lax.broadcast_in_dim(weight.astype(f32), x.shape, (0,))
            x = (x + total().astype(bf16).astype(f32)).astype(bf16)
            outs[at["residual"]].at[rows][...] = x
            x = x.astype(f32)
            outs[at["squares"]].at[tile][...] = jnp.sum(x * x, axis=0)
            put(outs[at["normed"]], rows, x * (1.0 + weight))
            fence_copy_engine()
            signal(at["done"])

        def put(out: Any, channels: Any, value: Any) -> None:
            value = plgpu.layout_cast(value.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            out.at[:, channels].transpose((1, 0))[...] = value

        def products(first: Any, steps: Any, pieces: int, i: int) -> tuple[jax.Array, ...]:
            """Sums [64, 8] over steps of the ring, `first` others having gone through it before."""

            def sums(*accs: Any) -> Any:
                def one(n: Any, _: Any) -> None:
                    slot = jax.lax.rem(first + n, depth)
                    with jax.named_scope(f"wait for a step of {i}"):
                        plgpu.barrier_wait(w_filled.at[slot])
                        plgpu.barrier_wait(x_filled.at[slot])
                    for half in range(2):
                        k = 0 if pieces == 2 else half * HALF
                        x = x_smem.at[slot, :, pl.ds(k, HALF)].transpose((1, 0))
                        plgpu.wgmma(accs[half % pieces], w_smem.at[slot, half], x)
                    # The products of the step before have ended once only this one's are under way.
                    plgpu.wgmma_wait(2)
                    before = jax.lax.rem(first + n + depth - 1, depth)
                    pl.when(n > 0)(lambda: plgpu.barrier_arrive(emptied.at[before]))

                jax.lax.fori_loop(0, steps, one, None)
                plgpu.wgmma_wait(0)
                last = jax.lax.rem(first + steps - 1, depth)
                plgpu.barrier_arrive(emptied.at[last])
                return tuple(acc[...] for acc in accs)

            return pl.run_scoped(sums, *(plgpu.ACC((TILE, ROWS), f32),) * pieces)

        def multiply(i: int, stage: Product | Down, done: Any, scale: Any) -> Any:
            at = places[i]
            begin, end = stage.span(block, blocks)
            pieces, shared = stage.pieces, outs[at["shared"]]

            @pl.loop(*stage.tiles_of(begin, end))
            def _(tile: Any) -> None:
                low, high = stage.part(tile, begin, end)

                totals = products(done + low - begin, high - low, pieces, i)
                owner = stage.owner(tile, blocks)

                @pl.when(block > owner)
                def _give() -> None:
                    with jax.named_scope(f"give a part of {i}"):
                        for p in range(pieces):
                            shared.at[block, p][...] = totals[p]
                        signal(at["given"] + owner)

                def sum_of_all() -> Any:
                    count = stage.sharers(tile, blocks)

                    def take(_: Any, results: Any) -> Any:
                        wait(at["given"] + block, count)
                        # All reads are under way together; what lies past the last sharer may be anything.
                        others = [
                            [
                                read(shared.at[jnp.minimum(block + n, blocks - 1), p], wgmma)
                                for p in range(pieces)
                            ]
                            for n in range(1, stage.most_sharers(blocks) + 1)
                        ]
                        for n, parts in enumerate(others, 1):
                            results = tuple(
                                r + jnp.where(jnp.broadcast_to(count, part.shape) >= n, part, 0.0)
                                for r, part in zip(results, parts, strict=True)
                            )
                        return results

                    # A condition, as a loop of at most one trip.
                    with jax.named_scope(f"take the parts of {i}"):
                        results = jax.lax.fori_loop(0, jnp.minimum(count, 1), take, totals)
                    return results if scale is None else tuple(r * scale for r in results)

                def finish() -> None:
                    if stage.kind == "add":
                        add(i, tile, lambda: sum_of_all()[0])
                        return
                    result, *up = sum_of_all()
                    if up:
                        gate, up = (r.astype(bf16).astype(f32) for r in (result, up[0]))
                        result = gate / (1.0 + jnp.exp(-gate)) * up
                    assert isinstance(stage, Product)
                    if "order" in at:
                        pl.when(tile == stage.tiles - 1)(lambda: wait(at["order"], 1))
                    put(outs[at["result"]], pl.ds(stage.row(tile), TILE), result)
                    if "order" in at:
                        pl.when(tile == stage.tiles - 2)(lambda: signal(at["order"]))

                @pl.when(block == owner)
                def _finish() -> None:
                    with jax.named_scope(f"finish a tile of {i}"):
                        finish()

            if i + 1 < len(stages) and stage.kind != "add":
                fence_copy_engine()
                signal(at["done"])
            return done + end - begin

        def enter() -> None:
            """The first stage, where it is an `Add`."""
            parts = [first_ref.at[p] for p in range(first.shape[0])]

            def one(tile: Any) -> None:
                rows = pl.ds(tile * TILE, TILE)
                add(0, tile, lambda: sum(read(part.at[rows], wgmma) for part in parts))

            for begin in range(0, chunks, blocks):
                pl.when(block < chunks - begin)(partial(one, block + begin))

        def slots_of(stage: Experts) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Which of every `ways`-th slots are this block's, how many, and in how many stacks."""
            ways, plan = stage.ways(blocks), of_experts[4]
            way = jnp.where(block < stage.groups * ways, jax.lax.rem(block, ways), plan[0])
            mine = (plan[0] - way + ways - 1) // ways
            return way, mine, (mine + STACK - 1) // STACK

        def load_router(i: int, stage: Experts, issued: Any) -> Any:
            router, gate = (weight_refs[places[i]["stack"] + n] for n in range(2))
            layer, gate_layer = (layers_ref[places[i]["stack"] + n] for n in range(2))
            x, _, _ = source(i)
            splits = stage.splits(blocks)
            steps = stage.hidden // (2 * HALF) // splits
            group, first = block // splits, block % splits * (steps * 2 * HALF)

            def weights(step: Any, half: int, slot: Any) -> None:
                columns = pl.ds(first + (2 * step + half) * HALF, HALF)
                place = w_smem.at[slot, half, pl.ds(0, ROWS)]

                @pl.when(group < stage.router_groups - 1)
                def _router() -> None:
                    piece = router.at[layer, pl.ds(group * ROWS, ROWS), columns]
                    plgpu.copy_gmem_to_smem(piece, place, w_filled.at[slot])

                @pl.when(group == stage.router_groups - 1)
                def _gate() -> None:
                    piece = gate.at[gate_layer, :, columns]
                    plgpu.copy_gmem_to_smem(piece, place, w_filled.at[slot])

            def rows(step: Any) -> Any:
                return x.at[:, pl.ds(first + step * (2 * HALF), 2 * HALF)]

            end = jnp.where(group < stage.router_groups, steps, 0)
            return stream(0, end, issued, weights, rows, 2 * HALF, source_is_there(i))

        def load_stacks(i: int, stage: Experts, loader: int) -> None:
            """What one of the loaders copies of the gate and up projections: half of the slots of a stack, of one."""
            filled, emptied, planned, _, plan, *_ = of_experts
            half, stacked = (
                loader // 2,
                range(loader % 2 * STACK // 2, (loader % 2 + 1) * STACK // 2),
            )
            at = places[i]["stack"]
            routed, shared = weight_refs[at + 2], weight_refs[at + 4]
            routed_layer, shared_layer = layers_ref[at + 2], layers_ref[at + 4]
            x, _, _ = source(i)
            ways, width = stage.ways(blocks), stage.width
            channel = half * width + block // ways * ROWS
            plgpu.barrier_wait(planned)
            way, mine, stacks = slots_of(stage)

            def stack(b: Any, count: Any) -> Any:
                first, valid = way + b * (STACK * ways), mine - b * STACK
                ids = {j: plan[1 + jnp.minimum(first + ways * j, stage.slots - 1)] for j in stacked}

                def chunk(c: Any, count: Any) -> Any:
                    slot, columns = jax.lax.rem(count, depth), pl.ds(c * HALF, HALF)
                    pl.when(count >= depth)(lambda: plgpu.barrier_wait(emptied.at[slot]))

                    def copy(j: int, weight: Any, layer: Any, row: Any) -> None:
                        place = w_smem.at[slot, half, pl.ds(j * ROWS, ROWS)]
                        piece = weight.at[layer, pl.ds(row + channel, ROWS), columns]
                        plgpu.copy_gmem_to_smem(piece, place, filled.at[slot])

                    for j in stacked:
                        from_routed = partial(copy, j, routed, routed_layer, ids[j] * (2 * width))
                        if j == 0:  # slot 0, the shared expert, is nowhere else
                            pl.when(first == 0)(partial(copy, j, shared, shared_layer, 0))
                            pl.when(first > 0)(from_routed)
                        else:
                            pl.when(j < valid)(from_routed)
                            pl.when(j >= valid)(lambda: plgpu.barrier_arrive(filled.at[slot]))
                    if loader == 0:
                        place = x_smem.at[slot, :, pl.ds(0, HALF)]
                        plgpu.copy_gmem_to_smem(x.at[:, columns], place, filled.at[slot])
                    return count + 1

                return jax.lax.fori_loop(0, stage.hidden // HALF, chunk, count)

            jax.lax.fori_loop(0, stacks, stack, jnp.int32(0))

        def load_down(i: int, stage: Experts, issued: Any) -> Any:
            plan, at = of_experts[4], places[i]
            routed, shared = weight_refs[at["stack"] + 3], weight_refs[at["stack"] + 5]
            routed_layer, shared_layer = layers_ref[at["stack"] + 3], layers_ref[at["stack"] + 5]
            down = stage.down(plan[0])
            begin, end = down.span(block, blocks)
            row, part = down.row(block // stage.parts), block % stage.parts
            columns = pl.ds(part * HALF, HALF)

            def weights(step: Any, half: int, slot: Any) -> None:
                # Of an odd number of slots the last is taken twice, the second time with zeros.
                expert = jnp.minimum(2 * (step - begin) + half, plan[0] - 1)

                def copy(weight: Any, layer: Any, row: Any) -> None:
                    piece = weight.at[layer, pl.ds(row, TILE), columns]
                    plgpu.copy_gmem_to_smem(piece, w_smem.at[slot, half], w_filled.at[slot])

                pl.when(expert == 0)(lambda: copy(shared, shared_layer, row))
                of_routed = plan[1 + expert] * stage.hidden + row
                pl.when(expert > 0)(lambda: copy(routed, routed_layer, of_routed))

            def rows(step: Any) -> Any:
                return outs[at["hidden"]].at[part, :, pl.ds((step - begin) * (2 * HALF), 2 * HALF)]

            def ready() -> None:
                with jax.named_scope("wait for hidden"):
                    wait(at["met"], stage.groups * stage.ways(blocks))
                    fence_copy_engine()

            return stream(begin, end, issued, weights, rows, 2 * HALF, ready)

        def route(i: int, stage: Experts, done: Any, scale: Any) -> Any:
            """Compute this block's part of the logits, and list the slots."""
            _, _, planned, _, plan, shares, *scratch = of_experts
            at, splits = places[i], stage.splits(blocks)
            steps, routers = stage.hidden // (2 * HALF) // splits, stage.router_groups * splits

            @pl.when(block < routers)
            def _logits() -> None:
                with jax.named_scope("router"):
                    (value,) = products(done, steps, 1, i)
                    first, row = block // splits * ROWS, block % splits * ROWS
                    store_logits(value * scale, outs[at["logits"]], row, first)
                    signal(at["routed"])

            with jax.named_scope("wait for logits"):
                wait(at["routed"], routers)
            with jax.named_scope("choose"):
                choice.choose(
                    outs[at["logits"]],
                    running_ref,
                    plan,
                    shares,
                    tuple(scratch),
                    E=stage.experts,
                    top_k=stage.top_k,
                    normalise=stage.normalise,
                )
            plgpu.barrier_arrive(planned)
            plgpu.barrier_wait(planned)
            return done + jnp.where(block < routers, steps, 0)

        def gate_and_up(i: int, stage: Experts, scale: Any) -> None:
            filled, emptied, _, _, plan, shares, *_ = of_experts
            ways = stage.ways(blocks)
            way, mine, stacks = slots_of(stage)
            channel = block // ways * ROWS
            hidden, column = outs[places[i]["hidden"]].at[channel // HALF], channel % HALF

            def stack(b: Any, count: Any) -> Any:
                first, valid = way + b * (STACK * ways), jnp.minimum(STACK, mine - b * STACK)
                share = load_shares(shares, first, ways, stage.slots)

                def sums(*accs: Any) -> Any:
                    def chunk(c: Any, _: Any) -> None:
                        slot = jax.lax.rem(count + c, depth)
                        plgpu.barrier_wait(filled.at[slot])
                        x = x_smem.at[slot, :, pl.ds(0, HALF)].transpose((1, 0))
                        for half, acc in enumerate(accs):
                            plgpu.wgmma(acc, w_smem.at[slot, half], x)
                        plgpu.wgmma_wait(2)
                        before = jax.lax.rem(count + c + depth - 1, depth)
                        pl.when(c > 0)(lambda: plgpu.barrier_arrive(emptied.at[before]))

                    chunks = stage.hidden // HALF
                    jax.lax.fori_loop(0, chunks, chunk, None)
                    plgpu.wgmma_wait(0)
                    last = jax.lax.rem(count + chunks - 1, depth)
                    plgpu.barrier_arrive(emptied.at[last])
                    return tuple(acc[...] * scale for acc in accs)

                gate, up = pl.run_scoped(sums, *(plgpu.ACC((TILE, ROWS), f32),) * 2)
                value = gate / (1.0 + jnp.exp(-gate)) * up * share
                # A product with zero would let an overflow of an unchosen expert through as NaN.
                value = jnp.where(share != 0, value, 0.0).astype(bf16)
                store_hidden(value, hidden, first, valid, column, ways)
                return count + stage.hidden // HALF

            with jax.named_scope("gate and up"):
                jax.lax.fori_loop(0, stacks, stack, jnp.int32(0))

            @pl.when(block < stage.groups * ways)
            def _signal() -> None:
                @pl.when((way == 0) & (plan[0] % 2 == 1))
                def _nothing() -> None:
                    zeros = plgpu.layout_cast(jnp.zeros((TILE, ROWS), bf16), wgmma)
                    store_hidden(zeros, hidden, plan[0], jnp.int32(1), column, ways)

                fence_copy_engine()
                signal(places[i]["met"])

        @pl.when(role == 0)
        def _multiply() -> None:
            done = jnp.int32(0)
            for i, stage in enumerate(stages):
                if isinstance(stage, Product):
                    done = multiply(i, stage, done, scale_of(i))
                elif isinstance(stage, Experts):
                    scale = scale_of(i)
                    done = route(i, stage, done, scale)
                    gate_and_up(i, stage, scale)
                    plgpu.barrier_arrive(of_experts[3])
                    done = multiply(i, stage.down(of_experts[4][0]), done, None)
                else:
                    enter()
                if i + 1 < len(stages):
                    plgpu.barrier_arrive(signalled.at[i])

        @pl.when(role == 1)
        def _load() -> None:
            issued = jnp.int32(0)
            for i, stage in enumerate(stages):
                if i > 0:
                    plgpu.barrier_wait(signalled.at[i - 1])
                if isinstance(stage, Product):
                    issued = load(i, stage, issued)
                elif isinstance(stage, Experts):
                    issued = load_router(i, stage, issued)
                    load_stacks(i, stage, 0)
                    plgpu.barrier_wait(of_experts[3])
                    issued = load_down(i, stage, issued)

        for i, stage in enumerate(stages):
            for loader in range(1, _LOADERS) if isinstance(stage, Experts) else ():
                pl.when(role == 1 + loader)(partial(load_stacks, i, stage, loader))

    # Barriers: the ring's for experts, filled and emptied; slots listed; hidden done. Then the list and the shares.
    scratch: list[Any] = []
    for stage in stages:
        if isinstance(stage, Experts):
            scratch = [
                plgpu.Barrier(num_arrivals=2 * STACK + 1, num_barriers=depth),
                plgpu.Barrier(num_barriers=depth),
                plgpu.Barrier(),
                plgpu.Barrier(),
                plgpu.SMEM((1 + stage.slots,), jnp.int32),
                plgpu.SMEM((stage.slots * ROWS,), f32),
                *choice.scratch(stage.experts, stage.top_k),
            ]
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    run = plgpu.kernel(
        body,
        out_type=tuple(out_types),
        scratch_types=(
            plgpu.SMEM((depth, 2, TILE, HALF), bf16, transforms=swizzled),
            plgpu.SMEM((depth, ROWS, 2 * HALF), bf16, transforms=swizzled),
            plgpu.Barrier(num_arrivals=2, num_barriers=depth),
            plgpu.Barrier(num_barriers=depth),
            plgpu.Barrier(num_barriers=depth),
            plgpu.Barrier(num_barriers=len(stages)),
            *scratch,
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1 + _LOADERS if scratch else 2,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            **timeline(traces),
        ),
        interpret=interpret,
    )
    # Copies have at most 5 dimensions: experts lie one under the other.
    under = lambda w: w.reshape(len(w), -1, w.shape[-1]) if w.ndim == 4 else w  # noqa: E731
    given = [under(stack) for own in weights for stack in own]
    running = jnp.ones((ROWS,), jnp.int32) if running is None else running
    outs = run(first, residual, layers, running, *given)
    streams = [outs[at["residual"]] for at in places if "residual" in at]
    found = {name: outs[place] for name, place in places[-1].items() if name in Result._fields}
    none = dict.fromkeys(Result._fields)
    return Result(**none | found | {"residual": streams[-1] if streams else None})
