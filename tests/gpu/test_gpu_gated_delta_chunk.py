"""The chunked gated delta kernels on the device, against a token-by-token float64 program."""

import jax
import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta_chunked_fused
from pallas_kernels.gated_delta.chunk_shapes import ChunkShape, random_arguments

pytestmark = pytest.mark.gpu


def oracle(qkv, g, beta, state, length, nk):
    """One row in float64: the recurrence of model_math section 3.2, for all heads at once."""
    nv = state.shape[0]
    heads = np.asarray(qkv, np.float64).reshape(len(qkv), 2 * nk + nv, 128)
    g, beta, M = (
        np.asarray(g, np.float64),
        np.asarray(beta, np.float64),
        np.array(state, np.float64),
    )
    out = np.zeros((length, nv, 128))
    for t in range(length):
        q, k = heads[t, :nk], heads[t, nk : 2 * nk]
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = np.repeat(q, nv // nk, 0) / np.sqrt(128), np.repeat(k, nv // nk, 0)
        M *= np.exp(g[t])[:, None, None]
        d = beta[t][:, None] * (heads[t, 2 * nk :] - np.einsum("hd,hdv->hv", k, M))
        M += k[:, :, None] * d[:, None]
        out[t] = np.einsum("hd,hdv->hv", q, M)
    return out, M


def error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def run(values, **options):
    step = jax.jit(lambda v: gated_delta_chunked_fused(**v, implementation="pallas", **options))
    return step(values)


@pytest.mark.parametrize("nv", [4, 8, 12])
@pytest.mark.parametrize("kind", ["usual", "equal keys", "strong decay", "tiny decay"])
def test_against_the_recurrence(nv, kind):
    nk = 4
    values = random_arguments(ChunkShape(B=2, T=300, nv=nv, nk=nk), seed=nv)
    values["lengths"] = np.array([300, 170], np.int32)
    # With equal keys the writes of a chunk cancel but for the last one, and their bfloat16 roundings add up.
    most = 2e-2 if kind == "equal keys" else 1e-2
    if kind == "equal keys":
        values["qkv"] = values["qkv"].copy()
        values["qkv"][:, :, nk * 128 : 2 * nk * 128] = values["qkv"][:, :1, nk * 128 : 2 * nk * 128]
        values["g"], values["beta"] = 0 * values["g"], 0 * values["beta"] + 1
    elif kind == "strong decay":
        values["g"] = np.where(values["g"] < -0.1, np.float32(-1000), values["g"])
    elif kind == "tiny decay":
        values["g"] = values["g"] * np.float32(1e-6)
    out, state, after = run(values, boundaries=True)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    for b, n in enumerate(values["lengths"]):
        row = [values[name][b] for name in ("qkv", "g", "beta", "state")]
        want, M = oracle(*row, n, nk)
        assert error(out[b, :n], want) < most
        assert error(state[b], M) < most
        M = oracle(*row, 128, nk)[1]
        assert error(after[b, 1], M) < most


def test_rows_do_not_depend_on_their_neighbours_or_on_padding():
    values = random_arguments(ChunkShape(B=3, T=200, nv=8, nk=4))
    values["lengths"] = np.array([200, 0, 130], np.int32)
    out, state, _ = run(values)
    assert np.array_equal(np.asarray(state[1]), values["state"][1])
    alone = {name: x[2:] for name, x in values.items()}
    for T in (200, 130):
        cut = {n: x[:, :T] if n in ("qkv", "g", "beta") else x for n, x in alone.items()}
        one, end, _ = run(cut)
        assert np.array_equal(np.asarray(end[0]), np.asarray(state[2]))
        assert np.array_equal(
            np.asarray(one[0, :130], np.float32), np.asarray(out[2, :130], np.float32)
        )
