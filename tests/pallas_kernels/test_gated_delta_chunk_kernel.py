"""The chunked gated delta kernels without a GPU: lowering of every real shape, and the interpreter."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import (
    boundary_tokens,
    chunk_kernel,
    gated_delta_chunked,
    gated_delta_chunked_fused,
)
from pallas_kernels.gated_delta.chunk_shapes import SHAPES, ChunkShape, random_arguments

HERE = pathlib.Path(__file__).parent


def lowered(monkeypatch, shape, **options):
    monkeypatch.setattr(chunk_kernel, "unavailable", chunk_kernel.unsupported)

    def run(values):
        return gated_delta_chunked_fused(**values, implementation="pallas", **options)

    return jax.jit(run).trace(shape.arguments()).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes_lower_for_cuda(monkeypatch, name):
    assert lowered(monkeypatch, SHAPES[name]).count("stablehlo.custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(("T", "boundaries"), [(9, False), (100, True)])
def test_any_length_lowers(monkeypatch, T, boundaries):
    shape = ChunkShape(B=3, T=T, nv=4, nk=2)
    assert "mosaic_gpu" in lowered(monkeypatch, shape, boundaries=boundaries)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the interpreter transposes no references before 0.11"
)
def test_in_the_interpreter():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, HERE / "gated_delta_on_cpu.py"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == 4


def test_what_the_kernel_does_not_take():
    a = ChunkShape(B=1, T=64, nv=4, nk=2).arguments()
    f32 = jax.ShapeDtypeStruct(a["qkv"].shape, jnp.float32)
    small = jax.ShapeDtypeStruct((1, 4, 64, 128), jnp.float32)
    assert chunk_kernel.unsupported(a["qkv"], a["state"], nk=2) is None
    assert "bfloat16" in chunk_kernel.unsupported(f32, a["state"], nk=2)
    assert "128" in chunk_kernel.unsupported(a["qkv"], small, nk=2)
    assert "key heads" in chunk_kernel.unsupported(a["qkv"], a["state"], nk=3)
    values = jax.tree.map(jnp.asarray, random_arguments(ChunkShape(B=1, T=64, nv=2, nk=1)))
    with pytest.raises(NotImplementedError, match=r"gated_delta_chunked.*needs a GPU"):
        gated_delta_chunked_fused(**values, implementation="pallas")


def test_fused_equals_separate_and_boundaries_are_states_of_prefixes():
    shape = ChunkShape(B=2, T=150, nv=2, nk=1, d=128)
    values = jax.tree.map(jnp.asarray, random_arguments(shape))
    values["lengths"] = jnp.asarray([150, 70], jnp.int32)
    out, state, after = gated_delta_chunked_fused(**values, boundaries=True)
    heads = values["qkv"].reshape(2, 150, 4, 128)
    rest = [values[n] for n in ("g", "beta", "state")]
    split = heads[:, :, :1], heads[:, :, 1:2], heads[:, :, 2:]
    same = gated_delta_chunked(*split, *rest, values["lengths"])
    assert np.array_equal(out, same[0])
    assert np.array_equal(state, same[1])
    C = boundary_tokens(128, 150)
    assert C == 64
    assert after.shape == (2, 3, 2, 128, 128)
    for i in range(3):
        ends = jnp.minimum(values["lengths"], C * (i + 1))
        prefix = gated_delta_chunked(*split, *rest, ends)[1]
        assert np.allclose(after[:, i], prefix, rtol=0, atol=1e-6)
