"""Runs the chunked kernels in Mosaic's interpreter against the reference; prints one line a case. For a subprocess."""

import mosaic_on_cpu

mosaic_on_cpu.replace()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret import params  # noqa: E402

from pallas_kernels.gated_delta import chunk_kernel, reference  # noqa: E402


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def inputs(rng, B, T, nv, decay, equal):
    f = lambda *s: rng.standard_normal(s, np.float32)  # noqa: E731
    q, k, v = f(B, T, 1, 128), f(B, T, 1, 128), f(B, T, nv, 128)
    g, beta = -decay * np.abs(f(B, T, nv)), 1 / (1 + np.exp(-f(B, T, nv)))
    if equal:
        k, beta = np.repeat(k[:, :1], T, axis=1), np.ones_like(beta)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    return q, k, v, jnp.asarray(g), jnp.asarray(beta), jnp.asarray(f(B, nv, 128, 128))


def main():
    rng = np.random.default_rng(0)
    cases = [
        # lengths, tokens, value heads, decay, equal keys, fused, boundaries
        ([150, 70, 0], 150, 2, 0.1, False, False, True),
        ([128], 128, 1, 0.0, True, True, False),
        ([64], 64, 3, 1000.0, False, True, False),
        ([5, 9], 9, 1, 1e-4, False, False, True),
    ]
    for lengths, T, nv, decay, equal, fused, boundaries in cases:
        B = len(lengths)
        q, k, v, g, beta, state = inputs(rng, B, T, nv, decay, equal)
        used = jnp.asarray(lengths, jnp.int32)
        want = reference.chunked(q, k, v, g, beta, state, used, boundaries=boundaries)
        heads, first = (q, k, v), (0, 0, 0)
        if fused:
            heads, first = (jnp.concatenate(heads, axis=2),) * 3, (0, 1, 2)
        with params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)):
            got = chunk_kernel.chunked(
                *heads, g, beta, state, used, nk=1, first=first, boundaries=boundaries
            )
            got = jax.block_until_ready(got)
        assert got[0].dtype == jnp.bfloat16
        assert got[0].shape == want[0].shape
        assert np.isfinite(np.asarray(got[0], np.float32)).all()
        for b, length in enumerate(lengths):
            if length == 0:
                assert np.array_equal(np.asarray(got[1][b]), np.asarray(state[b]))
                continue
            assert error(got[0][b, :length], want[0][b, :length]) < 6e-3
            assert error(got[1][b], want[1][b]) < 6e-3
        if boundaries:
            assert got[2].shape == want[2].shape
            assert error(got[2], want[2]) < 6e-3
            assert np.array_equal(np.asarray(got[2][:, -1]), np.asarray(got[1]))
        print("ok", lengths, error(got[1], want[1]), flush=True)


if __name__ == "__main__":
    main()
