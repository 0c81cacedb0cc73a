"""Decode attention: the fused reference and the kernel against float64, in the interpreter, lowered for the GPU."""

import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import paged_decode_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import attention_decode, decode_kernel, paged_attention
from pallas_kernels.paged_attention.decode_shapes import SHAPES, DecodeShape, random_arguments

SCALE, EPS = 1 / 16, 1e-6
ONE_TOKEN = [name for name, shape in SHAPES.items() if shape.T == 1 and shape.running is None]
SEVERAL = [name for name, shape in SHAPES.items() if shape.T > 1]


def fused(values, op=attention_decode, **options):
    """One step on fresh Refs: output and both planes afterwards."""
    values = dict(values)
    pools = {n: jax.new_ref(values.pop(n)) for n in ("k_pages", "v_pages")}
    out = op(**values, **pools, scale=SCALE, eps=EPS, **options)
    return out, *(jax.freeze(pool) for pool in pools.values())


def rows(shape, starts, lengths, *, is_fused, seed=0):
    values = random_arguments(shape, jax.random.key(seed), fused=is_fused)
    return values | {
        "layer": jnp.int32(1),
        "starts": jnp.array(starts, jnp.int32),
        "lengths": jnp.array(lengths, jnp.int32),
    }


def check_fused(values, result, most):
    """Output, the written columns, and that nothing else outside the null page has changed."""
    out, *planes = result
    want, *new = oracle.attention_decode(values, SCALE, EPS)
    runs = np.asarray(values["lengths"]) > 0
    assert oracle.error(out[runs], want[runs]) <= most
    assert not np.asarray(out)[~runs].any()
    layer, starts = int(values["layer"]), np.asarray(values["starts"])
    for plane, name, expected in zip(planes, ("k_pages", "v_pages"), new, strict=True):
        before, after = (oracle.exact(x)[:, 1:] for x in (values[name], plane))
        for b in np.flatnonzero(runs):
            page = int(values["block_tables"][b, starts[b] // 64]) - 1
            at = (layer, page, slice(None), starts[b] % 64)
            assert oracle.error(after[at], expected[b]) <= most
            after[at] = before[at]
        assert np.array_equal(before, after, equal_nan=True)


def test_the_fused_reference_equals_the_oracle():
    values = rows(DecodeShape(4, 1, 6, 1, 192), [70, 64, 0, 9], [1, 1, 1, 0], is_fused=True)
    check_fused(values, jax.jit(fused)(values), 1e-2)


@pytest.mark.parametrize("name", lowering.shapes(ONE_TOKEN, {"27B/B1/2k", "35B-A3B/B8/32k"}))
def test_the_fused_kernel_lowers_for_the_gpu_and_updates_pages_in_place(name):
    values = SHAPES[name].arguments(fused=True)
    step = jax.jit(lambda values: fused(values, decode_kernel.attention_decode))
    text = step.trace(values).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == 2


@pytest.mark.parametrize("name", [*SEVERAL, "27B/B8/2k", "0.8B/B1/2k"])
def test_the_kernel_lowers_for_the_gpu(name):
    values = SHAPES[name].arguments(fused=False)
    step = jax.jit(lambda values: decode_kernel.paged_attention(**values, scale=SCALE))
    text = step.trace(values).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call") == 2


chunk_lines = jax.jit(decode_kernel.chunk_lines, static_argnames=("kv_heads", "query_blocks"))


@pytest.mark.parametrize(
    ("rows", "heads", "table"), [(1, 2, 32), (8, 4, 512), (8, 2, 4096), (16, 4, 7), (16, 32, 40)]
)
def test_chunks_are_even_and_of_a_number_that_fills_the_blocks(rows, heads, table):
    sizes = {"rows": rows, "kv_heads": heads, "table": table}
    counts = [decode_kernel.chunk_count(pages, **sizes) for pages in range(table + 1)]
    traced = jax.vmap(lambda pages: decode_kernel.chunk_count(pages, **sizes))(
        jnp.arange(table + 1)
    )
    assert counts == traced.tolist()
    assert counts == sorted(counts)
    once = max(1, decode_kernel.BLOCKS // (rows * heads))
    for pages, count in enumerate(counts):
        assert min(pages, 1) <= count <= pages
        assert -(-pages // max(count, 1)) <= max(16, -(-table // 64))
        if once < pages <= 2 * decode_kernel.BLOCKS // heads - 2 * once:
            assert count == pages or (count % once == 0 and -(-pages // count) <= 2)


@settings(deadline=None)
@given(st.data())
def test_blocks_share_out_the_chunks_of_all_rows(data):
    """Each chunk once and in order, equal shares, and who has a row's last chunk appends from its first item on."""
    rows, heads, parts, table = data.draw(
        st.sampled_from([(1, 1, 1, 7), (8, 4, 1, 512), (3, 2, 3, 32), (8, 2, 1, 33)])
    )
    lengths = np.array([data.draw(st.sampled_from([0, 1, 1, 5])) for _ in range(rows)])
    starts = np.array([data.draw(st.integers(0, table * 64 - 5)) for _ in range(rows)])
    tables = np.random.default_rng(0).permutation(rows * table).reshape(rows, table)
    want = []
    for b in range(rows):
        tokens = int(starts[b] + lengths[b]) if lengths[b] else 0
        pages = -(-tokens // 64)
        count = decode_kernel.chunk_count(pages, rows=rows, kv_heads=heads * parts, table=table)
        edges = [n * pages // count for n in range(count + 1)] if count else []
        want += [
            (
                b,
                head,
                part,
                n,
                first,
                tables[b, first],
                end - first,
                starts[b],
                tokens,
                n == count - 1,
            )
            for head in range(heads)
            for n, (first, end) in enumerate(itertools.pairwise(edges))
            for part in range(parts)
        ]
    told, _ = chunk_lines(
        *(jnp.asarray(x, jnp.int32) for x in (tables, starts, lengths)),
        kv_heads=heads,
        query_blocks=parts,
    )
    items = [
        [decode_kernel.Item(*line) for line in block[: block[0, -1]]] for block in np.array(told)
    ]
    assert [tuple(item[:10]) for block in items for item in block] == want
    shares = [len(block) for block in items if block]
    assert not shares or set(shares[:-1]) <= {-(-len(want) // decode_kernel.BLOCKS)}
    assert all(item.items == len(block) for block in items for item in block)
    if parts == 1:
        for block in items:
            last = {(item.row, item.head) for item in block if item.last}
            assert all(item.appends == ((item.row, item.head) in last) for item in block)


def test_a_kernel_that_cannot_run_says_why():
    shape = DecodeShape(2, 1, 6, 1, 64)
    values = rows(shape, [3, 4], [1, 1], is_fused=False)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        paged_attention(**values, scale=SCALE, implementation="pallas")
    exact = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in values.items()}
    with pytest.raises(NotImplementedError, match="takes bfloat16"):
        paged_attention(**exact, scale=SCALE, implementation="pallas")


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="the interpreter lacks what the kernel uses before jax 0.11",
)
def test_the_kernels_in_the_interpreter():
    """Mosaic's interpreter keeps global state and threads: it gets a process of its own."""
    subprocess.run(
        [sys.executable, __file__],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )


def interpret():
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    options = {"interpret": InterpretGPUParams()}
    step = jax.jit(lambda v: fused(v, decode_kernel.attention_decode, **options))

    # One token, unused columns full of NaN, rows that do not run; blocks with several chunks, of one row and of two.
    decode_kernel.BLOCKS = 3
    shape = DecodeShape(3, 1, 4, 1, 192)
    last = {}
    for starts, lengths in (
        ([150, 180, 128], [1, 1, 1]),
        ([63, 150, 128], [1, 1, 1]),
        ([150, 20, 128], [0, 0, 1]),
    ):
        values = oracle.with_garbage(rows(shape, starts, lengths, is_fused=True), new_tokens=False)
        told, _ = chunk_lines(
            *(values[name] for name in ("block_tables", "starts", "lengths")),
            kv_heads=1,
            query_blocks=1,
        )
        last[int(told[:, 0, -1].max())] = result = step(values)
        check_fused(values, result, 1e-2)
        # The last row is the same each time and does not notice its neighbours, bit for bit.
        assert np.array_equal(result[0][2], next(iter(last.values()))[0][2])
    assert max(last) > 1
    decode_kernel.BLOCKS = 6

    # Several tokens, some of them invalid; 8 heads a group make two blocks of queries.
    shape = DecodeShape(2, 5, 8, 1, 192)
    values = oracle.with_garbage(rows(shape, [121, 62], [5, 3], is_fused=False), new_tokens=True)
    out = np.asarray(decode_kernel.paged_attention(**values, scale=SCALE, **options), np.float32)
    assert np.isfinite(out).all()
    for b, want in enumerate(oracle.paged_attention(values, SCALE)):
        assert oracle.error(out[b, : want.shape[0]], want) <= 1e-2

    # A row does not notice its neighbours: bit for bit, in another place and beside others.
    lonely = {n: x[::-1] if n in ("q", "block_tables") else x for n, x in values.items()}
    lonely |= {"starts": jnp.array([0, 121], jnp.int32), "lengths": jnp.array([0, 5], jnp.int32)}
    again = np.asarray(decode_kernel.paged_attention(**lonely, scale=SCALE, **options), np.float32)
    assert np.array_equal(again[1], out[0])
    assert not again[0].any()


if __name__ == "__main__":
    interpret()
