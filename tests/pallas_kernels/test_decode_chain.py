"""Chains of products: how work is cut, the reference against float64, lowering for CUDA, a run in the interpreter."""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
from decode_chain_oracle import chain_oracle, row_errors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.decode_chain import ROWS, Experts, Norm, Product, chain, kernel, stages
from pallas_kernels.decode_chain.shapes import SHAPES, Shape, random_inputs, random_weights

HERE = pathlib.Path(__file__).parent
EPS = 1e-6


@st.composite
def products(draw):
    kind = draw(st.sampled_from(["rows", "swiglu", "add"]))
    outputs = 8 * draw(st.integers(8, 400))
    outputs = outputs // 64 * 64 if kind == "add" else outputs
    step = 128 if kind == "swiglu" else 256
    rows = 2 * outputs if kind == "swiglu" else outputs
    return Product(rows, step * draw(st.integers(1, 12)), kind)


@settings(deadline=None)
@given(product=products(), blocks=st.integers(1, 200))
@example(product=Product(64, 512, "rows"), blocks=132)
@example(product=Product(8224, 1024, "rows"), blocks=114)
def test_every_step_is_computed_once_and_nobody_waits_in_a_circle(product, blocks):
    computed = {}
    for block in range(blocks):
        begin, end = product.span(block, blocks)
        tiles = range(*product.tiles_of(begin, end))
        assert (begin < end) == (len(tiles) > 0)
        at = begin
        for n, tile in enumerate(tiles):
            low, high = product.part(tile, begin, end)
            assert low == at < high  # a run has no gaps, and no tile of nothing
            at = high
            for step in range(low, high):
                assert computed.setdefault((tile, step - tile * product.steps), block) == block
            owner = product.owner(tile, blocks)
            assert owner <= block <= owner + product.sharers(tile, blocks)
            # Whoever gives a part of somebody else's tile does so before all else.
            assert owner == block or n == 0
            # And whoever owns a tile that it shares has nothing to do after it.
            assert product.sharers(tile, blocks) == 0 or owner != block or n == len(tiles) - 1
        assert at == end
    assert set(computed) == {(t, s) for t in range(product.tiles) for s in range(product.steps)}
    for tile in range(product.tiles):
        who = [computed[tile, step] for step in range(product.steps)]
        assert who == sorted(who)
        owner = product.owner(tile, blocks)
        assert who[0] == owner
        assert set(who) == set(range(owner, owner + product.sharers(tile, blocks) + 1))


@settings(deadline=None)
@given(product=products(), blocks=st.integers(1, 200))
def test_tiles_cover_the_outputs(product, blocks):
    rows = [product.row(tile) for tile in range(product.tiles)]
    assert {r + i for r in rows for i in range(64)} == set(range(product.outputs))
    overlap = any(b - a < 64 for a, b in itertools.pairwise(rows))
    cut = any(product.sharers(tile, blocks) for tile in range(product.tiles))
    assert product.ordered(blocks) or not (overlap and cut)


@settings(max_examples=30, deadline=None)
@given(product=products(), blocks=st.integers(1, 200))
def test_traced_values_give_what_integers_give(product, blocks):
    # Always as many, so that nothing compiles anew; the formulas hold past the last one.
    block, tile = np.arange(200, dtype=np.int32), np.arange(400, dtype=np.int32)
    spans = [product.span(int(b), blocks) for b in block]
    got = product.span(jnp.asarray(block), blocks)
    assert np.array_equal(np.stack(got, axis=1), spans)
    of_tiles = jnp.asarray(tile)
    for f in (
        lambda t: product.owner(t, blocks),
        lambda t: product.sharers(t, blocks),
        product.row,
    ):
        assert np.asarray(f(of_tiles)).tolist() == [f(int(t)) for t in tile]
    begin, end = spans[0]
    got = product.part(of_tiles, jnp.int32(begin), jnp.int32(end))
    assert np.array_equal(np.stack(got, axis=1), [product.part(int(t), begin, end) for t in tile])


