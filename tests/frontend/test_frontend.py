"""The facade: prompts, chats and sessions of one checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from artifacts.resources import FrontendResources
from ninfer_jax.errors import InputError
from ninfer_jax.frontend import Channel, Frontend, PreparedPrompt
from ninfer_jax.sampling_params import SamplingParams

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def frontend(resources: FrontendResources) -> Frontend:
    return Frontend.from_resources(resources, vocab_size=1100)


def test_prompts_in_every_form(frontend: Frontend) -> None:
    ids = frontend.tokenizer.encode("hello")
    text = frontend.prepare_prompt("hello")
    assert text == PreparedPrompt(tuple(ids), "hello", recovery=len(ids) - 1)
    assert frontend.prepare_prompt({"prompt": "hello"}) == text
    for form in (
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, np.uint16),
        [np.int32(i) for i in ids],
    ):
        given = replace(text, text=None)
        assert frontend.prepare_prompt(form) == given
        assert frontend.prepare_prompt({"prompt_token_ids": form}) == given
    assert text.array.dtype == np.int32
    assert text.array.tolist() == ids
    assert len(text) == len(ids)
    assert frontend.prepare_prompt(text) is text
    assert all(type(i) is int for i in frontend.prepare_prompt(np.array(ids)).token_ids)
    assert frontend.prepare_prompt([1099]).token_ids == (1099,)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        (np.array([], np.int32), "empty"),
        ({"prompt": ""}, "empty"),
        ([1100], "0 to 1099"),
        ([0, -1], r"prompt\[1\]"),
        ([2**70], "vocabulary"),
        ([1.0], "no token id"),
        ([True], "no token id"),
        (["a"], "no token id"),
        ([None], "no token id"),
        ([[1]], "no token id"),
        (np.array([1.0]), "integer array"),
        (np.array([[1]]), "one dimension"),
        (np.array([True]), "integer array"),
        (None, "list of token ids"),
        (3, "list of token ids"),
        (b"x", "list of token ids"),
        ({}, "either"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "either"),
        ({"prompt": [1]}, "string"),
        ({"prompt_token_ids": "a"}, "list of token ids"),
        ({"promt": "a"}, "promt"),
        ({"prompt": "a", "multi_modal_data": {}}, "not supported yet"),
        ("a\ud800", "surrogate"),
    ],
)
def test_bad_prompts_are_refused(frontend: Frontend, prompt: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        frontend.prepare_prompt(prompt)


def test_a_vocabulary_smaller_than_the_tokenizers(resources: FrontendResources) -> None:
    small = Frontend.from_resources(resources, vocab_size=1000)
    with pytest.raises(InputError, match="0 to 999"):
        small.prepare_prompt("<|im_end|>")
    assert Frontend.from_resources(resources).vocab_size == 1024


def test_chats(frontend: Frontend) -> None:
    thinking = frontend.prepare_chat([USER])
    assert thinking.channel is Channel.REASONING
    assert thinking.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert frontend.tokenizer.decode(thinking.token_ids, False) == thinking.text
    assert frontend.prepare_chat([USER], enable_thinking=False).channel is Channel.CONTENT
    plain = frontend.prepare_chat([USER], add_generation_prompt=False)
    assert plain.channel is Channel.CONTENT
    tool = {"type": "function", "function": {"name": "f"}}
    assert frontend.prepare_chat([USER], tools=[tool]).tools == (tool,)
    with pytest.raises(InputError, match="messages"):
        frontend.prepare_chat([])


def test_templates(resources: FrontendResources) -> None:
    without = replace(resources, chat_template=None, tokenizer_config={})
    with pytest.raises(InputError, match="no chat template"):
        Frontend.from_resources(without).prepare_chat([USER])
    own = Frontend.from_resources(without, chat_template="{{ messages[0].content }}!")
    assert own.prepare_chat([USER]).text == "hi!"


def test_from_prompt_to_output(frontend: Frontend) -> None:
    prompt = frontend.prepare_chat([USER])
    sampling = frontend.resolve(SamplingParams(max_tokens=50), prompt, max_context=200)
    assert (sampling.temperature, sampling.top_k) == (0.6, 20)
    session = frontend.output_session(prompt, sampling)
    ids = frontend.tokenizer.encode("hm\n</think>\n\nhello<|im_end|>")
    session.commit(session.preview(ids))
    out = session.final()
    assert (out.reasoning, out.content, out.finish_reason) == ("hm", "hello", "stop")
    with pytest.raises(InputError, match="max_tokens"):
        frontend.resolve(SamplingParams(max_tokens=190), prompt, max_context=200)
    with pytest.raises(InputError, match="logit_bias"):
        frontend.resolve(SamplingParams(logit_bias={1100: 1}))
