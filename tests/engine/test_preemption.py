"""Preempted equals unpreempted: pausing and resuming changes no token (PR, SCH-10..16, X-15)."""

import time

import numpy as np
import pytest

import ninfer_jax as nj
from ninfer_jax import SamplingParams

OUTPUTS = 256


def small(goldens, **more):
    """A pool of 512 tokens for two requests that need 448 each."""
    options = {
        "max_concurrency": 2,
        "max_context": 448,
        "kv_capacity": 512,
        "prefill_chunk": 64,
        "dtype": "float32",
        "host_capacity_bytes": 64 << 20,
        **more,
    }
    return nj.load(goldens / "tiny-qwen3.5-dense", **options)


def two(seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 990, 192).tolist() for _ in range(2)]


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=OUTPUTS, ignore_eos=True),
    "sampled": SamplingParams(
        temperature=0.9, top_p=0.9, seed=7, max_tokens=OUTPUTS, ignore_eos=True
    ),
    "penalties": SamplingParams(
        temperature=1.1,
        seed=3,
        presence_penalty=0.7,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        max_tokens=OUTPUTS,
        ignore_eos=True,
        logprobs=1,
    ),
}


def solos(engine, prompts, params):
    return [
        engine.generate([p], params, cache="off", use_tqdm=False)[0].outputs[0] for p in prompts
    ]


def empty(engine):
    engine.clear_cache()
    return engine.idle


@pytest.mark.parametrize("name", list(PARAMS))
@pytest.mark.parametrize("host", [64 << 20, 0], ids=["snapshot", "replay"])
def test_two_requests_in_a_pool_for_one_and_a_bit(goldens, name, host):
    """X-15: both start, the younger pauses, both give the tokens of the solo run, nothing is left."""
    prompts, params = two(), PARAMS[name]
    with small(goldens, host_capacity_bytes=host) as engine:
        want = solos(engine, prompts, params)
        engine.clear_cache()
        before = engine.stats()
        handles = [engine.submit(p, params) for p in prompts]
        streamed = [[] for _ in handles]
        for i, handle in enumerate(handles):
            for chunk in handle:
                streamed[i] += chunk.token_ids
        outs = [h.wait() for h in handles]
        after = engine.stats()
        form = "replay" if host == 0 else "snapshot"
        paused = {
            k: after["preemptions"][k] - before["preemptions"][k] for k in after["preemptions"]
        }
        assert paused[form] >= 1, (paused, engine.explain())
        assert outs[0].metrics.preemptions == 0
        assert outs[1].metrics.preemptions >= 1
        for out, text, w in zip(outs, streamed, want, strict=True):
            got = out.outputs[0]
            assert got.token_ids == w.token_ids
            assert list(text) == got.token_ids  # nothing repeated, nothing missing (INV-18)
            assert got.text == w.text
            assert len(got.token_ids) == OUTPUTS
            if got.logprobs is not None:
                assert got.logprobs == w.logprobs
        assert empty(engine)


def test_cancelled_while_paused(goldens):
    prompts, params = two(), PARAMS["greedy"]
    with small(goldens) as engine:
        want = solos(engine, prompts[:1], params)
        engine.clear_cache()
        first, second = (engine.submit(p, params) for p in prompts)
        wait_for(lambda: sum(engine.stats()["preemptions"].values()) >= 1)
        second.cancel()
        out = second.wait()
        assert out.outputs[0].finish_reason == "abort"
        assert 0 < len(out.outputs[0].token_ids) < OUTPUTS
        assert first.wait().outputs[0].token_ids == want[0].token_ids
        assert empty(engine)


def test_cancelled_in_replay(goldens):
    prompts, params = two(), PARAMS["greedy"]
    with small(goldens, host_capacity_bytes=0) as engine:
        first, second = (engine.submit(p, params) for p in prompts)
        out = first.wait()
        assert len(out.outputs[0].token_ids) == OUTPUTS
        wait_for(lambda: engine.stats()["tokens"]["replayed"] > 0 or second.done)
        second.cancel()
        assert second.wait().outputs[0].finish_reason in ("abort", "length")
        assert empty(engine)


def test_three_requests_and_a_revoked_snapshot(goldens):
    """Host space for one snapshot only: a younger paused request gives its snapshot to an older one (PR-05)."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 990, 192).tolist() for _ in range(4)]
    params = PARAMS["sampled"]
    with small(goldens, max_concurrency=4, kv_capacity=640, host_capacity_bytes=0) as probe:
        page, image = probe.memory()["kv"] // 11, probe.memory()["state_images"] // 9
        want = solos(probe, prompts, params)
    host = int(5 * page + 1.5 * image)
    with small(goldens, max_concurrency=4, kv_capacity=640, host_capacity_bytes=host) as engine:
        handles = [engine.submit(p, params) for p in prompts]
        got = [h.wait().outputs[0].token_ids for h in handles]
        assert got == [w.token_ids for w in want]
        assert sum(engine.stats()["preemptions"].values()) >= 1
        assert empty(engine)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.001)
