"""The engine's bench runs and counts what it says. No timing decides a test."""

from scripts import bench_engine


def test_the_loop_runs_on_a_program_that_computes_nothing():
    result = bench_engine.bench_loop(bench_engine.MODEL, tokens=40)
    assert 20 <= result["cycles"] <= 40
    assert 0 < result["planner_p50_us"] < result["loop_p50_us"] <= result["loop_p99_us"]


def test_requests_with_prompts_of_their_own_fill_the_cache():
    result = bench_engine.bench_requests(bench_engine.MODEL, requests=12)
    assert result["requests"] == 12
    assert result["uncached_ms"] > 0 < result["full_cache_ms"]
    assert result["checkpoints"] >= 12


def test_a_prompt_that_was_there_is_hit():
    result = bench_engine.bench_warm_hit(bench_engine.MODEL, length=130, repeats=1)
    assert result["prompt_tokens"] == 130
    assert result["cold_s"] > 0 < result["warm_s"]


def test_throughput_is_of_one_and_of_eight():
    result = bench_engine.bench_throughput(bench_engine.MODEL, tokens=4, repeats=1)
    assert result["one_tokens_s"] > 0 < result["eight_tokens_s"]
