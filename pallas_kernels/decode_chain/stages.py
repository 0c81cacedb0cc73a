"""What a chain is made of, and the arithmetic of how its kernel shares the work.

A product has tiles of 64 outputs, and a tile `steps` steps along K. All steps, tile after tile, are cut into equal
runs, one a thread block. The block that computes a tile's first step owns it: it sums what the others computed of the
tile and writes the result. Since runs are contiguous, those others are the next blocks, and the tile is the first thing
in each of their runs, so that they give their part before they wait for anybody: nobody waits in a circle.

Experts are cut otherwise, as the cuts of their work must not depend on how many experts the rows chose: sums over cuts
would differ in their last bits (see `Experts`).

Methods that take a tile or a block take Python integers and traced ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from pallas_kernels.dispatch import multiprocessors

ROWS = 8
"""Rows that a chain computes; those that mean nothing may hold anything."""
TILE = 64
HALF = 128
"""A step reads two pieces of [64, 128] weights: neighbours along K, or the gate's rows and the up projection's."""
MOST_HIDDEN = 128 * TILE
"""Channels of the residual stream: its sums of squares have 128 rows."""
MOST_CHOSEN = 11
"""Experts a row: their lists have this room in shared memory beside the ring."""
KINDS = ("rows", "swiglu", "add")


class _Cut:
    """Tiles of `steps` steps, laid end to end: step s belongs to tile s // steps."""

    steps: Any

    def tiles_of(self, begin: Any, end: Any) -> tuple[Any, Any]:
        """First tile of the steps from `begin` to before `end`, and the one past their last."""
        return begin // self.steps, (end + self.steps - 1) // self.steps

    def part(self, tile: Any, begin: Any, end: Any) -> tuple[Any, Any]:
        """Those of the steps from `begin` to before `end` that belong to a tile."""
        low, high = tile * self.steps, (tile + 1) * self.steps
        return _most(begin, low), _least(end, high)


@dataclass(frozen=True)
class Product(_Cut):
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
        """First step of a block and the one past its last."""
        run, total = self.run(blocks), self.tiles * self.steps
        return _least(block * run, total), _least((block + 1) * run, total)

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
class Norm:
    """The RMS norm of the residual stream as it comes; only the first stage."""

    eps: float


