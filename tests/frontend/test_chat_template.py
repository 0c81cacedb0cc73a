"""Templates: the environment, the sandbox, and every content shape on our own and the real
templates."""

from __future__ import annotations

import copy
import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from artifacts.resources import FrontendResources
from ninfer_jax.errors import ArtifactError, InputError
from ninfer_jax.frontend import ChatTemplate

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}},
}
OWN = Path(__file__).parent / "data" / "chat.jinja"
REAL = os.environ.get("NINFER_TEMPLATES")
REAL_NAMES = ["qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"]


def _load(name: str) -> ChatTemplate:
    path = OWN
    if name != "own":
        if not REAL or not Path(REAL).is_dir():
            pytest.skip("NINFER_TEMPLATES names no folder with the real chat templates")
        path = Path(REAL) / f"{name}.jinja"
    return ChatTemplate(path.read_text(), special_tokens={"eos_token": "<|im_end|>"})


@pytest.fixture(scope="module", params=["own", *REAL_NAMES])
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    return _load(request.param)


def _render(source: str, *messages: Any, **kwargs: Any) -> str:
    return ChatTemplate(source).render(list(messages) or [USER], **kwargs)


# Every content shape, on every template.


EMPTY: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": []}]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_empty_contents_render_alike(template: ChatTemplate, role: str) -> None:
    call = {"name": "f", "arguments": {}}
    calling = {"role": "assistant", "content": "calling", "tool_calls": [call]}
    before = {"tool": [USER, calling], "system": [], "developer": []}.get(role, [USER])
    texts = {
        template.render([*before, {"role": role, **extra}, USER], tools=tools)
        for extra in EMPTY
        for tools in ([TOOL],)
    }
    assert len(texts) == 1
    assert "None" not in texts.pop()


def test_an_assistant_that_only_calls(template: ChatTemplate) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
    texts = {
        template.render([USER, {"role": "assistant", "tool_calls": [call], **extra}])
        for extra in EMPTY
    }
    assert len(texts) == 1
    assert "None" not in texts.pop().replace("<parameter=a>\nNone", "")


def test_arguments_as_text_or_object(template: ChatTemplate) -> None:
    value = {"b": 1, "a": "é<", "list": [1, {"x": None}], "t": True}
    texts = set()
    for arguments in (value, json.dumps(value), json.dumps(value, ensure_ascii=False)):
        function = {"name": "f", "arguments": arguments}
        for call in (function, {"id": "1", "type": "function", "function": function}):
            answer = {"role": "tool", "content": "42", "tool_call_id": "1"}
            texts.add(template.render([USER, {"role": "assistant", "tool_calls": [call]}, answer]))
    assert len(texts) == 1
    text = texts.pop()
    assert "<parameter=a>\né<\n</parameter>" in text
    assert (
        text.index("<parameter=b>") < text.index("<parameter=a>") < text.index("<parameter=list>")
    )
    assert "<tool_response>\n42\n</tool_response>" in text


def test_parts_are_text(template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "a b"}]
    )


def test_system_and_developer_anywhere(template: ChatTemplate) -> None:
    system = {"role": "system", "content": "SYS"}
    developer = {"role": "developer", "content": "SYS"}
    answer = {"role": "assistant", "content": "yes"}
    assert template.render([system, USER]) == template.render([developer, USER])
    assert "<|im_start|>system" in template.render([developer, USER])
    for conversation in (
        [USER, system],
        [USER, answer, developer, USER],
        [system, developer, USER],
        [USER, system, answer, developer, USER],
        [developer, USER, answer, system],
    ):
        text = template.render(conversation)
        wanted = sum(message["content"] == "SYS" for message in conversation)
        assert text.count("SYS") == wanted
    # What was said before a late system message renders as it did without it: reuse survives.
    early = template.render([USER, answer, USER], add_generation_prompt=False)
    late = template.render([USER, answer, USER, system], add_generation_prompt=False)
    assert late.startswith(early)


def test_both_names_of_thinking(template: ChatTemplate) -> None:
    texts = {
        template.render([USER, {"role": "assistant", "content": "yes", name: "I THINK"}])
        for name in ("reasoning", "reasoning_content")
    }
    assert len(texts) == 1
    assert "<think>\nI THINK\n</think>\n\nyes" in texts.pop()


def test_thinking_of_earlier_turns_does_not_crash(template: ChatTemplate) -> None:
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "I THINK"}
    assert "yes" in template.render([USER, answer, USER])
    inline = {"role": "assistant", "content": "<think>\nI THINK\n</think>\n\nyes"}
    assert "yes" in template.render([USER, inline, USER])


