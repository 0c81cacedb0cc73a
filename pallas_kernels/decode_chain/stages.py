"""What a chain is made of, and the arithmetic of how its kernel shares the work.

A product has tiles of 64 outputs, and a tile `steps` steps along K. All steps, tile after tile, are cut into equal
runs, one a thread block. The block that computes a tile's first step owns it: it sums what the others computed of the
tile and writes the result. Since runs are contiguous, those others are the next blocks, and the tile is the first thing
in each of their runs, so that they give their part before they wait for anybody: nobody waits in a circle.

Methods that take a tile or a block take Python integers and traced ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.dispatch import not_hopper

ROWS = 8
"""Rows that a chain computes; the real ones come first, the others may hold anything."""
TILE = 64
HALF = 128
"""A step reads two pieces of [64, 128] weights: neighbours along K, or the gate's rows and the up projection's."""
MOST_HIDDEN = 128 * TILE
"""Channels of the residual stream: its sums of squares have 128 rows."""
KINDS = ("rows", "swiglu", "add")


@dataclass(frozen=True)
class Product:
    """`x @ weight[layer].T`, over all blocks.

    Args:
      rows: weight rows M; with `swiglu` the first half is the gate and the second goes with it.
      width: K.
      kind: "rows" gives the result in `dtype`; "swiglu" gives `silu(gate) * up` in `dtype`; "add" adds the result to
        the residual stream and prepares the stream's RMS norm (see `api.chain`).
      dtype: of the result; where another stage follows, that of the residual stream.
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
        """Channels of K in a step."""
        return HALF if self.kind == "swiglu" else 2 * HALF

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.width // self.step

    @property
    def tiles(self) -> int:
        return -(-self.outputs // TILE)

    def run(self, blocks: int) -> int:
        """Most steps of a block."""
        return -(-self.tiles * self.steps // blocks)

    def span(self, block: Any, blocks: int) -> tuple[Any, Any]:
        """First step of a block and the one past its last; step `s` belongs to tile `s // steps`."""
        run, total = self.run(blocks), self.tiles * self.steps
        return _least(block * run, total), _least((block + 1) * run, total)

    def tiles_of(self, begin: Any, end: Any) -> tuple[Any, Any]:
        """First tile of the steps from `begin` to before `end`, and the one past their last."""
        return begin // self.steps, (end + self.steps - 1) // self.steps

    def part(self, tile: Any, begin: Any, end: Any) -> tuple[Any, Any]:
        """Those of the steps from `begin` to before `end` that belong to a tile."""
        low, high = tile * self.steps, (tile + 1) * self.steps
        return _most(begin, low), _least(end, high)

    def owner(self, tile: Any, blocks: int) -> Any:
        """Block that computes a tile's first step."""
        return tile * self.steps // self.run(blocks)

    def sharers(self, tile: Any, blocks: int) -> Any:
        """How many blocks after the owner compute steps of a tile."""
        return ((tile + 1) * self.steps - 1) // self.run(blocks) - self.owner(tile, blocks)

    def most_sharers(self, blocks: int) -> int:
        """Most blocks after an owner that compute steps of its tile."""
        return max(self.sharers(tile, blocks) for tile in range(self.tiles))

    def row(self, tile: Any) -> Any:
        """First output of a tile; where 64 does not divide the outputs, the last tile overlaps the one before."""
        return _least(tile * TILE, self.outputs - TILE)

    def ordered(self, blocks: int) -> bool:
        """Whether the last two tiles must be written in order.

        They overlap, and where tiles are cut, each may sum its rows in pieces of its own: equal up to rounding only.
        """
        return self.outputs % TILE > 0 and self.run(blocks) % self.steps > 0


@dataclass(frozen=True)
class Add:
    """What "add" does with its result, with parts that were computed before the chain; only the first stage."""

    eps: float


class Result(NamedTuple):
    """What a chain leaves; None where its stages give no such thing."""

    result: Any
    """Of a last product of kind "rows" or "swiglu": [8, N]."""
    residual: Any
    """[H, 8]: the residual stream as it was last added to."""
    normed: Any
    """Of a last stage that adds: [8, H], the stream times (1 + weight), not yet divided by its rms."""
    squares: Any
    """Of a last stage that adds: float32 [128, 8], sums of squares over runs of 64 channels; from row H / 64 on
    unwritten."""


def adds(stage: Product | Add) -> bool:
    return isinstance(stage, Add) or stage.kind == "add"


def check(
    stages: Sequence[Product | Add],
    first: Any,
    residual: Any,
    weights: Sequence[Sequence[Any]],
    layers: Any,
) -> None:
    """Raise ValueError where the arguments of a chain do not go together."""
    H, width = residual.shape[0], None
    if len(stages) != len(weights):
        raise ValueError(f"chain: {len(stages)} stages but weights of {len(weights)}")
    for i, (stage, own) in enumerate(zip(stages, weights, strict=True)):
        if isinstance(stage, Add):
            if i > 0:
                raise ValueError("chain: an Add must be the first stage")
            want: list[tuple[int, ...]] = [(H,)]
            given = first.shape[1:] == residual.shape
        else:
            if stage.kind not in KINDS:
                raise ValueError(f"chain: stage {i} has kind {stage.kind!r}, not one of {KINDS}")
            if stage.kind == "add" and stage.rows != H:
                raise ValueError(f"chain: stage {i} adds {stage.rows} channels to {H}")
            want = [(stage.rows, stage.width), *([(H,)] if stage.kind == "add" else [])]
            given = (first.shape[1] if i == 0 else width) == stage.width
        if not given:
            raise ValueError(f"chain: the input of stage {i} does not fit {stage}")
        if [w.shape[1:] for w in own] != want:
            raise ValueError(f"chain: stage {i} wants stacks of {want}, not {own}")
        width = H if adds(stage) else stage.outputs  # type: ignore[union-attr]
    if layers.shape != (sum(map(len, weights)),):
        raise ValueError(f"chain: {layers.shape} layer indices for {sum(map(len, weights))} stacks")


def unfit(
    stages: Sequence[Product | Add], first: Any, residual: Any, weights: Sequence[Sequence[Any]]
) -> str | None:
    """Why the kernel cannot be built for such arguments, or None."""
    H, rows = residual.shape
    arrays = [residual, *(stack for own in weights for stack in own)]
    arrays += [] if isinstance(stages[0], Add) else [first]
    for array in arrays:
        if array.dtype != jnp.bfloat16:
            return f"dtype is {array.dtype}, not bfloat16"
    if rows != ROWS:
        return f"there are {rows} rows, not {ROWS}"
    if H % TILE or H > MOST_HIDDEN:
        return f"the residual stream of {H} is not a multiple of {TILE} up to {MOST_HIDDEN}"
    for stage in stages:
        if not isinstance(stage, Product):
            continue
        if stage.width % stage.step:
            return f"width {stage.width} is not a multiple of {stage.step}"
        if stage.outputs < TILE or stage.outputs % 8:
            return f"{stage.outputs} outputs are not a multiple of 8 from {TILE} on"
    return None


def unavailable(
    dtype: Any, widths: Iterable[int], *, hidden: int = TILE, outputs: Iterable[int] = ()
) -> str | None:
    """Why chains with these sizes cannot run here, or None.

    Args:
      dtype: of activations and weights.
      widths: K of the products.
      hidden: channels of the residual stream.
      outputs: of the products.
    """
    if (missing := not_hopper()) is not None:
        return missing
    if dtype != jnp.bfloat16:
        return f"dtype is {dtype}, not bfloat16"
    if bad := sorted(width for width in widths if width % (2 * HALF)):
        return f"widths {bad} are not multiples of {2 * HALF}"
    if hidden % TILE or hidden > MOST_HIDDEN:
        return f"the residual stream of {hidden} is not a multiple of {TILE} up to {MOST_HIDDEN}"
    odd = sorted(n for n in outputs if n < TILE or n % 8)
    return f"outputs {odd} are not multiples of 8 from {TILE} on" if odd else None


def _least(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _most(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
