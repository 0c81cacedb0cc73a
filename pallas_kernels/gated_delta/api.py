"""Public functions of the gated delta rule."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import NO_KERNEL_YET, Implementation, pick
from pallas_kernels.gated_delta import reference


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
    """The gated delta rule over T tokens in chunks of 64 or 32, continuing from `state`.

    Args:
      q, k, v, g, beta: as in `gated_delta_step`, with a token axis.
      state: float32 state before the first token.
      lengths: valid tokens of each row, 0..T; later columns leave the state unchanged.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      float32 outputs (meaningless past a row's length), and the float32 state after `lengths` tokens.
    """
    pick("gated_delta_chunked", implementation, pallas_unavailable=NO_KERNEL_YET)
    return reference.chunked(q, k, v, g, beta, state, lengths)
