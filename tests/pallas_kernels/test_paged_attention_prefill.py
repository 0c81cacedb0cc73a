"""The prefill kernel without a GPU: it lowers at every real shape, and its interpreter agrees with float64."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import paged_attention, prefill_kernel
from pallas_kernels.paged_attention.prefill_shapes import SHAPES

TESTS = Path(__file__).parent.parent

INTERPRETED = """
from jax._src.pallas.mosaic_gpu.interpret.params import force_gpu_interpret_mode
from prefill_attention_cases import Case
from pallas_kernels.paged_attention import prefill_kernel

def run(T, N, K, starts, lengths):
    case = Case(T, N, K, starts, lengths)
    out = prefill_kernel.paged_attention(*case.arguments(), 0.0625, interpret=True)
    case.check(out, 0.0625)

with force_gpu_interpret_mode():
    run(64, 2, 1, [70, 0], [50, 0])  # starts and ends inside a page; a row that does not run
    run(128, 4, 2, [0], [128])  # two tiles, two KV heads, ends with its page
"""


def test_the_interpreter_agrees_with_float64():
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def described(shape, dtype=jnp.bfloat16, page=(64, 256)):
    def of(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct(dims, dtype)

    pages = of(2, 100, shape.K, *page)
    rows = of(shape.B, dtype=jnp.int32)
    q = of(shape.B, shape.T, shape.N, page[1])
    tables = of(shape.B, 512, dtype=jnp.int32)
    return q, pages, pages, of(dtype=jnp.int32), tables, rows, rows


@pytest.mark.parametrize("shape", sorted({s._replace(start=0) for s in SHAPES.values()}))
def test_lowers_for_cuda(shape):
    def attend(*args):
        return prefill_kernel.paged_attention(*args, 0.0625)

    text = jax.jit(attend).trace(*described(shape)).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": jnp.float32}, "bfloat16"),
        ({"page": (16, 256)}, "pages of 64 x 256"),
        ({"T": 1}, "at least 32"),
        ({"N": 12}, "in pairs"),
        ({}, "needs a GPU"),
    ],
)
def test_says_why_it_cannot_run(changes, why):
    shape = SHAPES["27B-scoring"]
    fields = {name: changes.pop(name) for name in ("T", "N") if name in changes}
    args = described(shape._replace(**fields), **changes)
    assert why in prefill_kernel.unavailable(args[0], args[1])
    with pytest.raises(NotImplementedError, match=why):
        jax.eval_shape(lambda *a: paged_attention(*a, scale=0.0625, implementation="pallas"), *args)
