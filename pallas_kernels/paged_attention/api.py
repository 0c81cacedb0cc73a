"""Public functions of paged attention.

A pool plane is one array [A, X, K, P, D]: attention layer, page, KV head, token in page, channel. That is the
page-major order of KV-06 (fastest axis first: D, P, K, X) with the layers outermost. Page 0 is the null page: rows
that do not run, and columns past a row's length, write there.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import NO_KERNEL_YET, Implementation, takes_kernel
from pallas_kernels.paged_attention import decode_kernel, prefill_kernel, reference


def append_kv(
    pages: Float[Array, "A X K P D"],
    new: Float[Array, "B T K D"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B L"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "A X K P D"]:
    """Write T new keys (or values) of each row into its pages (KV-08).

    Args:
      pages: one plane of the pool.
      new: keys after norm and rope, or raw values.
      layer: index of the attention layer.
      block_tables: physical page of each logical block (KV-24); any order.
      starts: position of each row's first new token.
      lengths: valid new tokens of each row, 0..T; the others go to the null page.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      The plane with the new columns; in place where the caller donates it.
    """
    takes_kernel("append_kv", implementation, NO_KERNEL_YET)
    return reference.append_kv(pages, new, layer, block_tables, starts, lengths)


def paged_attention(
    q: Float[Array, "B T N D"],
    k_pages: Float[Array, "A X K P D"],
    v_pages: Float[Array, "A X K P D"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B L"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    implementation: Implementation = None,
) -> Float[Array, "B T N D"]:
    """Causal attention of T queries a row against everything in the row's pages up to the query's own position.

    Args:
      q: queries after norm and rope; query t of row b stands at position `starts[b] + t`. Query head h reads KV
        head h // (N / K).
      k_pages, v_pages: the planes, the new tokens already appended.
      layer, block_tables, starts, lengths: as in `append_kv`.
      scale: factor of the scores.
      implementation: see `pallas_kernels.dispatch`. "pallas" is one kernel for few queries (decode, verification) and
        one for chunks of a prefill; they have no derivative: name "reference" to differentiate on a GPU.

    Returns:
      Like `q`. Softmax in float32. Queries past a row's length are meaningless; a row of length 0 is finite. The
      result of a row does not depend on the other rows, nor on the physical order of its pages.
    """
    few = decode_kernel.unavailable(
        rows=q.shape[0],
        tokens=q.shape[1],
        heads=q.shape[2],
        dtype=q.dtype,
        k_pages=k_pages,
        block_tables=block_tables,
    )
    many = prefill_kernel.unavailable(q, k_pages)
    args = (q, k_pages, v_pages, layer, block_tables, starts, lengths)
    if few is None and takes_kernel("paged_attention", implementation, few):
        return decode_kernel.paged_attention(*args, scale=scale)
    if takes_kernel("paged_attention", implementation, many and f"{few}; {many}"):
        return prefill_kernel.paged_attention(*args, scale)
    return reference.paged_attention(*args, scale)


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
    implementation: Implementation = None,
) -> Float[Array, "R N_D"]:
    """All of gated full attention between its two projections, for one new token a row (model_math section 3.1).

    Norm and rope of queries and keys, the write of key and value into the row's page, attention over the row's pages,
    and the product with the sigmoid of the gate. Rounds where `layers.full_attention` does.

    Args:
      qkv: the fused projection: per query head its D channels and the D channels of its gate, then K keys, then K
        values; M = (2 N + 2 K) D. R >= B: rows past the B of the others are ignored, and mean nothing in the result.
      q_norm, k_norm: zero-centred RMS norm weights of all attention layers.
      cos, sin: float32 rope tables of the new tokens; the first 2 * half channels turn, pairs (j, j + half).
      k_pages, v_pages: `jax.Ref`s of the planes [A, X, K, P, D]; they change in place.
      layer: index into the weights and the planes.
      block_tables: as in `append_kv`.
      starts: position of each row's new token.
      lengths: 1, or 0 for a row that does not run: it yields zeros and changes no page but the null page.
      scale: factor of the scores.
      eps: of the norms.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      Like `qkv`, [R, N * D], ready for the output projection. A row's result does not depend on the other rows, nor
      on the physical order of its pages.
    """
    K, D = k_pages.shape[2], k_pages.shape[4]
    why_not = decode_kernel.unavailable(
        rows=starts.shape[0],
        tokens=1,
        heads=(qkv.shape[1] // D - 2 * K) // 2,
        dtype=qkv.dtype,
        k_pages=k_pages,
        block_tables=block_tables,
    )
    if why_not is None and 2 * cos.shape[1] != decode_kernel.ROTARY:
        why_not = f"the decode kernel turns {decode_kernel.ROTARY} channels, not {2 * cos.shape[1]}"
    args = (
        qkv, q_norm, k_norm, cos, sin, k_pages, v_pages, layer, block_tables, starts, lengths,
    )  # fmt: skip
    if takes_kernel("attention_decode", implementation, why_not):
        return decode_kernel.attention_decode(*args, scale=scale, eps=eps)
    return reference.attention_decode(*args, scale=scale, eps=eps)
