"""The gated delta rule in plain JAX, everything in float32 (Yang et al., arXiv:2412.06464; model_math section 3.2).

Per value head the state M [dk, dv] follows, token by token,

    M <- exp(g) M;   M <- M + k (beta (v - k^T M))^T;   o = q^T M

The chunked form computes the same for 64 tokens at a time: inside a chunk the corrections form a unit lower
triangular system, between chunks only the state is carried.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 64
_L2_EPS = 1e-6
_EXACT = jax.lax.Precision.HIGHEST


def _l2_normalised(x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.sum(jnp.square(x32), axis=-1, keepdims=True) + _L2_EPS)


def _query(q: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    return _l2_normalised(q) * q.shape[-1] ** -0.5


def step(
    q: Float[Array, "B nk dk"],
    k: Float[Array, "B nk dk"],
    v: Float[Array, "B nv dv"],
    g: Float[Array, "B nv"],
    beta: Float[Array, "B nv"],
    state: Float[Array, "B nv dk dv"],
) -> tuple[Float[Array, "B nv dv"], Float[Array, "B nv dk dv"]]:
    """See `api.gated_delta_step`."""
    r = v.shape[1] // k.shape[1]
    q32 = jnp.repeat(_query(q), r, axis=1)
    k32 = jnp.repeat(_l2_normalised(k), r, axis=1)
    decayed = state * jnp.exp(g)[:, :, None, None]
    # Products summed over dk rather than matrix products: one row's result cannot depend on the number of rows.
    recalled = jnp.sum(k32[:, :, :, None] * decayed, axis=2)
    delta = beta[:, :, None] * (v.astype(jnp.float32) - recalled)
    new_state = decayed + k32[:, :, :, None] * delta[:, :, None, :]
    return jnp.sum(q32[:, :, :, None] * new_state, axis=2), new_state


def _differences(g: Float[Array, "*n C"]) -> Float[Array, "*n C C"]:
    """`sum(g[j+1..i])` at [i, j], for i >= j.

    A plain difference of running sums loses the digits of a small decay behind a large one, so the sums run over a
    coarse part, a multiple of 2^-8 whose sums are exact in float32, and a remainder that stays small.
    """
    g = jnp.maximum(g, -1000.0)  # exp(-1000) is 0, and the coarse sums stay below 2^16
    coarse = jnp.round(g * 256.0) / 256.0
    parts = [jnp.cumsum(part, axis=-1) for part in (coarse, g - coarse)]
    high, low = (part[..., :, None] - part[..., None, :] for part in parts)
    return high + low


def _inverse_unit_lower(a: Float[Array, "*n C C"]) -> Float[Array, "*n C C"]:
    """Inverse of I + A for strictly lower triangular A, by matrix products alone.

    Diagonal blocks of 8 by the product (I - A)(I + A^2)(I + A^4), which is short enough to stay accurate even for equal
    keys, where entries of the powers grow like binomials; then blocks are merged in pairs,
    [[P, 0], [R, Q]]^-1 = [[P', 0], [-Q' R P', Q']].
    """
    size = 8

    def times(x: Array, y: Array) -> Array:
        return jnp.matmul(x, y, precision=_EXACT)

    def tiles(below: int) -> Array:
        """Every block of the given size that stands `below` (0 or 1) blocks under the diagonal, in steps of a pair."""
        starts = range(below * size, CHUNK, (1 + below) * size)
        return jnp.stack(
            [a[..., i : i + size, i - below * size : i + size - below * size] for i in starts],
            axis=-3,
        )

    block = tiles(below=0)
    eye = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), block.shape)
    second = times(block, block)
    inverse = times(times(eye - block, eye + second), eye + times(second, second))
    while size < CHUNK:
        first, last = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -times(last, times(tiles(below=1), first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, last], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def chunked(
    q: Float[Array, "B T nk dk"],
    k: Float[Array, "B T nk dk"],
    v: Float[Array, "B T nv dv"],
    g: Float[Array, "B T nv"],
    beta: Float[Array, "B T nv"],
    state: Float[Array, "B nv dk dv"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T nv dv"], Float[Array, "B nv dk dv"]]:
    """See `api.gated_delta_chunked`."""
    B, T, nk, _ = q.shape
    nv, dv = v.shape[2], v.shape[3]
    r = nv // nk
    n = -(-T // CHUNK)

    # A token past the row's length writes nothing and decays nothing.
    valid = jnp.arange(T, dtype=lengths.dtype)[None, :, None] < lengths[:, None, None]
    g = jnp.where(valid, g, 0.0)
    beta = jnp.where(valid, beta, 0.0)

    def chunks(x: Float[Array, "B T heads *d"]) -> Float[Array, "n B heads C *d"]:
        x = jnp.pad(x, [(0, 0), (0, n * CHUNK - T)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(B, n, CHUNK, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)

    def per_value_head(x: Float[Array, "n B nk *d"]) -> Float[Array, "n B nv *d"]:
        return jnp.repeat(x, r, axis=2)

    qc, kc = chunks(_query(q)), chunks(_l2_normalised(k))
    vc, bc = chunks(v.astype(jnp.float32)), chunks(beta)[..., None]
    gc = chunks(g)

    row = jnp.arange(CHUNK)
    lower = row[:, None] >= row[None, :]
    strict = (row[:, None] > row[None, :])[None, None, None]
    # Masked before the exponential: above the diagonal it may overflow, which would make gradients NaN.
    decay = jnp.exp(jnp.where(lower[None, None, None], _differences(gc), -jnp.inf))
    c = jnp.cumsum(gc, axis=-1)
    kk = per_value_head(jnp.einsum("nbhid,nbhjd->nbhij", kc, kc, precision=_EXACT))
    qk = per_value_head(jnp.einsum("nbhid,nbhjd->nbhij", qc, kc, precision=_EXACT)) * decay
    system = jnp.where(strict, bc * kk * decay, 0.0)
    qv, kv = per_value_head(qc), per_value_head(kc)
    rhs = jnp.concatenate([bc * vc, bc * kv * jnp.exp(c)[..., None]], axis=-1)
    solved = jnp.matmul(_inverse_unit_lower(system), rhs, precision=_EXACT)
    u, w = solved[..., :dv], solved[..., dv:]
    q_in = qv * jnp.exp(c)[..., None]
    k_out = kv * decay[..., -1, :, None]
    keep = jnp.exp(c[..., -1])[..., None, None]

    def one_chunk(M: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        u, w, q_in, qk, k_out, keep = x
        fresh = u - jnp.matmul(w, M, precision=_EXACT)
        out = jnp.matmul(q_in, M, precision=_EXACT) + jnp.matmul(qk, fresh, precision=_EXACT)
        M = keep * M + jnp.matmul(jnp.swapaxes(k_out, -1, -2), fresh, precision=_EXACT)
        return M, out

    state, out = jax.lax.scan(one_chunk, state, (u, w, q_in, qk, k_out, keep))
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3).reshape(B, n * CHUNK, nv, dv)
    return out[:, :T], state