@settings(deadline=None)
@given(
    tiles=st.integers(1, 40),
    parts=st.integers(1, 8),
    slots=st.integers(1, 129),
    more=st.integers(0, 9),
)
def test_down_projections_are_cut_alike_for_any_number_of_slots(tiles, parts, slots, more):
    experts = Experts(32, 64 * tiles, 128 * parts, 1, True, EPS)
    down, blocks = experts.down(slots), tiles * parts + more
    assert 2 * down.steps - 1 <= slots <= 2 * down.steps
    for block in range(blocks):
        begin, end = down.span(block, blocks)
        of_block = list(range(*down.tiles_of(begin, end)))
        if block >= tiles * parts:
            assert begin == end
            assert not of_block
            continue
        assert of_block == [block // parts]
        (tile,) = of_block
        assert (
            down.part(tile, begin, end) == (begin, end) == (tile * down.steps, begin + down.steps)
        )
        owner = down.owner(tile, blocks)
        assert owner <= block <= owner + down.sharers(tile, blocks) == owner + parts - 1
        traced = down.span(jnp.int32(block), blocks)
        assert [int(x) for x in traced] == [begin, end]


def test_experts_use_the_blocks_that_there_are():
    for E, blocks, splits, ways in ((256, 132, 4, 2), (512, 132, 2, 2), (1024, 132, 1, 2)):
        experts = Experts(E, 2048, 512, 8, True, EPS)
        assert (experts.splits(blocks), experts.ways(blocks)) == (splits, ways)
    fewer = stages.unfit_experts(Experts(256, 2048, 512, 8, True, EPS), 114)
    assert "need 128 multiprocessors, not 114" in (fewer or "")
    # Parts of the router's K have no remainder.
    assert Experts(64, 256 * 3, 128, 2, True, EPS).splits(132) == 1


def small(*chosen, H=512, rows=ROWS):
    return Shape(H, chosen, rows)


TAIL = (
    Product(512, 1024, "add", eps=EPS),
    Product(1024, 512, "swiglu"),
    Product(512, 512, "add", eps=EPS),
)
EXPERTS = Experts(32, 512, 128, 4, True, EPS)
SMALL = {
    "tail": small(*TAIL, Product(200, 512, "rows", jnp.float32)),
    "ends in swiglu": small(TAIL[0], TAIL[1]),
    "enter": small(Norm(EPS), Product(328, 512, "rows")),
    "one product": small(Product(72, 512, "rows")),
    "experts": small(TAIL[0], EXPERTS, Product(200, 512, "rows", jnp.float32)),
    "experts of three rows": small(Norm(EPS), EXPERTS, Product(72, 512, "rows"), rows=3),
}


def arguments(shape, dtype, layers=2):
    weights = random_weights(shape, layers)
    first, residual = random_inputs(shape)
    index = jnp.arange(sum(map(len, weights)), dtype=jnp.int32) % layers
    first, residual, weights = jax.tree.map(lambda a: a.astype(dtype), (first, residual, weights))
    return first, residual, weights, index, shape.running


@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", SMALL)
def test_reference_against_float64(name, dtype, most):
    shape = SMALL[name]
    chosen = tuple(
        s if not isinstance(s, Product) or s.dtype == jnp.float32
        else Product(s.rows, s.width, s.kind, dtype, s.eps)
        for s in shape.stages
    )  # fmt: skip
    args = arguments(shape, dtype)
    result, residual = jax.jit(lambda *a: chain(chosen, *a))(*args)
    want, stream = chain_oracle(chosen, *args)
    assert row_errors(result, want) <= most
    assert row_errors(residual.T, stream.T) <= most
    last = chosen[-1]
    assert isinstance(last, Product)
    assert result.dtype == last.dtype


@pytest.mark.parametrize("running", [[0, 1, 0, 0, 1, 0, 0, 1], [0] * 8])
def test_rows_that_do_not_run_get_nothing_of_experts(running):
    shape = SMALL["experts"]
    args = arguments(shape, jnp.float32)[:4]
    runs = jnp.asarray(running, jnp.int32)
    _, residual = chain(shape.stages, *args, runs)
    _, stream = chain_oracle(shape.stages, *args, runs)
    assert row_errors(residual.T, stream.T) <= 1e-5
    first, before, weights, index = args
    out = shape.stages[0], Product(72, 512, "rows")
    head = jnp.zeros((2, 72, 512), jnp.float32)
    _, without = chain(out, first, before, (weights[0], (head,)), index[:3])
    assert np.array_equal(residual[:, runs == 0], without[:, runs == 0])


@pytest.mark.parametrize(
    "name",
    lowering.shapes(SHAPES, {"4B/tail to head", "27B/tail", "35B-A3B/enter", "80B-A3B/tail"}),
)
def test_the_kernel_lowers_for_the_gpu(name):
    shape = SHAPES[name]
    args = shape.arguments(layers=2)
    stages.check(shape.stages, *args)
    assert stages.unfit(shape.stages, shape.H, ROWS, [jnp.bfloat16]) is None
    f = jax.jit(lambda *a: kernel.chain(shape.stages, *a))
    text = f.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "custom_call @mosaic_gpu" in line)
    # Counters start at zero in every call: one a stage, one a block and product (or experts), two more of experts; none
    # of the real products has tiles that must be written in order.
    products = [s for s in shape.stages if isinstance(s, Product)]
    assert not any(p.ordered(132) for p in products)
    experts = sum(isinstance(s, Experts) for s in shape.stages)
    counters = len(shape.stages) + 132 * len(products) + (132 + 2) * experts
    zeros = re.findall(r"dense<0> : tensor<(\d+)xi32>|tensor<(\d+)xi32>\) ->", call)
    assert str(counters) in (a or b for a, b in zeros), zeros
    assert call.count("output_operand_alias<") == 1


