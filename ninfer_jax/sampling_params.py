"""What a user may ask of one request's output, and how unset fields are filled from the checkpoint.

`SamplingParams` keeps the user's words: None means "unset". `SamplingParams.resolve` fills the
unset fields from the checkpoint's `generation_config.json` and then from neutral defaults, and
returns a `ResolvedSampling`, in which nothing is left to guess. Both are immutable. Meaning of the
numbers: numeric_formats.md, section Sampling.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ninfer_jax.errors import ArtifactError, InputError

MAX_LOGPROBS = 20
"""The most alternatives a request may ask for at each position."""


def _integer(low: int, high: int | None = None) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        # bool is an int to Python, but `n=True` is a mistake, not a one.
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise InputError(f"{name} must be an integer, got {value!r}")
        number = int(value)
        if number < low or (high is not None and number > high):
            span = f"at least {low}" if high is None else f"between {low} and {high}"
            raise InputError(f"{name} must be {span}, got {number}")
        return number

    return check


def _real(
    low: float = -math.inf, high: float = math.inf, *, above_low: bool = False
) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InputError(f"{name} must be a number, got {value!r}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise InputError(f"{name} must be finite, got {value!r}")
        if number < low or number > high or (above_low and number == low):
            floor = "" if low == -math.inf else f"{'above' if above_low else 'at least'} {low:g}"
            roof = "" if high == math.inf else f"at most {high:g}"
            raise InputError(
                f"{name} must be {' and '.join(filter(None, (floor, roof)))}, got {number:g}"
            )
        return number

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r}")
    return value


def _top_k(name: str, value: Any) -> int:
    number = _integer(-1)(name, value)
    return max(number, 0)  # -1 is vLLM's word for "all", 0 is ours


def _stop(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or isinstance(strings, bytes | bytearray):
        raise InputError(f"{name} must be a string or a list of strings, got {value!r}")
    for text in strings:
        if not isinstance(text, str):
            raise InputError(f"{name} must hold strings only, got {text!r}")
        if not text:
            raise InputError(
                f"{name} holds an empty string, which would match everywhere; remove it"
            )
    return tuple(strings)


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise InputError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(sorted({_integer(0)(name, token) for token in value}))


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must map token ids to numbers, got {value!r}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        # JSON objects have string keys only, so "42" is how a token id arrives over a wire.
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        token = _integer(0)(f"{name} key", token)
        if token in bias:
            raise InputError(f"{name} names token {token} twice; keep one entry")
        bias[token] = _real(-100.0, 100.0)(f"{name}[{token}]", number)
    return bias


def _structured_outputs(name: str, value: Any) -> None:
    raise InputError(f"{name} is not supported yet; leave it unset")


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "n": _integer(1),
    "temperature": _real(0.0),
    "top_p": _real(0.0, 1.0, above_low=True),
    "top_k": _top_k,
    "min_p": _real(0.0, 1.0),
    "seed": _integer(-(2**63), 2**63 - 1),
    "max_tokens": _integer(1),
    "min_tokens": _integer(0),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _flag,
    "presence_penalty": _real(-2.0, 2.0),
    "frequency_penalty": _real(-2.0, 2.0),
    "repetition_penalty": _real(0.0, above_low=True),
    "logit_bias": _logit_bias,
    "logprobs": _integer(0, MAX_LOGPROBS),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS),
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "structured_outputs": _structured_outputs,
    "thinking_budget": _integer(0),
}

# What each unset field becomes when the checkpoint says nothing either.
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "min_tokens": 0,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
}

# Our field and its name in generation_config.json.
_FROM_CHECKPOINT = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}


@dataclass(frozen=True)
class ResolvedSampling:
    """The sampling of one request with every field decided. Built by `SamplingParams.resolve`;
    hashable."""

    n: int
    temperature: float
    """0 means greedy: the lowest id among the largest adjusted logits, no random number used."""
    top_p: float
    top_k: int
    """0 keeps all."""
    min_p: float
    seed: int | None
    """None: the engine draws one."""
    max_tokens: int | None
    """None: as many as the context has room for; the engine puts the number in."""
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    """Ascending, without repeats."""
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    """Pairs of token id and bias, ascending by id."""
    logprobs: int | None
    prompt_logprobs: int | None
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    thinking_budget: int | None

    @property
    def greedy(self) -> bool:
        """Whether no random number is used."""
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What the user asks of a request's output. Field names and meanings are vLLM's.

    None means unset: the checkpoint's generation config decides where it has the field, else a
    neutral default (see `resolve`). Every value is checked at construction.

    Raises:
        InputError: an unknown field (the nearest known name is given), a wrong type (a bool is no
            integer), NaN, an infinity, or a value out of range. Nothing is silently ignored.
    """

    n: int | None = None
    """Completions for one prompt, at least 1; unset is 1."""
    temperature: float | None = None
    """At least 0; 0 is greedy."""
    top_p: float | None = None
    """Above 0, at most 1."""
    top_k: int | None = None
    """Keep the k largest; 0 and -1 keep all (stored as 0)."""
    min_p: float | None = None
    """Drop what is less likely than this share of the likeliest; 0 to 1."""
    seed: int | None = None
    """A signed 64-bit integer. Equal (prompt, params, seed) give equal tokens."""
    max_tokens: int | None = None
    """Tokens to generate at most, at least 1; unset is the checkpoint's `max_new_tokens`, else up
    to the context."""
    min_tokens: int | None = None
    """The first `min_tokens` tokens can neither be an end token nor complete a stop; unset is 0."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output (stored as a tuple); none may be empty."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the output (stored as an ascending tuple)."""
    ignore_eos: bool | None = None
    """Go on past the checkpoint's end-of-sequence tokens; unset is False."""
    presence_penalty: float | None = None
    """-2 to 2, over generated tokens."""
    frequency_penalty: float | None = None
    """-2 to 2, over generated tokens."""
    repetition_penalty: float | None = None
    """Above 0; 1 is neutral."""
    logit_bias: Mapping[int, float] | None = None
    """Added to logits, -100 to 100. Keys are token ids, or their decimal spelling as JSON has
    it."""
    logprobs: int | None = None
    """Alternatives to report for every generated token, 0 to 20; unset reports nothing."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string, or the text of the stop token, in the text; unset is False."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; unset is True."""
    structured_outputs: Any = None
    """Not supported yet: anything but None is refused."""
    thinking_budget: int | None = None
    """Thinking tokens after which the runtime closes the thinking of a chat; at least 0."""

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        # Looked at before the generated __init__, whose answer to a misspelt field would be a bare
        # TypeError.
        if args:
            raise InputError(
                "SamplingParams takes its fields by name, as in SamplingParams(max_tokens=64)"
            )
        for name in fields:
            if name not in _CHECKS:
                raise InputError(_unknown_field(name))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise InputError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}"
            )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Parameters from a mapping, as parsed from JSON. Raises InputError as the constructor
        does."""
        if not isinstance(fields, Mapping):
            raise InputError(f"sampling parameters must be a mapping, got {type(fields).__name__}")
        for name in fields:
            if not isinstance(name, str):
                raise InputError(f"sampling parameter names are strings, got {name!r}")
        return cls(**fields)

    def resolve(
        self,
        generation_config: Mapping[str, Any],
        *,
        vocab_size: int,
        max_context: int | None = None,
        prompt_tokens: int = 0,
    ) -> ResolvedSampling:
        """Fill what is unset, and check what needs the model to be checked (FE-03).

        Order: the user's value; else the checkpoint's (`temperature`, `top_p`, `top_k`, `min_p`,
            `repetition_penalty`,
        `max_new_tokens`; `do_sample: false` means temperature 0); else neutral: temperature 1, no
        truncation, no penalty. `max_tokens` that nobody sets stays None, and a checkpoint's default
        that does not fit the context is cut to what fits; a user's that does not fit is refused.

        Args:
            generation_config: `generation_config.json`, or an empty mapping.
            vocab_size: rows of the embedding; bounds `logit_bias` and `stop_token_ids`.
            max_context: tokens of prompt and output together, if limited.
            prompt_tokens: length of the prompt, looked at with `max_context`.

        Raises:
            InputError: an id outside the vocabulary, a prompt without room for a token, prompt plus
                output beyond `max_context`, `min_tokens` above the resolved `max_tokens`.
            ArtifactError: the checkpoint's own value is unusable.
        """
        values = {name: getattr(self, name) for name in _CHECKS if name != "structured_outputs"}
        defaults = _checkpoint_defaults(generation_config)
        room = None
        if max_context is not None:
            room = max_context - prompt_tokens
            if room < 1:
                raise InputError(
                    f"the prompt has {prompt_tokens} tokens and the context holds {max_context}, "
                    "which leaves no room for output; shorten the prompt or start the engine with "
                    "a larger max_context"
                )
            if self.max_tokens is not None and self.max_tokens > room:
                raise InputError(
                    f"max_tokens {self.max_tokens} after a prompt of {prompt_tokens} tokens "
                    f"exceeds the context of {max_context}; at most {room} fit"
                )
            if "max_tokens" in defaults:
                defaults["max_tokens"] = min(defaults["max_tokens"], room)
        for name, value in values.items():
            if value is None:
                values[name] = defaults.get(name, _NEUTRAL.get(name))
        bound = values["max_tokens"] if values["max_tokens"] is not None else room
        if bound is not None and values["min_tokens"] > bound:
            raise InputError(
                f"min_tokens is {values['min_tokens']}, but the output ends at {bound} tokens; "
                "lower min_tokens or raise max_tokens"
            )
        bias = values.pop("logit_bias") or {}
        for name, ids in (("logit_bias", bias), ("stop_token_ids", values["stop_token_ids"])):
            for token in ids:
                if token >= vocab_size:
                    raise InputError(
                        f"{name} names token {token}; the vocabulary has ids 0 to {vocab_size - 1}"
                    )
        return ResolvedSampling(logit_bias=tuple(sorted(bias.items())), **values)


def _checkpoint_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for name, key in _FROM_CHECKPOINT.items():
        value = generation_config.get(key)
        if value is not None:
            try:
                defaults[name] = _CHECKS[name](key, value)
            except InputError as error:
                raise ArtifactError(f"generation_config.json: {error}") from error
    if generation_config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def _unknown_field(name: str) -> str:
    nearest = difflib.get_close_matches(name, _CHECKS, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(_CHECKS)}"
    return f"unknown sampling parameter {name!r}{hint}"


# A field without a check would be accepted unseen; a check without a field would be dead.
assert list(_CHECKS) == [field.name for field in dataclasses.fields(SamplingParams)]
