"""Decode steps of Gated DeltaNet in numpy and float64, written from model_math section 3.2."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.gated_delta.decode_shapes import random_arguments


def bf16(x):
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def decode_oracle(values, *, eps, rounded):
    """Output and both pools after the step; `rounded` rounds where a bfloat16 model does."""
    r = bf16 if rounded else np.asarray
    v = {
        n: np.asarray(x) if x.dtype.kind in "bi" else np.asarray(x).astype(np.float64)
        for n, x in values.items()
    }
    window, states, G = v["window"].copy(), v["recurrent"].copy(), int(v["layer"])
    nv, dk, dv = states.shape[2:]
    C = window.shape[3]
    nk = (C - nv * dv) // (2 * dk)
    out = np.zeros((len(v["read_slots"]), nv * dv))
    for b, (source, target) in enumerate(zip(v["read_slots"], v["write_slots"], strict=True)):
        if target == 0:
            continue
        keep = float(v["continues"][b])
        x, z, raw_b, raw_a = np.split(v["projected"][b], np.cumsum([C, nv * dv, nv]))
        z = z.reshape(nv, dv)
        inputs = np.concatenate([keep * window[source, G], x[None]])
        y = r(sum(inputs[j] * v["conv"][G][:, j] for j in range(len(inputs))))
        y = r(y * sigmoid(y))
        M = keep * states[source, G]
        window[target, G] = inputs[1:]
        for h in range(nv):
            q = y[h // (nv // nk) * dk :][:dk]
            k = y[(nk + h // (nv // nk)) * dk :][:dk]
            value = y[2 * nk * dk + h * dv :][:dv]
            q = q / np.sqrt((q**2).sum() + 1e-6) / np.sqrt(dk)
            k = k / np.sqrt((k**2).sum() + 1e-6)
            beta = r(sigmoid(raw_b[h]))
            step = np.log1p(np.exp(raw_a[h] + v["dt_bias"][G, h]))
            m = M[h] * np.exp(-np.exp(v["a_log"][G, h]) * step)
            m = m + np.outer(k, beta * (value - k @ m))
            o = q @ m
            o = r(o / np.sqrt((o**2).mean() + eps)) * v["norm"][G] * z[h] * sigmoid(z[h])
            out[b, h * dv : (h + 1) * dv] = r(o)
            states[target, G, h] = m
    return out, window, states


def several_tokens(shape, T):
    """Arguments of a verification: two rows, the second at its start."""
    values = random_arguments(shape, jax.random.key(1))
    del values["write_slots"]
    one = values["projected"]
    drawn = jax.random.normal(jax.random.key(0), (one.shape[0], T, one.shape[1]))
    return values | {
        "projected": drawn.astype(one.dtype),
        "layer": jnp.int32(1),
        "continues": jnp.array([True, False]),
    }


def oracle_steps(values, *, eps, rounded):
    """The same tokens one float64 step after the other: outputs, and the rows' states before and after each."""
    slots, kept = values["read_slots"], values["continues"][:, None, None, None]
    tokens, values = values, values | {"write_slots": slots}
    outs, states = [], [np.where(kept, values["recurrent"][slots, 1], 0)]
    for t in range(tokens["projected"].shape[1]):
        here = values | {"projected": tokens["projected"][:, t]}
        out, window, recurrent = decode_oracle(here, eps=eps, rounded=rounded)
        values |= {"window": window, "recurrent": recurrent, "continues": np.array([True, True])}
        outs.append(out)
        states.append(recurrent[slots, 1])
    return np.stack(outs, 1), states
