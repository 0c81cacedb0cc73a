"""Paged attention in plain JAX: a few pages at a time with an online softmax, so that work follows the real context."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.norms import rms_norm

_EXACT = jax.lax.Precision.HIGHEST
_PAGES_PER_STEP = 4
"""Pages that one step of the loop reads: fewer steps, and products large enough to be worth launching."""
_MASKED = -1e30
_LOWEST_PEAK = -1e20
"""Far over `_MASKED`, so that the weight of a masked key is exactly zero, and under any score."""


def append_kv(
    pages: Float[Array, "A X K P D"],
    new: Float[Array, "B T K D"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B L"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> Float[Array, "A X K P D"]:
    """See `api.append_kv`."""
    T, P = new.shape[1], pages.shape[3]
    column = jnp.arange(T, dtype=starts.dtype)[None, :]
    position = starts[:, None] + column
    page = jnp.take_along_axis(block_tables, position // P, axis=1, mode="clip")
    page = jnp.where(column < lengths[:, None], page, 0)
    return pages.at[layer, page, :, position % P].set(new.astype(pages.dtype))


def paged_attention(
    q: Float[Array, "B T N D"],
    k_pages: Float[Array, "A X K P D"],
    v_pages: Float[Array, "A X K P D"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B L"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    scale: float,
) -> Float[Array, "B T N D"]:
    """See `api.paged_attention`."""
    B, T, N, D = q.shape
    K, P = k_pages.shape[2], k_pages.shape[3]
    G = N // K
    # The G query heads of a KV head and the T queries make the rows of one product.
    grouped = jnp.moveaxis(q.reshape(B, T, K, G, D), 1, 3).reshape(B, K, G * T, D)
    position = starts[:, None] + jnp.arange(T, dtype=starts.dtype)[None, :]

    # The table is padded with the null page; nothing there is ever in sight of a query.
    steps = -(-block_tables.shape[1] // _PAGES_PER_STEP)
    padding = steps * _PAGES_PER_STEP - block_tables.shape[1]
    tables = jnp.pad(block_tables, [(0, 0), (0, padding)]).reshape(B, steps, _PAGES_PER_STEP)
    span = _PAGES_PER_STEP * P

    def read(pages: Array, page: Array) -> Array:
        return jnp.swapaxes(pages[layer, page], 1, 2).reshape(B, K, span, D)

    def one_step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, out = carry
        page = jax.lax.dynamic_index_in_dim(tables, j, axis=1, keepdims=False)
        k, v = read(k_pages, page), read(v_pages, page)
        key = j * span + jnp.arange(span, dtype=starts.dtype)
        # What stands where no token is yet may be NaN of another request, and a weight of zero would not hide it.
        held = key[None] < (starts + lengths)[:, None]
        v = jnp.where(held[:, None, :, None], v, jnp.zeros((), v.dtype))
        scores = jnp.einsum(
            "bkrd,bksd->bkrs", grouped, k, precision=_EXACT, preferred_element_type=jnp.float32
        ).reshape(B, K, G, T, span)
        visible = (key[None, None, :] <= position[:, :, None]) & held[:, None]
        scores = jnp.where(visible[:, None, None], scores * scale, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        shrink = jnp.exp(peak - new_peak)
        weight = jnp.exp(scores - new_peak[..., None])
        total = total * shrink + jnp.sum(weight, axis=-1)
        value = jnp.einsum(
            "bkrs,bksd->bkrd",
            weight.reshape(B, K, G * T, span).astype(v.dtype),
            v,
            precision=_EXACT,
            preferred_element_type=jnp.float32,
        )
        return new_peak, total, out * shrink[..., None] + value.reshape(B, K, G, T, D)

    rows = (B, K, G, T)
    empty = (
        jnp.full(rows, _LOWEST_PEAK, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, D), jnp.float32),
    )
    used = jnp.max(starts + lengths)
    _, total, out = jax.lax.fori_loop(0, (used + span - 1) // span, one_step, empty)
    # A row without any key (inactive rows) yields zeros, not NaN.
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(B, T, N, D).astype(q.dtype)


def attention_decode(
    qkv: Float[Array, "R M"],
    q_norm: Float[Array, "A D"],
    k_norm: Float[Array, "A D"],
    cos: Float[Array, "B half"],
    sin: Float[Array, "B half"],
    k_pages: Any,
    v_pages: Any,
    layer: Int[Array, ""],
    block_tables: Int[Array, "B L"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    eps: float,
) -> Float[Array, "R N_D"]:
    """See `api.attention_decode`."""
    B, rows = starts.shape[0], qkv.shape[0]
    qkv = qkv[:B]
    M = qkv.shape[1]
    K, D = k_pages.shape[2], k_pages.shape[4]
    N = (M // D - 2 * K) // 2
    q_gate, k, v = jnp.split(qkv, [2 * N * D, (2 * N + K) * D], axis=-1)
    q, gate = jnp.split(q_gate.reshape(B, 1, N, 2 * D), 2, axis=-1)
    q = _rope(rms_norm(q, q_norm[layer], eps=eps), cos, sin)
    k = _rope(rms_norm(k.reshape(B, 1, K, D), k_norm[layer], eps=eps), cos, sin)
    where = (layer, block_tables, starts, lengths)
    k_pages[...] = append_kv(k_pages[...], k, *where)
    v_pages[...] = append_kv(v_pages[...], v.reshape(B, 1, K, D), *where)
    out = paged_attention(q, k_pages[...], v_pages[...], *where, scale)
    out = out * jax.nn.sigmoid(gate)
    # Rows that do not run have attended to the null page, or to nothing.
    out = jnp.where(lengths[:, None] > 0, out.reshape(B, N * D), jnp.zeros((), out.dtype))
    return jnp.pad(out, ((0, rows - B), (0, 0)))


def _rope(x: Array, cos: Array, sin: Array) -> Array:
    """x [B, 1, n, D]; tables [B, half]."""
    half = cos.shape[-1]
    cos, sin = (a[:, None, None].astype(x.dtype) for a in (cos, sin))
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
