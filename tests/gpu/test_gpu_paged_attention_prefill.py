"""The prefill kernel on a Hopper GPU against float64, and what must not change a row's bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prefill_attention_cases import Case

from pallas_kernels.paged_attention import prefill_kernel

pytestmark = pytest.mark.gpu

SCALE = 0.0625
attend = jax.jit(lambda *a: prefill_kernel.paged_attention(*a, SCALE))


@pytest.mark.parametrize(
    ("T", "N", "K", "starts", "lengths"),
    [
        (64, 8, 2, [0], [64]),
        (96, 8, 2, [0, 100], [40, 96]),
        (32, 16, 2, [63], [32]),
        (256, 16, 2, [0, 1000, 77], [256, 130, 0]),
        (512, 24, 4, [3000], [511]),
        (1024, 16, 4, [17], [1024]),
    ],
)
def test_equals_float64_attention(T, N, K, starts, lengths):
    case = Case(T, N, K, starts, lengths)
    case.check(attend(*case.arguments()), SCALE)


def test_a_row_depends_on_neither_neighbours_nor_page_order():
    case = Case(256, 24, 4, [500, 30, 2000], [256, 200, 100])
    q, k, v, *where = case.arguments()
    out = np.asarray(attend(q, k, v, *where).view(jnp.uint16))
    layer, tables, starts, lengths = where
    alone = attend(q[:1], k, v, layer, tables[:1], starts[:1], lengths[:1]).view(jnp.uint16)
    assert np.array_equal(np.asarray(alone[0]), out[0])

    moved = np.random.default_rng(1).permutation(k.shape[1])
    home = jnp.asarray(np.argsort(moved), jnp.int32)
    elsewhere = attend(q, k[:, moved], v[:, moved], layer, home[tables], starts, lengths)
    elsewhere = np.asarray(elsewhere.view(jnp.uint16))
    for b, n in enumerate(case.lengths):
        assert np.array_equal(elsewhere[b, :n], out[b, :n])
