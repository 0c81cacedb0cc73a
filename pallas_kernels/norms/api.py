"""Public functions of the norms."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.dispatch import NO_KERNEL_YET, Implementation, takes_kernel
from pallas_kernels.norms import reference


def rms_norm(
    x: Float[Array, "*n d"],
    weight: Float[Array, " d"],
    *,
    eps: float,
    implementation: Implementation = None,
) -> Float[Array, "*n d"]:
    """Zero-centred RMS norm: `x / sqrt(mean(x^2) + eps) * (1 + weight)` over the last axis, computed in float32.

    Args:
      x: activations, float32 or bfloat16.
      weight: any float dtype; 0 means "scale by one".
      eps: added to the mean square.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      An array like `x`.
    """
    takes_kernel("rms_norm", implementation, NO_KERNEL_YET)
    return reference.rms_norm(x, weight, eps)


def gated_rms_norm(
    x: Float[Array, "*n d"],
    gate: Float[Array, "*n d"],
    weight: Float[Array, " d"],
    *,
    eps: float,
    implementation: Implementation = None,
) -> Float[Array, "*n d"]:
    """RMS norm of `x` with a plain weight, then times `silu(gate)`; norm first, gate second.

    Args:
      x: output of the recurrence, any float dtype.
      gate: pre-activation of the gate; its dtype is the result's dtype.
      weight: one weight vector for all heads.
      eps: added to the mean square.
      implementation: see `pallas_kernels.dispatch`.
    """
    takes_kernel("gated_rms_norm", implementation, NO_KERNEL_YET)
    return reference.gated_rms_norm(x, gate, weight, eps)
