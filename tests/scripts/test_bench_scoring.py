"""The scoring bench: its jobs, its agreement check and its verdicts. No timing decides a test."""

import pytest

from scripts import bench_scoring
from scripts.bench_scoring import Row


def test_the_windows_score_every_token_once():
    text = bench_scoring.text_of(list(range(100)))
    assert len(text) == bench_scoring.TEXT_TOKENS
    pairs = bench_scoring.window_pairs(text)
    assert [t for _, after in pairs for t in after] == text[1:]
    assert all(len(before) + len(after) == bench_scoring.WINDOW for before, after in pairs)


@pytest.mark.parametrize(("low", "high"), bench_scoring.SHOTS.values())
def test_continuations_share_their_contexts(low, high):
    pairs = bench_scoring.choice_pairs(bench_scoring.text_of(list(range(100))), (low, high))
    assert len(pairs) == bench_scoring.CONTEXTS * bench_scoring.CHOICES
    assert len({tuple(before) for before, _ in pairs}) <= bench_scoring.CONTEXTS
    assert all(low <= len(before) < high and 1 <= len(after) < 9 for before, after in pairs)


def test_sides_that_disagree_are_not_compared():
    pairs = [([1], [2, 3])]
    sides = {"ours": lambda: [-3.0], "other": lambda: [-3.1]}
    with pytest.raises(ValueError, match="ours and other differ"):
        bench_scoring.measure(sides, pairs, repeats=1)
    same = bench_scoring.measure({"ours": lambda: [-3.0], "other": lambda: [-3.01]}, pairs, 1)
    assert set(same) == {"ours", "other"}


@pytest.mark.parametrize(("ours", "passed"), [(40.0, True), (39.9, False)])
def test_verdicts(ours, passed):
    row = Row("windows", ours, {"batch 1": 10.0, "batch 8": 20.0})
    assert row.huggingface == 20.0
    assert row.passed is passed
    assert row.as_json()["passed"] is passed
