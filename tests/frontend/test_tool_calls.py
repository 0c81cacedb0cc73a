"""Tool calls in both of Qwen's forms, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_jax.frontend import ChatTemplate, parse_tool_calls


def _tool(**properties: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def _xml(name: str = "f", **values: str) -> str:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def _arguments(content: str, tools: Any = None) -> dict[str, Any]:
    _, calls = parse_tool_calls(content, tools)
    assert len(calls) == 1
    parsed: dict[str, Any] = json.loads(calls[0].arguments)
    return parsed


def test_both_forms_and_the_text_around_them() -> None:
    content = (
        "Let me look.\n\n"
        + _xml("weather", city="Paris", note="a\nb")
        + '\n<tool_call>\n{"name": "g", "arguments": {"x": [1, "é"]}}\n</tool_call>'
    )
    text, calls = parse_tool_calls(content)
    assert text == "Let me look."
    assert [call.name for call in calls] == ["weather", "g"]
    assert json.loads(calls[0].arguments) == {"city": "Paris", "note": "a\nb"}
    assert calls[1].arguments == '{"x": [1, "é"]}'


def test_no_arguments_and_compact_spelling() -> None:
    assert _arguments(_xml()) == {}
    assert _arguments('<tool_call>{"name":"f"}</tool_call>') == {}
    assert _arguments('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>') == {"a": 1}
    compact = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    assert _arguments(compact) == {"a": "1"}


def test_only_one_newline_on_each_side_is_the_templates() -> None:
    assert _arguments(_xml(a="\n  x \n", b="", c="\n")) == {"a": "\n  x \n", "b": "", "c": "\n"}


def test_values_may_hold_the_tags() -> None:
    code = "if x:\n  print('</parameter>')\n</function>"
    assert _arguments(_xml(a=code, b="1")) == {"a": code, "b": "1"}
    inside = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'
    assert _arguments(inside) == {"a": "</tool_call>"}


@pytest.mark.parametrize(
    "content",
    [
        "no call at all",
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nstray\n</function>\n</tool_call>",
        "<tool_call><function= ></function></tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"} and so on</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_malformed_stays_text(content: str) -> None:
    assert parse_tool_calls("before " + content + " after") == ("before " + content + " after", ())


def test_a_good_call_after_a_bad_one() -> None:
    bad = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"
    text, calls = parse_tool_calls(bad + "\n" + _xml("g", b="2"))
    assert text == bad
    assert [(call.name, call.arguments) for call in calls] == [("g", '{"b": "2"}')]


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " -5 ", -5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "2.5e3", 2500.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "array"}, '[1, "x", null]', [1, "x", None]),
        ({"type": "array"}, "{'a'", "{'a'"),
        ({"items": {}}, "[1]", [1]),
        ({"properties": {}}, "{}", {}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, "[2]", [2]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": 3}, "3", 3),
        ({"enum": [1, 2]}, "9", "9"),
        ({}, "5", "5"),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"$ref": "#/nowhere"}, "5", "5"),
        ({"$ref": "http://elsewhere"}, "5", "5"),
        (True, "5", "5"),
    ],
)
def test_values_follow_the_schema(schema: Any, value: str, expected: Any) -> None:
    tools = _tool(a=schema)
    tools[0]["function"]["parameters"]["$defs"] = {"n": {"type": "integer"}}
    got = _arguments(_xml(a=value), tools)["a"]
    assert got == expected
    assert type(got) is type(expected)


def test_a_schema_that_refers_to_itself_ends() -> None:
    assert _arguments(_xml(a="1"), _tool(a={"$ref": "#/properties/a"})) == {"a": "1"}


def test_unknown_tools_and_parameters_stay_strings() -> None:
    assert _arguments(_xml(b="5"), _tool(a={"type": "integer"})) == {"b": "5"}
    assert _arguments(_xml("g", a="5"), _tool(a={"type": "integer"})) == {"a": "5"}
    assert _arguments(_xml(a="5"), [{"name": "f"}]) == {"a": "5"}


def test_ids_are_reproducible_and_differ() -> None:
    content = _xml(a="1") + "\n" + _xml(a="1")
    ids = [call.id for call in parse_tool_calls(content, scope="r1")[1]]
    assert ids == [call.id for call in parse_tool_calls(content, scope="r1")[1]]
    assert len({*ids, *(call.id for call in parse_tool_calls(content, scope="r2")[1])}) == 4
    assert all(call_id.startswith("call_") for call_id in ids)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,6}", fullmatch=True),
        st.one_of(
            st.text('ab<>/{}"\n =', max_size=12),
            st.integers(),
            st.booleans(),
            st.lists(st.integers(), max_size=3),
            st.none(),
        ),
        max_size=4,
    )
)
def test_what_a_template_writes_is_read_back(arguments: dict[str, Any]) -> None:
    template = ChatTemplate(
        "{% for call in messages[1].tool_calls %}<tool_call>\n<function={{ call.name }}>\n"
        "{% for k, v in call.arguments|items %}<parameter={{ k }}>\n"
        "{{ v if v is string else v|tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}"
    )
    types = {str: "string", int: "integer", bool: "boolean", list: "array", type(None): "null"}
    tools = _tool(**{key: {"type": types[type(value)]} for key, value in arguments.items()})
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    written = template.render([{"role": "user", "content": "x"}, call])
    assert _arguments(written, tools) == arguments


def test_hostile_text_takes_no_quadratic_time() -> None:
    for part in (
        "<tool_call>",
        "<tool_call><function=f>",
        '<tool_call>{"name": "f"',
        "</tool_call>",
    ):
        assert parse_tool_calls(part * 5000)[1] == ()
