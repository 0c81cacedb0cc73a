"""Public function of the causal convolution."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.causal_conv import reference
from pallas_kernels.dispatch import NO_KERNEL_YET, Implementation, takes_kernel


def causal_conv(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C K"],
    window: Float[Array, "B W C"],
    lengths: Int[Array, " B"],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
    """`y_t = silu(sum_j weight[:, j] * x_{t-K+1+j})` per channel, continuing from the last inputs of earlier chunks.

    Args:
      x: raw inputs of this chunk; columns at or past a row's length are ignored by the carried window.
      weight: one filter of K taps a channel; tap K-1 meets the current token.
      window: the last W = K - 1 raw inputs before the chunk, oldest first; zeros at the start of a sequence.
      lengths: valid tokens of each row, 0..T.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      y like `x` (values past a row's length are meaningless), and the window after `lengths` tokens.
    """
    takes_kernel("causal_conv", implementation, NO_KERNEL_YET)
    return reference.causal_conv(x, weight, window, lengths)
