"""`Engine.score` and `perplexity`: goldens, independence of the batch, refusals."""

import math

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ninfer_jax as nj
from ninfer_jax.scoring import requests


@pytest.fixture(scope="module")
def golden(goldens):
    return np.load(goldens / "scoring.npz")


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 990, n).tolist()


def logprobs(score):
    return np.array(score.logprobs)


def test_the_golden_text(scoring, golden):
    got = scoring.perplexity(golden["ids"], window=512, stride=256)
    assert math.isnan(got.logprobs[0])
    np.testing.assert_allclose(got.logprobs[1:], golden["logprob"][1:], atol=1e-3)
    np.testing.assert_array_equal(got.greedy[1:], golden["rank"][1:] == 0)
    assert got.scored == golden["scored"] == 2999
    assert abs(got.sum_logprob - golden["sum_logprob"]) < 0.05
    assert got.perplexity == pytest.approx(float(golden["ppl"]), rel=1e-4)
    assert got.bits_per_byte is None


def test_one_window_over_the_whole_golden_text(scoring, golden):
    got = scoring.perplexity(golden["ids"].tolist(), window=3000)
    np.testing.assert_allclose(got.logprobs[1:], golden["logprob_one_window"][1:], atol=1e-3)


def test_against_the_plain_forward_pass(small):
    contexts = [ids(n, n) for n in (1, 2, 64, 65, 66, 200)]
    after = [ids(n, 100 + n) for n in (1, 5, 70, 64, 16, 17)]
    for context, continuation, got in zip(
        contexts, after, small.score(contexts, after), strict=True
    ):
        tokens = np.array([context + continuation])
        want = jax.nn.log_softmax(nj.forward(small.model, tokens[:, :-1]), axis=-1)[0]
        rows = np.arange(len(context) - 1, tokens.size - 1)
        np.testing.assert_allclose(logprobs(got), want[rows, continuation], atol=1e-4)
        assert got.token_ids == tuple(continuation)
        assert got.greedy == tuple(
            (np.argmax(want[rows], axis=-1) == np.array(continuation)).tolist()
        )
        assert got.sum_logprob == pytest.approx(sum(got.logprobs), abs=1e-9)


ITEMS = st.lists(
    st.tuples(st.sampled_from([1, 2, 40, 65, 128, 150]), st.integers(0, 2), st.integers(1, 90)),
    min_size=1,
    max_size=24,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(items=ITEMS, seed=st.integers(0, 99))
def test_numbers_depend_on_nothing_else_in_the_job(small, items, seed):
    """Batch size, order, and whether contexts are shared change nothing beyond 1e-5 (here: nothing at all)."""
    rng = np.random.default_rng(seed)
    contexts = [ids(n, 10 * n + which) for n, which, _ in items]
    after = [rng.integers(0, 990, n).tolist() for _, _, n in items]
    want = [logprobs(s) for s in small.score(contexts, after)]
    order = rng.permutation(len(items))
    shuffled = small.score([contexts[i] for i in order], [after[i] for i in order])
    spans = requests.score_spans(small.frontend, contexts, after, max_context=320)
    apart = small._scorer.run(spans, share=False)
    one = int(order[0])
    (alone,) = small.score([contexts[one]], [after[one]])
    for i, got in zip(order, shuffled, strict=True):
        np.testing.assert_allclose(logprobs(got), want[i], atol=1e-5)
    for got, expected in zip(apart, want, strict=True):
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(logprobs(alone), want[one], atol=1e-5)


def test_a_shared_context_is_computed_once(small):
    """SC-01; and many more continuations than there are rows."""
    context, after = ids(200), [ids(3, i) for i in range(40)]
    before = small.stats()["scoring"]["computed_tokens"]
    got = small.score(context, after)
    assert small.stats()["scoring"]["computed_tokens"] - before == 199 + 40 * 3
    (one,) = small.score([context], [after[39]])
    np.testing.assert_allclose(logprobs(got[39]), logprobs(one), atol=1e-5)


def test_sequences_as_long_as_they_may_be(small):
    """The temporary pool holds the longest context and continuation, many of them in turns."""
    got = small.score([ids(300, i) for i in range(3)], [ids(21, i) for i in range(3)])
    assert [len(s.logprobs) for s in got] == [21] * 3
    got = small.score(ids(1), [ids(320, i) for i in range(20)])
    assert all(len(s.logprobs) == 320 for s in got)
    with pytest.raises(nj.InputError, match="322 together; max_context=320 allows 321"):
        small.score([ids(300)], [ids(22)])


def test_strings_are_cut_as_lm_eval_cuts_them(small):
    encode = small.frontend.tokenizer.encode
    (got,) = small.score("Hello world ", "again")
    assert list(got.token_ids) == encode("Hello world again")[len(encode("Hello world")) :]
    (same,) = small.score([encode("Hello world")], [list(got.token_ids)])
    assert same == got


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_context_is_the_prefix_token(small, empty):
    prefix = requests.prefix_token_id(small.frontend)
    encode = small.frontend.tokenizer.encode
    (got,) = small.score(empty, "Hello")
    (same,) = small.score([[prefix]], [encode(empty + "Hello")])
    assert got == same
    assert small.score([[]], [encode("Hello")]) == small.score([[prefix]], [encode("Hello")])


def test_bits_per_byte_count_the_bytes_of_scored_tokens(small):
    text = "Once upon a time there was a naïve fox. " * 20
    got = small.perplexity(text, window=64, stride=32)
    tokens = small.frontend.tokenizer.encode(text)
    size = sum(len(small.frontend.tokenizer.token_bytes(t)) for t in tokens[1:])
    assert got.scored == len(tokens) - 1
    assert got.bits_per_byte == pytest.approx(-got.sum_logprob / math.log(2) / size)
    assert got.perplexity == pytest.approx(math.exp(-got.sum_logprob / got.scored))


def test_nothing_to_score(small):
    assert small.score([], []) == []
    assert small.score("Hello", []) == []


@pytest.mark.parametrize(
    ("contexts", "continuations", "message"),
    [
        ("a", 3, "continuations must be a string"),
        (b"a", "b", "contexts must be a string"),
        (["a", "b"], ["c"], "2 contexts for 1 continuations"),
        (["a"], ["c", "d"], "not in a list"),
        ("a", [""], "continuation 0 has no token"),
        ([[1]], [[]], "continuation 0 has no token"),
        ([[1]], ["a"], "both strings or both token ids"),
        ([[1]], [[5000]], "the vocabulary has ids 0 to 1023"),
        ([[-1]], [[5]], "context 0"),
        ([[True]], [[5]], "context 0"),
        ([3.5], [[5]], "context 0"),
    ],
)
def test_malformed_scores_are_refused(small, contexts, continuations, message):
    with pytest.raises(nj.InputError, match=message):
        small.score(contexts, continuations)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "empty"),
        ([1], {}, "nothing to score"),
        ([1, 2], {"window": 321}, "over max_context=320"),
        ([1, 2], {"window": 1}, "at least 2"),
        ([1, 2], {"window": 8, "stride": 8}, "stride must be"),
        ([1, 2], {"window": "8"}, "window must be a number"),
        ([1, 5000], {}, "the vocabulary"),
        (3, {}, "text must be a list"),
    ],
)
def test_malformed_texts_are_refused(small, text, options, message):
    with pytest.raises(nj.InputError, match=message):
        small.perplexity(text, **options)
