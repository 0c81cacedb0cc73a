"""Cases of prefill attention in bfloat16, with NaN wherever nobody has written, and a float64 oracle."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

PAGE, D = 64, 256
LAYER = 1


class Case:
    """Rows of random pages in random physical order; `lengths[b]` queries of row b after `starts[b]` cached keys."""

    def __init__(self, T, N, K, starts, lengths, seed=0):
        rng = np.random.default_rng(seed)
        B = len(starts)
        used = [-(-(s + n) // PAGE) for s, n in zip(starts, lengths, strict=True)]
        X = sum(used) + 2
        order = rng.permutation(X - 1) + 1
        self.tables = np.zeros((B, max(used) + 3), np.int32)
        self.starts, self.lengths = np.array(starts, np.int32), np.array(lengths, np.int32)
        self.q = _bfloat16(rng.standard_normal((B, T, N, D)))
        self.keys = [_bfloat16(rng.standard_normal((2, u * PAGE, K, D))) for u in used]
        pages = np.full((2, LAYER + 1, X, K, PAGE, D), np.nan, np.float32)
        for b, count in enumerate(used):
            ids, order = order[:count], order[count:]
            self.tables[b, :count] = ids
            self.keys[b][:, starts[b] + lengths[b] :] = np.nan
            paged = self.keys[b].reshape(2, count, PAGE, K, D)
            pages[:, LAYER, ids] = np.swapaxes(paged, 2, 3)
        self.k, self.v = jnp.asarray(pages, jnp.bfloat16)

    def arguments(self):
        """Of `paged_attention`, without the scale."""
        where = (jnp.int32(LAYER), self.tables, self.starts, self.lengths)
        return (jnp.asarray(self.q, jnp.bfloat16), self.k, self.v, *map(jnp.asarray, where))

    def want(self, b, scale):
        """Row b's outputs [lengths[b], N, D] in float64."""
        start, n = self.starts[b], self.lengths[b]
        k, v = self.keys[b][:, : start + n].astype(np.float64)
        q = self.q[b, :n].astype(np.float64)
        q = q.reshape(n, k.shape[1], q.shape[1] // k.shape[1], D)
        scores = np.einsum("tkgd,skd->kgts", q, k) * scale
        seen = np.arange(start + n)[None, :] <= start + np.arange(n)[:, None]
        weights = np.exp(np.where(seen, scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("kgts,skd->tkgd", weights, v).reshape(n, self.q.shape[2], D)

    def check(self, out, scale, most=1e-2):
        """Every row within the relative error, and nothing that is not finite."""
        out = np.asarray(out, np.float64)
        for b, n in enumerate(self.lengths):
            want = self.want(b, scale)
            assert np.linalg.norm(out[b, :n] - want) <= most * np.linalg.norm(want)
        assert np.isfinite(out).all()


def _bfloat16(x):
    return np.array(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
