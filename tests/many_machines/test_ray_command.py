"""`ninfer batch --ray` as a user runs it: a process of its own, beside the same job without Ray. Extra `ray`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ninfer_jax as nj
from tests.batch.lines import chat, comparable, completion, read, write
from tests.conftest import CACHE, GOLDENS

ray = pytest.importorskip("ray", reason="ray is in the extra `ray`")
pytestmark = [pytest.mark.eval, pytest.mark.filterwarnings("ignore")]

ROOT = Path(nj.__file__).parent.parent
MODEL = str(GOLDENS / "tiny-qwen3.5-dense")
ENGINE = ["--max-context", "320", "--max-concurrency", "4", "--prefill-chunk", "64"]
RAY = ["--ray", "--num-replicas", "2", "--batch-size", "5"]


@pytest.fixture(scope="module")
def environment():
    """Of commands that join a cluster of this test, which has three cores however many the machine has."""
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "PYTHONPATH": str(ROOT),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)  # what Ray starts has the environment of what starts it
        context = ray.init(num_cpus=3, include_dashboard=False)
        yield {**os.environ, "RAY_ADDRESS": context.address_info["address"]}
        ray.shutdown()


def start(source, output, environment, *options, model=MODEL):
    code = "from ninfer_jax.cli import main; main()"
    command = ["batch", "-i", source, "-o", output, "-m", model, *options]
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def finish(job):
    out, err = job.communicate(timeout=300)
    return job.returncode, out, err


def rows(count, tokens=6):
    """Greedy and drawn, over two beginnings of several pages."""
    heads = ["Once upon a time. " * 12, "Hello. "]
    return [
        [chat, completion][i % 2](
            f"r{i}", f"{heads[i % 3 // 2]}{i}?", temperature=i % 2, max_tokens=tokens + i % 4
        )
        for i in range(count)
    ]


def test_the_same_answers_as_without_ray_and_resume(environment, tmp_path):
    refused = completion("bad", "x", foo=1)
    source = write(tmp_path / "in", [*rows(24), refused, "nonsense", rows(1)[0]])
    alone, output = tmp_path / "alone", tmp_path / "out"
    code, _, err = finish(start(source, alone, environment, *ENGINE))
    assert code == 0, err
    code, out, err = finish(start(source, output, environment, *ENGINE, *RAY))
    assert code == 0, err
    summary = json.loads(out)  # and nothing else on stdout
    assert (summary["rows"], summary["answered"], summary["errors"]) == (27, 24, 3)
    assert "tokens/s" in err
    assert comparable(read(output)) == comparable(read(alone))

    kept = output.read_bytes().splitlines(keepends=True)
    del kept[3:17:2]
    output.write_bytes(b"".join(kept)[:-9])  # and a torn last line
    code, out, err = finish(start(source, output, environment, *ENGINE, *RAY, "--no-progress"))
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["done_before"], summary["remaining"]) == (19, 0)
    assert summary["answered"] + summary["errors"] == 8
    assert summary["cut_bytes"] > 0
    assert comparable(read(output)) == comparable(read(alone))

    code, out, err = finish(start(source, output, environment, *ENGINE, *RAY))
    assert code == 0, err
    assert json.loads(out)["done_before"] == 27


def test_an_interrupted_run_ends_at_once_and_is_gone_on_with(environment, tmp_path):
    source, output = write(tmp_path / "in", rows(400, tokens=60)), tmp_path / "out"
    job = start(source, output, environment, *ENGINE, *RAY, "--no-progress")
    deadline = time.monotonic() + 200
    while not output.exists() or output.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline, "no line came"
        time.sleep(0.05)
    began = time.monotonic()
    job.send_signal(signal.SIGINT)
    code, out, err = finish(job)
    assert code == 130, err
    assert time.monotonic() - began < 30
    summary = json.loads(out)
    assert summary["interrupted"]
    lines = read(output)
    assert len(lines) == summary["answered"] == 400 - summary["remaining"] < 400
    write(source, rows(400, tokens=60)[: len(lines) + 5])
    code, out, err = finish(start(source, output, environment, *ENGINE, *RAY, "--no-progress"))
    assert code == 0, err
    again = json.loads(out)
    assert again["done_before"] + again["answered"] == len(lines) + 5
    assert len({x["id"] for x in read(output)}) == len(read(output))


def test_a_model_that_is_not_there(environment, tmp_path):
    source, output = write(tmp_path / "in", ["nonsense", *rows(3)]), tmp_path / "out"
    job = start(source, output, environment, *RAY, "--no-progress", model="/no/model")
    code, out, err = finish(job)
    assert code == 2, err
    assert out == ""
    (said,) = [x for x in err.splitlines() if x.startswith("ninfer: ")]
    assert "1 of 4 rows are in" in said
    assert said.endswith("/no/model: no such folder")
    assert len(read(output)) == 1
