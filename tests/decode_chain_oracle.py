"""Chains as the model defines them: the norm before the product, no rounding in between."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_chain import Experts, Norm
from pallas_kernels.decode_chain.stages import normed


def float64(x):
    return np.asarray(np.asarray(x, np.float32), np.float64)


def experts_oracle(stage, x, weights, running, product, xp, rounded):
    """What a sparse layer adds for [rows, H]; only rows that run choose."""
    router, gate, gate_up, down, shared_gate_up, shared_down = weights

    def gated(x, gate_up, down):
        gate, up = xp.split(product(x, gate_up), 2, axis=1)
        return product(gate / (1 + xp.exp(-gate)) * up, down)

    # Logits are rounded to bfloat16 as the model does: a near tie decides which expert is chosen.
    logits = np.asarray(product(x, router), np.float32)
    if rounded:
        logits = np.asarray(jnp.asarray(logits).astype(jnp.bfloat16), np.float32)
    logits = logits.astype(np.float64)
    out = np.zeros(x.shape)
    opened = 1 / (1 + np.exp(-np.asarray(product(x, gate[:1]), np.float64)))
    used = np.flatnonzero(running)
    out[used] = (opened * np.asarray(gated(x, shared_gate_up, shared_down), np.float64))[used]
    for row in used.tolist():
        chosen = np.argsort(-logits[row], kind="stable")[: stage.top_k]
        shares = np.exp(logits[row, chosen] - logits[row, chosen[0]])
        total = (
            shares.sum() if stage.normalise else np.exp(logits[row] - logits[row, chosen[0]]).sum()
        )
        for e, share in zip(chosen.tolist(), (shares / total).tolist(), strict=True):
            out[row] += (
                share * np.asarray(gated(x[row : row + 1], gate_up[e], down[e]), np.float64)[0]
            )
    return xp.asarray(out)


def chain_oracle(
    stages,
    first,
    residual,
    weights,
    layers,
    running=None,
    number=float64,
    product=lambda x, w: x @ w.T,
    xp=np,
):
    """(result, residual stream [H, 8]) after a chain.

    number: from a device array to what is computed with.
    """
    layers = iter(np.asarray(layers).tolist())
    x, stream = None if first is None else number(first), number(residual).T
    for stage, own in zip(stages, weights, strict=True):
        of_layer = [number(stack[next(layers)]) for stack in own]
        if isinstance(stage, Experts):
            rounded = own[0].dtype == jnp.bfloat16
            total = experts_oracle(stage, x, of_layer[:-1], running, product, xp, rounded)
        else:
            total = 0 if isinstance(stage, Norm) else product(x, of_layer[0])
        if normed(stage):
            stream = stream + total
            rms = xp.sqrt((stream * stream).mean(axis=1, keepdims=True) + stage.eps)
            x = stream / rms * (1 + of_layer[-1][None])
        elif stage.kind == "swiglu":
            gate, up = xp.split(total, 2, axis=1)
            x = gate / (1 + xp.exp(-gate)) * up
        else:
            x = total
    return x, stream.T


def row_errors(got, want):
    """Largest relative error of a row (norm)."""
    got, want = (np.asarray(np.asarray(x, np.float32), np.float64) for x in (got, want))
    return (np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max()
