"""Chains as the model defines them: the norm before the product, no rounding in between."""

import numpy as np

from pallas_kernels.decode_chain import Add


def float64(x):
    return np.asarray(np.asarray(x, np.float32), np.float64)


def chain_oracle(
    stages, first, residual, weights, layers, number=float64, product=lambda x, w: x @ w.T, xp=np
):
    """(result or normed stream, residual stream [H, 8] or None) after a chain.

    number: from a device array to what is computed with.
    """
    layers = iter(np.asarray(layers).tolist())
    x, stream, added = number(first), number(residual).T, False
    for stage, own in zip(stages, weights, strict=True):
        of_layer = [number(stack[next(layers)]) for stack in own]
        total = x.sum(axis=0).T if isinstance(stage, Add) else product(x, of_layer[0])
        if isinstance(stage, Add) or stage.kind == "add":
            stream, added = stream + total, True
            rms = xp.sqrt((stream * stream).mean(axis=1, keepdims=True) + stage.eps)
            x = stream / rms * (1 + of_layer[-1][None])
        elif stage.kind == "swiglu":
            gate, up = xp.split(total, 2, axis=1)
            x = gate / (1 + xp.exp(-gate)) * up
        else:
            x = total
    return x, stream.T if added else None


def of(out, stages):
    """What corresponds in a `Result`: float64, with the norm of a last adding stage applied."""
    result = out.result
    if result is None:
        H = out.residual.shape[0]
        mean = float64(out.squares)[: -(-H // 64)].sum(axis=0) / H
        result = float64(out.normed) / np.sqrt(mean + stages[-1].eps)[:, None]
    return float64(result), None if out.residual is None else float64(out.residual)


def row_errors(got, want):
    """Largest relative error of a row (norm)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return (np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max()
