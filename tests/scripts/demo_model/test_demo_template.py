"""The demo's chat template, through the runtime's renderer and as bare jinja."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from ninfer_jax.frontend import ChatTemplate
from ninfer_jax.frontend.tool_calls import parse_tool_calls
from scripts.demo_model.dialogues.rendering import TEMPLATE, template

USER = {"role": "user", "content": "hi"}
HEAD = "<|im_start|>user\nhi<|im_end|>\n"
OPEN = "<|im_start|>assistant\n<think>\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "<é>",
        "parameters": {
            "type": "object",
            "properties": {
                "s": {"type": "string"},
                "n": {"type": "integer"},
                "x": {"type": "number"},
                "b": {"type": "boolean"},
                "o": {"type": "object"},
                "l": {"type": "array"},
            },
        },
    },
}
ARGUMENTS = {"s": "two\nlines", "n": 3, "x": 1.5, "b": True, "o": {"a": [1, "é"]}, "l": [1, 2]}


@pytest.fixture(scope="module")
def demo() -> ChatTemplate:
    return template()


def _called(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


def _bare(*messages: Any, **variables: Any) -> str:
    """Without the runtime's tidying of messages."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: jinja2.utils.htmlsafe_json_dumps(value)
    return environment.from_string(TEMPLATE.read_text()).render(messages=messages, **variables)


def test_the_generation_prompt(demo: ChatTemplate) -> None:
    assert demo.render([USER]) == HEAD + OPEN
    assert demo.render([USER], enable_thinking=True) == HEAD + OPEN
    assert demo.render([USER], enable_thinking=False) == HEAD + OPEN + "\n</think>\n\n"
    assert demo.render([USER], add_generation_prompt=False) == HEAD


def test_tools_stand_one_a_line_after_the_system_message(demo: ChatTemplate) -> None:
    system = {"role": "system", "content": "Be brief."}
    lines = demo.render([system, USER], tools=[TOOL, TOOL]).splitlines()
    assert lines[:4] == ["<|im_start|>system", "Be brief.", "", "# Tools"]
    assert lines[4] == "<tools>"
    assert lines[5] == lines[6]
    assert lines[5].startswith(
        '{"type": "function", "function": {"name": "f", "description": "<é>"'
    )
    assert lines[7] == "</tools>"
    assert lines[8].endswith("<|im_end|>")
    assert demo.render([USER], tools=[TOOL]).startswith("<|im_start|>system\n# Tools\n<tools>\n{")
    assert demo.render([system, USER]).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n" + HEAD
    )


def test_thinking_of_earlier_turns_goes(demo: ChatTemplate) -> None:
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    shown = "<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>\n"
    assert demo.render([USER, answer], add_generation_prompt=False) == HEAD + shown
    later = demo.render([USER, answer, USER])
    assert later == HEAD + "<|im_start|>assistant\nyes<|im_end|>\n" + HEAD + OPEN
    plain = {"role": "assistant", "content": "yes"}
    empty = "<|im_start|>assistant\n<think>\n\n</think>\n\nyes<|im_end|>\n"
    assert demo.render([USER, plain], add_generation_prompt=False) == HEAD + empty


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_has_two_names(name: str) -> None:
    answer = {"role": "assistant", "content": "yes", name: "hm"}
    inline = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    assert "<think>\nhm\n</think>\n\nyes<|im_end|>" in _bare(USER, answer)
    assert _bare(USER, answer) == _bare(USER, inline)


def test_a_tool_answer_is_no_question(demo: ChatTemplate) -> None:
    calling = _called({"n": 1}, content="", reasoning_content="I call f.")
    answers = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    text = demo.render([USER, calling, *answers])
    assert "<think>\nI call f.\n</think>\n\n<tool_call>\n<function=f>\n<parameter=n>\n1\n" in text
    grouped = (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n"
        "</tool_response><|im_end|>\n"
    )
    assert text.endswith(grouped + OPEN)
    written = {"role": "user", "content": "<tool_response>\n1\n</tool_response>"}
    assert "I call f." in demo.render([USER, calling, written])
    assert "I call f." not in demo.render([USER, calling, *answers, USER])


@pytest.mark.parametrize("content", [None, "", "calling"])
def test_calls_come_back_with_their_types(demo: ChatTemplate, content: str | None) -> None:
    text = demo.render([USER, _called(ARGUMENTS, content=content)], add_generation_prompt=False)
    answer = text.removesuffix("<|im_end|>\n").split("</think>\n\n")[1]
    left, (call,) = parse_tool_calls(answer, [TOOL])
    assert left == (content or "")
    assert call.name == "f"
    assert json.loads(call.arguments) == ARGUMENTS
    as_text = _called(call.arguments, content=content)
    assert demo.render([USER, as_text], add_generation_prompt=False) == text


def test_two_calls_and_none_of_the_arguments(demo: ChatTemplate) -> None:
    two = _called(None)
    two["tool_calls"] *= 2
    text = demo.render([USER, two], add_generation_prompt=False)
    one = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    assert text.endswith(f"</think>\n\n{one}\n{one}<|im_end|>\n")
    assert _bare(USER, two) == text


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_messages_anywhere(demo: ChatTemplate, role: str) -> None:
    first, later = {"role": role, "content": "A."}, {"role": role, "content": "B."}
    answer = {"role": "assistant", "content": "yes"}
    expected = (
        f"<|im_start|>system\nA.<|im_end|>\n{HEAD}<|im_start|>assistant\nyes<|im_end|>\n"
        f"<|im_start|>system\nB.<|im_end|>\n{HEAD}"
    )
    messages = [first, USER, answer, later, USER]
    assert demo.render(messages) == expected + OPEN
    assert _bare(*messages) == expected


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_contents_may_be_empty(content: dict[str, Any]) -> None:
    for role in ("system", "developer", "user", "assistant", "tool"):
        assert _bare(USER, {"role": role, **content}) == _bare(USER, {"role": role, "content": ""})


def test_parts() -> None:
    parts = [
        {"type": "text", "text": "a "},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "video", "video": "y"},
        {"type": "image"},
        "b",
    ]
    vision = "<|vision_start|><|{}_pad|><|vision_end|>"
    body = f"a {vision.format('image')}{vision.format('video')}{vision.format('image')}b"
    assert _bare({"role": "user", "content": parts}) == f"<|im_start|>user\n{body}<|im_end|>\n"


def test_it_continues_a_message(demo: ChatTemplate) -> None:
    started = {"role": "assistant", "content": "The ans", "reasoning": "hm"}
    text = demo.render([USER, started], continue_final_message=True)
    assert text == HEAD + OPEN + "hm\n</think>\n\nThe ans"
