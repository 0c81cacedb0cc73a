"""The gated delta rule in plain JAX, everything in float32 (Yang et al., arXiv:2412.06464; model_math section 3.2).

Per value head the state M [dk, dv] follows, token by token,

    M <- exp(g) M;   M <- M + k (beta (v - k^T M))^T;   o = q^T M

The chunked form computes the same for 64 tokens at a time (32 for small heads): inside a chunk the corrections form a
unit lower triangular system, between chunks only the state is carried.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.causal_conv.reference import causal_conv
from pallas_kernels.norms.reference import gated_rms_norm

_L2_EPS = 1e-6
_EXACT = jax.lax.Precision.HIGHEST


def chunk_length(dk: int, tokens: int) -> int:
    """Tokens of a chunk: a power of two from 8 on, no longer than it takes to hold all tokens.

    What a chunk computes within itself grows with its length, what the state takes with dk.
    """
    longest = 32 if dk <= 32 else 64
    return next(C for C in (8, 16, 32, 64) if tokens <= C or longest == C)


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


def _running_sums(g: Float[Array, "*n C"]) -> tuple[Float[Array, "*n C"], Float[Array, "*n C"]]:
    """Running sums of g as a coarse part, exact in float32 (multiples of 2^-8), and a small remainder.

    Differences of the two parts keep the digits of a small decay behind a large one; those of a plain sum do not.
    """
    g = jnp.maximum(g, -1000.0)  # exp(-1000) is 0, and the coarse sums stay below 2^16
    coarse = jnp.round(g * 256.0) / 256.0
    ones = jnp.triu(jnp.ones((g.shape[-1], g.shape[-1]), g.dtype))
    return (
        jnp.matmul(coarse, ones, precision=_EXACT),
        jnp.matmul(g - coarse, ones, precision=_EXACT),
    )


@jax.custom_jvp
def _inverse_unit_lower(a: Float[Array, "*n C C"]) -> Float[Array, "*n C C"]:
    """Inverse of I + A for strictly lower triangular A, by matrix products alone.

    Diagonal blocks of 8 by the product (I - A)(I + A^2)(I + A^4), which is short enough to stay accurate even for equal
    keys, where entries of the powers grow like binomials; then blocks are merged in pairs,
    [[P, 0], [R, Q]]^-1 = [[P', 0], [-Q' R P', Q']].
    """
    size, whole = 8, a.shape[-1]

    def times(x: Array, y: Array) -> Array:
        return jnp.matmul(x, y, precision=_EXACT)

    def tiles(below: int) -> Array:
        """Every block of the given size that stands `below` (0 or 1) blocks under the diagonal, in steps of a pair."""
        starts = range(below * size, whole, (1 + below) * size)
        return jnp.stack(
            [a[..., i : i + size, i - below * size : i + size - below * size] for i in starts],
            axis=-3,
        )

    block = tiles(below=0)
    eye = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), block.shape)
    second = times(block, block)
    inverse = times(times(eye - block, eye + second), eye + times(second, second))
    while size < whole:
        first, last = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -times(last, times(tiles(below=1), first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, last], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


@_inverse_unit_lower.defjvp
def _inverse_unit_lower_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """`d(I + A)^-1 = -(I + A)^-1 dA (I + A)^-1`: two products, where the steps above would give dozens."""
    inverse = _inverse_unit_lower(*primals)
    right = jnp.matmul(tangents[0], inverse, precision=_EXACT)
    return inverse, -jnp.matmul(inverse, right, precision=_EXACT)


def chunked(
    q: Float[Array, "B T nk dk"],
    k: Float[Array, "B T nk dk"],
    v: Float[Array, "B T nv dv"],
    g: Float[Array, "B T nv"],
    beta: Float[Array, "B T nv"],
    state: Float[Array, "B nv dk dv"],
    lengths: Int[Array, " B"],
    *,
    boundaries: bool = False,
) -> tuple[
    Float[Array, "B T nv dv"], Float[Array, "B nv dk dv"], Float[Array, "B n nv dk dv"] | None
]:
    """See `api.gated_delta_chunked`; third come the states after each chunk, if `boundaries`."""
    B, T, nk, dk = q.shape
    nv, dv = v.shape[2], v.shape[3]
    r = nv // nk
    C = chunk_length(dk, T)
    n = -(-T // C)

    # A token past the row's length writes nothing and decays nothing.
    valid = jnp.arange(T, dtype=lengths.dtype)[None, :, None] < lengths[:, None, None]
    g = jnp.where(valid, g, 0.0)
    beta = jnp.where(valid, beta, 0.0)

    def chunks(x: Float[Array, "B T heads *d"]) -> Float[Array, "n B heads C *d"]:
        x = jnp.pad(x, [(0, 0), (0, n * C - T)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(B, n, C, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)

    def per_value_head(x: Float[Array, "n B nk *d"]) -> Float[Array, "n B nv *d"]:
        return jnp.repeat(x, r, axis=2)

    qc, kc = chunks(_query(q)), chunks(_l2_normalised(k))
    vc, bc = chunks(v.astype(jnp.float32)), chunks(beta)[..., None]
    gc = chunks(g)

    row = jnp.arange(C)
    lower = row[:, None] >= row[None, :]
    strict = (row[:, None] > row[None, :])[None, None, None]
    coarse, fine = _running_sums(gc)
    between = (coarse[..., :, None] - coarse[..., None, :]) + (
        fine[..., :, None] - fine[..., None, :]
    )
    # Masked before the exponential: above the diagonal it may overflow, which would make gradients NaN.
    decay = jnp.exp(jnp.where(lower[None, None, None], between, -jnp.inf))
    c = coarse + fine
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

    # What reads the state, and what reads the chunk's fresh values, each as one product.
    reads_state = jnp.concatenate([w, q_in], axis=-2)
    reads_fresh = jnp.concatenate([qk, jnp.swapaxes(k_out, -1, -2)], axis=-2)

    def one_chunk(M: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array | None]]:
        u, reads_state, reads_fresh, keep = x
        recalled = jnp.matmul(reads_state, M, precision=_EXACT)
        fresh = u - recalled[..., :C, :]
        read = jnp.matmul(reads_fresh, fresh, precision=_EXACT)
        M = keep * M + read[..., C:, :]
        return M, (recalled[..., C:, :] + read[..., :C, :], M if boundaries else None)

    state, (out, after) = jax.lax.scan(one_chunk, state, (u, reads_state, reads_fresh, keep))
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3).reshape(B, n * C, nv, dv)
    return out[:, :T], state, None if after is None else jnp.moveaxis(after, 0, 1)


class Records(NamedTuple):
    """What T tokens did to a state, small enough to keep until it is known how many of them count."""

    k: Float[Array, "B T nk dk"]
    """float32 unit keys."""
    delta: Float[Array, "B T nv dv"]
    """float32: what each token wrote along its key."""
    decay: Float[Array, "B T nv"]
    """float32 factor of the state before the write."""


def verify(
    projected: Float[Array, "B T M"],
    conv: Float[Array, "G C K"],
    dt_bias: Float[Array, "G nv"],
    a_log: Float[Array, "G nv"],
    norm: Float[Array, "G dv"],
    layer: Int[Array, ""],
    window: Any,
    recurrent: Any,
    read_slots: Int[Array, " B"],
    continues: Bool[Array, " B"] | Int[Array, " B"],
    *,
    eps: float,
) -> tuple[Float[Array, "B T val"], Records]:
    """See `api.gated_delta_verify`."""
    B, T, C = *projected.shape[:2], conv.shape[1]
    nv, dk, dv = recurrent.shape[2:]
    qkv, z, b, a = _split(projected, C, nv, dv)
    nk = (C - nv * dv) // (2 * dk)
    kept = continues.astype(bool)
    old_window = jnp.where(kept[:, None, None], window[...][read_slots, layer], 0)
    state = jnp.where(kept[:, None, None, None], recurrent[...][read_slots, layer], 0)
    y, _ = causal_conv(qkv, conv[layer], old_window, jnp.full((B,), T, jnp.int32))
    q, k, v = jnp.split(y, [nk * dk, 2 * nk * dk], axis=-1)
    q, k, v = q.reshape(B, T, nk, dk), k.reshape(B, T, nk, dk), v.reshape(B, T, nv, dv)
    beta = jax.nn.sigmoid(b).astype(jnp.float32)
    step_size = jax.nn.softplus(a.astype(jnp.float32) + dt_bias[layer][None, None])
    g = -jnp.exp(a_log[layer])[None, None] * step_size
    unit = _l2_normalised(k)

    def token(state: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        q, k, v, g, beta, unit = x
        decayed = state * jnp.exp(g)[:, :, None, None]
        wide = jnp.repeat(unit, nv // nk, axis=1)
        recalled = jnp.sum(wide[:, :, :, None] * decayed, axis=2)
        delta = beta[:, :, None] * (v.astype(jnp.float32) - recalled)
        o, state = step(q, k, v, g, beta, state)
        return state, (o, delta)

    by_token = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, unit)]
    _, (o, delta) = jax.lax.scan(token, state, tuple(by_token))
    o, delta = jnp.moveaxis(o, 0, 1), jnp.moveaxis(delta, 0, 1)
    out = gated_rms_norm(o, z.reshape(B, T, nv, dv), norm[layer], eps)
    return out.reshape(B, T, nv * dv), Records(unit, delta, jnp.exp(g))


def commit(
    state: Float[Array, "B nv dk dv"], records: Records, accepted: Int[Array, " B"]
) -> Float[Array, "B nv dk dv"]:
    """See `api.gated_delta_commit`."""
    T = records.k.shape[1]
    r = state.shape[1] // records.k.shape[2]
    # Token by token as the step does it; XLA makes one pass over the state of it.
    for t in range(T):
        taken = (t < accepted)[:, None]
        k = jnp.repeat(records.k[:, t], r, axis=1)
        decay = jnp.where(taken, records.decay[:, t], 1.0)
        delta = jnp.where(taken[:, :, None], records.delta[:, t], 0.0)
        state = state * decay[:, :, None, None] + k[:, :, :, None] * delta[:, :, None, :]
    return state


def decode(
    projected: Float[Array, "R M"],
    conv: Float[Array, "G C K"],
    dt_bias: Float[Array, "G nv"],
    a_log: Float[Array, "G nv"],
    norm: Float[Array, "G dv"],
    layer: Int[Array, ""],
    window: Any,
    recurrent: Any,
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    continues: Bool[Array, " B"] | Int[Array, " B"],
    *,
    eps: float,
) -> Float[Array, "R val"]:
    """See `api.gated_delta_decode`."""
    B, C, rows = read_slots.shape[0], conv.shape[1], projected.shape[0]
    slots, _, nv, dk, dv = recurrent.shape
    qkv, z, b, a = _split(projected[:B], C, nv, dv)
    nk = (C - nv * dv) // (2 * dk)
    windows, states = window[...], recurrent[...]
    kept = continues.astype(bool)
    old_window = jnp.where(kept[:, None, None], windows[read_slots, layer], 0)
    old_state = jnp.where(kept[:, None, None, None], states[read_slots, layer], 0)
    ones = jnp.ones((B,), jnp.int32)
    y, new_window = causal_conv(qkv[:, None], conv[layer], old_window, ones)
    q, k, v = jnp.split(y[:, 0], [nk * dk, 2 * nk * dk], axis=-1)
    beta = jax.nn.sigmoid(b).astype(jnp.float32)
    g = -jnp.exp(a_log[layer])[None] * jax.nn.softplus(a.astype(jnp.float32) + dt_bias[layer][None])
    heads = (q.reshape(B, nk, dk), k.reshape(B, nk, dk), v.reshape(B, nv, dv))
    o, new_state = step(*heads, g, beta, old_state)
    out = gated_rms_norm(o, z.reshape(B, nv, dv), norm[layer], eps)
    # A row that does not run writes past the pool, which drops it.
    target = jnp.where(write_slots == 0, slots, write_slots)
    window[...] = windows.at[target, layer].set(new_window, mode="drop")
    recurrent[...] = states.at[target, layer].set(new_state, mode="drop")
    out = jnp.where(write_slots[:, None] == 0, 0, out.reshape(B, nv * dv))
    return jnp.pad(out, ((0, rows - B), (0, 0)))


def _split(projected: Float[Array, "*n M"], C: int, nv: int, dv: int) -> list[Array]:
    """The raw q, k, v together, then z, b and a."""
    return jnp.split(projected, [C, C + nv * dv, C + nv * dv + nv], axis=-1)
