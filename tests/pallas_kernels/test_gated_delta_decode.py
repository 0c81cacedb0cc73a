"""The fused decode step: against float64, in the interpreter, and lowered for the GPU."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
from gated_delta_oracle import decode_oracle
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.gated_delta import decode_kernel, gated_delta_decode, kernel_parts
from pallas_kernels.gated_delta.decode_shapes import SHAPES, DecodeShape, random_arguments

HERE = pathlib.Path(__file__).parent
EPS = 1e-6


def run(values, **options):
    """One step on fresh Refs: output and both pools afterwards."""
    values = dict(values)
    window, recurrent = (jax.new_ref(values.pop(name)) for name in ("window", "recurrent"))
    out = gated_delta_decode(**values, window=window, recurrent=recurrent, eps=EPS, **options)
    return out, jax.freeze(window), jax.freeze(recurrent)


def some_rows(shape):
    """A continued row, one that forks, one that does not run, a fresh one."""
    values = random_arguments(shape, jax.random.key(0))
    return values | {
        "layer": jnp.int32(1),
        "read_slots": jnp.array([3, 2, 0, 5], jnp.int32),
        "write_slots": jnp.array([3, 4, 0, 6], jnp.int32),
        "continues": jnp.array([True, True, False, False]),
    }


SMALL = DecodeShape(B=4, nk=2, nv=4, S=8, G=2, d=16)
# The norm magnifies the rounding of a head whose q^T M nearly cancels. Among a few small heads one such head decides
# the error of all (1e-2 is missed by one draw in eight of SMALL, by none of 80 of these).
REAL_HEADS = DecodeShape(B=4, nk=4, nv=8, S=8, G=2)


@pytest.mark.parametrize(
    ("dtype", "shape", "most"), [(jnp.float32, SMALL, 1e-5), (jnp.bfloat16, REAL_HEADS, 1e-2)]
)
def test_reference_equals_the_oracle(dtype, shape, most):
    values = {
        name: x.astype(dtype) if x.dtype == jnp.bfloat16 else x
        for name, x in some_rows(shape).items()
    }
    out, window, recurrent = jax.jit(run)(values)
    want = decode_oracle(values, eps=EPS, rounded=dtype == jnp.bfloat16)
    for got, expected in zip((out, window, recurrent), want, strict=True):
        got = np.asarray(got.astype(jnp.float32), np.float64)
        assert np.linalg.norm(got - expected) <= most * np.linalg.norm(expected)
    assert not np.asarray(out)[2].any()


def test_reference_touches_the_written_slots_of_its_layer_only():
    values = some_rows(SMALL)
    _, window, recurrent = jax.jit(run)(values)
    for new, old in ((window, values["window"]), (recurrent, values["recurrent"])):
        new, old = np.array(new.astype(jnp.float32)), np.array(old.astype(jnp.float32))
        changed = {tuple(i) for i in np.argwhere((new != old).reshape(8, 2, -1).any(-1))}
        assert changed == {(3, 1), (4, 1), (6, 1)}


def with_spare_rows(values, rows=8):
    """`values` with rows of NaN after the B of its projection, as wide kernels around this op leave them."""
    projected = values["projected"]
    spare = jnp.full((rows - len(projected), projected.shape[1]), jnp.nan, projected.dtype)
    return values | {"projected": jnp.concatenate([projected, spare])}


def test_spare_rows_are_ignored():
    values = some_rows(SMALL)
    out, *pools = jax.jit(run)(with_spare_rows(values))
    assert out.shape[0] == 8
    for got, want in zip((out[:4], *pools), jax.jit(run)(values), strict=True):
        assert np.array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


def test_the_reference_runs_inside_a_scan_over_layers():
    values = some_rows(SMALL)
    values |= {n: x.astype(jnp.float32) for n, x in values.items() if x.dtype == jnp.bfloat16}

    def layers(values):
        values = dict(values)
        window, recurrent = (jax.new_ref(values.pop(n)) for n in ("window", "recurrent"))

        def body(x, layer):
            here = values | {"layer": layer}
            out = gated_delta_decode(**here, window=window, recurrent=recurrent, eps=EPS)
            return x + out.sum(), None

        total, _ = jax.lax.scan(body, jnp.float32(0), jnp.arange(2))
        return total, jax.freeze(recurrent)

    _, recurrent = jax.jit(layers)(values)
    one = jax.jit(run)(values | {"layer": jnp.int32(0)})[2]
    assert np.allclose(recurrent[:, 0], one[:, 0], rtol=1e-5, atol=1e-6)


MANY = {f"{r} a key head": DecodeShape(B=8, nk=4, nv=4 * r) for r in (4, 5)}


@pytest.mark.parametrize("name", lowering.shapes(SHAPES | MANY, {"0.8B/B1", "27B/B8", *MANY}))
def test_the_kernel_lowers_for_the_gpu(name):
    sizes = (SHAPES | MANY)[name]
    shape, r = sizes.arguments(), sizes.nv // sizes.nk
    width = shape["projected"].shape[1]
    shape["projected"] = jax.ShapeDtypeStruct((8, width), jnp.bfloat16)  # whatever B is
    checked = (shape[n] for n in ("projected", "conv", "window", "recurrent"))
    assert kernel_parts.unsupported(*checked) is None

    def f(values):
        values = dict(values)
        window, recurrent = (jax.new_ref(values.pop(n)) for n in ("window", "recurrent"))
        out = decode_kernel.gated_delta_decode(
            **values, window=window, recurrent=recurrent, eps=EPS
        )
        return out, jax.freeze(window), jax.freeze(recurrent)

    text = jax.jit(f).trace(shape).lower(lowering_platforms=("cuda",)).as_text()
    # Where blocks of other rows may help there are counters as well.
    helped = decode_kernel.choose_parts(sizes.B, sizes.nk, r) == 1 < r
    in_place = text.count("output_operand_alias<")
    assert in_place == 2 + helped, "the pools are not updated in place"


def test_a_kernel_that_cannot_run_says_why():
    with pytest.raises(NotImplementedError, match="16 and 16"):
        run(some_rows(SMALL), implementation="pallas")


@pytest.mark.parametrize(
    "parts", ["whole key heads", pytest.param("value heads", marks=pytest.mark.slow)]
)
def test_the_kernel_in_the_interpreter(parts):
    """Mosaic's interpreter keeps global state and threads: it gets a process of its own."""
    subprocess.run(
        [sys.executable, __file__, parts],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )


