"""Checks of what callers of the engine give, one argument a function."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import Any, Literal, get_args

from ninfer_jax.engine.request import CacheOptions
from ninfer_jax.errors import InputError

CacheMode = Literal["read_write", "prompt", "off"]


def cache_options(cache: CacheMode, session: str | None) -> CacheOptions:
    if cache not in get_args(CacheMode):
        raise InputError(f'cache must be "read_write", "prompt" or "off"; got {cache!r}')
    if session is not None and not isinstance(session, str):
        raise InputError(f"session must be a string, got {type(session).__name__}")
    return CacheOptions(cache != "off", cache == "read_write", session or "")


def checked_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not math.isfinite(timeout) or timeout <= 0:
        raise InputError(f"timeout must be a positive number of seconds; got {timeout!r}")
    return timeout


def one_each(name: str, value: Any, kind: type, count: int) -> list[Any]:
    """One value a prompt, from one for all or a list."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, SequenceOf) or not all(isinstance(v, kind) for v in value):
        raise InputError(
            f"{name} must be {kind.__name__} or a list of them, got {type(value).__name__}"
        )
    if len(value) != count:
        raise InputError(f"{len(value)} {name} for {count} prompts; give one, or one a prompt")
    return list(value)


def listed(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or many. A list of integers is one prompt."""
    if isinstance(prompts, list | tuple) and not (
        prompts and all(isinstance(x, int) and not isinstance(x, bool) for x in prompts)
    ):
        return list(prompts)
    return [prompts]
