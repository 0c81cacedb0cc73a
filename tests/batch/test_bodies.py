import json

import pytest

from ninfer_jax import InputError, SamplingParams
from ninfer_jax.batch.bodies import prepare
from ninfer_jax.batch.requests import parse_line
from tests.batch.lines import chat, completion, line, score
from tests.batch.stand_in_job import stand_in_frontend

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def frontend():
    return stand_in_frontend()


def prepared(value, frontend):
    return prepare(parse_line(json.dumps(value).encode()), frontend)


def test_chat_fields(frontend):
    body = {
        "max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": "x", "seed": 4,
        "logprobs": True, "top_logprobs": 3, "presence_penalty": 1, "frequency_penalty": -1,
        "logit_bias": {"5": 2}, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 1, "thinking_budget": 0,
        "chat_template_kwargs": {"enable_thinking": True}, "model": "m", "user": "u",
        "metadata": {"a": 1}, "stream": False, "tools": [TOOL], "tool_choice": "auto",
        "response_format": {"type": "text"},
    }  # fmt: skip
    (call,) = prepared(chat("a", "hi", **body), frontend).calls
    assert call.params == SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, n=2, stop="x", seed=4, logprobs=3,
        presence_penalty=1, frequency_penalty=-1, logit_bias={5: 2}, top_k=7, min_p=0.1,
        repetition_penalty=1.1, stop_token_ids=[3], ignore_eos=True, min_tokens=1, thinking_budget=0,
    )  # fmt: skip
    assert call.sequences == 2
    assert call.prompt.tools == (TOOL,)
    assert call.prompt.recovery == 0
    assert call.prompt.markers == ()


def test_both_names_of_the_longest_output(frontend):
    for body in ({"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}):
        assert prepared(chat("a", "x", **body), frontend).calls[0].params.max_tokens == 3


def test_tool_choice_none_offers_no_tools(frontend):
    with_tools = prepared(chat("a", "hi", tools=[TOOL], tool_choice="none"), frontend)
    assert with_tools.calls[0].prompt == prepared(chat("a", "hi"), frontend).calls[0].prompt


def test_prompts_of_a_completion(frontend):
    ids = list(frontend.prepare_prompt("one").token_ids)
    for prompt, count in [("one", 1), (ids, 1), (["one", "two"], 2), ([ids, ids], 2)]:
        work = prepared(completion("a", prompt), frontend)
        assert len(work.calls) == count
        assert list(work.calls[0].prompt.token_ids) == ids


def test_seeds(frontend):
    """Without one the line's own, another for each prompt; a given one serves all."""
    first = prepared(completion("a", ["x", "x"]), frontend)
    again = prepared(completion("a", ["x", "x"]), frontend)
    other = prepared(completion("b", ["x", "x"]), frontend)
    seeds = [[c.params.seed for c in w.calls] for w in (first, again, other)]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 4
    given = prepared(completion("a", ["x", "x"], seed=3), frontend)
    assert [c.params.seed for c in given.calls] == [3, 3]


def test_scores(frontend):
    assert prepared(score("a", "c", "x"), frontend).continuations == ("x",)
    assert prepared(score("a", "c", ["x", "y"]), frontend).continuations == ("x", "y")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (chat("a", "x", foo=1), "unknown field 'foo'"),
        (chat("a", "x", stream=True), "stream must be false"),
        (chat("a", "x", model=3), "model"),
        (chat("a", "x", tool_choice="required"), "tool_choice"),
        (chat("a", "x", parallel_tool_calls=False), "parallel_tool_calls"),
        (chat("a", "x", response_format={"type": "json_object"}), "response_format"),
        (chat("a", "x", top_logprobs=2), "logprobs: true"),
        (chat("a", "x", max_tokens=1, max_completion_tokens=2), "differ"),
        (chat("a", "x", max_tokens=[1], max_completion_tokens={"a": 1}), "differ"),
        (chat("a", "x", max_tokens=[1]), "max_tokens"),
        (chat("a", "x", max_completion_tokens={"a": 1}), "max_tokens"),
        (chat("a", "x", temperature=-1), "temperature"),
        (chat("a", "x", n=True), "n must be"),
        (chat("a", "x", chat_template_kwargs={"tools": []}), "tools"),
        (chat("a", "x", chat_template_kwargs={"self": 1}), "self"),
        (line("a", "/v1/chat/completions"), "no messages"),
        (line("a", "/v1/chat/completions", messages=[]), "messages is empty"),
        (line("a", "/v1/chat/completions", messages=[{"role": "x"}]), "role 'x'"),
        (chat("a", "x \ud800"), "surrogate"),
        (completion("a", "x", echo=True), "echo"),
        (completion("a", "x", best_of=2), "best_of"),
        (completion("a", "x", suffix="y"), "suffix"),
        (completion("a", "x", messages=[]), "messages"),
        (completion("a", {"prompt": "x"}), "prompt must be"),
        (completion("a", ["x", 3]), "prompt must be"),
        (completion("a", []), "empty"),
        (completion("a", [10**9]), "vocabulary"),
        (line("a", "/v1/completions"), "no prompt"),
        (score("a", "c", []), "continuation"),
        (score("a", "c", ["x", ""]), "continuation"),
        (score("a", None, "x"), "context"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(frontend, value, words):
    with pytest.raises(InputError, match=words):
        prepared(value, frontend)
