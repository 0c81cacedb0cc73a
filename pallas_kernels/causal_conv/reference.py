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
    total, carried = jax.lax.platform_dependent(
        x, weight, window.astype(x.dtype), lengths, cpu=_in_one_array, default=_apart
    )
    y = total.astype(x.dtype)
    # silu, ending in the division: XLA does not repeat one in each reader of the result, as it would the sums above.
    y = y / (1.0 + jnp.exp(-jnp.maximum(y, -80.0)))
    return y, carried.astype(window.dtype)


def _in_one_array(x: Array, weight: Array, window: Array, lengths: Array) -> tuple[Array, Array]:
    """The convolution in float32 and the window after it, of the inputs behind the window in one array."""
    inputs = jnp.concatenate([window, x], axis=1)
    total = jnp.zeros(x.shape, jnp.float32)
    for j in range(weight.shape[1]):
        total += inputs[:, j : j + x.shape[1]].astype(jnp.float32) * _tap(weight, j, x)
    last = lengths[:, None] + jnp.arange(window.shape[1], dtype=lengths.dtype)[None, :]
    return total, jnp.take_along_axis(inputs, last[:, :, None], axis=1)


def _apart(x: Array, weight: Array, window: Array, lengths: Array) -> tuple[Array, Array]:
    """`_in_one_array` without that array, which XLA for GPUs makes slowly: what the window adds to the first W tokens,
    and the inputs shifted by padding. On CPU this would cost a copy of the pool that the window is a part of."""
    T, W = x.shape[1], window.shape[1]
    total = jnp.zeros(window.shape, jnp.float32)
    for j in range(W):
        part = window[:, j:].astype(jnp.float32) * _tap(weight, j, window[:, j:])
        total += jax.lax.pad(part, jnp.float32(0), _tokens(0, j))
    total = jax.lax.pad(total, jnp.float32(0), _tokens(0, T - W))
    for j in range(W + 1):
        shifted = jax.lax.pad(x, jnp.zeros((), x.dtype), _tokens(W - j, j - W))
        total += shifted.astype(jnp.float32) * _tap(weight, j, x)
    last = lengths[:, None] + jnp.arange(-W, 0, dtype=lengths.dtype)[None, :]
    carried = jnp.where(
        (last >= 0)[:, :, None],
        jnp.take_along_axis(x, jnp.maximum(last, 0)[:, :, None], axis=1),
        jnp.take_along_axis(window, jnp.minimum(last + W, W - 1)[:, :, None], axis=1),
    )
    return total, carried


def _tokens(before: int, after: int) -> tuple[tuple[int, int, int], ...]:
    """Padding of the tokens, none of rows and channels."""
    return ((0, 0, 0), (before, after, 0), (0, 0, 0))


def _tap(weight: Float[Array, "C K"], j: int, like: Float[Array, "B T C"]) -> Array:
    return jax.lax.broadcast_in_dim(weight[:, j].astype(jnp.float32), like.shape, (2,))
