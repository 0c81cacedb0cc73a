"""Runs of a real model, over the command line and in this process."""

import json
import os
import subprocess
import sys

import pytest

import ninfer_jax as nj
from tests.batch.lines import chat, comparable, completion, read, score, write
from tests.conftest import CACHE, GOLDENS

MODEL = GOLDENS / "tiny-qwen3.5-dense"


@pytest.fixture(scope="module")
def engine():
    with nj.load(MODEL, max_context=320, max_concurrency=4, prefill_chunk=64) as engine:
        yield engine


def rows():
    """Greedy and drawn, over three beginnings."""
    heads = ["Once upon a time. " * 12, "Of two numbers say the larger one. " * 6, "Hello. "]
    return [
        make(f"{make.__name__}-{i}", f"{heads[i % 3]}{i}?", temperature=i % 2, max_tokens=6 + i % 4)
        for i in range(12)
        for make in (chat, completion)
    ]


def test_reuse_order_and_restarts_change_nothing(engine, tmp_path):
    """With units of one page, whose pieces are the same whatever is reused, every number is."""
    lines = [*rows(), completion("n", ["a", "b"], n=2, max_tokens=4, logprobs=2)]
    lines.append(chat("l", "a", max_tokens=4, logprobs=True, top_logprobs=2))
    source = write(tmp_path / "in", lines)
    whole = nj.run_batch(source, tmp_path / "whole", engine, progress=False)
    assert whole.answered == len(lines)
    assert whole.cached_tokens > 500
    engine.clear_cache()
    cold = nj.run_batch(source, tmp_path / "cold", engine, cache=False, progress=False)
    assert cold.cached_tokens == 0
    output = tmp_path / "pieces"
    for count in (5, 11, len(lines)):
        engine.clear_cache()
        write(source, lines[:count][::-1])
        nj.run_batch(source, output, engine, progress=False)
    expected = comparable(read(tmp_path / "cold"))
    assert comparable(read(tmp_path / "whole")) == expected
    assert comparable(read(output)) == expected


def test_scores_are_those_of_the_engine(engine, tmp_path):
    lines = [score("a", "Once upon", [" a time", " the"]), chat("b", "hi", max_tokens=2)]
    source = write(tmp_path / "in", [*lines, score("c", "Once", " upon")])
    assert nj.run_batch(source, tmp_path / "out", engine, progress=False).answered == 3
    found = {x["custom_id"]: x["response"]["body"] for x in read(tmp_path / "out")}
    one, two, three = engine.score(["Once upon", "Once upon", "Once"], [" a time", " the", " upon"])
    for got, want in zip(
        (*found["a"]["scores"], *found["c"]["scores"]), (one, two, three), strict=True
    ):
        assert got["sum_logprob"] == pytest.approx(want.sum_logprob, abs=1e-5)
        assert got["token_ids"] == list(want.token_ids)
        assert got["is_greedy"] is want.is_greedy


def test_the_command(tmp_path):
    source = write(tmp_path / "in", [completion("a", "Hello", max_tokens=3), "nonsense"])
    code = "from ninfer_jax.cli import main; main()"
    command = ["batch", "-i", source, "-o", tmp_path / "out", "-m", MODEL, "--max-context", "64"]
    for done in (0, 2):
        job = subprocess.run(
            [sys.executable, "-c", code, *map(str, command)],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(CACHE)},
            check=True,
        )
        assert json.loads(job.stdout)["done_before"] == done
        if not done:
            assert "tokens/s" in job.stderr
            assert "1 errors" in job.stderr
    assert len(read(tmp_path / "out")) == 2
