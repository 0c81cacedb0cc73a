"""chat(): channels, thinking budget, streaming, several conversations."""

from dataclasses import replace

import pytest

import ninfer_jax as nj
from ninfer_jax import SamplingParams

ASK = [{"role": "user", "content": "hi"}]


def greedy(**more):
    return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **more)


def test_a_checkpoint_without_a_template_says_so(engine):
    bare = replace(engine.frontend, chat_template=None)
    with pytest.raises(nj.InputError, match="no chat template"):
        bare.prepare_chat(ASK)


def test_thinking_goes_to_reasoning_until_it_is_closed(engine):
    close = engine.frontend.tokenizer.think_end_id
    (open_ended,) = engine.chat(ASK, greedy(logit_bias={close: -100.0}))
    assert open_ended.outputs[0].text == ""
    assert open_ended.outputs[0].reasoning
    (answer,) = engine.chat(ASK, greedy(), enable_thinking=False)
    assert answer.outputs[0].reasoning is None
    assert answer.outputs[0].text
    assert answer.prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_thinking_budget_closes_thinking_at_its_token(engine, budget):
    close = engine.frontend.tokenizer.think_end_id
    params = greedy(thinking_budget=budget, logit_bias={close: -100.0}, logprobs=1)
    (result,) = engine.chat(ASK, params)
    out = result.outputs[0]
    assert out.token_ids.index(close) == budget
    assert len(out.token_ids) == 24
    assert out.logprobs[budget] == {}
    # What follows is what the model says after that prefix.
    prefix = result.prompt_token_ids + out.token_ids[: budget + 1]
    (rest,) = engine.generate(
        prefix, SamplingParams(temperature=0, max_tokens=23 - budget, ignore_eos=True, logit_bias={close: -100.0})
    )  # fmt: skip
    assert rest.outputs[0].token_ids == out.token_ids[budget + 1 :]
    chunks = list(engine.stream_chat(ASK, params))
    assert [t for c in chunks for t in c.token_ids] == out.token_ids
    assert "".join(c.reasoning for c in chunks) == (out.reasoning or "")
    assert "".join(c.text for c in chunks) == out.text


def test_several_conversations_and_tools(engine):
    results = engine.chat(
        [ASK, ASK, [*ASK, {"role": "assistant", "content": "yes"}, *ASK]], greedy()
    )
    assert len(results) == 3
    assert results[0].outputs[0].token_ids == results[1].outputs[0].token_ids
    assert results[2].prompt != results[0].prompt


def test_messages_are_checked(engine):
    with pytest.raises(nj.InputError, match="role"):
        engine.chat([{"role": "alien", "content": "x"}])
