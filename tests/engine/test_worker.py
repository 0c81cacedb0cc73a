"""The worker over a program without a device: life cycles, ends, limits, failures."""

import asyncio
import gc
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

import ninfer_jax as nj
from artifacts import open_checkpoint
from ninfer_jax import SamplingParams
from ninfer_jax.engine import Engine
from ninfer_jax.frontend import Frontend
from planner.world import check_world
from tests.engine.conftest import wait_until_idle
from tests.engine.stand_in import StandInProgram, limits, next_token


@pytest.fixture(scope="module")
def frontend(goldens):
    checkpoint = open_checkpoint(goldens / "tiny-qwen3.5-dense", verify=False)
    return Frontend.from_resources(checkpoint.frontend, vocab_size=checkpoint.config.vocab_size)


@pytest.fixture
def start(frontend):
    engines = []

    def start(**options):
        program = StandInProgram(limits(**options), frontend.vocab_size)
        engines.append(Engine(None, frontend, program))
        return engines[-1], program

    yield start
    for engine in engines:
        engine.close()
        assert engine.idle
        assert engine._program.closed
        check_world(engine._worker.world)


@pytest.fixture(autouse=True)
def _everything_is_given_back():
    """The engines of this module are their own."""


def greedy(count, **more):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, 990, length).tolist()


def expected(ids, count, vocab):
    out = []
    for _ in range(count):
        out.append(next_token([*ids, *out], vocab))
    return out


def check(engine, outs, count):
    for out in outs:
        for o in out.outputs:
            want = expected(out.prompt_token_ids, count, engine.frontend.vocab_size)
            assert o.token_ids == want


def test_many_requests_with_shared_prefixes_through_a_small_pool(start):
    engine, _ = start(pages=10, slots=2)
    shared = prompt(0, 100)
    prompts = [[*shared[: 30 * (i % 4)], *prompt(i, 1 + 37 * i % 130)] for i in range(24)]
    check(engine, engine.generate(prompts, greedy(20), use_tqdm=False), 20)
    wait_until_idle(engine)
    again = engine.generate(prompts[-1], greedy(20))
    assert again[0].num_cached_tokens == len(prompts[-1]) - 1
    check(engine, again, 20)
    stats = engine.stats()
    assert stats["requests"]["finished"] == 25
    tokens = stats["tokens"]
    assert tokens["generated"] == 25 * 20
    assert tokens["cached"] + tokens["computed"] == tokens["prompt"] - 25


def test_further_sequences_fork_the_prompt_of_the_first(start):
    engine, program = start()
    (out,) = engine.generate(prompt(1, 150), greedy(5, n=4))
    check(engine, [out], 5)
    assert len(out.outputs) == 4
    assert sum(u.length for u in program.units if hasattr(u, "length")) == 149
    assert engine.stats()["tokens"]["cached"] == 3 * 149
    assert out.num_cached_tokens == 0


def test_cache_off_reads_nothing_and_leaves_nothing(start):
    engine, _ = start()
    before = engine._worker.world.physical
    for _ in range(2):
        (out,) = engine.generate(prompt(1, 150), greedy(5, n=2), cache="off")
        check(engine, [out], 5)
        assert out.num_cached_tokens == 0
    after = engine._worker.world.physical
    assert len(after.checkpoints) == len(before.checkpoints) == 0
    engine.generate(prompt(1, 150), greedy(5))
    engine.generate(prompt(1, 150), SamplingParams(max_tokens=1, temperature=0), cache="off")
    assert len(engine._worker.world.physical.checkpoints) > 0
    engine.clear_cache()
    assert len(engine._worker.world.physical.checkpoints) == 0


@pytest.mark.parametrize("step", range(14))
def test_a_cancel_at_any_boundary_ends_the_request_once(start, step):
    """The cancel arrives while the nth unit or copy batch is launched."""
    engine, program = start()
    submitted = threading.Event()

    def cancel(count):
        submitted.wait()
        if count == step:
            handle.cancel()

    program.on_step = cancel
    handle = engine.submit(prompt(2, 200), greedy(100, n=2))
    submitted.set()
    (out, other) = (handle.wait(20), engine.submit("x", greedy(3)).wait(20))
    check(engine, [other], 3)
    assert [o.finish_reason for o in out.outputs] == ["abort"] * 2
    assert "cancelled" in out.outputs[0].error
    chunks = list(handle)
    assert [c.output is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].output is out
    ids = [t for c in chunks for t in c.token_ids if c.index == 0]
    assert ids == out.outputs[0].token_ids
    assert ids == expected(out.prompt_token_ids, len(ids), engine.frontend.vocab_size)


