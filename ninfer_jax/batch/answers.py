"""Output lines: results in OpenAI's shapes, errors with a reason.

Nothing in a line depends on when or where it was made, except `usage.prompt_tokens_details.cached_tokens`: ids come
from the request's key, and `created` is 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from ninfer_jax.batch.requests import BatchRequest
from ninfer_jax.outputs import CompletionOutput, Logprob, RequestOutput

Decode = Callable[[int], str]
"""The text of one token id."""

CREATED = 0
"""`created` of every body, so that two runs give equal lines."""


def answer_line(
    request: BatchRequest, outputs: Sequence[RequestOutput], model: str, decode: Decode
) -> dict[str, Any]:
    """The line of a row whose every sequence ended by itself.

    Args:
      request: the row.
      outputs: a result for each of its prompts, in order.
      model: the name that the body carries.
      decode: the text of a token id.
    """
    chat = request.kind == "chat"
    choices: list[dict[str, Any]] = []
    for output in outputs:
        for sequence in output.outputs:
            index = len(choices)
            choice = _chat_choice if chat else _completion_choice
            choices.append({"index": index, **choice(request, index, sequence, decode)})
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.key}",
        "object": "chat.completion" if chat else "text_completion",
        "created": CREATED,
        "model": model,
        "choices": choices,
        "usage": _usage(outputs),
    }
    return _line(request, 200, body)


def score_line(request: BatchRequest, scores: Sequence[Any], model: str) -> dict[str, Any]:
    """The line of a scored row; each score has `sum_logprob`, `logprobs`, `token_ids`, `is_greedy`."""
    body = {
        "id": f"score-{request.key}",
        "object": "score",
        "created": CREATED,
        "model": model,
        "scores": [
            {
                "index": i,
                "sum_logprob": float(score.sum_logprob),
                "logprobs": [float(x) for x in score.logprobs],
                "token_ids": [int(x) for x in score.token_ids],
                "is_greedy": bool(score.is_greedy),
            }
            for i, score in enumerate(scores)
        ],
    }
    return _line(request, 200, body)


def refusal_line(request: BatchRequest, status: int, message: str) -> dict[str, Any]:
    """The line of a row that the engine refused (400) or could not finish (500)."""
    kind, code = ("invalid_request_error", "invalid_request")
    if status >= 500:
        kind, code = ("server_error", "aborted")
    error = {"message": message, "type": kind, "param": None, "code": code}
    return _line(request, status, {"error": error}) | {"error": {"code": code, "message": message}}


def error_line(line_id: str, custom_id: str | None, code: str, message: str) -> dict[str, Any]:
    """The line of an input line that is no request."""
    return {
        "id": line_id,
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }


def _line(request: BatchRequest, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{request.key}", "body": body}
    return {
        "id": request.line_id,
        "custom_id": request.custom_id,
        "response": response,
        "error": None,
    }


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    generated = sum(len(s.token_ids) for o in outputs for s in o.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in outputs)},
    }


def _chat_choice(
    request: BatchRequest, index: int, sequence: CompletionOutput, decode: Decode
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": sequence.text, "refusal": None}
    if sequence.reasoning is not None:
        message["reasoning_content"] = sequence.reasoning
    reason: str | None = sequence.finish_reason
    if sequence.tool_calls:
        message["content"] = sequence.text or None
        message["tool_calls"] = [
            {
                "id": _call_id(request, index, i),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(sequence.tool_calls)
        ]
        reason = "tool_calls" if reason == "stop" else reason
    return {
        "message": message,
        "logprobs": _chat_logprobs(request, sequence, decode),
        "finish_reason": reason,
    }


def _completion_choice(
    request: BatchRequest, index: int, sequence: CompletionOutput, decode: Decode
) -> dict[str, Any]:
    return {
        "text": sequence.text,
        "logprobs": _completion_logprobs(sequence, decode),
        "finish_reason": sequence.finish_reason,
    }


def _call_id(request: BatchRequest, choice: int, call: int) -> str:
    data = f"{request.key}/{choice}/{call}".encode()
    return f"call_{hashlib.sha256(data).hexdigest()[:24]}"


def _chosen(token: int, entry: dict[int, Logprob], decode: Decode) -> Logprob:
    """The token that was taken; one that a control rule forced was certain."""
    return entry.get(token) or Logprob(0.0, 1, decode(token))


def _ranked(entry: dict[int, Logprob]) -> list[Logprob]:
    return sorted(entry.values(), key=lambda score: score.rank)


def _by_text(entry: dict[int, Logprob]) -> dict[str, float]:
    """Of tokens that read alike, as parts of characters do, the most probable one."""
    best: dict[str, float] = {}
    for score in _ranked(entry):
        best.setdefault(score.decoded_token, score.logprob)
    return best


def _chat_logprobs(
    request: BatchRequest, sequence: CompletionOutput, decode: Decode
) -> dict[str, Any] | None:
    if sequence.logprobs is None:
        return None
    count = request.body.get("top_logprobs") or 0
    content = [
        {
            **_named(_chosen(token, entry, decode)),
            "top_logprobs": [_named(score) for score in _ranked(entry)[:count]],
        }
        for token, entry in zip(sequence.token_ids, sequence.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _named(score: Logprob) -> dict[str, Any]:
    text = score.decoded_token
    # A part of a character has no text of its own, so its bytes cannot be told from it.
    data = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": score.logprob, "bytes": data}


def _completion_logprobs(sequence: CompletionOutput, decode: Decode) -> dict[str, Any] | None:
    if sequence.logprobs is None:
        return None
    pairs = list(zip(sequence.token_ids, sequence.logprobs, strict=True))
    chosen = [_chosen(token, entry, decode) for token, entry in pairs]
    offsets, at = [], 0
    for score in chosen:
        offsets.append(at)
        at += len(score.decoded_token)
    return {
        "tokens": [score.decoded_token for score in chosen],
        "token_logprobs": [score.logprob for score in chosen],
        "top_logprobs": [_by_text(entry) for _, entry in pairs],
        "text_offset": offsets,
    }
