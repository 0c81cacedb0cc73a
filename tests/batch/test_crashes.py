"""Jobs in a process of their own that are killed, interrupted, or started twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.batch.lines import comparable, read, write
from tests.batch.test_run import rows

ROOT = Path(__file__).parent.parent.parent


def start(source, output, slow=0.0):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.batch.stand_in_job", str(source), str(output), str(slow)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def finish(job):
    out, err = job.communicate(timeout=120)
    return job.returncode, out.removeprefix("ready\n"), err


def wait_for_lines(output, count):
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no line came"
        time.sleep(0.01)


def killed_and_whole(tmp_path, kills, count, seed):
    """Kill a job at random moments after its start, then let it end; and once without."""
    source = write(tmp_path / "in", [*rows(count), "nonsense", rows(1)[0]])
    output = tmp_path / "out"
    luck = random.Random(seed)
    torn = 0
    for _ in range(kills):
        job = start(source, output, slow=0.005)
        assert job.stdout.readline() == "ready\n"
        time.sleep(luck.uniform(0.0, 1.5))
        job.kill()
        job.communicate(timeout=60)
        if output.exists() and luck.random() < 0.5:  # a kill seldom meets a write, so tear one
            data = output.read_bytes()
            last = len(data) - len(data[:-1].rpartition(b"\n")[2]) if data else 0
            if data:
                output.write_bytes(data[: luck.randint(max(0, last - 1), len(data))])
                torn += 1
    code, out, err = finish(start(source, output))
    assert code == 0, err
    assert json.loads(out)["remaining"] == 0
    code, _, err = finish(start(source, tmp_path / "whole"))
    assert code == 0, err
    lines = read(output)
    assert len(lines) == count + 2
    assert len({line["id"] for line in lines}) == count + 2
    assert comparable(lines) == comparable(read(tmp_path / "whole"))
    return torn


def test_a_job_killed_three_times(tmp_path):
    killed_and_whole(tmp_path, 3, 250, seed=3)


@pytest.mark.slow
def test_a_job_killed_twenty_times(tmp_path):
    assert killed_and_whole(tmp_path, 20, 2000, seed=20) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_what_runs(tmp_path, number):
    source, output = write(tmp_path / "in", rows(150)), tmp_path / "out"
    job = start(source, output, slow=0.005)
    wait_for_lines(output, 1)
    job.send_signal(number)
    code, out, err = finish(job)
    assert code == 130, err
    summary = json.loads(out)
    assert summary["interrupted"]
    lines = read(output)
    assert len(lines) == summary["answered"] == 150 - summary["remaining"]
    assert all(line["error"] is None for line in lines)
    code, out, err = finish(start(source, output))
    assert code == 0, err
    assert json.loads(out)["done_before"] == len(lines)
    assert len(read(output)) == 150


def test_a_second_signal_cancels_what_runs(tmp_path):
    long = rows(40, max_tokens=250)
    source, output = write(tmp_path / "in", [*rows(10)[:4], *long[4:]]), tmp_path / "out"
    job = start(source, output, slow=0.02)
    assert job.stdout.readline() == "ready\n"
    time.sleep(1.5)
    began = time.monotonic()
    job.send_signal(signal.SIGINT)
    time.sleep(0.3)
    job.send_signal(signal.SIGINT)
    code, out, err = finish(job)
    assert code == 130, err
    assert time.monotonic() - began < 5
    summary = json.loads(out)
    assert summary["remaining"] > 0
    assert all(line["error"] is None for line in read(output))
    assert len(read(output)) == 40 - summary["remaining"]


def test_two_jobs_on_one_output(tmp_path):
    source, output = write(tmp_path / "in", rows(400)), tmp_path / "out"
    job = start(source, output, slow=0.02)
    wait_for_lines(output, 1)
    code, _, err = finish(start(source, output))
    assert code != 0
    assert "another run" in err
    job.kill()
    job.communicate(timeout=60)
