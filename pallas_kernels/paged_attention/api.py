"""Public functions of paged attention.

A pool plane is one array [A, X, K, P, D]: attention layer, page, KV head, token in page, channel. That is the
page-major order of KV-06 (fastest axis first: D, P, K, X) with the layers outermost. Page 0 is the null page: rows
that do not run, and columns past a row's length, write there.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import NO_KERNEL_YET, Implementation, pick
from pallas_kernels.paged_attention import prefill_kernel, reference


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
    pick("append_kv", implementation, pallas_unavailable=NO_KERNEL_YET)
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
      implementation: see `pallas_kernels.dispatch`. "pallas" is for chunks of a prefill (`prefill_kernel.unavailable`
        says when it can run), and has no derivative: name "reference" to differentiate on a GPU.

    Returns:
      Like `q`. Softmax in float32. Queries past a row's length are meaningless; a row of length 0 is finite. The
      result of a row does not depend on the other rows, nor on the physical order of its pages.
    """
    args = (q, k_pages, v_pages, layer, block_tables, starts, lengths, scale)
    why_not = prefill_kernel.unavailable(q, k_pages)
    if why_not is None and implementation in (None, "pallas"):
        return prefill_kernel.paged_attention(*args)
    pick("paged_attention", implementation, pallas_unavailable=why_not or "")
    return reference.paged_attention(*args)
