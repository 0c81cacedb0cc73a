"""Whole runs over the real engine, planner and files, and a stand-in for the device."""

import itertools
import json
import os
import random
import threading
import time
from types import SimpleNamespace

import pytest

import ninfer_jax as nj
from ninfer_jax.batch import run as runs
from ninfer_jax.batch import run_batch, windows
from tests.batch.lines import chat, comparable, completion, read, score, write
from tests.batch.stand_in_job import stand_in_engine


@pytest.fixture
def engine():
    with stand_in_engine() as engine:
        yield engine
        deadline = time.monotonic() + 20
        while not engine.idle:
            assert time.monotonic() < deadline
            time.sleep(0.002)


def rows(count, **body):
    """Chats and completions; the stand-in is always greedy."""
    body = {"max_tokens": 8, "ignore_eos": True, "temperature": 0} | body
    return [[chat, completion][i % 2](f"row-{i}", f"Question {i}?", **body) for i in range(count)]


def run(engine, tmp_path, lines, output="out", **options):
    source = write(tmp_path / "in", lines)
    return run_batch(source, tmp_path / output, engine, progress=False, **options)


def test_every_line_has_one_answer(engine, tmp_path):
    summary = run(engine, tmp_path, rows(20))
    assert (summary.rows, summary.answered, summary.errors) == (20, 20, 0)
    lines = read(tmp_path / "out")
    assert sorted(x["custom_id"] for x in lines) == sorted(f"row-{i}" for i in range(20))
    for line in lines:
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["usage"]["completion_tokens"] == 8
    assert summary.generated_tokens == 160


def test_an_answer_is_what_the_engine_says(engine, tmp_path):
    run(engine, tmp_path, [completion("a", "Hello", max_tokens=9, temperature=0, n=2)])
    (line,) = read(tmp_path / "out")
    (out,) = engine.generate("Hello", nj.SamplingParams(max_tokens=9, temperature=0, n=2))
    assert [c["text"] for c in line["response"]["body"]["choices"]] == [s.text for s in out.outputs]


def test_order_and_cache_change_no_answer(engine, tmp_path):
    lines = rows(20)
    run(engine, tmp_path, lines, "a")
    engine.clear_cache()
    run(engine, tmp_path, lines, "b", ordered=False)
    run(engine, tmp_path, lines, "c", cache=False)
    assert comparable(read(tmp_path / "a")) == comparable(read(tmp_path / "b"))
    assert comparable(read(tmp_path / "a")) == comparable(read(tmp_path / "c"))


def test_a_second_run_does_nothing(engine, tmp_path):
    run(engine, tmp_path, rows(5))
    before = (tmp_path / "out").read_bytes()
    source = write(tmp_path / "in", rows(5))
    summary = run_batch(source, tmp_path / "out", "no such model", progress=False)
    assert (summary.done_before, summary.answered) == (5, 0)
    assert (tmp_path / "out").read_bytes() == before


def test_lines_inserted_removed_and_reordered(engine, tmp_path):
    lines = rows(12)
    run(engine, tmp_path, lines[:8])
    changed = [*lines[3:], "", "  "]
    random.Random(1).shuffle(changed)
    summary = run(engine, tmp_path, changed)
    assert (summary.rows, summary.done_before, summary.answered, summary.stale) == (9, 5, 4, 3)
    run(engine, tmp_path, lines, "whole")
    assert comparable(read(tmp_path / "out")) == comparable(read(tmp_path / "whole"))


def test_a_changed_request_runs_again_and_the_old_answer_is_stale(engine, tmp_path):
    run(engine, tmp_path, rows(3))
    summary = run(engine, tmp_path, rows(3, max_tokens=5))
    assert (summary.done_before, summary.answered, summary.stale) == (0, 3, 3)
    assert len(read(tmp_path / "out")) == 6
    summary = run(engine, tmp_path, rows(3, max_tokens=5))
    assert (summary.done_before, summary.answered, summary.stale) == (3, 0, 3)


def test_duplicates_are_an_error_each(engine, tmp_path):
    first, second, other = rows(1)[0], rows(1, max_tokens=5)[0], rows(2)[1]
    summary = run(engine, tmp_path, [first, second, other, first])
    assert (summary.answered, summary.errors) == (2, 2)
    lines = read(tmp_path / "out")
    errors = [x for x in lines if x["error"]]
    assert [x["error"]["code"] for x in errors] == ["duplicate_custom_id"] * 2
    assert {x["custom_id"] for x in errors} == {"row-0"}
    assert len({x["id"] for x in lines}) == 4
    for order in itertools.permutations([first, second, other, first]):
        summary = run(engine, tmp_path, order)
        assert (summary.done_before, summary.answered, summary.errors) == (4, 0, 0)
        assert summary.stale == 0
    assert read(tmp_path / "out") == lines


