"""What a caller asks to be scored, checked and turned into sequences; and their results in the caller's terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ninfer_jax.errors import InputError
from ninfer_jax.frontend import Frontend
from ninfer_jax.frontend.prompt import check_token_ids, is_integral
from ninfer_jax.scoring.job import Result
from ninfer_jax.scoring.results import Perplexity, Score
from ninfer_jax.scoring.windows import Span, Window, pair, text_windows, window_span


def prefix_token_id(frontend: Frontend) -> int:
    """The token that stands for an empty context, as lm-evaluation-harness chooses it: BOS, else EOS.

    Raises:
      InputError: the tokenizer names neither.
    """
    tokenizer = frontend.tokenizer
    for name in ("bos_token", "eos_token"):
        if (token := tokenizer.special_tokens.get(name)) is not None:
            found = tokenizer.token_to_id(token)
            if found is not None:
                return found
    if tokenizer.eos_token_ids:
        return min(tokenizer.eos_token_ids)
    raise InputError(
        "an empty context needs a first token, and this tokenizer names neither BOS nor EOS; give a context"
    )


def score_spans(
    frontend: Frontend, contexts: Any, continuations: Any, *, max_context: int
) -> list[Span]:
    """Sequences of (context, continuation) pairs; see `Engine.score`."""
    after, _ = _listed("continuations", continuations)
    before, one = _listed("contexts", contexts)
    if one:
        before = before * len(after)
    if len(before) != len(after):
        raise InputError(
            f"{len(before)} contexts for {len(after)} continuations; give one a continuation, or a single context "
            "(a string or a list of ids, not in a list) for all"
        )
    encoded: dict[str, list[int]] = {}
    spans = []
    for i, (context, continuation) in enumerate(zip(before, after, strict=True)):
        if isinstance(context, str) and isinstance(continuation, str):
            first, rest = encode_pair(frontend, context, continuation, encoded)
        elif isinstance(context, str) or isinstance(continuation, str):
            raise InputError(f"context and continuation {i} must be both strings or both token ids")
        else:
            first, rest = context, continuation
            if isinstance(first, Sequence | np.ndarray) and not len(first):
                first = [prefix_token_id(frontend)]
        if isinstance(rest, Sequence | np.ndarray) and not len(rest):
            raise InputError(f"continuation {i} has no token of its own to score; give some text")
        ids = check_token_ids(first, frontend.vocab_size, f"context {i}")
        scored = check_token_ids(rest, frontend.vocab_size, f"continuation {i}")
        if len(ids) + len(scored) - 1 > max_context:
            raise InputError(
                f"context and continuation {i} have {len(ids)} and {len(scored)} tokens, {len(ids) + len(scored)} "
                f"together; max_context={max_context} allows {max_context + 1}. Cut the context from the left, "
                "or load the model with a larger max_context"
            )
        spans.append(pair(ids, scored))
    return spans


def encode_pair(
    frontend: Frontend, context: str, continuation: str, encoded: dict[str, list[int]]
) -> tuple[list[int], list[int]]:
    """Ids of a context and of what comes after it, as lm-evaluation-harness cuts them.

    Spaces at the end of the context go to the continuation; the two are encoded together and cut after as many tokens
    as the context has alone. `encoded` remembers contexts.
    """
    tokenizer = frontend.tokenizer
    stripped = context.rstrip()
    if not stripped:
        # Nothing but a first token stands before the text.
        ids = tokenizer.encode(context + continuation)
        prefix = prefix_token_id(frontend)
        return (ids[:1], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)
    if stripped not in encoded:
        encoded[stripped] = tokenizer.encode(stripped)
    before = encoded[stripped]
    whole = tokenizer.encode(context + continuation)
    return before, whole[len(before) :]


def scores(spans: Sequence[Span], results: Sequence[Result]) -> list[Score]:
    """Results a continuation."""
    return [
        Score(
            token_ids=tuple(span.tokens[span.first :].tolist()),
            logprobs=tuple(result.logprobs.tolist()),
            greedy=tuple(result.greedy.tolist()),
            sum_logprob=float(result.logprobs.sum(dtype=np.float64)),
        )
        for span, result in zip(spans, results, strict=True)
    ]


def perplexity_spans(
    frontend: Frontend,
    text: Any,
    *,
    window: int | None,
    stride: int | None,
    max_context: int,
) -> tuple[np.ndarray, list[Window], list[Span]]:
    """Ids of a text, the windows over it and their sequences; see `Engine.perplexity`."""
    ids = frontend.tokenizer.encode(text) if isinstance(text, str) else text
    if isinstance(text, str) and not ids:
        raise InputError("the text is empty; give at least 2 tokens")
    array = np.asarray(check_token_ids(ids, frontend.vocab_size, "text"), np.int32)
    for name, value in (("window", window), ("stride", stride)):
        if value is not None and not is_integral(value):
            raise InputError(f"{name} must be a number of tokens; got {value!r}")
    size = max_context if window is None else int(window)
    if size > max_context:
        raise InputError(
            f"window={size} is over max_context={max_context} tokens; lower it, or load the model with a larger "
            "max_context"
        )
    step = max(1, size // 2) if stride is None else int(stride)
    found = text_windows(len(array), size, step)
    return array, found, [window_span(array, w) for w in found]


def perplexity(
    frontend: Frontend,
    text: Any,
    ids: np.ndarray,
    windows: Sequence[Window],
    results: Sequence[Result],
) -> Perplexity:
    """Windows put together again."""
    logprobs = np.full(len(ids), np.nan, np.float32)
    greedy = np.zeros(len(ids), bool)
    for window, result in zip(windows, results, strict=True):
        logprobs[window.first : window.end] = result.logprobs
        greedy[window.first : window.end] = result.greedy
    total, scored = float(logprobs[1:].sum(dtype=np.float64)), len(ids) - 1
    bits = None
    if isinstance(text, str):
        size = len(text.encode()) - len(frontend.tokenizer.token_bytes(int(ids[0])))
        bits = -total / math.log(2) / max(size, 1)
    nats = -total / scored
    return Perplexity(
        sum_logprob=total,
        scored=scored,
        perplexity=math.exp(nats) if nats < 700 else math.inf,
        bits_per_byte=bits,
        logprobs=logprobs,
        greedy=greedy,
    )


def _listed(name: str, value: Any) -> tuple[list[Any], bool]:
    """A list of strings or id lists, and whether a single one was given."""
    if isinstance(value, str):
        return [value], True
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return [value], True
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        if value and all(is_integral(x) for x in value):
            return [value], True
        return list(value), False
    raise InputError(
        f"{name} must be a string, a list of token ids, or a list of those; got {type(value).__name__}"
    )
