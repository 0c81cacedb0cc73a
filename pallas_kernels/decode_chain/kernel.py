"""The products between two mixers of a decode step as one kernel: Pallas Mosaic GPU for Hopper.

With at most 8 rows a matrix product is a read of its weights, and a step is as fast as the weights stream. Separate
kernels leave the memory idle at each boundary: launch, first loads, last stragglers. Here one block a multiprocessor
stays for a whole chain of products; one warpgroup keeps a ring of weight tiles in flight through the copy engine, and
runs ahead of what other blocks still compute, since weights depend on nothing; another multiplies and waits for other
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
- What experts load depends on what the rows choose: once the slots are listed, four warpgroups load (`sparse`).
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

from pallas_kernels.decode_chain.ring import Counters, Ring
from pallas_kernels.decode_chain.sparse import LOADERS, SparseLayer, Weights
from pallas_kernels.decode_chain.stages import (
    HALF,
    ROWS,
    TILE,
    Down,
    Experts,
    Norm,
    Product,
    Stage,
    normed,
    unfit_experts,
)
from pallas_kernels.dispatch import multiprocessors
from pallas_kernels.mosaic import fence_copy_engine, read, store, timeline


def chain(
    stages: tuple[Stage, ...],
    first: jax.Array | None,
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
) -> tuple[jax.Array, jax.Array]:
    """See `api.chain`, whose arguments have been checked.

    Args:
      blocks: thread blocks, at most the multiprocessors of the device; None: as many.
      depth: steps that are loaded ahead; each takes 36 KiB of shared memory.
      window: steps whose weights are under way at once.
      traces: folder for a timeline of each call, see `mosaic.timeline`.
      interpret: parameters of Mosaic's interpreter, to run without a GPU.
    """
    blocks = blocks or multiprocessors()
    for stage in stages:
        if isinstance(stage, Experts) and (why := unfit_experts(stage, blocks)):
            raise ValueError(f"chain: {why}")
    H = residual.shape[0]
    chunks = H // TILE
    f32, bf16, wgmma = jnp.float32, jnp.bfloat16, plgpu.Layout.WGMMA

    # Everything a stage writes is an output of the kernel: global memory that all blocks see.
    out_types: list[Any] = []

    def new(shape: tuple[int, ...], dtype: Any) -> int:
        out_types.append(jax.ShapeDtypeStruct(shape, dtype))
        return len(out_types) - 1

    places: list[dict[str, int]] = []
    count = stacks = 0
    for stage, own in zip(stages, weights, strict=True):
        at: dict[str, int] = {"done": count, "stack": stacks}
        count += 1
        stacks += len(own)
        if isinstance(stage, Experts):
            gates = stage.router_groups * ROWS
            pairs = 2 * stage.down(stage.slots).steps
            at |= {
                "logits": new((stage.splits(blocks) * ROWS, gates), f32),
                "hidden": new((stage.parts, ROWS, pairs * HALF), bf16),
                "shared": new((blocks, 1, TILE, ROWS), f32),
                "given": count,
                "routed": count + blocks,
                "met": count + blocks + 1,
            }
            count += blocks + 2
        if normed(stage):
            if not isinstance(stage, Norm):
                at["residual"] = new((H, ROWS), bf16)
            at |= {
                "norm": stacks - 1,
                "normed": new((ROWS, H), bf16),
                "squares": new((128, ROWS), f32),
            }
        elif isinstance(stage, Product):
            at["result"] = new((ROWS, stage.outputs), stage.dtype)
        if isinstance(stage, Product):
            at |= {
                "shared": new((blocks, stage.pieces, TILE, ROWS), f32),
                "given": count,
            }
            count += blocks
            if stage.ordered(blocks):
                at["order"] = count
                count += 1
        places.append(at)

    def decode_chain(*refs: Any) -> None:
        first_ref, residual_ref, layers_ref, running_ref, *rest = (
            (None, *refs) if first is None else refs
        )
        weight_refs, rest = rest[:stacks], rest[stacks:]
        outs, scratch = rest[: len(out_types)], rest[len(out_types) :]
        ring_refs, (signalled, *of_experts) = scratch[:5], scratch[5:]
        weights_smem, rows_smem, *filled, emptied = ring_refs
        ring = Ring(depth, window, weights_smem, rows_smem, tuple(filled), emptied)
        counters = Counters(pl.get_global(plgpu.SemaphoreType.REGULAR((count,))))
        block, role = jax.lax.axis_index("block"), jax.lax.axis_index("role")

        def source(i: int) -> tuple[Any, int | None, int]:
            """What a product reads, and which counter says that it is there."""
            if i == 0:
                return first_ref, None, 0
            before, at = stages[i - 1], places[i - 1]
            if normed(before):
                return outs[at["normed"]], at["done"], chunks
            return outs[at["result"]], at["done"], blocks

        def source_is_there(i: int) -> Callable[[], None]:
            _, counter, count = source(i)

            def ready() -> None:
                if counter is not None:
                    with jax.named_scope(f"wait for x of {i}"):
                        counters.wait(counter, count)
                        fence_copy_engine()

            return ready

        def load(i: int, stage: Product, issued: Any) -> Any:
            weight, layer = weight_refs[places[i]["stack"]], layers_ref[places[i]["stack"]]
            x, _, _ = source(i)
            steps = stage.steps

            def weights(step: Any, half: int, place: Any, filled: Any) -> None:
                row = stage.row(step // steps)
                k = step % steps * stage.step
                if stage.kind == "swiglu":
                    row += half * stage.outputs
                else:
                    k += half * HALF
                piece = weight.at[layer, pl.ds(row, TILE), pl.ds(k, HALF)]
                plgpu.copy_gmem_to_smem(piece, place, filled)

            def rows(step: Any) -> Any:
                return x.at[:, pl.ds(step % steps * stage.step, stage.step)]

            span = stage.span(block, blocks)
            return ring.load(*span, issued, weights, rows, stage.step, source_is_there(i))

        def scale_of(i: int) -> Any:
            """1 / rms of each row, where the product reads a normed stream."""
            if i == 0 or not normed(stages[i - 1]):
                return None
            counters.wait(places[i - 1]["done"], chunks)
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
            rows = pl.ds(tile * TILE, TILE)
            x = read(stream_before(i).at[rows], wgmma).astype(f32)
            weight = weight_of_norm(i, rows)
            x = (x + total().astype(bf16).astype(f32)).astype(bf16)
            store(outs[places[i]["residual"]].at[rows], x)
            prepare_norm(i, tile, x.astype(f32), weight)

        def weight_of_norm(i: int, rows: Any) -> Any:
            norm = places[i]["norm"]
            weight = read(weight_refs[norm].at[layers_ref[norm], rows], wgmma.reduce(1))
            return jax.lax.broadcast_in_dim(weight.astype(f32), (TILE, ROWS), (0,))

        def prepare_norm(i: int, tile: Any, x: Any, weight: Any) -> None:
            at, rows = places[i], pl.ds(tile * TILE, TILE)
            store(outs[at["squares"]].at[tile], jnp.sum(x * x, axis=0))
            put(outs[at["normed"]], rows, x * (1.0 + weight))
            fence_copy_engine()
            counters.signal(at["done"])

        def put(out: Any, channels: Any, value: Any) -> None:
            value = plgpu.layout_cast(value.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            store(out.at[:, channels].transpose((1, 0)), value)

        def multiply(i: int, stage: Product | Down, done: Any, scale: Any) -> Any:
            at = places[i]
            begin, end = stage.span(block, blocks)
            pieces, shared = stage.pieces, outs[at["shared"]]

            @pl.loop(*stage.tiles_of(begin, end))
            def _(tile: Any) -> None:
                low, high = stage.part(tile, begin, end)

                totals = ring.multiply(done + low - begin, high - low, pieces, str(i))
                owner = stage.owner(tile, blocks)

                @pl.when(block > owner)
                def _give() -> None:
                    with jax.named_scope(f"give a part of {i}"):
                        for p in range(pieces):
                            store(shared.at[block, p], totals[p])
                        counters.signal(at["given"] + owner)

                def sum_of_all() -> Any:
                    count = stage.sharers(tile, blocks)

                    def take(_: Any, results: Any) -> Any:
                        counters.wait(at["given"] + block, count)
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
                        pl.when(tile == stage.tiles - 1)(lambda: counters.wait(at["order"], 1))
                    put(outs[at["result"]], pl.ds(stage.row(tile), TILE), result)
                    if "order" in at:
                        pl.when(tile == stage.tiles - 2)(lambda: counters.signal(at["order"]))

                @pl.when(block == owner)
                def _finish() -> None:
                    with jax.named_scope(f"finish a tile of {i}"):
                        finish()

            if i + 1 < len(stages) and stage.kind != "add":
                fence_copy_engine()
                counters.signal(at["done"])
            return done + end - begin

        def norm() -> None:
            """The first stage, where it is a `Norm`."""

            def one(tile: Any) -> None:
                rows = pl.ds(tile * TILE, TILE)
                x = read(residual_ref.at[rows], wgmma).astype(f32)
                prepare_norm(0, tile, x, weight_of_norm(0, rows))

            for begin in range(0, chunks, blocks):
                pl.when(block < chunks - begin)(partial(one, block + begin))

        def sparse_layer(i: int, stage: Experts) -> SparseLayer:
            at = places[i]
            x, _, _ = source(i)
            filled, emptied, listed, hidden_given, plan, shares, *lists = of_experts
            return SparseLayer(
                stage=stage,
                block=block,
                blocks=blocks,
                ring=ring,
                counters=counters,
                weights=tuple(
                    Weights(weight_refs[n], layers_ref[n]) for n in range(at["stack"], at["norm"])
                ),
                x=x,
                ready=source_is_there(i),
                running=running_ref,
                logits=outs[at["logits"]],
                hidden=outs[at["hidden"]],
                routed=at["routed"],
                met=at["met"],
                filled=filled,
                emptied=emptied,
                listed=listed,
                hidden_given=hidden_given,
                plan=plan,
                shares=shares,
                lists=tuple(lists),
            )

        layers_of_experts = [
            sparse_layer(i, stage) for i, stage in enumerate(stages) if isinstance(stage, Experts)
        ]
        sparse = layers_of_experts[0] if layers_of_experts else None

        @pl.when(role == 0)
        def _multiply() -> None:
            done = jnp.int32(0)
            if sparse:
                sparse.prepare()
            for i, stage in enumerate(stages):
                if isinstance(stage, Product):
                    done = multiply(i, stage, done, scale_of(i))
                elif sparse and isinstance(stage, Experts):
                    scale = scale_of(i)
                    done = sparse.route(done, scale)
                    sparse.gate_and_up(scale)
                    done = multiply(i, stage.down(sparse.plan[0]), done, None)
                else:
                    norm()
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
                elif sparse and isinstance(stage, Experts):
                    issued = sparse.load_router(issued)
                    sparse.load_stacks(0)
                    issued = sparse.load_down(issued)

        if sparse:
            for loader in range(1, LOADERS):
                pl.when(role == 1 + loader)(partial(sparse.load_stacks, loader))

    scratch_of_experts = [
        entry
        for stage in stages
        if isinstance(stage, Experts)
        for entry in SparseLayer.scratch(stage, depth)
    ]
    run = plgpu.kernel(
        decode_chain,
        out_type=tuple(out_types),
        scratch_types=(
            *Ring.scratch(depth),
            plgpu.Barrier(num_barriers=len(stages)),
            *scratch_of_experts,
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1 + LOADERS if scratch_of_experts else 2,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            **timeline(traces),
        ),
        interpret=interpret,
    )
    inputs = (residual, layers, jnp.ones((ROWS,), jnp.int32) if running is None else running)
    # Copies have at most 5 dimensions: experts lie one under the other.
    given = [
        stack.reshape(len(stack), -1, stack.shape[-1]) if stack.ndim == 4 else stack
        for own in weights
        for stack in own
    ]
    outs = run(*(() if first is None else (first,)), *inputs, *given)
    streams = [residual, *(outs[at["residual"]] for at in places if "residual" in at)]
    return outs[places[-1]["result"]], streams[-1]
