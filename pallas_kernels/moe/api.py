"""Public functions of the routed experts."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import NO_KERNEL_YET, Implementation, takes_kernel
from pallas_kernels.moe import many, reference


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
    takes_kernel("routed_experts", implementation, NO_KERNEL_YET)
    n, k = experts.shape
    form = reference.form(n, k, gate_up.shape[0])
    return form(x, weights, experts, gate_up, down)


def sparse_layer(
    x: Float[Array, "n H"],
    router: Float[Array, "M E H"],
    shared_gate: Float[Array, "M 1 H"],
    experts_gate_up: Float[Array, "M E two_i H"],
    experts_down: Float[Array, "M E H i"],
    shared_gate_up: Float[Array, "M two_is H"],
    shared_down: Float[Array, "M H is"],
    layer: Int[Array, ""] | int,
    *,
    top_k: int,
    normalise: bool,
    implementation: Implementation = None,
) -> Float[Array, "n H"]:
    """One sparse feed-forward layer: router, routed experts, and the shared expert under its gate.

    `routed_experts(x, *route(x @ router.T)) + sigmoid(x @ shared_gate.T) * shared(x)`, with the weights of all M layers
    given whole, so that a loop over layers copies none of them.

    Args:
      x: activations.
      router, shared_gate, experts_gate_up, experts_down, shared_gate_up, shared_down: weights of all layers; gate rows
        come before up rows.
      layer: which layer, may be traced.
      top_k, normalise: see `route`.
      implementation: None takes "pallas" (more than `reference.GATHER_TOKENS` tokens on a Hopper GPU, see
        `many.unavailable`) or else "reference". A decode step of few tokens has them in its chain
        (`decode_chain.Experts`).

    Returns:
      Like `x`. Up to `reference.GATHER_TOKENS` tokens a row does not depend on the other rows bit for bit.

    Raises:
      NotImplementedError: "pallas" was asked for and cannot run.
      ValueError: the name is unknown.
    """
    weights, experts = route(reference.linear(x, router[layer]), top_k=top_k, normalise=normalise)
    why_not = many.unavailable(x, experts_down)
    if takes_kernel("sparse_layer", implementation, why_not):
        stacks = experts_gate_up, experts_down
        routed = many.experts_of_many(x, weights, experts, *stacks, jnp.asarray(layer, jnp.int32))
    elif reference.form(len(x), top_k, experts_down.shape[1]) is reference.gathered:
        # Out of the whole stack, of which nothing else is read.
        flat = [w.reshape(-1, *w.shape[2:]) for w in (experts_gate_up, experts_down)]
        experts = experts + layer * experts_down.shape[1]
        routed = reference.gathered(x, weights, experts, *flat)
    else:
        routed = routed_experts(x, weights, experts, experts_gate_up[layer], experts_down[layer])
    shared = (shared_gate[layer], shared_gate_up[layer], shared_down[layer])
    return routed + reference.shared_expert(x, *shared)
