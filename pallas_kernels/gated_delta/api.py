"""Public functions of the gated delta rule."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import NO_KERNEL_YET, Implementation, pick
from pallas_kernels.gated_delta import chunk_kernel, reference


def gated_delta_step(
    q: Float[Array, "B nk dk"],
    k: Float[Array, "B nk dk"],
    v: Float[Array, "B nv dv"],
    g: Float[Array, "B nv"],
    beta: Float[Array, "B nv"],
    state: Float[Array, "B nv dk dv"],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B nv dv"], Float[Array, "B nv dk dv"]]:
    """One token of the gated delta rule for each row.

    Args:
      q, k: raw queries and keys; the op applies the L2 norm (eps 1e-6) and q's dk^-0.5. Value head h uses key head
        h // (nv / nk).
      v: values.
      g: float32 log decay, <= 0.
      beta: float32 write strength, 0..1.
      state: float32 state before the token.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      float32 outputs, and the float32 state after the token. Rows are independent of each other bit for bit.
    """
    pick("gated_delta_step", implementation, pallas_unavailable=NO_KERNEL_YET)
    return reference.step(q, k, v, g, beta, state)


def gated_delta_chunked(
    q: Float[Array, "B T nk dk"],
    k: Float[Array, "B T nk dk"],
    v: Float[Array, "B T nv dv"],
    g: Float[Array, "B T nv"],
    beta: Float[Array, "B T nv"],
    state: Float[Array, "B nv dk dv"],
    lengths: Int[Array, " B"],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T nv dv"], Float[Array, "B nv dk dv"]]:
    """The gated delta rule over T tokens in chunks of 64 or fewer, continuing from `state`.

    "pallas" (`chunk_kernel`) takes bfloat16 q, k, v with heads of 128 channels, on compute capability 9.0. Its products
    have bfloat16 operands and float32 sums: outputs and states are within 1e-2 of exact arithmetic (relative norm; 4e-3
    and 3e-3 measured), where the reference is exact in float32.

    Args:
      q, k, v, g, beta: as in `gated_delta_step`, with a token axis.
      state: float32 state before the first token.
      lengths: int32 valid tokens of each row, 0..T; later columns leave the state unchanged.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      Outputs (meaningless but finite past a row's length), float32 from the reference and in v's dtype from the kernel;
      and the float32 state after `lengths` tokens. Rows are independent of each other bit for bit in the kernel.

    Raises:
      NotImplementedError: "pallas" was asked for and cannot run here.
    """
    reason = chunk_kernel.unavailable(q, state, nk=k.shape[2])
    if _takes_kernel("gated_delta_chunked", implementation, reason):
        out, state, _ = chunk_kernel.chunked(q, k, v, g, beta, state, lengths, nk=k.shape[2])
    else:
        out, state, _ = reference.chunked(q, k, v, g, beta, state, lengths)
    return out, state


def gated_delta_chunked_fused(
    qkv: Float[Array, "B T C"],
    g: Float[Array, "B T nv"],
    beta: Float[Array, "B T nv"],
    state: Float[Array, "B nv dk dv"],
    lengths: Int[Array, " B"],
    *,
    boundaries: bool = False,
    implementation: Implementation = None,
) -> tuple[
    Float[Array, "B T nv dv"], Float[Array, "B nv dk dv"], Float[Array, "B n nv dk dv"] | None
]:
    """`gated_delta_chunked` on q, k and v as they lie side by side after the convolution, which spares a copy of each.

    Args:
      qkv: nk dk queries, nk dk keys, then nv dv values of each token.
      g, beta, state, lengths, implementation: as in `gated_delta_chunked`.
      boundaries: also return the states inside: index i is the float32 state after the first
        min(C (i + 1), lengths) tokens, where C is `boundary_tokens(dk, T)`.

    Returns:
      Outputs and final state as in `gated_delta_chunked`, and the states at chunk boundaries or None.

    Raises:
      NotImplementedError: "pallas" was asked for and cannot run here.
    """
    B, T, channels = qkv.shape
    nv, dk, dv = state.shape[1:]
    nk = (channels - nv * dv) // (2 * dk)
    reason = chunk_kernel.unavailable(qkv, state, nk=nk)
    if _takes_kernel("gated_delta_chunked_fused", implementation, reason):
        heads = qkv.reshape(B, T, 2 * nk + nv, dk)
        first = (0, nk, 2 * nk)
        return chunk_kernel.chunked(
            heads, heads, heads, g, beta, state, lengths, nk=nk, first=first, boundaries=boundaries
        )
    q, k, v = (
        x.reshape(B, T, -1, d)
        for x, d in zip(jnp.split(qkv, [nk * dk, 2 * nk * dk], axis=-1), (dk, dk, dv), strict=True)
    )
    return reference.chunked(q, k, v, g, beta, state, lengths, boundaries=boundaries)


def boundary_tokens(dk: int, tokens: int) -> int:
    """Tokens between the states that `gated_delta_chunked_fused` returns: 64 for heads of 128 and T > 32.

    The kernel always has 64, which for T <= 32 is one boundary at the end, as in the reference.
    """
    return reference.chunk_length(dk, tokens)


def _takes_kernel(op: str, implementation: Implementation, reason: str | None) -> bool:
    if implementation is None:
        return reason is None
    if implementation == "pallas" and reason is None:
        return True
    pick(op, implementation, pallas_unavailable=str(reason))
    return False
