"""Events, commands and configuration as JSON and back, exactly.

The set of types is closed: what can be reached through the field types of `Event`, `Command` and
`WorldConfig`. A dataclass becomes an object without the fields that have their default, a NamedTuple
a list without trailing defaults, bytes become base64 (deflated where that is shorter). In a union a
record is ``{"Name": {...}}``, or just ``"Name"`` where every field has its default; ``X | None`` has
null for None.
"""

from __future__ import annotations

import base64
import binascii
import types
import zlib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from planner.errors import PlannerError

Json = Any
_DEFLATED: Final = "~"  # no base64 text starts with it


class JournalError(PlannerError):
    """A record that this version cannot read or write; the message names the place."""


class Codec(NamedTuple):
    """How values of one type are written and read; ``tag`` names a record inside a union."""

    encode: Callable[[Any], Json]
    decode: Callable[[Json], Any]
    tag: str = ""
    kind: type | None = None


class _Field(NamedTuple):
    name: str
    codec: Codec
    default: Any


@cache
def codec(hint: Any) -> Codec:
    """The codec of a type: a record, a union of records, a tuple, a literal or a plain value."""
    origin = get_origin(hint)
    if hint in _PLAIN:
        return _plain(hint)
    if origin is Literal:
        return _literal(get_args(hint))
    if origin is tuple:
        return _tuple(hint, get_args(hint))
    if origin in (Union, types.UnionType):
        members = tuple(codec(a) for a in get_args(hint) if a is not type(None))
        inner = members[0] if len(members) == 1 else _union(hint, members)
        return inner if len(members) == len(get_args(hint)) else _optional(inner)
    if is_dataclass(hint):
        return _dataclass(hint)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return _named_tuple(hint)
    raise JournalError(f"{hint!r} is no type that a journal can hold; use plain records")


def _refuse(what: str, value: Any) -> JournalError:
    text = repr(value)
    return JournalError(f"{what} expected, found {text if len(text) <= 60 else text[:57] + '...'}")


def _at(where: str, run: Callable[[Any], Any], value: Any) -> Any:
    """``run(value)``; an error says where inside the record it happened."""
    try:
        return run(value)
    except JournalError as e:
        raise JournalError(f"{where}: {e}") from None