def test_text_comes_before_the_end_and_the_end_once(start):
    engine, _ = start()
    handle = engine.submit(prompt(3, 10), greedy(6, n=2))
    chunks = list(handle)
    assert handle.done
    assert list(handle) == []
    for index in (0, 1):
        mine = [c for c in chunks if c.index == index]
        assert [c.finish_reason for c in mine] == [None] * 6 + ["length"]
        assert [len(c.token_ids) for c in mine] == [1] * 6 + [0]
    assert chunks[-1].output is handle.wait()
    assert engine.explain(handle.request_id).count("ended after 6 tokens: length") == 2


def test_a_full_queue_refuses_and_generate_feeds_gradually(start):
    engine, _ = start(queue=3)
    handles = [engine.submit(prompt(i, 40), greedy(200)) for i in range(3)]
    with pytest.raises(nj.OverloadError, match="max_queue"):
        engine.submit("x")
    with pytest.raises(nj.InputError, match="max_queue=3"):
        engine.submit("x", SamplingParams(n=4))
    waiting = threading.Thread(
        target=lambda: check(engine, engine.generate([prompt(i, 9) for i in range(8)], greedy(4), use_tqdm=False), 4)
    )  # fmt: skip
    waiting.start()
    handles[0].close()
    outs = [h.wait(20) for h in handles[1:]]
    waiting.join(20)
    assert not waiting.is_alive()
    check(engine, outs, 200)
    assert engine.submit("x", greedy(1)).wait(20).finished


def test_a_place_is_held_until_the_result_is_collected(start):
    engine, _ = start(queue=1)
    handle = engine.submit("x", greedy(1))
    while not handle.done:
        time.sleep(0.001)
    with pytest.raises(nj.OverloadError):
        engine.submit("x", greedy(1))
    handle.wait()
    assert engine.submit("x", greedy(1)).wait(20).finished


def test_a_timeout_says_where_it_struck(start):
    engine, program = start(concurrency=1, slots=1, pages=5)
    running = engine.submit(prompt(1, 10), greedy(300), timeout=0.05)
    queued = engine.submit(prompt(2, 10), greedy(300), timeout=0.01)
    decode, program.decode = program.decode, lambda c: (time.sleep(0.005), decode(c))[1]
    assert "while waiting in the queue" in queued.wait(20).outputs[0].error
    out = running.wait(20)
    assert "timeout of 0.05 s reached while running" in out.outputs[0].error
    assert 0 < len(out.outputs[0].token_ids) < 300
    for bad in (0, -1, float("nan"), True, "1"):
        with pytest.raises(nj.InputError, match="timeout"):
            engine.submit("x", timeout=bad)


def test_an_abandoned_request_is_cancelled_and_frees_its_place(start):
    engine, _ = start(queue=1)
    handle = engine.submit(prompt(1, 10), greedy(300))
    next(handle)
    del handle
    gc.collect()
    wait_until_idle(engine)
    deadline = time.monotonic() + 20
    while engine.stats()["requests"]["cancelled"] != 1 or engine._ingress._taken:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_rows_that_are_not_finite_end_alone(start):
    engine, program = start()
    bad, good = prompt(5, 30), prompt(6, 30)
    program.sick.add((*bad, *expected(bad, 3, engine.frontend.vocab_size)))
    first, second = engine.generate([bad, good], greedy(8), use_tqdm=False)
    check(engine, [second], 8)
    assert first.outputs[0].finish_reason == "abort"
    assert "not finite" in first.outputs[0].error
    assert first.outputs[0].token_ids == expected(bad, 3, engine.frontend.vocab_size)
    assert engine.stats()["nan_rows"] == 1
    assert engine.stats()["requests"]["failed"] == 1


def test_an_exception_of_the_device_ends_every_request_once_and_the_engine(start):
    engine, program = start(concurrency=2, pages=10)
    handles = [engine.submit(prompt(i, 40), greedy(250)) for i in range(4)]
    next(handles[0])
    program.decode_error = RuntimeError("the device is gone")
    for handle in handles:
        with pytest.raises(nj.EngineFailure, match="the device is gone"):
            handle.wait(20)
        with pytest.raises(nj.EngineFailure, match="resident"):
            list(handle)
    with pytest.raises(nj.EngineFailure, match="takes no more requests"):
        engine.submit("x")
    with pytest.raises(nj.EngineFailure, match="takes no more requests"):
        engine.generate(["x", "y"])
    with pytest.raises(nj.EngineFailure):
        engine.clear_cache()


