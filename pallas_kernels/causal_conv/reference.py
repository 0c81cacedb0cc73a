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
    tokens, taps = x.shape[1], weight.shape[1]
    inputs = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for j in range(taps):
        tap = jax.lax.broadcast_in_dim(weight[:, j].astype(jnp.float32), x.shape, (2,))
        total += inputs[:, j : j + tokens].astype(jnp.float32) * tap
    y = total.astype(x.dtype)
    # silu, ending in the division: XLA does not repeat one in each reader of the result, as it would the sums above.
    y = y / (1.0 + jnp.exp(-jnp.maximum(y, -80.0)))
    last = lengths[:, None] + jnp.arange(taps - 1, dtype=lengths.dtype)[None, :]
    carried = jnp.take_along_axis(inputs, last[:, :, None], axis=1)
    return y, carried.astype(window.dtype)