@dataclass(frozen=True)
class Experts:
    """A sparse feed-forward layer on the normed stream: routed experts and a shared one, added like "add" does.

    The chosen experts are listed in slots, the shared expert first and the others by rising id, so a row sums its own
    experts in one order whatever its neighbours chose: what the others add to it is exact zeros.

    1. Router: a block computes parts of the logits of 8 experts; then every block lists the slots for itself
       (`choice`). The shared expert's gate goes with the router, in a group of 8 of its own.
    2. hidden = share * silu(gate) * up: a block owns 8 gate and 8 up rows of every `ways`-th slot, and stacks up to 8
       slots of them into the 64 rows of a `wgmma`.
    3. down @ hidden: a block owns 64 outputs and 128 columns of the experts' width, and runs over all slots (`Down`).

    Args:
      experts, hidden, width, top_k: routed experts, channels of the stream, width of every expert, experts a row.
      normalise: the shares of the chosen experts add up to 1.
      eps: of the norm after the layer.

    Its stacks are router [L, experts, hidden], shared gate [L, 8, hidden] (of which the first row counts), gate and up
    [L, experts, 2 * width, hidden], down [L, experts, hidden, width], the shared expert's [L, 2 * width, hidden] and
    [L, hidden, width], and the norm [L, hidden].
    """

    experts: int
    hidden: int
    width: int
    top_k: int
    normalise: bool
    eps: float

    @property
    def slots(self) -> int:
        """Most slots: the shared expert and `top_k` of each row."""
        return 1 + ROWS * self.top_k

    @property
    def parts(self) -> int:
        """Parts that `Down` cuts the experts' width into."""
        return self.width // HALF

    @property
    def router_groups(self) -> int:
        """Groups of 8 rows of the router and of the shared gate."""
        return self.experts // ROWS + 1

    @property
    def groups(self) -> int:
        """Groups of 8 channels of the experts' width."""
        return self.width // ROWS

    def splits(self, blocks: int) -> int:
        """Parts of K that the router is cut into, a block each; 0 where blocks are too few."""
        steps = self.hidden // (2 * HALF)
        fitting = (n for n in (4, 2, 1) if n * self.router_groups <= blocks and steps % n == 0)
        return next(fitting, 0)

    def ways(self, blocks: int) -> int:
        """Blocks that share the slots of a group of channels; 0 where blocks are too few."""
        return blocks // self.groups

    def down(self, slots: Any) -> Down:
        """The last product, for so many slots in use."""
        return Down(self.hidden, self.parts, (slots + 1) // 2)

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """Shapes of its stacks, but for the layers and the norm."""
        E, H, width = self.experts, self.hidden, self.width
        return [
            (E, H),
            (ROWS, H),
            (E, 2 * width, H),
            (E, H, width),
            (2 * width, H),
            (H, width),
        ]


@dataclass(frozen=True)
class Down(_Cut):
    """How the down projections of a sparse layer are cut; the same whatever the number of slots.

    A block has one tile, for 128 columns of every expert's width; a step takes two slots. Blocks with the other columns
    come next and give their parts to the first one.
    """

    hidden: int
    parts: int
    steps: Any

    kind: ClassVar[str] = "add"
    pieces: ClassVar[int] = 1

    @property
    def tiles(self) -> int:
        return self.hidden // TILE

    def span(self, block: Any, blocks: int) -> tuple[Any, Any]:
        """First step of a block and the one past its last."""
        tile = _least(block // self.parts, self.tiles)
        return tile * self.steps, _least((tile + 1) * self.steps, self.tiles * self.steps)

    def owner(self, tile: Any, blocks: int) -> Any:
        """Block that computes a tile's first part."""
        return tile * self.parts

    def sharers(self, tile: Any, blocks: int) -> Any:
        """How many blocks after the owner compute parts of a tile."""
        return self.parts - 1

    def most_sharers(self, blocks: int) -> int:
        return self.parts - 1

    def row(self, tile: Any) -> Any:
        """First output of a tile."""
        return tile * TILE


Stage = Norm | Product | Experts


def normed(stage: Stage) -> bool:
    """Whether the stage leaves the stream and its norm; others leave a result."""
    return not isinstance(stage, Product) or stage.kind == "add"


def stacks_of(stage: Stage, hidden: int) -> list[tuple[int, ...]]:
    """Shapes of a stage's stacks beside a stream of so many channels, but for the layers."""
    if isinstance(stage, Product):
        own: list[tuple[int, ...]] = [(stage.rows, stage.width)]
    else:
        own = stage.stacks if isinstance(stage, Experts) else []
    return [*own, (hidden,)] if normed(stage) else own


def check(
    stages: Sequence[Stage],
    first: Any,
    residual: Any,
    weights: Sequence[Sequence[Any]],
    layers: Any,
    running: Any,
) -> None:
    """Raise ValueError where the arguments of a chain do not go together."""
    H, width = residual.shape[0], None if first is None else first.shape[1]
    if len(stages) != len(weights):
        raise ValueError(f"chain: {len(stages)} stages but weights of {len(weights)}")
    for i, (stage, own) in enumerate(zip(stages, weights, strict=True)):
        if isinstance(stage, Norm):
            if i > 0:
                raise ValueError("chain: a Norm must be the first stage")
            given = first is None
        elif isinstance(stage, Experts):
            if i == 0 or not normed(stages[i - 1]):
                raise ValueError("chain: Experts follow a stage that leaves the normed stream")
            if any(isinstance(s, Experts) for s in stages[:i]):
                raise ValueError("chain: there can be one stage of Experts")
            rows = (residual.shape[1:], jnp.int32)
            if running is None or (running.shape, running.dtype) != rows:
                raise ValueError("chain: Experts want to know which rows run, an int32 for each")
            given = stage.hidden == H
        else:
            if stage.kind not in KINDS:
                raise ValueError(f"chain: stage {i} has kind {stage.kind!r}, not one of {KINDS}")
            if stage.kind == "add" and stage.rows != H:
                raise ValueError(f"chain: stage {i} adds {stage.rows} channels to {H}")
            given = width == stage.width
        if not given:
            raise ValueError(f"chain: the input of stage {i} does not fit {stage}")
        if [w.shape[1:] for w in own] != (want := stacks_of(stage, H)):
            raise ValueError(f"chain: stage {i} wants stacks of {want}, not {own}")
        width = stage.outputs if isinstance(stage, Product) and not normed(stage) else H
    if normed(stages[-1]):
        raise ValueError("chain: the last stage must be a product that leaves a result")
    if layers.shape != (sum(map(len, weights)),):
        raise ValueError(f"chain: {layers.shape} layer indices for {sum(map(len, weights))} stacks")


def unfit(stages: Iterable[Stage], hidden: int, rows: int, dtypes: Iterable[Any]) -> str | None:
    """Why the kernel cannot be built for such stages, or None.

    Args:
      hidden, rows: sizes of the residual stream.
      dtypes: of the stream and the weights.
    """
    for dtype in dtypes:
        if dtype != jnp.bfloat16:
            return f"dtype is {dtype}, not bfloat16"
    if rows != ROWS:
        return f"there are {rows} rows, not {ROWS}"
    if hidden % TILE or hidden > MOST_HIDDEN:
        return f"the residual stream of {hidden} is not a multiple of {TILE} up to {MOST_HIDDEN}"
    for stage in stages:
        if isinstance(stage, Experts) and (why := unfit_experts(stage, multiprocessors())):
            return why
        if not isinstance(stage, Product):
            continue
        if stage.width % stage.step:
            return f"width {stage.width} is not a multiple of {stage.step}"
        if stage.outputs < TILE or stage.outputs % 8:
            return f"{stage.outputs} outputs are not a multiple of 8 from {TILE} on"
    return None


def unfit_experts(stage: Experts, blocks: int) -> str | None:
    """Why the kernel cannot compute such experts with so many blocks, or None."""
    E, H, width, k = stage.experts, stage.hidden, stage.width, stage.top_k
    if E % 32 or E > 1024:
        return f"{E} experts are not a multiple of 32 up to 1024"
    most = min(MOST_CHOSEN, E)
    if not 1 <= k <= most:
        return f"{k} experts a row are not 1 to {most}"
    if width % HALF:
        return f"experts of width {width} are not a multiple of {HALF}"
    if H % (2 * HALF):
        return f"experts beside {H} channels, which are not a multiple of {2 * HALF}"
    needed = max(stage.parts * H // TILE, stage.groups, stage.router_groups)
    if needed > blocks:
        return f"{E} experts of [{H}, {width}] need {needed} multiprocessors, not {blocks}"
    return None


def _least(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _most(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
