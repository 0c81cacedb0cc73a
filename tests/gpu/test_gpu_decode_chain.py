"""Chains of products on a Hopper GPU, against exact products of float32 (numpy would take minutes)."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_chain_oracle import chain_oracle, row_errors

from pallas_kernels.decode_chain import chain, kernel
from pallas_kernels.decode_chain.bench import following
from pallas_kernels.decode_chain.shapes import SHAPES, random_inputs, random_weights

pytestmark = pytest.mark.gpu

TESTED = (
    "0.8B/tail", "0.8B/tail to head", "0.8B/enter", "4B/tail", "9B/tail", "27B/tail", "35B-A3B/tail of 1 row",
    "35B-A3B/tail of 8 rows", "35B-A3B/tail to head", "80B-A3B/tail", "shares of all experts",
)  # fmt: skip


def shares_of_all_experts():
    shape = SHAPES["35B-A3B/tail to attention"]
    out, experts, after = shape.stages
    return replace(shape, stages=(out, replace(experts, normalise=False), after))


@functools.lru_cache(maxsize=1)
def case(name):
    """The last product's layer is not the first one's: each stack has its own index."""
    shape = SHAPES[name] if name in SHAPES else shares_of_all_experts()
    weights = random_weights(shape, 2)
    count = sum(map(len, weights))
    index = jnp.arange(count, dtype=jnp.int32) % 2
    run = jax.jit(functools.partial(chain, shape.stages, implementation="pallas"))
    rest = weights, index, shape.running
    return shape, weights, index, lambda first, residual: run(first, residual, *rest)


def exact(x, w):
    return jnp.dot(x, w.T, precision=jax.lax.Precision.HIGHEST)


def bits(out, rows):
    """Everything of these rows that a chain leaves, bit for bit."""
    result, residual = out
    return np.asarray(result[rows]).tobytes() + np.asarray(residual[:, rows]).tobytes()


@pytest.mark.parametrize("name", TESTED)
def test_against_exact_products(name):
    shape, weights, index, run = case(name)
    inputs = random_inputs(shape)
    result, residual = run(*inputs)
    number = lambda x: jnp.asarray(x).astype(jnp.float32)  # noqa: E731
    rest = weights, index, shape.running, number, exact, jnp
    want, stream = chain_oracle(shape.stages, *inputs, *rest)
    assert row_errors(result, want) <= 1e-2
    assert row_errors(residual.T, stream.T) <= 1e-2
    # Once more, and with each row alone among values that are no numbers.
    together = run(*inputs)
    for _ in range(10):
        assert bits(run(*inputs), slice(None)) == bits(together, slice(None))
    for row in {0, shape.rows - 1, 5}:
        only = jnp.arange(8) == row
        first, residual = inputs
        first = None if first is None else jnp.where(only[:, None], first, jnp.nan)
        alone = run(first, jnp.where(only[None], residual, jnp.inf))
        assert bits(alone, slice(row, row + 1)) == bits(together, slice(row, row + 1))


@pytest.mark.parametrize("running", [[0, 1, 0, 0, 1, 0, 0, 1], [0] * 8])
def test_rows_that_run_have_the_same_bits_whoever_else_does(running):
    shape, weights, index, run = case("35B-A3B/tail of 8 rows")
    first, residual = random_inputs(shape)
    some = jax.jit(functools.partial(chain, shape.stages, implementation="pallas"))
    out = some(first, residual, weights, index, jnp.array(running, jnp.int32))
    runs = np.flatnonzero(running)
    assert bits(out, runs) == bits(run(first, residual), runs)
    # The same rows in other places.
    turned = jnp.array(running[::-1], jnp.int32)
    result, stream = some(first[::-1], residual[:, ::-1], weights, index, turned)
    assert bits((result[::-1], stream[:, ::-1]), runs) == bits(out, runs)
    # Others get nothing of the experts: the stream is what the output projection left.
    product, _, after = shape.stages
    head = jnp.zeros((2, after.rows, shape.H), jnp.bfloat16)
    _, before = chain(
        (product, after), first, residual, (weights[0], (head,)), jnp.append(index[:2], 0)
    )
    idle = np.flatnonzero(np.logical_not(running))
    assert np.array_equal(np.asarray(stream[:, ::-1])[:, idle], np.asarray(before)[:, idle])


@pytest.mark.parametrize("blocks", [7, 100])
def test_any_number_of_blocks(blocks):
    """Other cuts: tiles with many sharers, tiles that overlap, and more tiles of a `Norm` than blocks."""
    for name in ("0.8B/tail", "0.8B/enter"):
        shape, weights, index, run = case(name)
        inputs = random_inputs(shape, seed=1)
        want, _ = run(*inputs)
        cut = jax.jit(functools.partial(kernel.chain, shape.stages, blocks=blocks))
        out = cut(*inputs, weights, index)
        assert row_errors(out[0], want) <= 5e-3
        for _ in range(10):
            assert bits(cut(*inputs, weights, index), slice(None)) == bits(out, slice(None))


@pytest.mark.parametrize("name", ["0.8B/tail", "35B-A3B/tail of 8 rows"])
def test_in_a_loop_over_layers_as_one_by_one(name):
    """The counters start at zero in every trip."""
    shape, weights, _, _ = case(name)
    layers = np.arange(8, dtype=np.int32) % 2

    def step(weights, carry, layer):
        args = (shape.stages, *carry, weights, shape.indices(layer), shape.running)
        result, residual = chain(*args, implementation="pallas")
        return (following(shape, result), residual), result

    @jax.jit
    def loop(weights, carry):
        return jax.lax.scan(functools.partial(step, weights), carry, layers)

    one = jax.jit(step)
    carry = random_inputs(shape)
    _, together = loop(weights, carry)
    for layer, want in zip(layers, together, strict=True):
        carry, got = one(weights, carry, layer)
        assert np.array_equal(np.asarray(got), np.asarray(want))