def interpret(whole):
    """The interpreter has no clusters: parts of a key head stand alone, and nobody writes the windows of q and k."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    shape = DecodeShape(B=4, nk=2, nv=6, S=8, G=2)
    values = some_rows(shape)
    assert not values["continues"][2]

    def f(values):
        values = dict(values)
        window, recurrent = (
            jax.new_ref(values.pop(n), memory_space=decode_kernel.plgpu.GMEM)
            for n in ("window", "recurrent")
        )
        out = decode_kernel.gated_delta_decode(
            **values,
            window=window,
            recurrent=recurrent,
            eps=EPS,
            parts=1 if whole else shape.nv // shape.nk,
            interpret=InterpretGPUParams(),
        )
        return out, jax.freeze(window), jax.freeze(recurrent)

    out, window, recurrent = jax.jit(f)(with_spare_rows(values))
    assert out.shape[0] == 8
    out = out[:4]
    want = decode_oracle(values, eps=EPS, rounded=True)
    checked = 0 if whole else 2 * shape.nk * shape.d
    results = [(out, want[0], 1e-2), (recurrent, want[2], 1e-5)]
    results.append((window[..., checked:], want[1][..., checked:], 0))
    for got, expected, most in results:
        got = np.asarray(got.astype(jnp.float32), np.float64)
        assert np.linalg.norm(got - expected) <= most * np.linalg.norm(expected)
    assert not np.asarray(out)[2].any()


@settings(max_examples=60, deadline=None)
@given(
    slots=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    heads=st.integers(1, 3),
    help=st.booleans(),
)
@example(slots=[0] * 8, heads=3, help=True)
@example(slots=[0, 0, 0, 5, 0, 0, 0, 0], heads=3, help=True)
def test_every_head_of_a_row_that_runs_has_one_block(slots, heads, help):
    B, given_to = len(slots), []
    write = jnp.array(slots)
    of_blocks = decode_kernel.head_lines(write + 20, write, jnp.arange(B), heads, help)
    lines = np.asarray(of_blocks).tolist()
    for own, (row, read, slot, continued, first, stride, count) in enumerate(lines):
        assert (first == 0) == (slots[own] != 0), (
            "a row's own blocks take its first head, no others do"
        )
        if slot:
            assert (read, slot, continued) == (slots[row] + 20, slots[row], row)
            taken = list(range(first, heads, stride))
            assert count == len(taken) > 0
            given_to += [(row, head) for head in taken]
            assert help or row == own
    assert sorted(given_to) == [
        (row, head) for row in range(B) if slots[row] for head in range(heads)
    ]
    if help and (running := sum(s != 0 for s in slots)):
        # Nobody idles while there is somebody to help.
        assert sum(line[2] != 0 for line in lines) == running * min(heads, B // running)


if __name__ == "__main__":
    interpret(whole=sys.argv[1] == "whole key heads")
