"""The products between two mixers of a decode step as one kernel: Pallas Mosaic GPU for Hopper.

With at most 8 rows a matrix product is a read of its weights, and a step is as fast as the weights stream. Separate
kernels leave the memory idle at each boundary: launch, first loads, last stragglers. Here one block a multiprocessor
stays for a whole chain of products; one warpgroup keeps a ring of weight tiles in flight through the copy engine, and
runs ahead of the data dependences, since weights depend on nothing; the other multiplies and waits for what other
blocks compute on counters in global memory.

- Tiles of 64 weight rows are the M side of `wgmma`, the rows of x its N side of 8.
- All blocks must be resident at once: one block a multiprocessor, at most as many as there are.
- The tiles x steps of K of a product are cut into equal runs, one a block, so that all blocks end together. A tile that
  several blocks share is summed in the order of K by the block that begins it; the others reach it first in their runs.
- A column of a `wgmma` result depends on its own row of x alone, and the order of summation on shapes alone: a row's
  bits do not depend on its neighbours.
- The RMS norm is split: who adds to the residual stream also multiplies it by (1 + weight) and stores sums of squares,
  and the product that reads it scales its result. Scaling a row after the product differs from before it by rounding.
- Weights are taken as the whole stack [L, M, K] and a layer index, so a loop over layers copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

ROWS = 8
"""Rows that a chain computes; the real ones come first, the others may hold anything."""
_TILE = 64
_HALF = 256
"""A step reads two pieces of [64, 256] weights: neighbours along K, or the gate's rows and the up projection's."""


def unavailable(dtype: Any, widths: Iterable[int]) -> str | None:
    """Why chains of products with these widths K (and H) cannot run here, or None."""
    if jax.default_backend() != "gpu":
        return f"the default backend is {jax.default_backend()}, not a GPU"
    device = jax.local_devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        return f"{device.device_kind} does not have compute capability 9.0"
    if dtype != jnp.bfloat16:
        return f"dtype is {dtype}, not bfloat16"
    bad = [width for width in widths if width % (2 * _HALF)]
    return f"widths {bad} are not multiples of {2 * _HALF}" if bad else None


def multiprocessors() -> int:
    """Multiprocessors of the default device; those of an H200 where it is no GPU (to lower without one)."""
    device = jax.local_devices()[0]
    return int(device.core_count) if device.platform == "gpu" else 132


@dataclass(frozen=True)
class Product:
    """`x @ weight[layer].T`, over all blocks.

    Args:
      rows: weight rows M; with `swiglu` the first half is the gate and the second goes with it.
      width: K.
      kind: "rows" gives the result in `dtype`; "swiglu" gives `silu(gate) * up`; "add" adds the result to the residual
        stream and prepares the stream's RMS norm (see the module).
      dtype: of the result of "rows".
      eps: of the norm of "add".
    """

    rows: int
    width: int
    kind: str
    dtype: Any = jnp.bfloat16
    eps: float = 0.0

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.kind == "swiglu" else self.rows

    @property
    def pieces(self) -> int:
        """Sums that a tile accumulates."""
        return 2 if self.kind == "swiglu" else 1

    @property
    def step(self) -> int:
        return _HALF if self.kind == "swiglu" else 2 * _HALF

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.width // self.step

    @property
    def tiles(self) -> int:
        return -(-self.outputs // _TILE)

    def run(self, blocks: int) -> int:
        """Steps of a block."""
        return -(-self.tiles * self.steps // blocks)


@dataclass(frozen=True)
class Add:
    """What "add" does with its result, with parts that were computed before the chain; only the first stage."""

    eps: float


class Result(NamedTuple):
    """What a chain leaves; None where its stages give no such thing."""

    result: Any
    """Of a last product of kind "rows" or "swiglu": [8, N]."""
    residual: Any
    """bfloat16 [H, 8]: the residual stream as it was last added to."""
    normed: Any
    """Of a last stage that adds: bfloat16 [8, H], the stream times (1 + weight), not yet divided by its rms."""
    squares: Any
    """Of a last stage that adds: float32 [128, 8], sums of squares over runs of 64 channels; from row H / 64 on
    unwritten."""


def chain(
    stages: tuple[Product | Add, ...],
    first: jax.Array,
    residual: jax.Array,
    weights: tuple[tuple[jax.Array, ...], ...],
    layers: jax.Array,
    *,
    blocks: int | None = None,
    depth: int = 3,
    interpret: Any = None,
) -> Result:
    """Run a chain of products and adds.

    Args:
      stages: a product after one that adds reads the normed stream, one after "swiglu" its result.
      first: input of the first stage: bfloat16 [8, K] of a product, float32 parts [P, H, 8] of an `Add`.
      residual: bfloat16 [H, 8], the stream that is added to.
      weights: for each stage its stacks, bfloat16: [L, M, K] of a product, [L, H] of a norm; "add" has both.
      layers: int32, for each of these stacks the index in it.
      blocks: thread blocks, at most the multiprocessors of the device; None: as many.
      depth: steps in flight; each takes 72 KiB of shared memory.
      interpret: parameters of Mosaic's interpreter, to run without a GPU.

    Rows are independent of each other bit for bit.
    """
    blocks = blocks or multiprocessors()
    H = residual.shape[0]
    chunks = H // _TILE
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
        if _adds(stage):
            at |= {
                "residual": new((H, ROWS), bf16),
                "normed": new((ROWS, H), bf16),
                "squares": new((128, ROWS), f32),
            }
        elif isinstance(stage, Product):
            at["result"] = new((ROWS, stage.outputs), stage.dtype)
        if isinstance(stage, Product):
            at |= {
                "shared": new((blocks, stage.pieces, _TILE, ROWS), f32),
                "flags": counters,
            }
            counters += blocks
        places.append(at)

    def body(*refs: Any) -> None:
        first_ref, residual_ref, layers_ref, *rest = refs
        weight_refs, rest = rest[:stacks], rest[stacks:]
        outs, (w_smem, x_smem, filled, emptied) = rest[: len(out_types)], rest[len(out_types) :]
        sems = pl.get_global(plgpu.SemaphoreType.REGULAR((counters,)))
        block, role = jax.lax.axis_index("block"), jax.lax.axis_index("role")

        def wait(counter: Any, count: Any) -> None:
            plgpu.semaphore_wait(sems.at[counter], count, decrement=False, memory_scope="gpu")

        def signal(counter: Any) -> None:
            _fence()
            plgpu.semaphore_signal(sems.at[counter], 1, memory_scope="gpu")

        def span(stage: Product) -> tuple[Any, Any]:
            run, total = stage.run(blocks), stage.tiles * stage.steps
            return jnp.minimum(block * run, total), jnp.minimum((block + 1) * run, total)

        def source(i: int) -> tuple[Any, int | None, int]:
            """What a product reads, and which counter says that it is there."""
            if i == 0:
                return first_ref, None, 0
            before, at = stages[i - 1], places[i - 1]
            if _adds(before):
                return outs[at["normed"]], at["done"], chunks
            return outs[at["result"]], at["done"], blocks

        def load(i: int, stage: Product, issued: Any) -> Any:
            weight, layer = weight_refs[places[i]["stack"]], layers_ref[places[i]["stack"]]
            x, counter, count = source(i)
            begin, end = span(stage)
            steps = stage.steps

            def weights_of(n: Any) -> None:
                step, slot = begin + n, jax.lax.rem(issued + n, depth)
                pl.when(issued + n >= depth)(lambda: plgpu.barrier_wait(emptied.at[slot]))
                row = jnp.minimum(step // steps * _TILE, stage.outputs - _TILE)
                k = step % steps * stage.step
                for half in range(2):
                    if stage.kind == "swiglu":
                        piece = weight.at[
                            layer, pl.ds(row + half * stage.outputs, _TILE), pl.ds(k, _HALF)
                        ]
                    else:
                        piece = weight.at[layer, pl.ds(row, _TILE), pl.ds(k + half * _HALF, _HALF)]
                    plgpu.copy_gmem_to_smem(piece, w_smem.at[slot, half], filled.at[slot])

            def rows_of(n: Any) -> None:
                step, slot = begin + n, jax.lax.rem(issued + n, depth)
                at = pl.ds(step % steps * stage.step, stage.step)
                place = x_smem.at[slot, :, pl.ds(0, stage.step)]
                plgpu.copy_gmem_to_smem(x.at[:, at], place, filled.at[slot])

            ahead = jnp.minimum(end - begin, depth)
            pl.loop(0, ahead)(weights_of)
            if counter is not None:
                wait(counter, count)
                _fence()
            pl.loop(0, ahead)(rows_of)

            @pl.loop(ahead, end - begin)
            def _(n: Any) -> None:
                weights_of(n)
                rows_of(n)

            return issued + end - begin

        def scale_of(i: int) -> Any:
            """1 / rms of each row, where the product reads a normed stream."""
            if i == 0 or not _adds(stages[i - 1]):
                return None
            wait(places[i - 1]["done"], chunks)
            sums = outs[places[i - 1]["squares"]]
            total = None
            for low in (0, _TILE):
                part = _read(sums.at[pl.ds(low, _TILE)], wgmma)
                index = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=wgmma)
                part = jnp.sum(jnp.where(index + low < chunks, part, 0.0), axis=0)
                total = part if total is None else total + part
            scale = jax.lax.rsqrt(total / H + float(stages[i - 1].eps))
            return jax.lax.broadcast_in_dim(scale, (_TILE, ROWS), (1,))

        def stream_before(i: int) -> Any:
            before = [outs[at["residual"]] for at in places[:i] if "residual" in at]
            return before[-1] if before else residual_ref

        def add(i: int, tile: Any, total: Callable[[], Any]) -> None:
            """Add to 64 channels of the stream and prepare their norm."""
            at, rows = places[i], pl.ds(tile * _TILE, _TILE)
            norm = at["stack"] + isinstance(stages[i], Product)
            x = _read(stream_before(i).at[rows], wgmma).astype(f32)
            weight = _read(weight_refs[norm].at[layers_ref[norm], rows], wgmma.reduce(1))
            weight = jax.lax.broadcast_in_dim(weight.astype(f32), x.shape, (0,))
            x = (x + total().astype(bf16).astype(f32)).astype(bf16)
            outs[at["residual"]].at[rows][...] = x
            x = x.astype(f32)
            outs[at["squares"]].at[tile][...] = jnp.sum(x * x, axis=0)
            put(outs[at["normed"]], rows, x * (1.0 + weight))
            signal(at["done"])

        def put(out: Any, channels: Any, value: Any) -> None:
            value = plgpu.layout_cast(value.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            out.at[:, channels].transpose((1, 0))[...] = value

        def multiply(i: int, stage: Product, done: Any) -> Any:
            at, steps, run = places[i], stage.steps, stage.run(blocks)
            begin, end = span(stage)
            scale = scale_of(i)
            pieces, shared = stage.pieces, outs[at["shared"]]

            @pl.loop(begin // steps, (end + steps - 1) // steps)
            def _(tile: Any) -> None:
                low, high = jnp.maximum(begin, tile * steps), jnp.minimum(end, (tile + 1) * steps)

                def sums(*accs: Any) -> Any:
                    def one(step: Any, _: Any) -> None:
                        slot = jax.lax.rem(done + step - begin, depth)
                        plgpu.barrier_wait(filled.at[slot])
                        for half in range(2):
                            k = 0 if pieces == 2 else half * _HALF
                            x = x_smem.at[slot, :, pl.ds(k, _HALF)].transpose((1, 0))
                            plgpu.wgmma(accs[half % pieces], w_smem.at[slot, half], x)
                        # The products of the step before have ended once only this one's are under way.
                        plgpu.wgmma_wait(2)
                        before = jax.lax.rem(done + step - begin + depth - 1, depth)
                        pl.when(step > low)(lambda: plgpu.barrier_arrive(emptied.at[before]))

                    jax.lax.fori_loop(low, high, one, None)
                    plgpu.wgmma_wait(0)
                    last = jax.lax.rem(done + high - 1 - begin, depth)
                    plgpu.barrier_arrive(emptied.at[last])
                    return tuple(acc[...] for acc in accs)

                totals = pl.run_scoped(sums, *(plgpu.ACC((_TILE, ROWS), f32),) * pieces)
                owner = tile * steps // run

                @pl.when(block > owner)
                def _give() -> None:
                    for p in range(pieces):
                        shared.at[block, p][...] = totals[p]
                    signal(at["flags"] + block)

                def sum_of_all() -> Any:
                    def take(other: Any, results: Any) -> Any:
                        wait(at["flags"] + block + other, 1)
                        return tuple(
                            r + _read(shared.at[block + other, p], wgmma)
                            for p, r in enumerate(results)
                        )

                    sharers = ((tile + 1) * steps - 1) // run - owner
                    results = jax.lax.fori_loop(1, sharers + 1, take, totals)
                    return results if scale is None else tuple(r * scale for r in results)

                @pl.when(block == owner)
                def _finish() -> None:
                    if stage.kind == "add":
                        add(i, tile, lambda: sum_of_all()[0])
                        return
                    result, *up = sum_of_all()
                    if up:
                        gate, up = (r.astype(bf16).astype(f32) for r in (result, up[0]))
                        result = gate / (1.0 + jnp.exp(-gate)) * up
                    row = jnp.minimum(tile * _TILE, stage.outputs - _TILE)
                    put(outs[at["result"]], pl.ds(row, _TILE), result)

            if i + 1 < len(stages) and stage.kind != "add":
                signal(at["done"])
            return done + end - begin

        def enter() -> None:
            """The first stage, where it is an `Add`."""
            parts = [first_ref.at[p] for p in range(first.shape[0])]
            rows = pl.ds(block * _TILE, _TILE)
            pl.when(block < chunks)(
                lambda: add(0, block, lambda: sum(_read(part.at[rows], wgmma) for part in parts))
            )

        @pl.when(role == 1)
        def _load() -> None:
            issued = jnp.int32(0)
            for i, stage in enumerate(stages):
                if isinstance(stage, Product):
                    issued = load(i, stage, issued)

        @pl.when(role == 0)
        def _multiply() -> None:
            done = jnp.int32(0)
            for i, stage in enumerate(stages):
                if isinstance(stage, Product):
                    done = multiply(i, stage, done)
                else:
                    enter()

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    run = plgpu.kernel(
        body,
        out_type=tuple(out_types),
        scratch_types=(
            plgpu.SMEM((depth, 2, _TILE, _HALF), bf16, transforms=swizzled),
            plgpu.SMEM((depth, ROWS, 2 * _HALF), bf16, transforms=swizzled),
            plgpu.Barrier(num_arrivals=3, num_barriers=depth),
            plgpu.Barrier(num_barriers=depth),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        interpret=interpret,
    )
    outs = run(first, residual, layers, *(stack for own in weights for stack in own))
    streams = [outs[at["residual"]] for at in places if "residual" in at]
    found = {name: outs[place] for name, place in places[-1].items() if name in Result._fields}
    none = dict.fromkeys(Result._fields)
    return Result(**none | found | {"residual": streams[-1] if streams else None})


def _adds(stage: Product | Add) -> bool:
    return isinstance(stage, Add) or stage.kind == "add"


def _read(ref: Any, layout: Any) -> Any:
    """From global memory to registers; neighbouring threads' accesses are small, but so is all that is read so."""
    return plgpu.load(ref, (), layout=layout, optimized=False)


def _fence() -> None:
    """Order ordinary accesses to memory with those of the copy engine."""

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [], "fence.proxy.async;", "", has_side_effects=True
        )

    fence()
