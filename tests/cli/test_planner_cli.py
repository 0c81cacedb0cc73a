"""`ninfer simulate` and `ninfer explain` as a user runs them."""

import json

import pytest

from planner.testing import tiny_layout
from planner.world import Journal, WorldConfig
from tests.cli.test_cli import run


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    lines = [
        {"arrival": i / 4, "prefix": ["system", f"user{i % 3}"], "lengths": [300, 90], "output": 20}
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def test_simulate_then_explain(trace, tmp_path):
    record = tmp_path / "record.jsonl"
    options = ("--max-context", 512, "--max-concurrency", 2, "--kv-capacity", 640)
    options += ("--device-state-slots", 4, "--host-capacity", 1 << 30, "--prefill-chunk", 128)
    done = run("simulate", trace, "--policy", "incremental", *options, "--json", "--record", record)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["completed"] == 6
    assert report["hit_tokens"] >= 5 * 300
    plain = run("simulate", trace, *options)
    assert plain.returncode == 0
    assert "6 completed" in plain.stdout
    assert plain.stderr == ""
    one = run("explain", record, 2)
    assert one.returncode == 0
    assert "request 2: submitted: 390 prompt tokens" in one.stdout
    assert "request 1" not in one.stdout.replace("for request 1", "")
    assert "request 6: finished" in run("explain", record).stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("simulate", "/no/such/file"), "No such file"),
        (("simulate", "TRACE", "--policy", "greedy"), "greedy"),
        (("simulate", "TRACE", "--max-context", 100), "line 1"),
        (("simulate", "TRACE", "--kv-capacity", 10), "kv_capacity"),
        (("simulate", "TRACE", "--prefill-chunk", 100), "prefill_chunk"),
        (("simulate", "TRACE", "--max-concurrency", 9), "max_concurrency"),
        (("simulate", "BAD"), "line 1: "),
        (("explain", "/no/such/file"), "No such file"),
        (("explain", "TRACE"), "line 1"),
        (("explain", "RECORD", 77), "no request 77"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(trace, tmp_path, args, message):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"arrival": "soon"}\n')
    record = tmp_path / "record"
    Journal(record, WorldConfig(tiny_layout(page_tokens=64))).close()
    places = {"TRACE": trace, "BAD": bad, "RECORD": record}
    done = run(*(places.get(a, a) for a in args))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ninfer: ")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
