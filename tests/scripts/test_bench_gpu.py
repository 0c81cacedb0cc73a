"""What decides the exit code of the bench on a GPU, and what its table shows."""

import io

from rich.console import Console

from scripts.bench_gpu import missed, table

DOCUMENT = {
    "device": "a GPU",
    "versions": {"jax": "0.0"},
    "decode": [
        {"model": "27B", "rows": 1, "share": 0.91},
        {"model": "27B", "rows": 8, "share": 0.91},
        {"model": "9B", "rows": 1, "share": 0.1},
    ],
    "prefill": [{"model": "4B", "tokens": 30_000, "share": 0.64}],
    "kernels": [
        {"model": "27B", "rows": 1, "idle": 0.04},
        {"model": "4B", "rows": 8, "idle": 0.04},
        {"model": "0.8B", "rows": 1, "idle": 0.5},
        {"model": "27B", "tokens": 2048, "idle": 0.5},
    ],
    "hit": [
        {"model": "27B", "which": "cold", "ttft_ms": 1400.0},
        {"model": "27B", "which": "warm", "ttft_ms": 61.0},
        {"model": "27B", "which": "warm", "ttft_ms": 20.0},
    ],
}


def test_limits_that_are_missed_are_named():
    assert sorted(missed(DOCUMENT)) == [
        "decode 27B 1 share: 0.91 < 0.92",
        "hit 27B warm ttft_ms: 61.0 > 60",
        "kernels 27B 1 idle: 0.04 > 0.03",
        "prefill 4B 30000 share: 0.64 < 0.65",
    ]
    assert missed({}) == []


def test_the_table_has_a_line_for_each_figure_that_a_limit_is_set_for():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(DOCUMENT))
    lines = [line.split() for line in console.export_text().splitlines() if "27B" in line]
    assert [line[1:5] for line in lines if line[1] == "decode"] == [
        ["decode", "27B", "1", "share"],
        ["decode", "27B", "8", "share"],
    ]
    assert [line[-2] for line in lines] == ["missed", "ok", "missed", "ok", "missed"]
