"""Verification of several tokens and its partial commit: the same as so many float64 steps."""

import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
from gated_delta_oracle import oracle_steps, several_tokens

from pallas_kernels.gated_delta import (
    gated_delta_commit,
    gated_delta_verify,
    kernel_parts,
    verify_kernel,
)
from pallas_kernels.gated_delta.decode_shapes import SHAPES, DecodeShape

EPS = 1e-6


def check(values, verify, T, *, rounded, most):
    want, states = oracle_steps(values, eps=EPS, rounded=rounded)
    out, records = verify(values)
    out = np.asarray(out.astype(jnp.float32), np.float64)
    assert np.linalg.norm(out - want) <= most * np.linalg.norm(want)
    for accepted in ((0, T), (T, 1), (1, T - 1)):
        start = jnp.asarray(states[0], jnp.float32)
        got = jax.jit(gated_delta_commit)(start, records, jnp.array(accepted))
        for b, n in enumerate(accepted):
            error = np.linalg.norm(np.asarray(got[b], np.float64) - states[n][b])
            assert error <= 1e-5 * np.linalg.norm(states[n][b])


@pytest.mark.parametrize("T", [2, 5])
def test_reference_equals_decode_steps(T):
    values = several_tokens(DecodeShape(B=2, nk=2, nv=4, S=3, G=2, d=16), T)
    values = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in values.items()}
    run = jax.jit(lambda v: gated_delta_verify(**v, eps=EPS))
    check(values, run, T, rounded=False, most=1e-5)


@pytest.mark.parametrize(
    "shape",
    lowering.shapes(
        itertools.product(["0.8B/B1", "4B/B8", "27B/B8"], [2, 4, 16]),
        {("0.8B/B1", 2), ("27B/B8", 4), ("4B/B8", 16)},
    ),
    ids=str,
)
def test_the_kernel_lowers_for_the_gpu(shape, monkeypatch):
    name, T = shape
    monkeypatch.setattr(kernel_parts, "not_hopper", lambda: None)
    shapes = SHAPES[name].arguments()
    del shapes["write_slots"]
    rows, width = shapes["projected"].shape
    shapes["projected"] = jax.ShapeDtypeStruct((rows, T, width), jnp.bfloat16)
    run = jax.jit(lambda v: gated_delta_verify(**v, eps=EPS, implementation="pallas"))
    assert "mosaic_gpu" in run.trace(shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_the_kernel_in_the_interpreter():
    """Mosaic's interpreter keeps global state and threads: it gets a process of its own."""
    subprocess.run(
        [sys.executable, __file__],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )


def interpret():
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    def verify(values):
        return verify_kernel.gated_delta_verify(**values, eps=EPS, interpret=InterpretGPUParams())

    values = several_tokens(DecodeShape(B=2, nk=1, nv=2, S=3, G=2), 3)
    check(values, jax.jit(verify), 3, rounded=True, most=1e-2)


if __name__ == "__main__":
    interpret()
