"""generate(): tokens, neighbours, seeds, and everything a result carries."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ninfer_jax as nj
from ninfer_jax import SamplingParams
from ninfer_jax.models.qwen3_5.params import SeparateLayers
from ninfer_jax.program import program
from tests.engine.conftest import wait_until_idle

forward = jax.jit(nj.forward)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, 990, length).tolist()


def tokens(outputs):
    return [[o.token_ids for o in r.outputs] for r in outputs]


def test_results_keep_the_order_and_requests_stop_separately(engine):
    prompts = [prompt(i, n) for i, n in enumerate((1, 2, 63, 64, 65, 130, 200))]
    params = [
        SamplingParams(temperature=0, max_tokens=m, ignore_eos=True)
        for m in (1, 40, 3, 17, 8, 60, 5)
    ]
    together = engine.generate(prompts, params, use_tqdm=False)
    assert [len(r.outputs[0].token_ids) for r in together] == [1, 40, 3, 17, 8, 60, 5]
    assert [r.prompt_token_ids for r in together] == prompts
    for p, s, r in zip(prompts, params, together, strict=True):
        assert tokens(engine.generate(p, s)) == tokens([r])
        assert r.finished
        assert r.outputs[0].finish_reason == "length"
        assert r.metrics.decode_steps == s.max_tokens
        assert r.metrics.prefill_tokens + r.num_cached_tokens == len(p) - 1


def test_a_large_model_steps_layer_by_layer(engine, goldens, monkeypatch):
    """Its tokens are those of the loop over stacks, its rows independent, and its weights counted once."""
    monkeypatch.setattr(program, "LARGE_BYTES", 0)
    prompts = [prompt(i, n) for i, n in enumerate((1, 70, 33, 130))]
    with nj.load(goldens / "tiny-qwen3.5-dense", max_concurrency=4, max_context=320) as large:
        assert isinstance(large._program._step_params, SeparateLayers)
        assert large._program.memory()["weights"] == engine._program.memory()["weights"]
        together = tokens(large.generate(prompts, GREEDY, use_tqdm=False))
        assert together == [tokens(large.generate([p], GREEDY))[0] for p in prompts]
    assert together == tokens(engine.generate(prompts, GREEDY, use_tqdm=False))


SAMPLED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([None, {7: 30.0, 8: -100.0}]),
    min_tokens=st.sampled_from([0, 3]),
    logprobs=st.sampled_from([None, 2]),
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.integers(3, 12),
    n=st.sampled_from([1, 2]),
)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 150), SAMPLED), min_size=2, max_size=7)
)
def test_a_request_never_depends_on_its_neighbours(engine, requests):
    prompts = [prompt(seed, length) for seed, length, _ in requests]
    params = [p for *_, p in requests]
    together = engine.generate(prompts, params, use_tqdm=False)
    for p, s, r in zip(prompts, params, together, strict=True):
        (alone,) = engine.generate(p, s)
        assert tokens([alone]) == tokens([r])
        for mine, theirs in zip(alone.outputs, r.outputs, strict=True):
            assert mine.logprobs == theirs.logprobs  # bit for bit
            assert mine.text == theirs.text


def test_seeds(engine):
    p = prompt(1, 20)
    hot = {"temperature": 1.0, "max_tokens": 16, "top_k": 0, "top_p": 1.0, "ignore_eos": True}
    a, b = engine.generate([p, p], SamplingParams(seed=5, **hot), use_tqdm=False)
    assert tokens([a]) == tokens([b])
    (c,) = engine.generate(p, SamplingParams(seed=6, **hot))
    assert tokens([c]) != tokens([a])
    (many,) = engine.generate(p, SamplingParams(seed=5, n=3, **hot))
    texts = [o.token_ids for o in many.outputs]
    assert texts[0] == a.outputs[0].token_ids
    assert len({tuple(t) for t in texts}) == 3
    assert [o.index for o in many.outputs] == [0, 1, 2]
    unseeded = engine.generate([p, p], SamplingParams(**hot), use_tqdm=False)
    assert tokens(unseeded[:1]) != tokens(unseeded[1:])


def test_unset_fields_come_from_the_checkpoint(engine):
    # generation_config.json: do_sample, temperature 0.6, top_k 20, top_p 0.95
    p = prompt(2, 20)
    ours = engine.generate(p, SamplingParams(seed=3, max_tokens=20, ignore_eos=True))
    written = SamplingParams(
        seed=3, max_tokens=20, ignore_eos=True, temperature=0.6, top_k=20, top_p=0.95
    )
    assert tokens(ours) == tokens(engine.generate(p, written))


def test_logprobs_are_of_the_raw_distribution(engine):
    p = prompt(3, 70)
    params = SamplingParams(
        temperature=0.3, top_k=3, seed=1, max_tokens=6, logprobs=4, prompt_logprobs=2, presence_penalty=1.0,
        ignore_eos=True,
    )  # fmt: skip
    (result,) = engine.generate(p, params)
    out = result.outputs[0]
    logits = np.asarray(forward(engine.model, np.array([p + out.token_ids], np.int32)))[0]
    raw = logits.astype(np.float64)
    raw -= np.log(np.exp(raw).sum(-1, keepdims=True))
    for i, (token, entry) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        row = raw[len(p) - 1 + i]
        best = np.argsort(-row, kind="stable")[:4].tolist()
        assert list(entry) == [token] + [t for t in best if t != token]
        for t, logprob in entry.items():
            assert abs(logprob.logprob - row[t]) < 1e-3
            assert logprob.rank == 1 + (row > row[t]).sum()
            assert logprob.decoded_token == engine.frontend.tokenizer.decode(
                [t], skip_special_tokens=False
            )
    total = sum(e[t].logprob for e, t in zip(out.logprobs, out.token_ids, strict=True))
    assert abs(out.cumulative_logprob - total) < 1e-4
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(p)
    for i, entry in enumerate(result.prompt_logprobs[1:], start=1):
        assert abs(entry[p[i]].logprob - raw[i - 1][p[i]]) < 1e-3
        assert set(entry) >= set(np.argsort(-raw[i - 1], kind="stable")[:2].tolist())


def test_penalties_and_bias_change_the_choice_as_computed_by_hand(engine):
    """Greedy with penalties, replayed on the host in float64 over the raw logits."""
    p = prompt(4, 30)
    params = SamplingParams(
        temperature=0, max_tokens=14, ignore_eos=True, presence_penalty=1.2, frequency_penalty=0.7,
        repetition_penalty=1.4, logit_bias={11: 4.0, 500: -3.0},
    )  # fmt: skip
    got = engine.generate(p, params)[0].outputs[0].token_ids
    logits = np.asarray(forward(engine.model, np.array([p + got], np.int32)))[0].astype(np.float64)
    for i in range(14):
        ids, row = p + got[:i], logits[len(p) - 1 + i].copy()
        row[11] += 4.0
        row[500] -= 3.0
        seen = np.isin(np.arange(len(row)), ids)
        row = np.where(seen, np.where(row > 0, row / 1.4, row * 1.4), row)
        counts = np.bincount(got[:i], minlength=len(row))
        row -= 0.7 * counts + 1.2 * (counts > 0)
        assert got[i] == row.argmax(), i


def test_min_tokens_forbids_the_end_and_no_longer(engine, golden):
    """A model pushed to end at once ends exactly one token after the minimum."""
    p = golden["input_ids_2"][0].tolist()
    eos = sorted(engine.frontend.tokenizer.eos_token_ids)
    for minimum in (0, 1, 5):
        params = SamplingParams(
            temperature=0, max_tokens=20, min_tokens=minimum, logit_bias={eos[0]: 100.0}
        )
        (result,) = engine.generate(p, params)
        out = result.outputs[0]
        assert len(out.token_ids) == minimum + 1
        assert out.token_ids[-1] == eos[0]
        assert not set(out.token_ids[:-1]) & set(eos)
        assert (out.finish_reason, out.stop_reason) == ("stop", None)


def test_stop_strings_and_ids(engine, golden):
    p = golden["input_ids"][0].tolist()
    free = engine.generate(p, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[
        0
    ].outputs[0]
    word = free.text[10:14]
    out = engine.generate(
        p, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=word)
    )[0]
    assert out.outputs[0].text == free.text[: free.text.index(word)]
    assert out.outputs[0].stop_reason == word
    stop = free.token_ids[7]
    out = engine.generate(
        p, SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop], ignore_eos=True)
    )
    end = free.token_ids.index(stop)
    assert out[0].outputs[0].token_ids == free.token_ids[: end + 1]
    assert out[0].outputs[0].stop_reason == stop


def test_stream_equals_generate(engine):
    params = SamplingParams(temperature=0.8, seed=9, max_tokens=30, stop=["e"], logprobs=1)
    for text in ("Hello", "Grüße, 世界 🎉"):
        chunks = list(engine.stream(text, params))
        (whole,) = engine.generate(text, params)
        assert "".join(c.text for c in chunks) == whole.outputs[0].text
        assert [t for c in chunks for t in c.token_ids] == whole.outputs[0].token_ids
        assert chunks[-1].output.outputs[0].text == whole.outputs[0].text
        assert chunks[-1].finish_reason == whole.outputs[0].finish_reason
        assert [c.output for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert whole.prompt == text


def test_closing_a_stream_gives_everything_back(engine):
    stream = engine.stream("Hello", GREEDY)
    next(stream)
    assert not engine.idle
    stream.close()
    assert engine.idle
    assert len(engine.generate("Hello", GREEDY)[0].outputs[0].token_ids) == 12


def test_other_requests_run_while_a_stream_is_open(engine):
    stream = engine.stream("Hello", GREEDY)
    next(stream)
    (other,) = engine.generate("Hello", GREEDY)
    (last,) = [c for c in stream if c.output]
    assert last.output.outputs[0].token_ids == other.outputs[0].token_ids


def test_an_exception_in_the_consumer_gives_everything_back(engine):
    def consume():
        for _ in engine.stream("Hello", GREEDY):
            raise RuntimeError("the consumer broke")

    with pytest.raises(RuntimeError, match="consumer"):
        consume()
    wait_until_idle(engine)


def test_prompt_forms(engine):
    text = "one two"
    ids = engine.frontend.tokenizer.encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    batch = engine.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(r.outputs[0].token_ids) for r in batch}) == 1
    for form in forms:
        assert len(engine.generate(form, GREEDY)) == 1
    assert engine.generate([], GREEDY) == []
    assert [r.request_id for r in batch] == sorted(
        {r.request_id for r in batch}, key=lambda x: int(x[8:])
    )


def test_progress_is_shown_for_lists_and_can_be_silenced(engine, capsys):
    engine.generate(["a", "b"], GREEDY)
    assert "tokens/s" in capsys.readouterr().err
    engine.generate(["a", "b"], GREEDY, use_tqdm=False)
    engine.generate("a", GREEDY)
    assert capsys.readouterr().err == ""


BAD = [
    ("", GREEDY, "empty"),
    ([[]], GREEDY, "no prompt|empty"),
    ([5, 1024], GREEDY, "1024"),
    ([-1], GREEDY, "-1"),
    ([1.5], GREEDY, "1.5|prompt"),
    (5, GREEDY, "int"),
    ({"prompt": "x", "images": 1}, GREEDY, "images"),
    ("x", "greedy", "sampling_params"),
    (["x", "y"], [GREEDY], "1 sampling_params for 2 prompts"),
    ([7] * 320, SamplingParams(max_tokens=1), "320"),
    ([7] * 300, SamplingParams(max_tokens=21), "at most 20"),
    ("x", SamplingParams(n=1025), "max_queue=1024"),
    ("x", SamplingParams(thinking_budget=3), "thinking_budget"),
]


@pytest.mark.parametrize(("prompts", "params", "message"), BAD)
def test_bad_input_is_refused_before_anything_runs(engine, prompts, params, message):
    before = next(engine._ids)
    with pytest.raises(nj.InputError, match=message):
        engine.generate(prompts, params, use_tqdm=False)
    assert next(engine._ids) <= before + 3
    # One bad prompt among good ones: none of them runs.
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], int):
        with pytest.raises(nj.InputError, match=message):
            engine.generate(["fine", prompts], params, use_tqdm=False)


def test_the_context_is_used_to_its_last_token(engine):
    (full,) = engine.generate(
        [7] * 300, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    )
    assert len(full.outputs[0].token_ids) == 20
    (room,) = engine.generate([7] * 310, SamplingParams(temperature=0, ignore_eos=True))
    assert len(room.outputs[0].token_ids) == 10
    assert room.outputs[0].finish_reason == "length"


def test_nothing_compiles_after_start(engine):
    events = []
    listen = lambda name, *_, **__: events.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine.generate(
            [prompt(i, n) for i, n in enumerate((1, 30, 100, 200))],
            SamplingParams(
                n=2, max_tokens=9, seed=1, presence_penalty=1.0, logprobs=3, prompt_logprobs=1, min_tokens=2
            ),
            use_tqdm=False,
        )  # fmt: skip
        engine.generate(prompt(9, 77), GREEDY)
        list(engine.stream("Hello", GREEDY))
        assert not [e for e in events if "compile" in e or "trace" in e]
        jax.jit(lambda x: x * 3 + 1)(np.ones(3))
        assert [e for e in events if "compile" in e]  # the listener does hear compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_broken_weights_abort_the_request_and_say_so(goldens):
    broken = nj.load(goldens / "tiny-qwen3.5-dense", max_concurrency=1, max_context=64)
    head = broken.model.params.lm_head.at[3].set(np.nan)
    broken._program._step_params = broken._program._step_params.replace(lm_head=head)
    (result,) = broken.generate("Hello", GREEDY)
    assert result.outputs[0].finish_reason == "abort"
    assert "not finite" in result.outputs[0].error
    assert broken.idle


def test_what_is_not_finite_stays_with_its_request(goldens):
    """Its keys and values are NaN; pages that it had, and the null page, serve others as if it had not been there."""
    with nj.load(goldens / "tiny-qwen3.5-dense", max_concurrency=2, max_context=192) as engine:
        clean = [prompt(i, n) for i, n in enumerate((70, 100, 3))]
        clean = [[t if t != 7 else 8 for t in ids] for ids in clean]
        want = tokens(engine.generate(clean, GREEDY, cache="off", use_tqdm=False))
        poison = engine._program._params.embed.at[7].set(np.nan)
        for name in ("_params", "_step_params"):
            params = getattr(engine._program, name)
            setattr(engine._program, name, params.replace(embed=poison))
        bad = [7] * 130
        for ids in (bad, bad, [*clean[0][:60], 7]):
            (result,) = engine.generate([ids], GREEDY, cache="off", use_tqdm=False)
            assert result.outputs[0].finish_reason == "abort"
        outs = engine.generate([*clean, bad], GREEDY, cache="off", use_tqdm=False)
        assert tokens(outs[:3]) == want
