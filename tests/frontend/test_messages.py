"""Message shapes that callers send."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ninfer_jax.errors import InputError
from ninfer_jax.frontend import normalize_messages, normalize_tools

USER = {"role": "user", "content": "hi"}


def _one(message: dict[str, Any]) -> dict[str, Any]:
    return normalize_messages([USER, message])[1]


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"content": None},
        {"content": ""},
        {"content": []},
        {"content": ({"type": "text", "text": ""},)},
    ],
)
def test_empty_contents_are_one(role: str, extra: dict[str, Any]) -> None:
    assert _one({"role": role, **extra})["content"] == ""


def test_text_parts_are_joined() -> None:
    parts = [
        {"type": "text", "text": "a"},
        "b",
        {"text": "c"},
        {"type": "input_text", "text": "\nd"},
    ]
    assert _one({"role": "user", "content": parts})["content"] == "abc\nd"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "image"},
        {"image": "x"},
        {"type": "video", "video": "x"},
        {"type": "input_audio", "input_audio": {}},
    ],
)
def test_media_is_not_supported_yet(part: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"messages\[1\]\.content\[1\].*not supported yet"):
        _one({"role": "user", "content": [{"type": "text", "text": "see"}, part]})


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        None,
        {},
        {"role": "robot", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "user", "content": 3},
        {"role": "user", "content": {"type": "text", "text": "x"}},
        {"role": "user", "content": [3]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": [{"type": "riddle", "text": "x"}]},
        {"role": "assistant", "content": "x", "reasoning": 3},
        {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"},
        {"role": "assistant", "tool_calls": {"name": "f"}},
        {"role": "assistant", "tool_calls": ["f"]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{oops"}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": NaN}'}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": 3}]},
    ],
)
def test_bad_messages_are_named(message: Any) -> None:
    with pytest.raises(InputError, match=r"messages\[1\]"):
        normalize_messages([USER, message])


@pytest.mark.parametrize("messages", [[], (), None, "hi", {"role": "user"}, 3, iter([USER])])
def test_messages_must_be_a_list(messages: Any) -> None:
    with pytest.raises(InputError, match="messages"):
        normalize_messages(messages)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"b": 1, "a": "é"}', {"b": 1, "a": "é"}),
        ({"b": 1, "a": None}, {"b": 1, "a": None}),
        ("", {}),
        (" ", {}),
        (None, {}),
    ],
)
def test_arguments_become_objects(wrapped: bool, given: Any, expected: Any) -> None:
    function = {"name": "f", "arguments": given}
    call = {"id": "1", "type": "function", "function": function} if wrapped else function
    out = _one({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"][0]
    out = out["function"] if wrapped else out
    assert out["arguments"] == expected
    assert list(out["arguments"]) == list(expected)


def test_missing_calls_and_arguments() -> None:
    assert "tool_calls" not in _one({"role": "assistant", "content": "x", "tool_calls": None})
    assert "tool_calls" not in _one({"role": "assistant", "content": "x", "tool_calls": []})
    called = _one({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]})
    assert called["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


def test_both_names_of_thinking() -> None:
    for name in ("reasoning", "reasoning_content"):
        out = _one({"role": "assistant", "content": "x", name: "hm"})
        assert out["reasoning"] == out["reasoning_content"] == "hm"
    out = _one({"role": "assistant", "content": "x", "reasoning": None})
    assert "reasoning" not in out
    assert "reasoning_content" not in out


def test_system_messages() -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "b"}]},
        {"role": "system", "content": None},
        USER,
        {"role": "developer", "content": "later"},
        {"role": "system", "content": " "},
    ]
    assert normalize_messages(messages) == [
        {"role": "system", "content": "a\n\nb"},
        USER,
        {"role": "user", "content": "later"},
    ]
    assert normalize_messages(messages, system_anywhere=True)[2:] == [
        {"role": "system", "content": "later"},
        {"role": "system", "content": " "},
    ]


def test_unknown_keys_go_to_the_template() -> None:
    assert _one({"role": "tool", "content": "x", "tool_call_id": "1", "name": "f"}) == {
        "role": "tool",
        "content": "x",
        "tool_call_id": "1",
        "name": "f",
    }


def test_the_callers_objects_are_left_alone() -> None:
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "system", "content": "t"},
        USER,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "x"}],
            "reasoning": "hm",
            "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
    ]
    before = copy.deepcopy(messages)
    normalize_messages(messages)
    assert messages == before


def test_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert normalize_tools(None) is None
    assert normalize_tools([]) is None
    assert normalize_tools([tool, {"name": "g"}]) == [tool, {"name": "g"}]
    for bad in ("f", {"name": "f"}, [len], [{}], [{"function": 3}], [{"type": "function"}]):
        with pytest.raises(InputError, match="tools"):
            normalize_tools(bad)
