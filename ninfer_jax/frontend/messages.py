"""Chat messages as callers write them, made uniform before a template sees them.

Callers disagree about what an empty content is, how tool-call arguments are written and what
thinking is called; templates disagree about what they bear. After `normalize_messages` every
message has a string `content`, arguments are objects, thinking is under both of its names, and
roles are system, user, assistant and tool.

Rules:
- Content that is missing, None, "" or [] is "". A list of text parts is their texts joined with
  nothing between, as Qwen's templates write them. Images, videos and audio are refused: this build
  is text only.
- Role developer is system. System messages at the beginning become one, joined by a blank line. A
  later one stays where it is if the template can say so (`system_anywhere`); if not, it becomes a
  user message in its place, and counts as one: Qwen's templates drop the thinking before it. Its
  text is never dropped, and never moved to the front, which would change its meaning and undo the
  reuse of everything after it.
- Arguments of tool calls may be an object or its JSON text; missing, None and blank are {}.
- Unknown keys of a message are handed to the template as they are.
- A content part may carry `cache_control: {"type": "ephemeral"}`: a marker after its message (see
  `cache_boundaries`), which the template does not see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ninfer_jax.errors import InputError
from ninfer_jax.frontend.strict_json import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles a message may have; developer is another word for system."""

_TEXT_TYPES = ("text", "input_text", "output_text")
_MEDIA_WORDS = ("image", "video", "audio")


def normalize_messages(messages: Any, *, system_anywhere: bool = False) -> list[dict[str, Any]]:
    """The messages in the uniform form described above. The caller's objects are not changed.

    Args:
        messages: a non-empty sequence of mappings.
        system_anywhere: whether the template renders system messages that are not first.

    Raises:
        InputError: naming the message by its index (from 0) and what is wrong with it.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InputError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise InputError("messages is empty; give at least one message")
    return _place_system([_message(i, m) for i, m in enumerate(messages)], system_anywhere)


def normalize_tools(tools: Any) -> list[Mapping[str, Any]] | None:
    """The tools as a list of mappings, or None if there are none. Raises InputError naming the tool
    by its index."""
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InputError(f"tools must be a list of objects, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InputError(f"tools[{i}] must be an object, got {type(tool).__name__}")
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(f"tools[{i}] has no function name")
    return list(tools) or None


def cache_boundaries(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The counts k such that a content part of the k-th message carries `cache_control`, ascending.
    The messages are such as `normalize_messages` accepts."""

    def asks(content: Any) -> bool:
        parts = () if content is None or isinstance(content, str) else content
        return any(isinstance(p, Mapping) and p.get("cache_control") is not None for p in parts)

    return [count for count, message in enumerate(messages, 1) if asks(message.get("content"))]


def _message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InputError(
            f"{where} must be an object with role and content, got {type(message).__name__}"
        )
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"{where} has role {role!r}; known roles are {', '.join(ROLES)}")
    out = dict(message)
    out["role"] = "system" if role == "developer" else role
    out["content"] = _content(where, message.get("content"))
    _set_reasoning(where, out)
    if out.get("tool_calls"):
        out["tool_calls"] = _tool_calls(where, out["tool_calls"])
    else:
        out.pop("tool_calls", None)
    return out


def _content(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping | bytes) or not isinstance(content, Sequence):
        raise InputError(
            f"{where} has content of type {type(content).__name__}; give a string or a list of "
            "parts"
        )
    return "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InputError(f"{where} must be a text part, got {type(part).__name__}")
    kind = part.get("type")
    words = [kind] if isinstance(kind, str) else list(part)
    if any(media in str(word) for word in words for media in _MEDIA_WORDS):
        raise InputError(f"{where} is of type {words[0]!r}, which is not supported yet: text only")
    if kind is not None and kind not in _TEXT_TYPES:
        raise InputError(f"{where} has unknown type {kind!r}; known is 'text'")
    control = part.get("cache_control")
    if control is not None and control != {"type": "ephemeral"}:
        raise InputError(f"{where} has cache_control {control!r}; known is {{'type': 'ephemeral'}}")
    if not isinstance(part.get("text"), str):
        raise InputError(f"{where} has no string under 'text'")
    text: str = part["text"]
    return text


def _set_reasoning(where: str, out: dict[str, Any]) -> None:
    given = {}
    for name in ("reasoning_content", "reasoning"):
        value = out.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InputError(f"{where} has {name} of type {type(value).__name__}; give a string")
        given[name] = value
    if len(set(given.values())) > 1:
        raise InputError(f"{where} has reasoning and reasoning_content that differ; give one")
    for value in given.values():
        out["reasoning_content"] = out["reasoning"] = value


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise InputError(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
    out = []
    for i, call in enumerate(calls):
        here = f"{where}.tool_calls[{i}]"
        if not isinstance(call, Mapping):
            raise InputError(f"{here} must be an object, got {type(call).__name__}")
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(f"{here} has no function name")
        fixed = {**function, "arguments": _arguments(here, function.get("arguments"))}
        out.append({**call, "function": fixed} if "function" in call else fixed)
    return out


def _arguments(where: str, arguments: Any) -> Mapping[str, Any]:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            raise InputError(f"{where} has arguments that are not valid JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise InputError(f"{where} has arguments that are no JSON object: {arguments!r}")
    return arguments


def _place_system(messages: list[dict[str, Any]], system_anywhere: bool) -> list[dict[str, Any]]:
    first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    placed: list[dict[str, Any]] = []
    if first:
        texts = [m["content"] for m in messages[:first] if m["content"]]
        placed.append({**messages[0], "content": "\n\n".join(texts)})
    for message in messages[first:]:
        if message["role"] == "system" and not system_anywhere:
            if not message["content"].strip():
                continue  # nothing to say, and an empty user turn would say something
            message = {**message, "role": "user"}
        placed.append(message)
    return placed