def test_bad_lines_are_an_error_each(engine, tmp_path):
    lines = [
        "nonsense", "nonsense", "{}", '{"custom_id": "u", "method": "POST", "url": "/v1/x"}',
        completion("body", "x", foo=1), completion("long", "x", max_tokens=100_000),
        completion("longer", [1] * 5000), *rows(2),
    ]  # fmt: skip
    summary = run(engine, tmp_path, lines)
    assert (summary.answered, summary.errors, summary.remaining) == (2, 7, 0)
    errors = {x["custom_id"]: x for x in read(tmp_path / "out") if x["error"]}
    assert "unknown field 'foo'" in errors["body"]["error"]["message"]
    assert errors["long"]["response"]["status_code"] == 400
    assert "context" in errors["longer"]["error"]["message"]
    random.Random(2).shuffle(lines)
    assert run(engine, tmp_path, lines).done_before == 9


def test_rows_wait_for_the_first_of_their_prefix(tmp_path):
    system = "Of two numbers say the larger one, and of two words the one that comes first. " * 2
    lines = [chat(f"{i}", f"{i}?", system=system, max_tokens=2, temperature=0) for i in range(24)]
    with stand_in_engine(context=640, pages=24) as engine:
        summary = run(engine, tmp_path, lines)
        (out,) = engine.chat(
            [lines[0]["body"]["messages"]], nj.SamplingParams(max_tokens=1, temperature=0)
        )
        shared = len(out.prompt_token_ids) // 64 * 64
        assert shared >= 64
        assert summary.cached_tokens == 23 * shared
        engine.clear_cache()
        assert run(engine, tmp_path, lines, "off", cache=False).cached_tokens == 0


def test_more_rows_than_the_queue_has_places(tmp_path):
    with stand_in_engine(queue=1, concurrency=2, pages=8) as engine:
        assert run(engine, tmp_path, rows(9)).answered == 9
        summary = run(
            engine, tmp_path, [completion("n", "x", n=2, max_tokens=1, temperature=0)], "n"
        )
        assert summary.errors == 1


def test_a_row_that_breaks_is_an_error_and_the_others_go_on(engine, tmp_path):
    sick = engine.frontend.prepare_prompt("Question 1?").token_ids
    engine._program.sick.add(tuple(sick))
    summary = run(engine, tmp_path, rows(6))
    assert (summary.answered, summary.errors) == (5, 1)
    (line,) = [x for x in read(tmp_path / "out") if x["error"]]
    assert (line["custom_id"], line["response"]["status_code"]) == ("row-1", 500)


def test_an_engine_that_fails_leaves_what_is_finished(tmp_path):
    engine = stand_in_engine()

    def fail(count):
        if count > 60:
            engine._program.decode_error = RuntimeError("device lost")

    engine._program.on_step = fail
    with pytest.raises(nj.EngineFailure, match="of 40 rows are in"):
        run(engine, tmp_path, rows(40))
    engine.close()
    done = len(read(tmp_path / "out"))
    assert 0 < done < 40
    with stand_in_engine() as engine:
        summary = run(engine, tmp_path, rows(40))
        assert (summary.done_before, summary.answered) == (done, 40 - done)
        run(engine, tmp_path, rows(40), "whole")
    assert comparable(read(tmp_path / "out")) == comparable(read(tmp_path / "whole"))


def scored(context, continuation):
    if "bad" in context:
        raise nj.InputError("bad context")
    if "nan" in context:
        raise nj.NumericError("token 3 is not finite")
    value = len(context) + len(continuation)
    return SimpleNamespace(sum_logprob=-value, logprobs=[-value], token_ids=[1], is_greedy=True)


def test_scores_are_grouped(engine, tmp_path, monkeypatch):
    calls = []

    def stand_in(contexts, continuations):
        calls.append(len(contexts))
        return [scored(a, b) for a, b in zip(contexts, continuations, strict=True)]

    monkeypatch.setattr(engine, "score", stand_in, raising=False)
    lines = [score(f"s{i}", "c" * i, ["x", "yy"]) for i in range(1, 41)]
    summary = run(engine, tmp_path, [*lines, *rows(4)])
    assert summary.answered == 44
    assert summary.scored_tokens == 80
    assert calls == [64, 16]
    values = {x["custom_id"]: x["response"]["body"] for x in read(tmp_path / "out")}
    assert [s["sum_logprob"] for s in values["s5"]["scores"]] == [-6.0, -7.0]
    summary = run(engine, tmp_path, [*lines[:3], score("s99", "bad", "x")], "bad")
    assert (summary.answered, summary.errors) == (3, 1)


