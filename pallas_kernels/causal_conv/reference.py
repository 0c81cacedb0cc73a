"""Causal depthwise convolution in plain JAX (model_math section 3.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def causal_conv(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C K"],
    window: Float[Array, "B W C"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
    """See `api.causal_conv`."""
    B, T, C = x.shape
    W = weight.shape[1] - 1
    taps = [weight[:, j].astype(jnp.float32) for j in range(W + 1)]
    old = window.astype(x.dtype)
    # Oldest inputs first. What the window adds is known for W tokens alone and padded, and so are the shifted inputs:
    # inputs that follow a window in one array would be copied there, or be looked up one by one.
    total = jnp.zeros((B, W, C), jnp.float32)
    for j in range(W):
        total += jnp.pad(old[:, j:].astype(jnp.float32) * _along(taps[j], old[:, j:]), _rows(0, j))
    total = jax.lax.pad(total, jnp.float32(0), _rows(0, T - W, 0))
    for j, tap in enumerate(taps):
        shifted = jax.lax.pad(x, jnp.zeros((), x.dtype), _rows(W - j, j - W, 0))
        total += shifted.astype(jnp.float32) * _along(tap, x)
    y = total.astype(x.dtype)
    # silu, ending in the division: XLA does not repeat one in each reader of the result, as it would the sums above.
    y = y / (1.0 + jnp.exp(-jnp.maximum(y, -80.0)))
    last = lengths[:, None] + jnp.arange(-W, 0, dtype=lengths.dtype)[None, :]
    carried = jnp.where(
        (last >= 0)[:, :, None],
        jnp.take_along_axis(x, jnp.maximum(last, 0)[:, :, None], axis=1),
        jnp.take_along_axis(old, jnp.minimum(last + W, W - 1)[:, :, None], axis=1),
    )
    return y, carried.astype(window.dtype)


def _rows(*padding: int) -> tuple[tuple[int, ...], ...]:
    """`padding` of the tokens, none of rows and channels."""
    none = (0,) * len(padding)
    return (none, padding, none)


def _along(tap: Float[Array, " C"], like: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
    return jax.lax.broadcast_in_dim(tap, like.shape, (2,))