def test_generation_header(template: ChatTemplate) -> None:
    assert template.render([USER], enable_thinking=True).endswith(
        "<|im_start|>assistant\n<think>\n"
    )
    assert template.render([USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert template.render([USER], add_generation_prompt=False).endswith("hi<|im_end|>\n")


def test_continue_final_message(template: ChatTemplate) -> None:
    for content in ("The answer", "The answer is ", ""):
        answer = {"role": "assistant", "content": content}
        text = template.render([USER, answer], continue_final_message=True)
        assert text.endswith("</think>\n\n" + content)
        closed = template.render([USER, answer], add_generation_prompt=False)
        assert closed.startswith(text.rstrip())
    with pytest.raises(InputError, match="continue"):
        template.render([USER], continue_final_message=True)
    calling = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    with pytest.raises(InputError, match="tools"):
        template.render([USER, calling], continue_final_message=True)


def test_tools_are_shown_as_json(template: ChatTemplate) -> None:
    assert json.dumps(TOOL, ensure_ascii=False) in template.render([USER], tools=[TOOL])
    assert template.render([USER], tools=[]) == template.render([USER])


def test_a_templates_refusal(template: ChatTemplate) -> None:
    with pytest.raises(InputError, match="refuses"):
        template.render([{"role": "assistant", "content": "x"}])
    with pytest.raises(InputError, match=r"messages\[1\]"):
        template.render([USER, {"role": "robot", "content": "x"}])


def test_nothing_of_the_callers_is_changed(template: ChatTemplate) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "s"}]},
        USER,
        {"role": "assistant", "reasoning": "r", "tool_calls": [{"name": "f", "arguments": "{}"}]},
        {"role": "tool", "content": None},
        {"role": "system", "content": "late"},
    ]
    tools = [copy.deepcopy(TOOL)]
    before = copy.deepcopy((messages, tools))
    template.render(messages, tools=tools)
    assert (messages, tools) == before


# The environment.


def test_tojson_is_hugging_faces() -> None:
    assert _render("{{ {'b': '<é>&', 'a': none}|tojson }}") == '{"b": "<é>&", "a": null}'
    assert _render("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':')) }}") == (
        '{"a":2,"b":1}'
    )
    assert _render("{{ {'b': 'é'}|tojson(indent=2, ensure_ascii=true) }}") == (
        '{\n  "b": "\\u00e9"\n}'
    )


def test_functions_blocks_and_variables() -> None:
    clock = ChatTemplate("{{ strftime_now('%d %B %Y') }}", clock=lambda: datetime(2026, 2, 3))
    assert clock.render([USER]) == "03 February 2026"
    assert (
        ChatTemplate("{{ bos_token }}!", special_tokens={"bos_token": "<s>"}).render([USER])
        == "<s>!"
    )
    assert _render("{{ color }}{{ unknown }}", color="red") == "red"
    assert _render(
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}"
    ) == ("user\n")
    numbers = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
    numbers += "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert _render(numbers) == "023"
    generation = "{% for m in messages %}{% generation %}{{ m.content }}{{ loop.last }}"
    generation += "{% endgeneration %}{% endfor %}"
    assert _render(generation) == "hiTrue"
    assert _render("{% for m in nothing %}x{% else %}none{% endfor %}") == "none"
    assert _render("{% for k, v in {'a': 1}|items %}{{ k }}{{ v }}{% endfor %}") == "a1"
    assert _render("{% for i in range(6) if i % 2 %}{{ i }}{{ loop.revindex }}{% endfor %}") == (
        "133251"
    )
    tree = "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    assert _render(tree) == "123"
    looks = "{% for m in messages %}{{ loop.length }}"
    looks += "{{ loop.previtem is defined }}{{ loop.nextitem is defined }};{% endfor %}"
    assert _render(looks, USER, USER) == "2FalseTrue;2TrueFalse;"


def test_reserved_variables() -> None:
    with pytest.raises(TypeError):
        ChatTemplate("x").render([USER], messages=[USER])  # type: ignore[misc]


def test_a_template_that_bears_system_anywhere_gets_it() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert _render(source, USER, {"role": "developer", "content": "s"}) == "[user]hi[system]s"


def test_lists_of_templates(resources: FrontendResources) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert ChatTemplate(named).render([USER]) == "D"
    assert ChatTemplate(named).render([USER], tools=[TOOL]) == "T"
    assert ChatTemplate(named[:1]).render([USER], tools=[TOOL]) == "D"
    with pytest.raises(InputError, match="default"):
        ChatTemplate(named[1:]).render([USER])
    for bad in ([], [{"name": "default"}], [3], 3, [{"name": "default", "template": 3}]):
        with pytest.raises(ArtifactError, match="chat_template"):
            ChatTemplate(bad)  # type: ignore[arg-type]
    config = {"chat_template": named}
    found = ChatTemplate.from_resources(
        FrontendResources(resources.tokenizer_json, tokenizer_config=config)
    )
    assert found is not None
    assert found.render([USER]) == "D"
    assert ChatTemplate.from_resources(FrontendResources(resources.tokenizer_json)) is None


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a", "{% endfor %}", "{{ x | nofilter }}"])
def test_broken_templates_name_the_line(source: str) -> None:
    with pytest.raises(ArtifactError, match="line 2"):
        ChatTemplate("fine\n" + source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + none }}",
        "{{ x.y.z }}",
        "{{ messages[0].content.nope() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_stumbles(source: str) -> None:
    with pytest.raises(InputError, match="failed on these messages"):
        _render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages[0].items.__self__.x }}",
        "{{ self._TemplateReference__context.x }}",
        "{{ 9 ** 9 ** 99999 }}",
        "{% set n = namespace(i=9) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ 'a' * 10**12 }}",
        "{{ [0] * 10**12 }}",
        "{{ '%999999999d' % 1 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}"
        "{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = 'a' * 100000 %}{% for i in range(99999) %}{{ n }}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(ArtifactError, match="not allowed"):
        _render(source)
    assert time.perf_counter() - begin < 5


def test_endless_recursion_ends() -> None:
    with pytest.raises(InputError):
        _render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    with pytest.raises(InputError):
        _render("{% for i in range(10**9) %}{% endfor %}")
