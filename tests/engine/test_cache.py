"""Reuse through the real model: what the second time costs, and that it changes nothing."""

import threading

import numpy as np
import pytest

import ninfer_jax as nj
from ninfer_jax import SamplingParams


def greedy(count, **more):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def prompt(seed, length):
    return np.random.default_rng([7, seed]).integers(0, 990, length).tolist()


def ids(result):
    return [o.token_ids for o in result.outputs]


@pytest.fixture(autouse=True)
def _empty(engine):
    engine.clear_cache()


def test_the_same_prompt_is_computed_once(engine):
    p = prompt(1, 150)
    cold, warm = (engine.generate(p, greedy(9, logprobs=3))[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 149)
    assert (cold.metrics.prefill_tokens, warm.metrics.prefill_tokens) == (149, 0)
    assert ids(cold) == ids(warm)
    assert cold.outputs[0].logprobs == warm.outputs[0].logprobs  # bit for bit


def test_a_longer_prompt_goes_on_from_the_output_of_a_shorter_one(engine):
    first = engine.generate(prompt(2, 100), greedy(30))[0]
    longer = [*first.prompt_token_ids, *first.outputs[0].token_ids, *prompt(3, 20)]
    warm = engine.generate(longer, greedy(8))[0]
    assert warm.num_cached_tokens >= 100 + 29
    assert ids(warm) == ids(engine.generate(longer, greedy(8), cache="off")[0])


def test_a_prefix_that_two_prompts_share_serves_the_third(engine):
    shared = prompt(4, 128)
    a, b, c = (engine.generate([*shared, *prompt(i, 40)], greedy(6))[0] for i in (5, 6, 7))
    assert a.num_cached_tokens == b.num_cached_tokens == 0  # the second shows where they part
    assert c.num_cached_tokens == 128
    assert ids(c) == ids(engine.generate(c.prompt_token_ids, greedy(6), cache="off")[0])


def test_a_marker_serves_the_second_prompt_already(engine):
    shared = prompt(8, 100)
    engine.generate([*shared, *prompt(1, 40)], greedy(6), markers=[100])
    warm = engine.generate([*shared, *prompt(2, 40)], greedy(6))[0]
    assert warm.num_cached_tokens == 100
    assert ids(warm) == ids(engine.generate(warm.prompt_token_ids, greedy(6), cache="off")[0])


def test_the_second_turn_of_a_chat_reuses_the_first(engine):
    messages = [{"role": "user", "content": "hi there"}]
    (first,) = engine.chat(messages, greedy(20), enable_thinking=False, session="s")
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "and now?"},
    ]
    (second,) = engine.chat(messages, greedy(20), enable_thinking=False, session="s")
    assert second.num_cached_tokens > 0
    (cold,) = engine.chat(messages, greedy(20), enable_thinking=False, cache="off")
    assert cold.num_cached_tokens == 0
    assert ids(second) == ids(cold)


def test_what_was_saved_survives_other_work_on_the_host(engine):
    """Sixteen pages and eight slots: the prompts after the first push its state off the device."""
    p = prompt(9, 200)
    first = engine.generate(p, greedy(5))[0]
    engine.generate([prompt(i, 200) for i in range(20, 32)], greedy(5), use_tqdm=False)
    warm = engine.generate(p, greedy(5))[0]
    assert warm.num_cached_tokens == 199, engine.explain(warm.request_id)
    assert ids(first) == ids(warm)
    assert engine.stats()["transfers"]["bytes"]["h2d"] > 0


def test_more_sequences_than_rows_and_prompt_logprobs(engine):
    many = engine.generate(prompt(10, 70), SamplingParams(n=6, seed=3, max_tokens=5))[0]
    assert len({tuple(t) for t in ids(many)}) > 1
    p = prompt(11, 70)
    engine.generate(p, greedy(3))
    scored = engine.generate(p, greedy(3, prompt_logprobs=1))[0]
    assert scored.num_cached_tokens == 0
    assert len(scored.prompt_logprobs) == 70


def test_sampled_outputs_do_not_depend_on_the_cache(engine):
    hot = SamplingParams(
        temperature=1.0, seed=4, max_tokens=12, ignore_eos=True, presence_penalty=0.5, repetition_penalty=1.2,
        min_tokens=4, logit_bias={5: 2.0}, n=2,
    )  # fmt: skip
    p = prompt(12, 90)
    cold, warm = (engine.generate(p, hot)[0] for _ in range(2))
    off = engine.generate(p, hot, cache="off")[0]
    assert warm.num_cached_tokens == 89
    assert ids(cold) == ids(warm) == ids(off)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancel(engine, after):
    handle = engine.submit(prompt(13, 200), greedy(100))
    for _ in range(after):
        next(handle)
    handle.cancel()
    out = handle.wait(60).outputs[0]
    assert out.finish_reason == "abort"
    assert len(out.token_ids) < 100


def test_threads_submit_at_the_same_time(engine):
    want = {i: ids(engine.generate(prompt(i, 50 + i), greedy(8))[0]) for i in range(6)}
    got = {}

    def ask(i):
        got[i] = ids(engine.submit(prompt(i, 50 + i), greedy(8)).wait(120))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert got == want


def test_an_engine_without_cache_and_with_a_short_queue(goldens):
    path = goldens / "tiny-qwen3.5-dense"
    with nj.load(path, max_concurrency=1, max_context=128, cache=False, max_queue=2) as small:
        outs = small.generate([prompt(1, 40)] * 5, greedy(4), use_tqdm=False)
        assert [o.num_cached_tokens for o in outs] == [0] * 5
        assert len({tuple(o.outputs[0].token_ids) for o in outs}) == 1
        assert "cache mode is off" in small.explain(outs[0].request_id)
    with pytest.raises(nj.EngineFailure, match="closed"):
        small.generate("x")


def test_a_prompt_only_request_reads_and_leaves_its_input_but_no_end(engine):
    """`cache="prompt"`: what it wrote is not kept, and nobody's record is used up."""
    base = engine.generate(prompt(20, 100), greedy(30))[0]
    longer = [*base.prompt_token_ids, *base.outputs[0].token_ids, *prompt(21, 20)]
    rows = [engine.generate(longer, greedy(8), cache="prompt")[0] for _ in range(2)]
    assert [row.num_cached_tokens for row in rows] == [129, 149]  # its input is kept
    assert ids(rows[0]) == ids(rows[1])
    whole = [*longer, *rows[1].outputs[0].token_ids, *prompt(22, 5)]
    assert engine.generate(whole, greedy(4))[0].num_cached_tokens == 149
    other = [*longer[:129], *prompt(23, 5)]
    assert engine.generate(other, greedy(4))[0].num_cached_tokens == 129
    with pytest.raises(nj.InputError, match='cache must be "read_write", "prompt" or "off"'):
        engine.generate(longer, greedy(1), cache="all")
