"""JSON as the standard has it: Python's reader also takes NaN and infinities, which no other reader
would."""

from __future__ import annotations

import json
import math
from typing import Any


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is beyond the range of a float")
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: not JSON, a number beyond a float's range, or nested too deeply to read.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins exactly at `start`, and where it ends. Raises ValueError as
    `parse_json` does."""
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