def test_products_of_fewer_blocks_lower_as_well():
    shape = SHAPES["0.8B/tail"]
    assert shape.stages[-1].ordered(100)
    f = jax.jit(lambda *a: kernel.chain(shape.stages, *a, blocks=100))
    text = f.trace(*shape.arguments(layers=2)).lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<{4 + 4 * 100 + 1}xi32>" in text
    shape = SHAPES["35B-A3B/enter"]  # fewer blocks than tiles of the stream
    f = jax.jit(lambda *a: kernel.chain(shape.stages, *a, blocks=20))
    f.trace(*shape.arguments(layers=2)).lower(lowering_platforms=("cuda",))


def test_the_most_experts_a_row_lower():
    for E, k in ((1024, stages.MOST_CHOSEN), (64, 1)):
        experts = Experts(E, 512, 128, k, True, EPS)
        shape = Shape(512, (Norm(EPS), experts, Product(72, 512, "rows")))
        f = jax.jit(lambda *a, chosen=shape.stages: kernel.chain(chosen, *a))
        f.trace(*shape.arguments(layers=2)).lower(lowering_platforms=("cuda",))
    shape = Shape(512, (Norm(EPS), Experts(1024, 512, 128, 2, True, EPS), Product(72, 512, "rows")))
    run = lambda *a: kernel.chain(shape.stages, *a, blocks=128)  # noqa: E731
    with pytest.raises(ValueError, match="need 129 multiprocessors, not 128"):
        jax.eval_shape(run, *shape.arguments(2))