def test_a_score_that_is_not_finite_harms_no_other_row(engine, tmp_path, monkeypatch):
    def stand_in(contexts, continuations):
        return [scored(a, b) for a, b in zip(contexts, continuations, strict=True)]

    monkeypatch.setattr(engine, "score", stand_in, raising=False)
    lines = [score("a", "c", "x"), score("b", "nan", "x"), score("d", "cc", "x")]
    summary = run(engine, tmp_path, lines)
    assert (summary.answered, summary.errors) == (2, 1)
    (wrong,) = (x for x in read(tmp_path / "out") if x["error"])
    assert wrong["custom_id"] == "b"
    assert wrong["response"]["status_code"] == 500
    assert "not finite" in wrong["error"]["message"]


def test_outside_the_main_thread(engine, tmp_path):
    summaries = []
    thread = threading.Thread(target=lambda: summaries.append(run(engine, tmp_path, rows(4))))
    thread.start()
    thread.join(60)
    assert summaries[0].answered == 4


def test_mistakes(engine, tmp_path):
    source = write(tmp_path / "in", rows(1))
    with pytest.raises(nj.InputError, match="is the input"):
        run_batch(source, source, engine)
    with pytest.raises(nj.InputError, match="loaded already"):
        run_batch(source, tmp_path / "out", engine, max_context=64)
    with pytest.raises(FileNotFoundError):
        run_batch(tmp_path / "none", tmp_path / "out", engine)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(nj.InputError, match="is no file"):
        run_batch(tmp_path / "pipe", tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()


def test_files_of_another_system(engine, tmp_path):
    lines = [json.dumps(x).encode() for x in rows(3)]
    (tmp_path / "in").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([*lines, b"", b""]))
    summary = run_batch(tmp_path / "in", tmp_path / "out", engine, progress=False)
    assert (summary.rows, summary.answered, summary.errors) == (3, 3, 0)
    summary = run(engine, tmp_path, rows(3))
    assert (summary.done_before, summary.stale) == (3, 0)


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_an_input_without_lines(engine, tmp_path, content):
    (tmp_path / "in").write_bytes(content)
    summary = run_batch(tmp_path / "in", tmp_path / "out", engine, progress=False)
    assert (summary.rows, summary.errors, summary.remaining) == (0, 0, 0)
    assert (tmp_path / "out").read_bytes() == b""


def test_an_input_that_is_still_written(engine, tmp_path):
    """Its last line may be torn, in the middle of a character; the next run finds it whole."""
    lines = [json.dumps(x, ensure_ascii=False).encode() + b"\n" for x in rows(2, user="é")]
    (tmp_path / "in").write_bytes(lines[0] + lines[1].partition(b"\xa9")[0])
    summary = run_batch(tmp_path / "in", tmp_path / "out", engine, progress=False)
    assert (summary.answered, summary.errors) == (1, 1)
    (tmp_path / "in").write_bytes(b"".join(lines))
    summary = run_batch(tmp_path / "in", tmp_path / "out", engine, progress=False)
    assert (summary.done_before, summary.answered, summary.errors, summary.stale) == (1, 1, 0, 1)


def test_another_seed_is_another_request(engine, tmp_path):
    run(engine, tmp_path, rows(3, seed=1))
    summary = run(engine, tmp_path, [rows(3, seed=1)[0], *rows(3, seed=2)[1:]])
    assert (summary.done_before, summary.answered, summary.stale) == (1, 2, 2)


def test_an_input_cut_during_the_run(engine, tmp_path, monkeypatch):
    """What is gone has no line, and the summary says so; what is back runs next time."""
    look = runs.scan

    def look_and_cut(path, journal):
        todo = look(path, journal)
        os.truncate(path, todo.todo[2] + 9)
        return todo

    with monkeypatch.context() as patch:
        patch.setattr(runs, "scan", look_and_cut)
        summary = run(engine, tmp_path, rows(4))
    assert (summary.answered, summary.errors, summary.remaining) == (2, 0, 2)
    assert not summary.interrupted
    summary = run(engine, tmp_path, rows(4))
    assert (summary.done_before, summary.answered, summary.remaining) == (2, 2, 0)


def test_a_fault_of_ours_costs_one_row(engine, tmp_path, monkeypatch):
    """What making a row's prompt was not expected to raise."""
    prepare = windows.prepare

    def faulty(line, frontend):
        if line.custom_id == "row-1":
            raise KeyError("a mistake")
        return prepare(line, frontend)

    monkeypatch.setattr(windows, "prepare", faulty)
    summary = run(engine, tmp_path, rows(3))
    assert (summary.answered, summary.errors) == (2, 1)
    (line,) = [x for x in read(tmp_path / "out") if x["error"]]
    assert (line["custom_id"], line["response"]["status_code"]) == ("row-1", 500)
    assert line["error"]["message"] == "KeyError: 'a mistake'"


def test_many_rows_in_small_windows(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("ninfer_jax.batch.windows.FIRST_ROWS", 2)
    monkeypatch.setattr("ninfer_jax.batch.windows.MAX_ROWS", 5)
    assert run(engine, tmp_path, rows(30)).answered == 30
