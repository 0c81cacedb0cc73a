import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.batch.order import MAX_MARKERS, arrange, reusable_tokens
from planner import PAGE_TOKENS


def prompt(*parts):
    """Token ids from (seed, length) pairs."""
    return tuple(int(t) for s, n in parts for t in np.random.default_rng(s).integers(0, 9999, n))


def test_rows_of_a_prefix_stand_together_and_name_it():
    prompts = [prompt((i % 3, 600), (100 + i, 20)) for i in range(30)]
    placed = arrange(prompts, [1] * 30)
    groups = [row.index % 3 for row in placed]
    assert sum(a != b for a, b in itertools.pairwise(groups)) == 2
    assert {row.markers for row in placed} == {(576,)}
    assert len({row.nodes for row in placed}) == 3
    assert reusable_tokens(placed) == 27 * 576


def test_nested_prefixes():
    outer, inner = (1, 128), (2, 128)
    prompts = [prompt(outer, inner, (9, 5)), prompt(outer, inner, (8, 5)), prompt(outer, (7, 90))]
    rows = {row.index: row for row in arrange(prompts, [1, 1, 1])}
    assert rows[0].markers == rows[1].markers == (128, 256)
    assert rows[2].markers == (128,)
    assert rows[2].nodes == rows[0].nodes[:1]


def test_long_rows_come_first():
    prompts = [prompt((i, 30)) for i in range(6)]
    assert [row.index for row in arrange(prompts, [3, 9, 1, 7, 5, 2])] == [1, 3, 4, 0, 5, 2]


def test_equal_prompts_leave_a_token_to_compute():
    for length, markers in ((128, (64,)), (129, (128,)), (64, ())):
        first, second = arrange([prompt((1, length))] * 2, [1, 1])
        assert first.markers == second.markers == markers


def test_a_conversation_that_grows_is_no_recursion():
    whole = np.arange(64 * 1500)
    placed = arrange([whole[: 64 * i + 1] for i in range(1, 1500)], [1] * 1499)
    assert sorted(row.index for row in placed) == list(range(1499))
    assert all(len(row.markers) <= MAX_MARKERS for row in placed)


def test_nothing():
    assert arrange([], []) == []


pieces = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@given(st.lists(pieces, min_size=1, max_size=25), st.data())
def test_what_is_named_is_shared(rows, data):
    """Every row once; rows with a node in common agree up to it; every marker is of whole pages inside the prefill;
    the deepest is the most that the row shares with any other."""
    prompts = [prompt(*((p, 40) for p in row)) for row in rows]
    work = data.draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
    placed = arrange(prompts, work)
    assert sorted(row.index for row in placed) == list(range(len(rows)))
    heads = {}
    for row in placed:
        mine = prompts[row.index]
        assert len(row.markers) == len(row.nodes)
        assert list(row.markers) == sorted(set(row.markers))
        for depth, node in zip(row.markers, row.nodes, strict=True):
            assert depth % PAGE_TOKENS == 0
            assert 0 < depth < len(mine)
            assert heads.setdefault(node, mine[:depth]) == mine[:depth]
        others = [p for i, p in enumerate(prompts) if i != row.index]
        common = max((_common(mine, other) for other in others), default=0)
        assert max(row.markers, default=0) == common


def _common(a, b):
    count = 0
    while count < min(len(a), len(b)) - 1 and a[count] == b[count]:
        count += 1
    return count // PAGE_TOKENS * PAGE_TOKENS
