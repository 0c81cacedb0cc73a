"""What decides the exit code of the bench on a GPU."""

from scripts.bench_gpu import missed


def test_limits_that_are_missed_are_named():
    document = {
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
    }
    assert sorted(missed(document)) == [
        "decode 27B 1: 0.91 < 0.92",
        "kernels 27B 1: idle 0.04 > 0.03",
        "prefill 4B 30000: 0.64 < 0.65",
    ]
    assert missed({}) == []