def test_close_ends_what_runs_and_refuses_the_rest(start):
    with start()[0] as engine:
        handles = [engine.submit(prompt(i, 40), greedy(250)) for i in range(9)]
        next(handles[0])
    for handle in handles:
        assert "closed" in handle.wait(0).outputs[0].error
    with pytest.raises(nj.EngineFailure, match="closed"):
        engine.submit("x")
    engine.close()
    assert "closed" in handles[0].wait().outputs[0].error


def test_an_engine_that_nobody_refers_to_ends(start, frontend):
    program = StandInProgram(limits(), frontend.vocab_size)
    handle = Engine(None, frontend, program).submit("x", greedy(3))
    assert handle.wait(20).finished  # the handle keeps its engine
    del handle
    gc.collect()
    deadline = time.monotonic() + 20
    while not program.closed:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_event_loops_and_threads_share_an_engine(start):
    engine, _ = start()

    async def consume(i):
        ids = []
        async for chunk in engine.submit(prompt(i, 30), greedy(10)):
            ids += chunk.token_ids
        out = await engine.submit(prompt(i, 30), greedy(10)).wait_async()
        assert ids == out.outputs[0].token_ids
        return out

    async def everything():
        return await asyncio.gather(*(consume(i) for i in range(6)))

    results = []
    run = lambda: results.extend(asyncio.run(everything()))  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(results) == 18
    check(engine, results, 10)


def test_a_cancelled_task_abandons_its_request(start):
    engine, _ = start()

    async def run():
        async def consume():
            async for _ in engine.submit(prompt(1, 30), greedy(280)):
                started.set()

        started = asyncio.Event()
        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    gc.collect()
    wait_until_idle(engine)


def test_waiting_has_a_limit_of_its_own(start):
    engine, program = start()
    decode, program.decode = program.decode, lambda c: (time.sleep(0.002), decode(c))[1]
    handle = engine.submit("x", greedy(200))
    with pytest.raises(TimeoutError, match=handle.request_id):
        handle.wait(0.01)
    assert len(handle.wait(30).outputs[0].token_ids) == 200


def test_explain_knows_requests_and_says_what_it_does_not_know(start):
    engine, _ = start()
    (first,) = engine.generate(prompt(1, 80), greedy(2))
    (second,) = engine.generate(prompt(1, 80), greedy(2), session="a")
    assert "0 prompt tokens reused" in engine.explain(first.request_id)
    words = engine.explain(second.request_id)
    assert "79 prompt tokens reused" in words
    assert "session 'a'" in words
    assert isinstance(engine.explain(), str)
    with pytest.raises(nj.InputError, match="request-99"):
        engine.explain("request-99")


def test_options_are_checked(start):
    engine, _ = start()
    with pytest.raises(nj.InputError, match="read_write"):
        engine.generate("x", cache="on")
    with pytest.raises(nj.InputError, match="session"):
        engine.submit("x", session=5)
    with pytest.raises(nj.InputError, match="2 session for 1 prompts"):
        engine.generate("x", session=["a", "b"])
    with pytest.raises(nj.InputError, match="markers"):
        engine.submit("x", markers=[0])
    with pytest.raises(nj.InputError, match="sampling_params"):
        engine.submit("x", [SamplingParams()])


def test_a_record_replays_to_the_same_commands(start, tmp_path):
    from planner.world.journal import replay

    engine, _ = start(record=str(tmp_path / "flight.jsonl"))
    engine.generate([prompt(i, 70) for i in range(6)], greedy(9), use_tqdm=False)
    engine.close()
    result = replay(tmp_path / "flight.jsonl")
    assert result.ok
    assert result.events > 30


def test_the_worker_sleeps_when_there_is_nothing_to_do(start):
    engine, _ = start()
    engine.generate("x", greedy(3))
    time.sleep(0.05)
    before = engine.stats()["cycles"]
    time.sleep(0.1)
    assert engine.stats()["cycles"] - before <= 1


def test_first_come_first_served(start):
    engine, _ = start(concurrency=1, slots=1, pages=5)
    handles = [engine.submit(prompt(i, 20), greedy(5)) for i in range(6)]
    times = [h.wait(20).metrics.first_token for h in handles]
    assert all(a < b for a, b in pairwise(times))
    assert all(h.wait().metrics.queue_time >= 0 for h in handles)
