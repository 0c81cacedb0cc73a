"""RMS norms in float32, as the checkpoints define them (model_math section 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def _normalised(x: Float[Array, "*n d"], eps: float) -> Float[Array, "*n d"]:
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)


def _along_last(weight: Float[Array, " d"], like: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    return jax.lax.broadcast_in_dim(weight, like.shape, (like.ndim - 1,))


def rms_norm(
    x: Float[Array, "*n d"], weight: Float[Array, " d"], eps: float
) -> Float[Array, "*n d"]:
    """`x / sqrt(mean(x^2) + eps) * (1 + weight)` in float32, cast to x's dtype at the end."""
    scale = 1.0 + weight.astype(jnp.float32)
    return (_normalised(x, eps) * _along_last(scale, x)).astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*n heads d"],
    gate: Float[Array, "*n heads d"],
    weight: Float[Array, " d"],
    eps: float,
) -> Float[Array, "*n heads d"]:
    """Plain-weight RMS norm, then times `silu(gate)`.

    The normalised value is rounded to the gate's dtype before the weight is applied, as the checkpoints were trained.
    """
    normed = _normalised(x, eps).astype(gate.dtype).astype(jnp.float32)
    # The heads in one axis, the weight repeated by a gather: a product usually reads the result so, and XLA's CPU
    # backend vectorises no loop over such an axis that takes its index modulo d.
    d = x.shape[-1]
    joined = (*x.shape[:-2], x.shape[-2] * d)
    repeated = weight.astype(jnp.float32)[jnp.arange(joined[-1]) % d]
    gate32 = gate.reshape(joined).astype(jnp.float32)
    out = normed.reshape(joined) * _along_last(repeated, gate32) * jax.nn.silu(gate32)
    return out.reshape(x.shape).astype(gate.dtype)