def _all(run: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """`_at` for every item of a list."""
    out: list[Any] = []
    try:
        for value in values:
            out.append(run(value))
    except JournalError as e:
        raise JournalError(f"item {len(out)}: {e}") from None
    return out


_PLAIN: Final[dict[Any, tuple[type, ...]]] = {
    int: (int,),
    str: (str,),
    bool: (bool,),
    float: (float, int),
    bytes: (bytes,),
    type(None): (type(None),),
}


def _plain(hint: type) -> Codec:
    allowed = _PLAIN[hint]

    def same(value: Any) -> Any:
        if type(value) not in allowed:  # exact: neither bool for int nor numpy scalars
            raise _refuse(hint.__name__, value)
        return value

    def number(value: Json) -> Any:
        return float(same(value))

    def to_text(value: Any) -> Json:
        packed = zlib.compress(same(value))
        if len(packed) < len(value):
            return _DEFLATED + base64.b64encode(packed).decode()
        return base64.b64encode(value).decode()

    def from_text(value: Json) -> Any:
        if type(value) is not str:
            raise _refuse("base64", value)
        try:
            if not value.startswith(_DEFLATED):
                return base64.b64decode(value, validate=True)
            return zlib.decompress(base64.b64decode(value[1:], validate=True))
        except (binascii.Error, zlib.error) as e:
            raise _refuse(f"base64 ({e})", value) from None

    if hint is bytes:
        return Codec(to_text, from_text)
    return Codec(number, number) if hint is float else Codec(same, same)


def _literal(options: tuple[Any, ...]) -> Codec:
    def same(value: Any) -> Any:
        if value not in options:
            raise _refuse(f"one of {options}", value)
        return value

    return Codec(same, same)


def _tuple(hint: Any, args: tuple[Any, ...]) -> Codec:
    if len(args) == 2 and args[1] is Ellipsis:
        item = codec(args[0])

        def encode(value: Any) -> Json:
            if type(value) is not tuple:
                raise _refuse("a tuple", value)
            return _all(item.encode, value)

        def decode(value: Json) -> Any:
            if type(value) is not list:
                raise _refuse("a list", value)
            return tuple(_all(item.decode, value))

        return Codec(encode, decode)
    raise JournalError(f"{hint!r}: tuples of one type only; use a NamedTuple")


def _optional(inner: Codec) -> Codec:
    def encode(value: Any) -> Json:
        return None if value is None else inner.encode(value)

    def decode(value: Json) -> Any:
        return None if value is None else inner.decode(value)

    return Codec(encode, decode)


def _union(hint: Any, members: tuple[Codec, ...]) -> Codec:
    by_type = {m.kind: m for m in members}
    by_tag = {m.tag: m for m in members}
    if None in by_type or len(by_tag) != len(members):
        raise JournalError(f"{hint!r}: unions of different records only")

    def encode(value: Any) -> Json:
        member = by_type.get(type(value))
        if member is None:
            raise _refuse(f"one of {', '.join(sorted(by_tag))}", value)
        body = _at(member.tag, member.encode, value)
        return {member.tag: body} if body else member.tag

    def decode(value: Json) -> Any:
        if type(value) is str:
            value = {value: {}}
        if type(value) is not dict or len(value) != 1:
            raise _refuse("a record with its name", value)
        ((tag, body),) = value.items()
        if tag not in by_tag:
            raise JournalError(
                f"{tag!r} is unknown here; this version knows {', '.join(sorted(by_tag))}"
            )
        return _at(tag, by_tag[tag].decode, body)

    return Codec(encode, decode)


def _dataclass(hint: Any) -> Codec:
    hints = get_type_hints(hint)
    parts: list[_Field] = []
    for f in fields(hint):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        parts.append(_Field(f.name, codec(hints[f.name]), default))
    names = {f.name for f in parts}

    def encode(value: Any) -> Json:
        if type(value) is not hint:
            raise _refuse(hint.__name__, value)
        body = {}
        for name, part, default in parts:
            item = getattr(value, name)
            if default is MISSING or item != default:
                body[name] = _at(name, part.encode, item)
        return body

    def decode(value: Json) -> Any:
        if type(value) is not dict:
            raise _refuse(f"the fields of {hint.__name__}", value)
        unknown = sorted(value.keys() - names)
        if unknown:
            raise JournalError(f"{hint.__name__} has no field {unknown[0]!r}")
        missing = [f.name for f in parts if f.default is MISSING and f.name not in value]
        if missing:
            raise JournalError(f"{hint.__name__} lacks its field {missing[0]!r}")
        return hint(**{
            f.name: _at(f.name, f.codec.decode, value[f.name]) for f in parts if f.name in value
        })  # fmt: skip

    return Codec(encode, decode, hint.__name__, hint)


def _named_tuple(hint: Any) -> Codec:
    hints = get_type_hints(hint)
    defaults = hint._field_defaults
    parts = [_Field(n, codec(hints[n]), defaults.get(n, MISSING)) for n in hint._fields]
    required = sum(f.default is MISSING for f in parts)

    def encode(value: Any) -> Json:
        if type(value) is not hint:
            raise _refuse(hint.__name__, value)
        keep = len(parts)
        while keep > required and value[keep - 1] == parts[keep - 1].default:
            keep -= 1
        return [_at(f.name, f.codec.encode, v) for f, v in zip(parts, value[:keep], strict=False)]

    def decode(value: Json) -> Any:
        if type(value) is not list or not required <= len(value) <= len(parts):
            raise _refuse(f"{hint.__name__}: a list of {required} to {len(parts)} fields", value)
        return hint(*[_at(f.name, f.codec.decode, v) for f, v in zip(parts, value, strict=False)])

    return Codec(encode, decode, hint.__name__, hint)
