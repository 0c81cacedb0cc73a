"""The CPU bench: its measuring on our side alone, its document and its verdicts. No timing decides a test."""

import json
import subprocess
import sys

import numpy as np
import pytest

from scripts import bench_cpu
from scripts.bench_cpu import Row, Side, Speed

ROWS_AHEAD = bench_cpu.rows_of("tiny", 1, Speed(300.0, 60.0), {1: Speed(100.0, 10.0)})


def fixed_side(tokens):
    return Side(first_token=lambda: None, generate=lambda n: [tokens[:n]])


def test_measures_our_side(goldens):
    folder = goldens / "tiny-qwen3.5-dense"
    prompts = [prompt[:5] for prompt in bench_cpu.prompts_of(folder, 2)]
    side = bench_cpu.our_side(folder, prompts, max_context=64)
    new = side.generate(3)
    assert [len(tokens) for tokens in new] == [3, 3]
    speeds = bench_cpu.measure({"ours": side}, prompts, tokens=2, repeats=1)
    assert list(speeds) == ["ours"]
    assert speeds["ours"].prefill > 0
    assert speeds["ours"].decode is None or speeds["ours"].decode > 0


def test_prompts_of_a_batch_differ_in_their_first_token(goldens):
    prompts = bench_cpu.prompts_of(goldens / "tiny-qwen3.5-dense", 8)
    assert {len(p) for p in prompts} == {200}
    assert len({p[0] for p in prompts}) == 8
    assert all(p[1:] == prompts[0][1:] for p in prompts)
    assert np.max(prompts) < 1024


def test_sides_that_disagree_are_not_compared():
    sides = {"one": fixed_side([1, 2, 3]), "other": fixed_side([1, 2, 4])}
    with pytest.raises(ValueError, match="one and other generate different tokens"):
        bench_cpu.measure(sides, [[5]], tokens=2, repeats=1)


def test_the_document_is_complete():
    document = json.loads(json.dumps(bench_cpu.document(ROWS_AHEAD, {"repeats": 1})))
    assert set(document) == {
        *("bench", "unit", "passed", "rows", "settings", "device", "versions", "commit", "date")
    }
    assert document["passed"] is True
    assert document["rows"][1] == {
        "checkpoint": "tiny",
        "batch": 1,
        "phase": "decode",
        "ours": 60.0,
        "huggingface": 10.0,
        "ratio": 6.0,
        "huggingface_by_threads": {"1": 10.0},
        "passed": True,
    }
    assert set(document["device"]) == {"cpu", "cores"}
    assert set(document["versions"]) == {"python", "jax", "torch", "transformers", "numpy"}


@pytest.mark.parametrize(
    ("batch", "phase", "ours", "huggingface", "passed"),
    [
        (1, "decode", 50.0, {1: 10.0}, True),
        (1, "decode", 49.0, {1: 10.0}, False),
        (1, "decode", 50.0, {1: 10.0, 2: 11.0}, False),  # held to the faster
        (8, "decode", 10.0, {1: 10.0, 2: 9.0}, True),
        (8, "decode", 9.9, {1: 10.0}, False),
        (1, "prefill", 10.0, {1: 10.0}, True),
        (1, "prefill", 9.9, {1: 10.0}, False),
        (8, "decode", None, {1: 10.0}, False),  # lost in noise
        (8, "decode", 10.0, {1: 1.0, 2: None}, False),
    ],
)
def test_verdicts(batch, phase, ours, huggingface, passed):
    row = Row("tiny", batch, phase, ours, huggingface)
    assert row.passed is passed
    assert bench_cpu.document([row], {})["passed"] is passed


def test_names_the_extra_when_torch_is_missing(goldens):
    block = "import sys; sys.modules['torch'] = None; sys.argv = ['bench_cpu']\n"
    code = block + "from scripts import bench_cpu; sys.exit(bench_cpu.main())"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=bench_cpu.ROOT
    )
    assert run.returncode == 2
    assert (
        run.stderr == "bench_cpu needs torch; install the extra: pip install 'ninfer-jax[eval]'\n"
    )
