"""Paged attention against float64 softmax attention over the same tokens, in any page order (KV-08, KV-12)."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import append_kv, paged_attention

P, K, N, D, L, LAYERS = 8, 2, 6, 16, 6, 3
attend = jax.jit(lambda *a: paged_attention(*a, scale=0.25))
append = jax.jit(append_kv)


def oracle(q, k, v, start):
    """q [T, N, D]; k, v [start + T, K, D]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for t in range(q.shape[0]):
        for h in range(N):
            kv = h // (N // K)
            scores = 0.25 * k[: start + t + 1, kv] @ q[t, h]
            p = np.exp(scores - scores.max())
            out[t, h] = (p / p.sum()) @ v[: start + t + 1, kv]
    return out


class Cache:
    """Pages of several rows in random physical order, filled through `append_kv`, with NaN everywhere else."""

    def __init__(self, rng, starts):
        B = len(starts)
        pages = rng.permutation(np.arange(1, B * L + 1)).astype(np.int32)
        self.tables = pages.reshape(B, L)
        shape = (LAYERS, B * L + 1, K, P, D)
        self.k = self.v = jnp.full(shape, jnp.nan, jnp.float32)
        self.starts = np.array(starts, np.int32)
        most = max(starts)
        self.old = [rng.standard_normal((2, s, K, D)).astype(np.float32) for s in starts]
        new = np.zeros((2, B, most, K, D), np.float32)
        for b, s in enumerate(starts):
            new[:, b, :s] = self.old[b]
        zeros = np.zeros(B, np.int32)
        if most:
            self.k = append(self.k, new[0], jnp.int32(1), self.tables, zeros, self.starts)
            self.v = append(self.v, new[1], jnp.int32(1), self.tables, zeros, self.starts)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_equals_float64_attention(data):
    B, T = 3, data.draw(st.sampled_from([1, 5, 11]))
    starts = data.draw(st.lists(st.integers(0, L * P - T), min_size=B, max_size=B))
    lengths = data.draw(st.lists(st.integers(0, T), min_size=B, max_size=B))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    cache = Cache(rng, starts)
    q, k, v = (rng.standard_normal((B, T, n, D)).astype(np.float32) for n in (N, K, K))
    lengths = np.array(lengths, np.int32)
    where = (jnp.int32(1), cache.tables, cache.starts, lengths)
    kp, vp = append(cache.k, k, *where), append(cache.v, v, *where)
    out = np.asarray(attend(q, kp, vp, *where))
    assert np.isfinite(out).all()
    for b in range(B):
        n = lengths[b]
        keys = np.concatenate([cache.old[b][0], k[b, :n]])
        values = np.concatenate([cache.old[b][1], v[b, :n]])
        want = oracle(q[b, :n], keys, values, starts[b])
        assert np.abs(out[b, :n] - want).max(initial=0) <= 2e-5
    # Other layers, and pages of no row, are untouched; only the null page may have changed beside the rows' own.
    for before, after in ((cache.k, kp), (cache.v, vp)):
        assert np.array_equal(*(np.asarray(x)[[0, 2]] for x in (after, before)), equal_nan=True)


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(5)
    q = rng.standard_normal((4, 1, N, D)).astype(np.float32)
    cache = Cache(rng, [40, 3, 17, 0])
    ones = np.ones(4, np.int32)
    out = np.asarray(
        attend(q, cache.k, cache.v, jnp.int32(1), cache.tables, cache.starts - 1, ones)
    )
    alone = cache.starts.copy()
    alone[[0, 2]] = 1  # shorter neighbours: fewer pages are walked
    other = np.asarray(attend(q, cache.k, cache.v, jnp.int32(1), cache.tables, alone - 1, ones))
    assert np.array_equal(out[1], other[1])


def test_an_idle_row_is_finite():
    rng = np.random.default_rng(6)
    cache = Cache(rng, [9, 9])
    q = rng.standard_normal((2, 1, N, D)).astype(np.float32)
    lengths = np.array([1, 0], np.int32)
    tables = cache.tables.copy()
    tables[1] = 0
    out = attend(q, cache.k, cache.v, jnp.int32(1), tables, np.array([8, 0], np.int32), lengths)
    assert np.isfinite(np.asarray(out)).all()


def test_bfloat16_pages():
    rng = np.random.default_rng(7)
    cache = Cache(rng, [30])
    q = rng.standard_normal((1, 1, N, D)).astype(np.float32)
    args = (jnp.int32(1), cache.tables, np.array([29], np.int32), np.ones(1, np.int32))
    low = [x.astype(jnp.bfloat16) for x in (jnp.asarray(q), cache.k, cache.v)]
    out = np.asarray(attend(*low, *args), np.float64)
    want = oracle(q[0], cache.old[0][0], cache.old[0][1][:30], 29)
    assert np.linalg.norm(out[0] - want) <= 1e-2 * np.linalg.norm(want)
