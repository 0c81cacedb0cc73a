"""The sparse layer's kernels on a Hopper GPU, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import sparse_layer
from pallas_kernels.moe.bench import weights
from pallas_kernels.moe.shapes import SHAPES

pytestmark = pytest.mark.gpu


def silu(x):
    return x / (1 + np.exp(-x))


@functools.lru_cache(maxsize=1)
def case(name):
    shape = SHAPES[name]
    stack = weights(shape)
    run = jax.jit(
        functools.partial(sparse_layer, top_k=shape.top_k, normalise=True, implementation="pallas")
    )
    return shape, stack, lambda x, layer: np.asarray(run(x, *stack, jnp.int32(layer)), np.float64)


def oracle(shape, stack, x, layer):
    router, gate, gate_up, down, shared_gate_up, shared_down = (w[layer] for w in stack)
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    x = f64(x)
    # Logits are rounded to bfloat16 as the model does: a near tie decides which expert is chosen.
    logits = f64(jnp.asarray(x @ f64(router).T, jnp.float32).astype(jnp.bfloat16))
    opened = 1 / (1 + np.exp(-x @ f64(gate).T))
    halves = np.split(x @ f64(shared_gate_up).T, 2, axis=1)
    out = opened * ((silu(halves[0]) * halves[1]) @ f64(shared_down).T)
    pairs = {}
    for row in range(len(x)):
        chosen = np.argsort(-logits[row], kind="stable")[: shape.top_k]
        shares = np.exp(logits[row, chosen] - logits[row, chosen[0]])
        for e, share in zip(chosen.tolist(), shares / shares.sum(), strict=True):
            pairs.setdefault(e, []).append((row, share))
    for e, rows in pairs.items():
        at, share = [r for r, _ in rows], np.array([s for _, s in rows])
        first, second = np.split(x[at] @ f64(gate_up[e]).T, 2, axis=1)
        out[at] += share[:, None] * ((silu(first) * second) @ f64(down[e]).T)
    return out


@pytest.mark.parametrize("n", [17, 40, 700])
@pytest.mark.parametrize("name", SHAPES)
def test_against_float64(name, n):
    shape, stack, run = case(name)
    x = jax.random.normal(jax.random.key(n), (n, shape.H), jnp.bfloat16)
    got, want = run(x, 1), oracle(shape, stack, x, 1)
    wrong = np.linalg.norm(got - want, axis=1) > 1e-2 * np.linalg.norm(want, axis=1)
    # A logit on the edge between two bfloat16 values may round either way and swap the last expert.
    assert wrong.sum() <= n // 50


def test_in_a_loop_over_layers_as_one_by_one():
    shape, stack, run = case("35B-A3B")
    x = jax.random.normal(jax.random.key(3), (20, shape.H), jnp.bfloat16)
    layers = np.arange(12, dtype=np.int32) % 3

    @jax.jit
    def loop(x, *stack):
        def step(x, layer):
            y = sparse_layer(
                x, *stack, layer, top_k=shape.top_k, normalise=True, implementation="pallas"
            )
            y = jax.lax.optimization_barrier(
                y
            )  # or the next x comes from what was y before its rounding
            return y / jnp.max(jnp.abs(y)), y

        return jax.lax.scan(step, x, layers)[1]

    for layer, y in zip(layers, np.asarray(loop(x, *stack), np.float64), strict=True):
        assert np.array_equal(run(x, layer), y)
        y = jnp.asarray(y, jnp.bfloat16)
        x = jax.jit(lambda y: y / jnp.max(jnp.abs(y)))(y)
