"""Lines of an input file: what each one asks for, and the name under which its answer is found again.

A line is an OpenAI batch request, `{"custom_id", "method", "url", "body"}`. Its key is a hash of the custom_id and of
the canonical JSON of everything else, so the same line has the same key wherever it stands in whatever file.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ninfer_jax.frontend.strict_json import parse_json

Kind = Literal["chat", "completion", "score"]

URLS: Mapping[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/score": "score",
}
"""What can be asked for."""

MAX_LINE_BYTES = 64 << 20
"""A line beyond this, spaces included, is refused without being read as JSON."""

_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchRequest:
    """A line that says what it wants; whether the body makes sense is seen when it is prepared."""

    custom_id: str
    kind: Kind
    body: Mapping[str, Any]
    key: str
    """32 hexadecimal digits."""

    @property
    def line_id(self) -> str:
        """The `id` of its output line."""
        return f"batch_req_{self.key}"

    @property
    def seed(self) -> int:
        """The seed of its draws if the body names none, 63 bits: a rerun gives the same tokens."""
        return int(self.key[:16], 16) >> 1


@dataclass(frozen=True)
class BadLine:
    """A line that can never run."""

    custom_id: str | None
    """None if it has none that can be used."""
    code: str
    message: str
    key: str

    @property
    def line_id(self) -> str:
        """The `id` of its output line; of a line without custom_id see `anonymous_id`."""
        return f"batch_req_{self.key}"


Line = BatchRequest | BadLine


def parse_line(data: bytes) -> Line:
    """What a line asks for. It never raises.

    Args:
      data: the line, with or without its newline.
    """
    whole = len(data.rstrip(b"\r\n"))  # of a longer line only the beginning may be here
    data = trimmed(data)
    key = _digest(data)
    if whole > MAX_LINE_BYTES:
        return BadLine(
            None, "line_too_long", f"a line may have {MAX_LINE_BYTES:,} bytes; split it", key
        )
    try:
        line = parse_json(data.decode())
    except UnicodeDecodeError as error:
        return BadLine(None, "invalid_json", f"the line is not UTF-8: {error}", key)
    except ValueError as error:
        return BadLine(None, "invalid_json", f"the line is not JSON: {error}", key)
    if not isinstance(line, dict):
        return BadLine(None, "invalid_line", f"the line must be an object, got {_kind(line)}", key)
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(None, "invalid_line", "custom_id must be a string that is not empty", key)
    key = request_key(custom_id, {k: v for k, v in line.items() if k != "custom_id"})
    wrong = _wrong(line)
    if wrong is not None:
        return BadLine(custom_id, *wrong, key)
    return BatchRequest(custom_id, URLS[line["url"]], line["body"], key)


def trimmed(data: bytes) -> bytes:
    """A line without the space around it, and without the byte order mark that some editors put before a file."""
    return data.strip().removeprefix(codecs.BOM_UTF8).strip()


def request_key(custom_id: str, request: Mapping[str, Any]) -> str:
    """The key of a request: equal for equal JSON values, in whatever order and spacing."""
    canonical = json.dumps([custom_id, request], sort_keys=True, separators=(",", ":"))
    return _digest(canonical.encode())


def anonymous_id(key: str, occurrence: int) -> str:
    """The `id` of an error line that answers no custom_id of its own.

    Args:
      key: of the line, or `duplicate_key`.
      occurrence: how many equal ones came before; equal lines have a line each.
    """
    return f"batch_err_{_digest(f'{key}/{occurrence}'.encode())}"


def duplicate_key(custom_id: str) -> str:
    """What the error lines of a custom_id that occurs again are named after."""
    return request_key(custom_id, {"duplicate": True})


def _wrong(line: Mapping[str, Any]) -> tuple[str, str] | None:
    for name in line:
        if name not in _FIELDS:
            known = ", ".join(_FIELDS)
            return "invalid_line", f"unknown field {name!r} in the line; known are {known}"
    if line.get("method") != "POST":
        return "invalid_line", f'method must be "POST", got {line.get("method")!r}'
    url = line.get("url")
    if not isinstance(url, str) or url not in URLS:
        return "unknown_url", f"url {url!r} is unknown; known are {', '.join(URLS)}"
    if "body" not in line:
        return "missing_body", "the line has no body; put the request's parameters there"
    if not isinstance(line["body"], dict):
        return "invalid_line", f"body must be an object, got {_kind(line['body'])}"
    return None


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
