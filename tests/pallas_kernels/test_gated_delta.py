"""The gated delta rule against a token-by-token float64 program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta_chunked, gated_delta_step


def oracle(q, k, v, g, beta, state):
    """One row, float64: the recurrence of model_math section 3.2, a token at a time."""
    q, k, v, g, beta, M = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    T, nv, dv = v.shape
    r = nv // k.shape[1]
    out = np.zeros((T, nv, dv))
    M = M.copy()
    for t in range(T):
        for h in range(nv):
            kt, qt = k[t, h // r], q[t, h // r]
            kt = kt / np.sqrt((kt**2).sum() + 1e-6)
            qt = qt / np.sqrt((qt**2).sum() + 1e-6) / np.sqrt(len(qt))
            M[h] *= np.exp(g[t, h])
            d = beta[t, h] * (v[t, h] - kt @ M[h])
            M[h] += np.outer(kt, d)
            out[t, h] = qt @ M[h]
    return out, M


def inputs(rng, B, T, nk=2, nv=4, dk=16, dv=24, decay=1.0):
    f = lambda *s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    g = -decay * np.abs(f(B, T, nv))
    beta = 1 / (1 + np.exp(-f(B, T, nv)))
    return f(B, T, nk, dk), f(B, T, nk, dk), f(B, T, nv, dv), g, beta, f(B, nv, dk, dv)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("decay", [1e-3, 1.0, 30.0])
def test_chunked_equals_the_recurrence(T, decay):
    x = inputs(np.random.default_rng(T), 2, T, decay=decay)
    lengths = np.array([T, T], np.int32)
    out, state = jax.jit(gated_delta_chunked)(*map(jnp.asarray, x), lengths)
    for b in range(2):
        want, M = oracle(*(a[b] for a in x))
        scale = np.abs(want).max()
        assert np.abs(np.asarray(out[b]) - want).max() <= 2e-5 * scale
        assert np.abs(np.asarray(state[b]) - M).max() <= 1e-5 * max(np.abs(M).max(), 1)


def test_equal_keys_with_full_writes_and_no_decay():
    """The hardest system of a chunk: I + A with A all ones below the diagonal (a repeated token)."""
    rng = np.random.default_rng(3)
    q, k, v, g, beta, state = inputs(rng, 1, 128)
    k = np.repeat(k[:, :1], 128, axis=1)
    x = (q, k, v, np.zeros_like(g), np.full_like(beta, 0.999), state)
    out, final = jax.jit(gated_delta_chunked)(*map(jnp.asarray, x), np.array([128], np.int32))
    want, M = oracle(*(a[0] for a in x))
    assert np.abs(np.asarray(out[0]) - want).max() <= 5e-5 * np.abs(want).max()
    assert np.abs(np.asarray(final[0]) - M).max() <= 1e-5 * np.abs(M).max()


def test_columns_past_the_length_change_nothing():
    rng = np.random.default_rng(0)
    x = inputs(rng, 3, 150)
    lengths = np.array([0, 70, 150], np.int32)
    _, state = jax.jit(gated_delta_chunked)(*map(jnp.asarray, x), lengths)
    assert np.array_equal(np.asarray(state[0]), x[-1][0])
    for b in (1, 2):
        row = [a[b][: lengths[b]] for a in x[:-1]]
        _, M = oracle(*row, x[-1][b])
        assert np.abs(np.asarray(state[b]) - M).max() <= 1e-5 * np.abs(M).max()


def test_steps_equal_the_recurrence_and_rows_are_independent():
    rng = np.random.default_rng(1)
    q, k, v, g, beta, state = map(jnp.asarray, inputs(rng, 4, 10))
    step = jax.jit(gated_delta_step)
    out, M = [], state
    for t in range(10):
        o, M = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], M)
        out.append(np.asarray(o))
    for b in range(4):
        want, wanted = oracle(q[b], k[b], v[b], g[b], beta[b], state[b])
        assert np.abs(np.stack(out)[:, b] - want).max() <= 1e-5 * np.abs(want).max()
        assert np.abs(np.asarray(M[b]) - wanted).max() <= 1e-5 * np.abs(wanted).max()
    mixed = jnp.asarray([2, 0, 3, 1])
    o, _ = step(q[mixed, 0], k[mixed, 0], v[mixed, 0], g[mixed, 0], beta[mixed, 0], state[mixed])
    assert np.array_equal(np.asarray(o), out[0][np.asarray(mixed)])


def test_a_named_kernel_that_cannot_run_says_why():
    *tokens, state = inputs(np.random.default_rng(0), 1, 1)
    args = (*(jnp.asarray(x[:, 0]) for x in tokens), jnp.asarray(state))
    with pytest.raises(NotImplementedError, match=r"gated_delta_step.*no GPU kernel"):
        gated_delta_step(*args, implementation="pallas")
