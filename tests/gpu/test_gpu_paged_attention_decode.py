"""Decode attention on the device against float64: `make test-gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import paged_decode_oracle as oracle
import pytest

from pallas_kernels.paged_attention import attention_decode, paged_attention
from pallas_kernels.paged_attention.decode_kernel import chunk_lines
from pallas_kernels.paged_attention.decode_shapes import DecodeShape, random_arguments

pytestmark = pytest.mark.gpu

SCALE, EPS = 1 / 16, 1e-6
attend = jax.jit(lambda values: paged_attention(**values, scale=SCALE, implementation="pallas"))


@jax.jit
def fused(values):
    values = dict(values)
    pools = {n: jax.new_ref(values.pop(n)) for n in ("k_pages", "v_pages")}
    out = attention_decode(**values, **pools, scale=SCALE, eps=EPS, implementation="pallas")
    return out, *(jax.freeze(pool) for pool in pools.values())


def rows(shape, starts, lengths, *, is_fused):
    values = random_arguments(shape, jax.random.key(0), fused=is_fused)
    return values | {
        "layer": jnp.int32(1),
        "starts": jnp.array(starts, jnp.int32),
        "lengths": jnp.array(lengths, jnp.int32),
    }


@pytest.mark.parametrize("heads", [(8, 2), (16, 4), (24, 4), (16, 2)])
def test_the_fused_step(heads):
    shape = DecodeShape(5, 1, *heads, 2112)
    values = rows(shape, [2100, 63, 64, 0, 700], [1, 1, 1, 1, 0], is_fused=True)
    values = oracle.with_garbage(values, new_tokens=False)
    out, *planes = fused(values)
    want, *new = oracle.attention_decode(values, SCALE, EPS)
    assert not np.asarray(out)[4].any()
    assert oracle.error(out, want) <= 1e-2
    for plane, expected in zip(planes, new, strict=True):
        for b, start in enumerate(np.asarray(values["starts"])[:4]):
            got = plane[1, values["block_tables"][b, start // 64], :, start % 64]
            assert oracle.error(got, expected[b]) <= 1e-2


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_several_tokens(tokens):
    shape = DecodeShape(3, tokens, 24, 4, 1024)
    starts, lengths = [900, 60, 0], [tokens, tokens // 2 + 1, 0]
    values = oracle.with_garbage(rows(shape, starts, lengths, is_fused=False), new_tokens=True)
    out = attend(values)
    assert np.isfinite(oracle.exact(out)).all()
    assert not np.asarray(out)[2].any()
    for b, want in enumerate(oracle.paged_attention(values, SCALE)[:2]):
        assert oracle.error(out[b, : want.shape[0]], want) <= 1e-2


def test_a_row_does_not_notice_its_neighbours():
    values = rows(DecodeShape(4, 1, 24, 4, 4096), [4000, 5, 70, 2000], [1] * 4, is_fused=False)
    out = np.asarray(attend(values))
    turned = [3, 0, 1, 2]
    moved = {
        n: x[jnp.array(turned)] if n in ("q", "block_tables", "starts") else x
        for n, x in values.items()
    }
    moved["lengths"] = jnp.array([1, 1, 0, 1], jnp.int32)
    again = np.asarray(attend(moved))
    for place in (0, 1, 3):
        assert np.array_equal(again[place], out[turned[place]])


@pytest.mark.parametrize("heads", [(8, 2), (24, 4), (16, 2)])
def test_blocks_with_several_chunks(heads):
    """Of one row and head, whose queries are prepared once, and of several; alone a row has equal bits."""
    shape = DecodeShape(8, 1, *heads, 2112)
    starts, everyone = [2100, 2047, 1500, 900, 63, 2048, 2111, 1983], [1, 1, 1, 1, 1, 0, 1, 1]
    values = oracle.with_garbage(rows(shape, starts, everyone, is_fused=True), new_tokens=False)
    work = {name: values[name] for name in ("block_tables", "starts", "lengths")}
    told, _ = chunk_lines(**work, kv_heads=heads[1], query_blocks=1)
    assert told[:, 0, -1].max() > 1
    out, *planes = fused(values)
    want, *new = oracle.attention_decode(values, SCALE, EPS)
    for b in np.flatnonzero(everyone):
        assert oracle.error(out[b], want[b]) <= 1e-2
        page, at = values["block_tables"][b, starts[b] // 64], starts[b] % 64
        for plane, expected in zip(planes, new, strict=True):
            assert oracle.error(plane[1, page, :, at], expected[b]) <= 1e-2
    for b in (0, 4, 7):
        alone = fused(values | {"lengths": jnp.zeros(8, jnp.int32).at[b].set(1)})[0]
        assert np.array_equal(np.asarray(alone)[b], np.asarray(out)[b])
