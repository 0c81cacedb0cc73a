"""Tool calls that a model wrote into its content, in the two forms of Qwen.

    <tool_call>                               <tool_call>
    <function=NAME>                           {"name": "NAME", "arguments": {...}}
    <parameter=P>                             </tool_call>
    value
    </parameter>
    </function>
    </tool_call>

The first (Qwen3.5) carries values as bare text, so their types come from the tool's JSON schema;
the second (Qwen3) carries JSON. What does not parse completely is no call and stays in the content
as the model wrote it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ninfer_jax.frontend.strict_json import parse_json, parse_json_at

_OPEN = "<tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
# A value may itself hold "</parameter>": it ends where the tag is followed by what must follow it.
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=[^>\n]+>|</function>\s*</tool_call>)",
    re.DOTALL,
)
_END = re.compile(r"</function>\s*</tool_call>")
_JSON_END = re.compile(r"\s*</tool_call>")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as OpenAI's API has it."""

    id: str
    """Equal for equal (scope, position, name, arguments): a rerun gives the same ids."""
    name: str
    arguments: str
    """A JSON object."""


def parse_tool_calls(
    content: str, tools: Sequence[Mapping[str, Any]] | None = None, *, scope: str = ""
) -> tuple[str, tuple[ToolCall, ...]]:
    """Take the tool calls out of a finished content.

    Args:
        content: the content channel, without thinking.
        tools: the tools offered, `{"type": "function", "function": {...}}` or the inner object
            alone. Values of the first form are converted by their `parameters` schema; without a
            schema they stay strings.
        scope: what makes ids differ between answers, such as the request's id.

    Returns:
        The content without the calls (white space next to them dropped), and the calls in order.
        Content without a call is returned unchanged.
    """
    schemas = _schemas(tools or ())
    pieces: list[str] = []
    calls: list[ToolCall] = []
    done = at = 0
    while (start := content.find(_OPEN, at)) >= 0:
        found = _parse_xml(content, start, schemas) or _parse_json(content, start)
        if found is None:
            at = start + len(_OPEN)
            continue
        name, arguments, end = found
        pieces.append(content[done:start])
        text = json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(_call_id(scope, len(calls), name, text), name, text))
        done = at = end
    if not calls:
        return content, ()
    kept = [pieces[0].rstrip(), *(piece.strip() for piece in pieces[1:]), content[done:].strip()]
    return "\n".join(piece for piece in kept if piece), tuple(calls)


def _call_id(scope: str, index: int, name: str, arguments: str) -> str:
    key = json.dumps([scope, index, name, arguments])
    return "call_" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


def _parse_xml(
    content: str, start: int, schemas: Mapping[str, Mapping[str, Any]]
) -> tuple[str, dict[str, Any], int] | None:
    head = _FUNCTION.match(content, start + len(_OPEN))
    if head is None:
        return None
    name, at = head[1].strip(), head.end()
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(content, at)) is not None:
        if _END.search(parameter[2]):
            # This call ended without closing its parameter; the tag found is a later call's.
            return None
        key = parameter[1].strip()
        # The template writes one newline on each side of the value; all others are the value's own.
        value = parameter[2].removeprefix("\n").removesuffix("\n")
        known = properties.get(key) if isinstance(properties, Mapping) else None
        arguments[key] = _convert(value, known, schema)
        at = parameter.end()
    end = _END.match(content, at)
    return (name, arguments, end.end()) if end is not None and name else None


def _parse_json(content: str, start: int) -> tuple[str, dict[str, Any], int] | None:
    begin = _SPACE.match(content, start + len(_OPEN))
    assert begin is not None
    try:
        # The decoder finds the end: a string of the arguments may hold the closing tag.
        call, at = parse_json_at(content, begin.end())
    except ValueError:
        return None
    end = _JSON_END.match(content, at)
    if end is None:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return call["name"], arguments, end.end()


def _convert(value: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A bare text as a value of its schema; a text that does not fit stays a string, for the tool
    to refuse."""
    types, choices = _types(schema, root)
    word = value.strip()
    if "null" in types and word.lower() in ("null", "none"):
        return None
    if "string" in types or (choices and value in choices) or not (types or choices):
        return value
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"  # older templates show Python's True
    try:
        parsed = parse_json(word)
    except ValueError:
        return value
    if parsed in choices and not isinstance(parsed, str):
        return parsed
    if isinstance(parsed, bool) or parsed is None:
        return value
    if isinstance(parsed, float) and "number" not in types:
        if "integer" in types and parsed.is_integer():
            return int(parsed)
        return value
    accepted = {int: ("integer", "number"), float: ("number",), dict: ("object",), list: ("array",)}
    return parsed if types.intersection(accepted.get(type(parsed), ())) else value


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> tuple[set[str], list[Any]]:
    """The JSON types and the listed values a schema allows, as far as they are written out."""
    if not isinstance(schema, Mapping) or depth > 16:
        return set(), []
    types: set[str] = set()
    choices: list[Any] = []
    kind = schema.get("type")
    types.update([kind] if isinstance(kind, str) else kind if isinstance(kind, list) else ())
    if "const" in schema:
        choices.append(schema["const"])
    if isinstance(schema.get("enum"), list):
        choices.extend(schema["enum"])
    if not types:
        if "properties" in schema:
            types.add("object")
        elif "items" in schema:
            types.add("array")
    reference = schema.get("$ref")
    parts = [_local_reference(reference, root)] if isinstance(reference, str) else []
    for word in ("anyOf", "oneOf", "allOf"):
        branch = schema.get(word)
        parts.extend(branch if isinstance(branch, list) else ())
    for part in parts:
        more_types, more_choices = _types(part, root, depth + 1)
        types |= more_types
        choices += more_choices
    return types, choices


def _local_reference(reference: str, root: Mapping[str, Any]) -> Any:
    if not reference.startswith("#/"):
        return None
    node: Any = root
    for step in reference[2:].split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
