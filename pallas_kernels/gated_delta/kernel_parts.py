"""What the decode and verification kernels of Gated DeltaNet share: checks, register layouts, the maths of a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import not_hopper
from pallas_kernels.mosaic import read

D = 128
"""dk = dv of every published model."""
TAPS = 4
COLUMNS = 64
"""Columns of dv a warpgroup works on; decides in which order it sums over dk."""
MOST_PARTS = 8
"""Blocks of the largest cluster that every Hopper device takes."""
_L2_EPS = 1e-6


def unavailable(projected: Any, conv: Any, window: Any, recurrent: Any) -> str | None:
    """Why the kernel cannot run on these arguments and the default device, or None."""
    return unsupported(projected, conv, window, recurrent) or not_hopper()


def unsupported(projected: Any, conv: Any, window: Any, recurrent: Any) -> str | None:
    """Why the kernel cannot be built for arguments of these shapes and dtypes, or None."""
    if not projected.dtype == conv.dtype == window.dtype == jnp.bfloat16:
        return "it takes bfloat16 activations, filters and windows"
    if recurrent.dtype != jnp.float32:
        return f"it takes a float32 state, not {recurrent.dtype}"
    nv, dk, dv = recurrent.shape[-3:]
    if (dk, dv) != (D, D):
        return f"it takes heads of {D} channels, not {dk} and {dv}"
    if conv.shape[2] != TAPS:
        return f"it takes a convolution of {TAPS} taps, not {conv.shape[2]}"
    nk = (conv.shape[1] - nv * D) // (2 * D)
    if nk < 1 or nv % nk or nv // nk > MOST_PARTS:
        return f"it takes 1 to {MOST_PARTS} value heads a key head, not {nv} / {nk}"
    if nv % 2:  # loads of 8 bytes need rows that start at a multiple of them
        return f"it takes an even number of value heads, not {nv}"
    return None


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Register layouts for a state tile of [128, columns], and loads into them.

    A warp has a quarter of the columns, a thread 4 of them in every (32 / across)th row: a sum over rows never leaves
    the warp, and a row of a warp's columns is contiguous in memory. A sum over columns would cross warps, through
    shared memory that all warpgroups of a block have in common: only one of them may take it.

    interpret: the interpreter knows no layouts, and plain reads only.
    """

    columns: int = COLUMNS
    interpret: Any = False

    @property
    def tile(self) -> Any:
        across = self.columns // 16
        down = 32 // across
        return plgpu.Layout.TILED(
            plgpu.Tiling(((down, self.columns), (down, 4 * across), (4,))),
            warp_dims=(-4,),
            lane_dims=(-3, -2),
            vector_dim=-1,
        )

    @property
    def down(self) -> Any:
        """One value a row of the tile."""
        return self.tile.reduce(1)

    @property
    def across(self) -> Any:
        """One value a column of the tile."""
        return self.tile.reduce(0)

    @property
    def taps(self) -> Any:
        """A [128, 4] tile, one row a thread."""
        return plgpu.Layout.TILED(
            plgpu.Tiling(((D, TAPS), (32, TAPS))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
        )

    @property
    def channel(self) -> Any:
        """A [128] vector, one element a thread."""
        return self.taps.reduce(1)

    def everywhere(self, size: int = D) -> Any:
        """A vector that every warp holds whole."""
        return plgpu.Layout.TILED(
            plgpu.Tiling(((size,), (size // 32,))),
            warp_dims=(plgpu.Replicated(4),),
            lane_dims=(-2,),
            vector_dim=-1,
        )

    def cast(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def load(self, ref: Any, layout: Any) -> jax.Array:
        if self.interpret:
            return ref[...]
        return read(ref, layout)

    def spread(self, x: jax.Array) -> jax.Array:
        """A scalar as one float32 a column."""
        return self.cast(jnp.broadcast_to(x.astype(jnp.float32), (self.columns,)), self.across)

    def by_column(self, x: jax.Array) -> jax.Array:
        return jax.lax.broadcast_in_dim(x, (D, self.columns), (1,))

    def by_row(self, x: jax.Array) -> jax.Array:
        return jax.lax.broadcast_in_dim(x, (D, self.columns), (0,))

    def filters(self, weights: jax.Array) -> list[jax.Array]:
        """Loaded filters [128, 4] as one float32 vector a tap."""
        tap = self.cast(jax.lax.broadcasted_iota(jnp.int32, (D, TAPS), 1), self.taps)
        weights = weights.astype(jnp.float32)
        return [jnp.sum(jnp.where(tap == j, weights, 0.0), axis=1) for j in range(TAPS)]


def rounded(x: jax.Array) -> jax.Array:
    """To bfloat16 and back."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def short_conv(inputs: list[jax.Array], filters: list[jax.Array]) -> jax.Array:
    """The convolution's value at the last input, rounded as `causal_conv` does, in float32."""
    total = jnp.zeros(inputs[0].shape, jnp.float32)
    for x, weight in zip(inputs, filters, strict=True):
        total += x.astype(jnp.float32) * weight
    y = rounded(total)
    return rounded(y / (1.0 + jnp.exp(-jnp.maximum(y, -80.0))))


def softplus(x: jax.Array) -> jax.Array:
    """`log(1 + exp(x))`, accurate where the result is small, as log1p is."""
    u = jnp.exp(jnp.minimum(x, -x))
    one_plus = 1.0 + u
    exact = one_plus == 1.0
    log1p = jnp.log(one_plus) * (u / jnp.where(exact, 1.0, one_plus - 1.0))
    return jnp.maximum(x, 0.0) + jnp.where(exact, u, log1p)


def gates(
    b: jax.Array, a: jax.Array, bias: jax.Array, log_rate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Write strength beta and decay exp(g)."""
    beta = rounded(1.0 / (1.0 + jnp.exp(-b)))
    return beta, jnp.exp(-jnp.exp(log_rate) * softplus(a + bias))


def unit(x: jax.Array) -> jax.Array:
    """The L2-normalised vector."""
    return x * jax.lax.rsqrt(jnp.broadcast_to(jnp.sum(x * x), x.shape) + _L2_EPS)


def delta_step(
    layouts: Layouts,
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    decay: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token on a tile of the state; q and k unit vectors, q scaled.

    Returns:
      The new state, the output, and delta (what was written along k).
    """
    decayed = state * layouts.by_column(decay)
    recalled = jnp.sum(layouts.by_row(k) * decayed, axis=0)
    queried = jnp.sum(layouts.by_row(q) * decayed, axis=0)
    delta = beta * (v - recalled)
    new = decayed + layouts.by_row(k) * layouts.by_column(delta)
    # q^T (M + k delta^T) = q^T M + (q . k) delta: no second pass over the state.
    return new, queried + jnp.broadcast_to(jnp.sum(q * k), v.shape) * delta, delta


def gated_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`gated_rms_norm` of one head."""
    mean = jnp.broadcast_to(jnp.sum(x * x), x.shape) * (1.0 / D)
    normed = rounded(x * jax.lax.rsqrt(mean + eps))
    gate = gate.astype(jnp.float32)
    return (normed * weight * (gate / (1.0 + jnp.exp(-gate)))).astype(jnp.bfloat16)
