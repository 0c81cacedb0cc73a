"""Public functions of the gated delta rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import NO_KERNEL_YET, Implementation, takes_kernel
from pallas_kernels.gated_delta import (
    chunk_kernel,
    decode_kernel,
    kernel_parts,
    reference,
    verify_kernel,
)
from pallas_kernels.gated_delta.reference import Records

_MOST_TOKENS = 16


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
    takes_kernel("gated_delta_step", implementation, NO_KERNEL_YET)
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
    if takes_kernel("gated_delta_chunked", implementation, reason):
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
    if takes_kernel("gated_delta_chunked", implementation, reason):
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


def gated_delta_decode(
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
    implementation: Implementation = None,
) -> Float[Array, "R val"]:
    """Everything between the input and output projections of a Gated DeltaNet layer, for one token of each row.

    `causal_conv`, gates, `gated_delta_step` and `gated_rms_norm` in one pass over the state (model_math section 3.2).

    Args:
      projected: the fused input projection: raw q, k, v (C = 2 nk dk + nv dv channels together), the gate z (nv dv),
        nv of b (write strength before the sigmoid), nv of a; M = C + nv dv + 2 nv. R >= B: rows past the B of
        `read_slots` are ignored, and mean nothing in the result.
      conv: filters of the short convolution of all G layers; tap K-1 meets the current token.
      dt_bias, a_log: float32 gate parameters of all layers.
      norm: float32 weight of the gated norm of all layers.
      layer: int32 index of this layer.
      window: `jax.Ref` of [S, G, K-1, C], the last raw inputs of the convolution, oldest first; written in place.
      recurrent: `jax.Ref` of float32 [S, G, nv, dk, dv], the states; written in place.
      read_slots: where each row's state and window come from.
      write_slots: where they go; distinct, except that rows that do not run have slot 0. No row may read a slot that
        another row writes. A slot that is only read stays as it is.
      continues: False (or 0) for a row at its first token, which starts from zeros. int32 spares a conversion.
      eps: of the gated norm.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      The input of the output projection, in `projected`'s dtype. Rows whose write slot is 0 give zeros and write
      nothing. Rows are independent of each other bit for bit.

    Raises:
      NotImplementedError: "pallas" was asked for and cannot run here.
    """
    kernel = takes_kernel(
        "gated_delta_decode",
        implementation,
        kernel_parts.unavailable(projected, conv, window, recurrent),
    )
    run: Callable[..., Any] = decode_kernel.gated_delta_decode if kernel else reference.decode
    return run(
        projected,
        conv,
        dt_bias,
        a_log,
        norm,
        layer,
        window,
        recurrent,
        read_slots,
        write_slots,
        continues,
        eps=eps,
    )


def gated_delta_verify(
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
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T val"], Records]:
    """`gated_delta_decode` for T consecutive tokens of each row of which only some will count.

    Args:
      projected: as in `gated_delta_decode`, with a token axis and no spare rows; T up to 16.
      conv, dt_bias, a_log, norm, layer, read_slots, continues: as in `gated_delta_decode`.
      window, recurrent: the pools, as arrays or `jax.Ref`s; only read.
      eps: of the gated norm.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      The input of the output projection, and what `gated_delta_commit` needs to advance the state by any number of the
      tokens. The window after n of them is the last K-1 of the old window followed by the first n raw inputs.

    Raises:
      NotImplementedError: "pallas" was asked for and cannot run here.
    """
    reason = kernel_parts.unavailable(projected, conv, window, recurrent)
    if projected.shape[1] > _MOST_TOKENS:
        reason = reason or f"it takes at most {_MOST_TOKENS} tokens a row, not {projected.shape[1]}"
    kernel = takes_kernel("gated_delta_verify", implementation, reason)
    run: Callable[..., Any] = verify_kernel.gated_delta_verify if kernel else reference.verify
    return run(
        projected,
        conv,
        dt_bias,
        a_log,
        norm,
        layer,
        window,
        recurrent,
        read_slots,
        continues,
        eps=eps,
    )


def gated_delta_commit(
    state: Float[Array, "B nv dk dv"], records: Records, accepted: Int[Array, " B"]
) -> Float[Array, "B nv dk dv"]:
    """The state after the first `accepted` of the tokens that `gated_delta_verify` saw.

    Args:
      state: float32 state that the verification started from, zeros where a row did not continue.
      records: of the verification.
      accepted: tokens that count, 0..T a row.

    Returns:
      The float32 state; what `accepted` decode steps give, up to rounding.
    """
    return reference.commit(state, records, accepted)
