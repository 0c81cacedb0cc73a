"""What an engine of each purpose holds, and what it refuses (SC-01, SC-02)."""

import threading
import weakref

import numpy as np
import pytest

import ninfer_jax as nj


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 990, n).tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.generate("Hello"),
        lambda e: e.submit("Hello"),
        lambda e: e.chat([{"role": "user", "content": "Hello"}]),
        lambda e: e.stream("Hello"),
        lambda e: e.clear_cache(),
    ],
)
def test_an_engine_for_scoring_does_not_generate(small, call):
    with pytest.raises(nj.InputError, match='purpose="generation"'):
        call(small)


def test_an_engine_for_scoring_holds_only_what_scoring_needs(small):
    """SC-02."""
    assert small._worker is None
    assert small._program is None
    assert small.idle
    assert set(small.memory()) >= {"weights", "kv", "state_images"}
    assert "sampler" not in small.memory()
    assert small.stats()["requests"]["submitted"] == 0
    assert small.explain() == ""
    with pytest.raises(nj.InputError, match="no request"):
        small.explain("request-0")


def test_nothing_compiles_after_the_start(small, monkeypatch):
    """CAP-21."""
    monkeypatch.setattr(small._scorer, "_compiled", None)
    small.score([ids(n, n) for n in (1, 20, 70, 200)], [ids(n, n) for n in (1, 20, 70, 100)])


def test_scoring_on_a_generating_engine_leaves_scheduler_and_cache_alone(generating, small):
    """SC-01: the same numbers, and the world is the same object as before."""
    prompt = ids(100)
    params = nj.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (first,) = generating.generate([prompt], params, use_tqdm=False)
    world, program = generating._worker.world, generating.memory()
    got = generating.score(prompt, [ids(5), ids(9)])
    assert got == small.score(prompt, [ids(5), ids(9)])
    assert generating.perplexity(prompt, window=64).scored == 99
    assert generating._worker.world is world
    assert generating.memory() == program
    (again,) = generating.generate([prompt], params, use_tqdm=False)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_cached_tokens > 0


def test_scores_are_the_generators_own(generating):
    """What greedy generation says of its tokens is what scoring says of them."""
    prompt = ids(70, 3)
    params = nj.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    (out,) = generating.generate([prompt], params, use_tqdm=False)
    tokens = out.outputs[0].token_ids
    (got,) = generating.score([prompt], [tokens])
    assert got.is_greedy
    want = [entry[t].logprob for entry, t in zip(out.outputs[0].logprobs, tokens, strict=True)]
    np.testing.assert_allclose(got.logprobs, want, atol=1e-4)


def test_threads_take_turns(small):
    items = [(ids(30, i), ids(4, i)) for i in range(4)]
    want = [small.score([c], [k])[0] for c, k in items]
    got = [None] * 4

    def work(i):
        (got[i],) = small.score([items[i][0]], [items[i][1]])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == want


def test_a_closed_engine_scores_no_more(goldens):
    engine = nj.load(
        goldens / "tiny-qwen3.5-dense", purpose="scoring", max_context=320, prefill_chunk=64
    )
    with engine:
        assert len(engine.score("Hello", " world")) == 1
    engine.close()
    with pytest.raises(nj.EngineFailure, match="closed"):
        engine.score("Hello", " world")
    with pytest.raises(nj.EngineFailure, match="closed"):
        engine.perplexity("Hello world")
    gone = weakref.ref(engine)
    del engine
    assert gone() is None


def test_output_that_is_not_finite_is_no_score(small, monkeypatch):
    params = small.model.params
    broken = small.model.replace(params=params.replace(final_norm=params.final_norm * np.nan))
    monkeypatch.setattr(small._scorer, "_model", broken)
    with pytest.raises(nj.NumericError, match="token 3 of sequence 0 is not finite"):
        small.score([[1, 2, 3]], [[4, 5]])


@pytest.mark.parametrize("purpose", ["training", None, 1])
def test_unknown_purposes(purpose):
    with pytest.raises(nj.InputError, match="purpose must be one of"):
        nj.EngineConfig(purpose=purpose)
