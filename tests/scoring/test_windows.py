"""Windows, chunks and groups are pure: every token once, no page too many, no sequence lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.errors import InputError
from ninfer_jax.scoring import core, windows
from ninfer_jax.scoring.windows import Window


def test_the_goldens_windows(goldens):
    golden = np.load(goldens / "scoring.npz")
    found = windows.text_windows(len(golden["ids"]), 512, 256)
    rows = [(w.begin, w.end, w.first, w.end) for w in found]
    np.testing.assert_array_equal(rows, golden["windows"])


@given(st.integers(2, 300), st.integers(2, 80), st.data())
def test_every_token_after_the_first_is_scored_once(length, window, data):
    stride = data.draw(st.integers(1, window - 1))
    found = windows.text_windows(length, window, stride)
    scored = [t for w in found for t in range(w.first, w.end)]
    assert scored == list(range(1, length))
    for w in found:
        assert w.begin < w.first
        assert 2 <= w.end - w.begin <= window
        assert w.begin == 0 or w.first - w.begin >= window - stride


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((1, 8, 4), "nothing to score"),
        ((9, 1, 1), "at least 2"),
        ((9, 8, 8), r"stride must be 1\.\.7"),
        ((9, 8, 0), r"stride must be 1\.\.7"),
    ],
)
def test_impossible_windows_are_refused(args, message):
    with pytest.raises(InputError, match=message):
        windows.text_windows(*args)


def test_a_window_shares_nothing():
    span = windows.window_span(np.arange(100, dtype=np.int32), Window(10, 20, 15))
    assert (span.first, span.branch, span.inputs) == (5, 0, 9)
    assert windows.grouped([span])[0].context.size == 0


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40), st.integers(0, 2)), max_size=30))
def test_waves_hold_everything_and_fit(items):
    shapes = core.shapes(256, 64)
    spans = [windows.pair([k] * c, [7] * n) for c, n, k in items]
    groups = windows.grouped(spans)
    assert sorted(i for g in groups for i in g.members) == list(range(len(spans)))
    for group in groups:
        for i in group.members:
            np.testing.assert_array_equal(spans[i].tokens[: spans[i].branch], group.context)
    held = windows.waves(groups, spans, rows=core.MAX_ROWS, pages=shapes.pages)
    assert [g for wave in held for g in wave] == groups
    for wave in held:
        assert len(wave) <= core.MAX_ROWS
        most = max(spans[i].pages for g in wave for i in g.members)
        assert sum(g.pages for g in wave) + most <= shapes.pages


@pytest.mark.parametrize(
    ("context", "chunk", "buckets"),
    [
        (4096, 2048, (16, 64, 128, 256, 512, 1024, 2048)),
        (4096, 320, (16, 64, 128, 256, 320)),
        (4096, 256, (16, 64, 128, 256)),
        (100, 256, (16, 64, 128)),
        (64, 64, (16, 64)),
        (1, 64, (16, 64)),
    ],
)
def test_shapes(context, chunk, buckets):
    shapes = core.shapes(context, chunk)
    assert shapes.buckets == buckets
    assert shapes.pages >= shapes.blocks + 1
    for bucket in buckets:
        assert 1 <= shapes.rows(bucket) <= core.MAX_ROWS
