"""Public functions of the routed experts."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import NO_KERNEL_YET, Implementation, pick
from pallas_kernels.moe import reference


def route(
    logits: Float[Array, "n E"], *, top_k: int, normalise: bool
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """Choose experts: softmax over all experts in float32, then the k largest (ties: lower id first).

    Args:
      logits: router logits in the activation dtype.
      top_k: experts a token.
      normalise: scale the k weights to sum 1.

    Returns:
      Weights in the activation dtype, and expert ids.
    """
    return reference.route(logits, top_k, normalise)


def routed_experts(
    x: Float[Array, "n H"],
    weights: Float[Array, "n k"],
    experts: Int[Array, "n k"],
    gate_up: Float[Array, "E two_i H"],
    down: Float[Array, "E H i"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "n H"]:
    """`sum_k weight_k * down_k(silu(gate_k x) * up_k x)`.

    Args:
      x: activations.
      weights, experts: from `route`.
      gate_up: first half of the rows gate, second half up.
      down: output projections.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      Like `x`. Up to `reference.GATHER_TOKENS` tokens a row does not depend on the other rows bit for bit.
    """
    pick("routed_experts", implementation, pallas_unavailable=NO_KERNEL_YET)
    if x.shape[0] <= reference.GATHER_TOKENS:
        form = reference.gathered
    elif gate_up.shape[0] <= reference.DENSE_RATIO * experts.shape[1]:
        form = reference.all_experts
    else:
        form = reference.sorted_blocks
    return form(x, weights, experts, gate_up, down)
