"""The sparse layer: its plain form against numpy, the layout of sorted pairs, and lowering for CUDA on any machine.

Mosaic's interpreter runs the kernel for many tokens; few of them are a stage of a chain, which runs only on a GPU
(tests/gpu/test_gpu_decode_chain.py), for experts are chosen with warp instructions that the interpreter does not know.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import params as interpret

from pallas_kernels.moe import many, sparse_layer
from pallas_kernels.moe.shapes import SHAPES


def silu(x):
    return x / (1 + np.exp(-x))


def gated(x, gate_up, down):
    gate, up = np.split(gate_up @ x, 2)
    return down @ (silu(gate) * up)


@pytest.mark.parametrize("n", [1, 8, 20])
def test_sparse_layer_in_plain_form(n):
    rng = np.random.default_rng(n)
    M, E, H, width, k = 2, 8, 16, 12, 3
    shapes = ((M, E, H), (M, 1, H), (M, E, 2 * width, H), (M, E, H, width))
    shapes += ((M, 2 * width, H), (M, H, width))
    stack = [rng.standard_normal(s) for s in shapes]
    x = rng.standard_normal((n, H))
    router, gate, gate_up, down, shared_gate_up, shared_down = (w[1] for w in stack)
    want = np.zeros_like(x)
    for row in range(n):
        logits = router @ x[row]
        chosen = np.argsort(-logits)[:k]
        shares = np.exp(logits[chosen] - logits.max())
        for share, e in zip(shares / shares.sum(), chosen, strict=True):
            want[row] += share * gated(x[row], gate_up[e], down[e])
        open_ = 1 / (1 + np.exp(-(gate @ x[row])))
        want[row] += open_ * gated(x[row], shared_gate_up, shared_down)
    f = jax.jit(lambda layer, *a: sparse_layer(*a, layer, top_k=k, normalise=True))
    got = f(1, *(jnp.asarray(a, jnp.float32) for a in (x, *stack)))
    assert np.abs(np.asarray(got) - want).max() <= 2e-5 * np.abs(want).max()


def test_pallas_says_why_it_cannot_run():
    x = jnp.zeros((1, 16), jnp.bfloat16)
    z = lambda *s: jnp.zeros(s, jnp.bfloat16)  # noqa: E731
    stack = (z(1, 8, 16), z(1, 1, 16), z(1, 8, 8, 16), z(1, 8, 16, 4), z(1, 8, 16), z(1, 16, 4))
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        sparse_layer(x, *stack, 0, top_k=2, normalise=True, implementation="pallas")


@pytest.mark.parametrize(
    ("n", "H", "width", "dtype", "why"),
    [
        (17, 2048, 512, jnp.bfloat16, None),
        (16, 2048, 512, jnp.bfloat16, "16 tokens are not more than 16"),
        (17, 2176, 512, jnp.bfloat16, "H=2176 must be a multiple of 256"),
        (17, 2048, 64, jnp.bfloat16, "width 64 of 128"),
        (17, 2048, 512, jnp.float32, "not bfloat16"),
    ],
)
def test_what_the_kernel_takes(n, H, width, dtype, why):
    of = lambda *s: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    got = many.unfit(of(n, H), of(1, 4, H, width))
    assert (got is None) if why is None else (why in got)


@pytest.mark.parametrize(("n", "k", "E"), [(1, 2, 4), (70, 3, 16), (400, 2, 4), (129, 4, 32)])
def test_every_pair_lies_in_one_tile_of_its_expert(n, k, E):
    rng = np.random.default_rng(n)
    crowd = E if n % 2 else E // 2  # else half of the experts get nothing
    experts = np.stack([rng.permutation(crowd)[:k] for _ in range(n)]).astype(np.int32)
    groups = jax.jit(many.group, static_argnums=1)(experts, E)
    row, source = np.asarray(groups.row), np.asarray(groups.source)
    assert len(set(row.tolist())) == n * k
    assert np.array_equal(source[row], np.arange(n * k) // k)
    assert source.min() >= 0
    assert source.max() < n
    expert, first, size = np.asarray(groups.tiles[:-1]).reshape(3, -1)[:, : int(groups.tiles[-1])]
    assert not (first % 8).any()
    assert not (size % 8).any()
    assert (first + many.PAIRS <= len(source)).all()
    owner = np.full(len(source), -1)
    for e, f, s in zip(expert, first, size, strict=True):
        assert (owner[f : f + s] == -1).all()
        owner[f : f + s] = e
    assert np.array_equal(owner[row], experts.reshape(-1))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10's interpreter never ends")
def test_grouped_products_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(many, "N_SMS", 2)
    rng = np.random.default_rng(0)
    n, k, E, H, width = 70, 2, 4, 256, 128  # groups of 35 pairs on average, and one of none
    experts = np.stack([rng.permutation(E - 1)[:k] for _ in range(n)]).astype(np.int32)
    experts[:, 0] = np.where(rng.random(n) < 0.9, E - 2, experts[:, 0])
    experts[:, 1] = (experts[:, 0] + 1 + rng.integers(0, E - 2, n)) % (E - 1)
    f = lambda *s: jnp.asarray(rng.standard_normal(s) * s[-1] ** -0.5, jnp.bfloat16)  # noqa: E731
    x, weights = f(n, H), jnp.asarray(rng.random((n, k)), jnp.bfloat16)
    gate_up, down = f(2, E, 2 * width, H), f(2, E, H, width)
    with interpret.force_gpu_interpret_mode():
        got = many.experts_of_many(x, weights, jnp.asarray(experts), gate_up, down, jnp.int32(1))
    x, weights, gate_up, down = (np.asarray(a, np.float64) for a in (x, weights, gate_up, down))
    want = np.zeros_like(x)
    for row in range(n):
        for w, e in zip(weights[row], experts[row], strict=True):
            want[row] += w * gated(x[row], gate_up[1, e], down[1, e])
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 1e-2 * np.linalg.norm(want)


def arguments(shape, n, layers=2):
    E, H, width = shape.E, shape.H, shape.width
    sizes = ((E, H), (1, H), (E, 2 * width, H), (E, H, width), (2 * width, H), (H, width))
    of = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    return of(n, H), *(of(layers, *s) for s in sizes), layer


@pytest.mark.parametrize("n", [17, 300])
@pytest.mark.parametrize("name", SHAPES)
def test_lowers_for_cuda(name, n, monkeypatch):
    monkeypatch.setattr(many, "not_hopper", lambda: None)
    shape = SHAPES[name]
    f = lambda *a: sparse_layer(*a, top_k=shape.top_k, normalise=True)  # noqa: E731
    text = jax.jit(f).trace(*arguments(shape, n)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2
