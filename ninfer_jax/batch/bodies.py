"""Request bodies: OpenAI's fields, and vLLM's beyond them, as calls of the engine.

A field that is not listed here is an error that names it: nothing is silently ignored. `null` is "unset".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ninfer_jax.batch.requests import BatchRequest
from ninfer_jax.errors import InputError
from ninfer_jax.frontend import Frontend, PreparedPrompt
from ninfer_jax.sampling_params import SamplingParams

_SHARED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
"""Fields that mean in a body what they mean in `SamplingParams`, which checks them."""


@dataclass(frozen=True)
class Call:
    """One prompt for the engine."""

    prompt: PreparedPrompt
    params: SamplingParams

    @property
    def sequences(self) -> int:
        """Outputs it has."""
        return self.params.n or 1


@dataclass(frozen=True)
class Generation:
    """A row that is answered by generated text; several prompts give their choices in order."""

    request: BatchRequest
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Scoring:
    """A row that is answered by log-probabilities: one context, one or several continuations."""

    request: BatchRequest
    context: str
    continuations: tuple[str, ...]


Work = Generation | Scoring


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class _Generating(_Body):
    stream: Literal[False] | None = None
    max_tokens: Any = None
    n: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    min_tokens: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None

    def sampling(self, request: BatchRequest, **more: Any) -> SamplingParams:
        """The sampling they ask for; without a seed the request's own."""
        values = {name: getattr(self, name) for name in _SHARED}
        params = SamplingParams(**values, **more)
        return params if params.seed is not None else replace(params, seed=request.seed)


class _Chat(_Generating):
    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    thinking_budget: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Completion(_Generating):
    prompt: Any
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
    logprobs: int | None = None


class _Score(_Body):
    context: str
    continuation: str | list[str]


B = TypeVar("B", bound=_Body)


def prepare(request: BatchRequest, frontend: Frontend) -> Work:
    """Check a body and make its prompts.

    Raises:
      InputError: a field is unknown, missing or malformed; the template refuses the messages.
    """
    if request.kind == "score":
        return _score(request)
    calls = _chat if request.kind == "chat" else _completion
    return Generation(request, tuple(calls(request, frontend)))


def bare(prompt: PreparedPrompt, markers: tuple[int, ...] = ()) -> PreparedPrompt:
    """A prompt that nobody goes on from: only what it shares with other rows is worth keeping."""
    return replace(prompt, recovery=0, splits=(), anchors=(), markers=markers)


def template_variables(given: Any) -> dict[str, Any]:
    """`chat_template_kwargs`, which may be None. Raises InputError for what is no variable of a template."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InputError(f"chat_template_kwargs must be an object, got {given!r:.200}")
    for name in ("self", "messages", "tools", "markers", "anchors"):
        if name in given:
            raise InputError(f"chat_template_kwargs cannot set {name!r}")
    return given


def _chat(request: BatchRequest, frontend: Frontend) -> list[Call]:
    body = _read(_Chat, request.body)
    if body.response_format not in (None, {"type": "text"}):
        raise InputError('response_format other than {"type": "text"} is not supported yet')
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens not in (None, limit):
        raise InputError("max_tokens and max_completion_tokens differ; give one")
    if body.top_logprobs is not None and not body.logprobs:
        raise InputError("top_logprobs needs logprobs: true")
    params = body.sampling(
        request,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        thinking_budget=body.thinking_budget,
    )
    variables = template_variables(body.chat_template_kwargs)
    tools = None if body.tool_choice == "none" else body.tools
    return [Call(bare(frontend.prepare_chat(body.messages, tools, **variables)), params)]


def _completion(request: BatchRequest, frontend: Frontend) -> list[Call]:
    body = _read(_Completion, request.body)
    params = body.sampling(request, max_tokens=body.max_tokens, logprobs=body.logprobs)
    prompt = body.prompt
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if many else [prompt]
    for one in prompts:
        if not isinstance(one, str | list):
            raise InputError("prompt must be a string, a list of token ids, or a list of those")
    return [
        Call(bare(frontend.prepare_prompt(one)), _for_prompt(params, i, body.seed is None))
        for i, one in enumerate(prompts)
    ]


def _for_prompt(params: SamplingParams, index: int, derived: bool) -> SamplingParams:
    """A seed of the caller's serves all prompts; one that we chose differs from prompt to prompt."""
    assert params.seed is not None
    return replace(params, seed=(params.seed + index) % 2**63) if derived else params


def _score(request: BatchRequest) -> Scoring:
    body = _read(_Score, request.body)
    given = body.continuation
    continuations = (given,) if isinstance(given, str) else tuple(given)
    if not continuations or not all(continuations):
        raise InputError("continuation must hold at least one string, none of them empty")
    return Scoring(request, body.context, continuations)


def _read(kind: type[B], body: Mapping[str, Any]) -> B:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise InputError(_words(kind, error)) from None


def _words(kind: type[BaseModel], error: ValidationError) -> str:
    """The first thing wrong, by name."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"body has unknown field {name!r}; known are {', '.join(kind.model_fields)}"
    if first["type"] == "missing":
        return f"body has no {name}"
    if name == "stream":
        return "stream must be false or left out: a batch gives whole answers"
    return f"body.{name}: {first['msg']}, got {first['input']!r}"[:500]