@pytest.mark.parametrize(
    ("chosen", "H", "why"),
    [
        (TAIL, 512, None),
        ((Product(512, 640, "rows"),), 512, "width 640 is not a multiple of 256"),
        ((Product(1024, 128, "swiglu"),), 512, None),
        ((Product(60, 512, "rows"),), 512, "60 outputs"),
        ((Product(100, 512, "rows"),), 512, "100 outputs"),
        ((Norm(EPS),), 8256, "residual stream of 8256"),
        ((Norm(EPS),), 520, "residual stream of 520"),
        (SMALL["experts"].stages, 512, None),
        ((Experts(40, 512, 128, 4, True, EPS),), 512, "40 experts are not"),
        ((Experts(1056, 512, 128, 4, True, EPS),), 512, "1056 experts are not"),
        ((Experts(64, 512, 128, 12, True, EPS),), 512, "12 experts a row are not 1 to 11"),
        ((Experts(32, 512, 128, 0, True, EPS),), 512, "0 experts a row"),
        ((Experts(64, 512, 192, 4, True, EPS),), 512, "width 192"),
        ((Experts(64, 640, 128, 4, True, EPS),), 640, "640 channels"),
        ((Experts(64, 4096, 1024, 4, True, EPS),), 4096, "need 512 multiprocessors, not 132"),
    ],
)
def test_sizes_that_do_not_fit(chosen, H, why):
    got = stages.unfit(chosen, H, ROWS, [jnp.bfloat16])
    assert got is None if why is None else why in got


def test_other_dtypes_and_rows_do_not_fit():
    assert "not bfloat16" in stages.unfit(TAIL, 512, ROWS, [jnp.bfloat16, jnp.float32])
    assert "16 rows" in stages.unfit(TAIL, 512, 2 * ROWS, [jnp.bfloat16])


def test_mistakes_are_named():
    args = arguments(SMALL["one product"], jnp.bfloat16)
    first, residual, weights, index, _ = args
    (product,) = SMALL["one product"].stages
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        chain((product,), *args, implementation="pallas")
    with pytest.raises(ValueError, match="2 stages but weights of 1"):
        chain((product, product), *args)
    with pytest.raises(ValueError, match="must be the first"):
        chain((product, Norm(EPS)), first, residual, weights * 2, index)
    with pytest.raises(ValueError, match="kind 'gelu'"):
        chain((Product(72, 512, "gelu"),), *args)
    with pytest.raises(ValueError, match="adds 72 channels to 512"):
        chain((Product(72, 512, "add"),), *args)
    with pytest.raises(ValueError, match="input of stage 0"):
        chain((Product(72, 1024, "rows"),), *args)
    with pytest.raises(ValueError, match="input of stage 1"):
        chain((product, product), first, residual, weights * 2, index)
    with pytest.raises(ValueError, match="stage 0 wants stacks"):
        chain((Product(80, 512, "rows"),), *args)
    experts = SMALL["experts"]
    args = arguments(experts, jnp.bfloat16)
    with pytest.raises(ValueError, match="which rows run"):
        chain(experts.stages, *args[:4])
    with pytest.raises(ValueError, match="an int32 for each"):
        chain(experts.stages, *args[:4], args[4] > 0)
    with pytest.raises(ValueError, match="follow a stage that leaves the normed stream"):
        chain(experts.stages[1:], first, residual, args[2][1:], index)
    out, one, last = experts.stages
    twice = (args[2][0], args[2][1], args[2][1], args[2][2])
    with pytest.raises(ValueError, match="one stage of Experts"):
        chain((out, one, one, last), *args[:2], twice, args[3], args[4])
    with pytest.raises(ValueError, match="must be a product that leaves a result"):
        chain(experts.stages[:2], *args[:2], args[2][:2], args[3][:-1], args[4])
    with pytest.raises(ValueError, match="layer indices"):
        chain((product,), first, residual, weights, jnp.zeros((2,), jnp.int32))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10's interpreter never ends")
@pytest.mark.parametrize("case", ["tail", "enter", "overlap"])
def test_the_kernel_in_the_interpreter(case):
    """With Python's counters in the place of those in global memory, which the interpreter does not know."""
    subprocess.run(
        [sys.executable, str(HERE / "chain_on_cpu.py"), case],
        check=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )
