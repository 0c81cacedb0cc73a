"""Norms, convolution and routed experts against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_conv import causal_conv, reference
from pallas_kernels.moe import reference as moe
from pallas_kernels.moe import route, routed_experts
from pallas_kernels.norms import gated_rms_norm, rms_norm


def silu(x):
    return x / (1 + np.exp(-x))


def test_rms_norm_is_zero_centred():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 5, 32)), rng.standard_normal(32)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + w)
    out = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), eps=1e-6)
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=1e-6)


def test_rms_norm_rounds_once_at_the_end():
    x = jnp.asarray([[1.0, 2.0, 3.0, 4.0]], jnp.bfloat16)
    w = jnp.asarray([0.01] * 4, jnp.bfloat16)
    exact = np.array([1.0, 2, 3, 4]) / np.sqrt(7.5 + 1e-6) * (1 + float(w[0]))
    want = jnp.asarray(exact, jnp.bfloat16)
    assert np.array_equal(rms_norm(x, w, eps=1e-6)[0], want)


def test_gated_rms_norm_norms_first_and_gates_second():
    rng = np.random.default_rng(1)
    o, z, w = (
        rng.standard_normal((4, 2, 16)),
        rng.standard_normal((4, 2, 16)),
        rng.standard_normal(16),
    )
    want = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-6) * w * silu(z)
    args = (jnp.asarray(a, jnp.float32) for a in (o, z, w))
    np.testing.assert_allclose(gated_rms_norm(*args, eps=1e-6), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [reference._in_one_array, reference._apart])
@pytest.mark.parametrize("bucket", [None, 24])
def test_causal_conv_continues_across_chunks_of_any_size(form, bucket, monkeypatch):
    monkeypatch.setattr(reference, "_in_one_array", form)  # what a CPU takes
    rng = np.random.default_rng(2)
    T, C, taps = 50, 12, 4
    x, w = rng.standard_normal((1, T, C)), rng.standard_normal((C, taps))
    padded = np.concatenate([np.zeros((taps - 1, C)), x[0]])
    want = silu(sum(w[:, j] * padded[j : j + T] for j in range(taps)))
    run = jax.jit(lambda *args: causal_conv(*args))
    window, start, got = jnp.zeros((1, taps - 1, C), jnp.float32), 0, []
    for size in (1, 2, 20, 3, 24):
        chunk = np.zeros((1, bucket or size, C), np.float32)
        chunk[0, :size] = x[0, start : start + size]
        chunk[0, size:] = 99  # columns past the length must not enter the window
        y, window = run(chunk, jnp.asarray(w, jnp.float32), window, np.array([size], np.int32))
        got.append(np.asarray(y)[0, :size])
        start += size
    np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(window[0], x[0, -3:], rtol=1e-6)


def expert_oracle(x, weights, experts, gate_up, down):
    x, weights, gate_up, down = (np.asarray(a, np.float64) for a in (x, weights, gate_up, down))
    out = np.zeros_like(x)
    for t in range(len(x)):
        for w, e in zip(weights[t], np.asarray(experts)[t], strict=True):
            gate, up = np.split(gate_up[e] @ x[t], 2)
            out[t] += w * (down[e] @ (silu(gate) * up))
    return out


@pytest.mark.parametrize(
    "E", [12, 20]
)  # computed all, and sorted, for more tokens than are gathered
@pytest.mark.parametrize("n", [1, 8, 16, 17, 100, 257])
def test_routed_experts(n, E):
    rng = np.random.default_rng(n)
    k, H, width = 3, 16, 8
    f = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.float32)  # noqa: E731
    x, gate_up, down = f(n, H), f(E, 2 * width, H), f(E, H, width)
    logits = f(n, E).at[:, 5].add(3.0)  # one popular expert, some never chosen
    weights, experts = route(logits, top_k=k, normalise=True)
    np.testing.assert_allclose(np.asarray(weights).sum(-1), 1, rtol=1e-6)
    out = jax.jit(routed_experts)(x, weights, experts, gate_up, down)
    want = expert_oracle(x, weights, experts, gate_up, down)
    assert np.abs(np.asarray(out) - want).max() <= 1e-5 * np.abs(want).max()


def test_all_forms_agree_and_gathered_rows_are_independent():
    rng = np.random.default_rng(9)
    f = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.float32)  # noqa: E731
    x, gate_up, down = f(16, 16), f(6, 8, 16), f(6, 16, 4)
    weights, experts = route(f(16, 6), top_k=2, normalise=False)
    gathered = jax.jit(moe.gathered)(x, weights, experts, gate_up, down)
    blocks = jax.jit(moe.sorted_blocks)(x, weights, experts, gate_up, down)
    np.testing.assert_allclose(gathered, blocks, rtol=1e-4, atol=1e-5)
    dense = jax.jit(moe.all_experts)(x, weights, experts, gate_up, down)
    np.testing.assert_allclose(gathered, dense, rtol=1e-4, atol=1e-5)
    order = jnp.asarray(rng.permutation(16))
    mixed = jax.jit(moe.gathered)(x[order], weights[order], experts[order], gate_up, down)
    assert np.array_equal(mixed, gathered[order])


@pytest.mark.parametrize("E", [16, 64])  # all are computed, or the chosen ones gathered
@pytest.mark.parametrize("n", [2, 8, 16])
def test_a_row_of_few_does_not_depend_on_the_others(n, E):
    rng = np.random.default_rng(n)
    f = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.float32)  # noqa: E731
    k = 32 // n if n > 2 else 8
    x, logits, gate_up, down = f(n, 64), f(n, E), f(E, 48, 64), f(E, 64, 24)
    run = jax.jit(
        lambda x, logits: routed_experts(x, *route(logits, top_k=k, normalise=True), gate_up, down)
    )
    row = n - 1
    want = np.asarray(run(x, logits))[row]
    for bad in (1.0, jnp.nan, jnp.inf):
        others = f(n, 64).at[0].set(bad).at[row].set(x[row])
        got = np.asarray(run(others, f(n, E).at[row].set(logits[row])))
        assert np.array_equal(got[row], want)


def test_route_prefers_the_lower_id_in_a_tie_and_uses_all_experts_in_the_softmax():
    logits = jnp.asarray([[0.0, 2.0, 2.0, 2.0]], jnp.float32)
    weights, experts = route(logits, top_k=2, normalise=False)
    assert experts.tolist() == [[1, 2]]
    share = np.exp(2) / (1 + 3 * np.exp(2))
    np.testing.assert_allclose(weights[0], [share, share], rtol=1e-6)
