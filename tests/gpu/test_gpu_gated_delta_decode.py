"""The fused decode step on a GPU against float64. Run by `make test-gpu`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_oracle import decode_oracle, oracle_steps, several_tokens

from pallas_kernels.gated_delta import (
    decode_kernel,
    gated_delta_commit,
    gated_delta_decode,
    gated_delta_verify,
)
from pallas_kernels.gated_delta.decode_shapes import KEY_HEADS, DecodeShape, random_arguments

pytestmark = pytest.mark.gpu

EPS = 1e-6


@functools.partial(jax.jit, static_argnames="implementation")
def run(values, implementation="pallas"):
    values = dict(values)
    window, recurrent = (jax.new_ref(values.pop(name)) for name in ("window", "recurrent"))
    out = gated_delta_decode(
        **values, window=window, recurrent=recurrent, eps=EPS, implementation=implementation
    )
    return out, jax.freeze(window), jax.freeze(recurrent)


def some_rows(nv):
    """A continued row, one that forks, one that does not run, a fresh one over a slot full of NaN."""
    values = random_arguments(DecodeShape(B=4, nv=nv, S=8, G=2), jax.random.key(nv))
    return values | {
        "layer": jnp.int32(1),
        "recurrent": values["recurrent"].at[5].set(jnp.nan),
        "window": values["window"].at[5].set(jnp.nan),
        "read_slots": jnp.array([3, 2, 0, 5], jnp.int32),
        "write_slots": jnp.array([3, 4, 0, 6], jnp.int32),
        "continues": jnp.array([True, True, False, False]),
    }


def one_row(values, row):
    each = ("projected", "read_slots", "write_slots", "continues")
    return values | {name: values[name][row : row + 1] for name in each}


@pytest.mark.parametrize("nv", [16, 32, 48])
def test_against_float64(nv):
    values = some_rows(nv)
    out, window, recurrent = (np.asarray(x.astype(jnp.float32)) for x in run(values))
    clean = {n: jnp.where(jnp.isnan(x), 0, x) if x.dtype != bool else x for n, x in values.items()}
    want, want_window, want_recurrent = decode_oracle(clean, eps=EPS, rounded=True)
    assert np.linalg.norm(out - want) <= 1e-2 * np.linalg.norm(want)
    written = [3, 4, 6]
    assert np.array_equal(window[written, 1], want_window[written, 1])
    error = np.linalg.norm(recurrent[written, 1] - want_recurrent[written, 1])
    assert error <= 1e-5 * np.linalg.norm(want_recurrent[written, 1])
    for new, old in ((window, values["window"]), (recurrent, values["recurrent"])):
        old = np.asarray(old.astype(jnp.float32))
        rest = [0, 1, 2, 5, 7]
        assert np.array_equal(new[rest], old[rest], equal_nan=True)
        assert np.array_equal(new[:, 0], old[:, 0], equal_nan=True)


@pytest.mark.parametrize("nv", [16, 48])
def test_no_split_changes_a_bit(nv):
    """The number of rows decides how many blocks share a key head; a row would depend on its neighbours otherwise."""
    values = some_rows(nv)

    def split(parts):
        @jax.jit
        def run(values):
            values = dict(values)
            window, recurrent = (jax.new_ref(values.pop(n)) for n in ("window", "recurrent"))
            out = decode_kernel.gated_delta_decode(
                **values, window=window, recurrent=recurrent, eps=EPS, parts=parts
            )
            return out, jax.freeze(window), jax.freeze(recurrent)

        return run(values)

    r = nv // KEY_HEADS
    first, *others = (split(parts) for parts in sorted({1, r, 2 * r}))
    for other in others:
        for x, y in zip(first, other, strict=True):
            assert np.array_equal(x.astype(jnp.float32), y.astype(jnp.float32), equal_nan=True)


@pytest.mark.parametrize("nv", [16, 48])
def test_a_row_does_not_depend_on_its_neighbours(nv):
    values = some_rows(nv)
    out, window, recurrent = run(values)
    for row, slot in ((0, 3), (1, 4), (3, 6)):
        alone = run(one_row(values, row))
        assert np.array_equal(alone[0][0], out[row])
        assert np.array_equal(alone[1][slot, 1], window[slot, 1])
        assert np.array_equal(alone[2][slot, 1], recurrent[slot, 1])


@pytest.mark.parametrize("nv", [16, 32, 48])
@pytest.mark.parametrize(
    "running", [[5], [2], [0, 7], [1, 2, 6], [1, 2, 4, 5], [0, 1, 2, 3, 4, 6, 7]]
)
def test_blocks_of_rows_that_do_not_run_help_the_others(nv, running):
    """Rows 1, 4 and 5 fork from one slot, row 2 starts over a slot full of NaN."""
    values = random_arguments(DecodeShape(B=8, nv=nv, S=10, G=2), jax.random.key(nv))
    runs = jnp.isin(jnp.arange(8), jnp.array(running))
    values |= {
        "layer": jnp.int32(1),
        "recurrent": values["recurrent"].at[3].set(jnp.nan),
        "window": values["window"].at[3].set(jnp.nan),
        "read_slots": jnp.where(runs, jnp.array([1, 9, 3, 4, 9, 9, 7, 8], jnp.int32), 0),
        "write_slots": jnp.where(runs, jnp.arange(1, 9, dtype=jnp.int32), 0),
        "continues": jnp.arange(8) != 2,
    }

    def same(x, y):
        return bool(jnp.array_equal(x, y, equal_nan=True))

    first = out, window, recurrent = run(values)
    for row in range(8):
        slot = row + 1
        if row not in running:
            assert not out[row].any()
            assert same(window[slot], values["window"][slot])
            assert same(recurrent[slot], values["recurrent"][slot])
            continue
        alone = run(one_row(values, row))
        assert jnp.isfinite(recurrent[slot, 1]).all()
        assert same(alone[0][0], out[row])
        assert same(alone[1][slot], window[slot])
        assert same(alone[2][slot], recurrent[slot])
    for _ in range(100):  # a window that is written too early is read by a helper now and then
        assert all(same(x, y) for x, y in zip(first, run(values), strict=True))


@pytest.mark.parametrize("nv", [16, 48])
def test_spare_rows_are_ignored(nv):
    values = some_rows(nv)
    spare = jnp.full((4, values["projected"].shape[1]), jnp.nan, jnp.bfloat16)
    more = run(values | {"projected": jnp.concatenate([values["projected"], spare])})
    assert more[0].shape[0] == 8
    for x, y in zip((more[0][:4], *more[1:]), run(values), strict=True):
        assert np.array_equal(x.astype(jnp.float32), y.astype(jnp.float32), equal_nan=True)


@pytest.mark.parametrize(("nv", "T"), [(16, 2), (48, 5), (32, 16)])
def test_verification_equals_float64_steps(nv, T):
    values = several_tokens(DecodeShape(B=2, nv=nv, S=3, G=2), T)
    verify = jax.jit(lambda v: gated_delta_verify(**v, eps=EPS, implementation="pallas"))
    out, records = verify(values)
    for _ in range(100):  # warpgroups that run into each other do so now and then
        assert jax.tree.all(jax.tree.map(jnp.array_equal, (out, records), verify(values)))
    want, states = oracle_steps(values, eps=EPS, rounded=True)
    error = np.linalg.norm(np.asarray(out.astype(jnp.float32)) - want)
    assert error <= 1e-2 * np.linalg.norm(want)
    for n in (0, 1, T):
        start = jnp.asarray(states[0], jnp.float32)
        got = jax.jit(gated_delta_commit)(start, records, jnp.full((2,), n, jnp.int32))
        assert np.linalg.norm(got - states[n]) <= 1e-5 * np.linalg.norm(states[n])


def test_the_pools_are_not_copied_in_a_scan_over_layers():
    values = random_arguments(DecodeShape(B=2, nv=16, S=64, G=4), jax.random.key(0))
    pools = values.pop("window"), values.pop("recurrent")
    del values["layer"]

    def layers(pools, values):
        def body(pools, layer):
            out, *pools = run(values | {"layer": layer, "window": pools[0], "recurrent": pools[1]})
            return tuple(pools), out

        return jax.lax.scan(body, pools, jnp.arange(4))

    compiled = jax.jit(layers, donate_argnums=0).lower(pools, values).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16e6 < pools[1].nbytes
