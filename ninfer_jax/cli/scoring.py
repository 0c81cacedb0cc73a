"""`ninfer score` and `ninfer perplexity`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ninfer_jax.api import load
from ninfer_jax.cli.text import Context, Dtype, Json, Model
from ninfer_jax.errors import InputError


def score(
    context: Annotated[str | None, typer.Argument(help="What stands before.")] = None,
    continuations: Annotated[
        list[str] | None, typer.Argument(help="One or more texts to score after it.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", help="Score the lines of this file, - is stdin, instead of arguments."
        ),
    ] = None,
    model: Model = "demo",
    max_context: Context = None,
    dtype: Dtype = "auto",
) -> None:
    """Log-probabilities of continuations, a JSON object a line.

    With --file, each line is {"context": ..., "continuation": ...}, both strings or both lists of token ids.
    """
    if file is None:
        if context is None or not continuations:
            raise InputError("give a context and at least one continuation, or --file")
        contexts: Any = context
        after: Any = list(continuations)
    elif context is not None:
        raise InputError("give either --file or a context and continuations, not both")
    else:
        contexts, after = _pairs(file)
    engine = load(model, max_context=max_context, dtype=dtype, purpose="scoring")
    began = time.perf_counter()
    results = engine.score(contexts, after, use_tqdm=len(after) > 1)
    for result in results:
        print(json.dumps(dataclasses.asdict(result) | {"is_greedy": result.is_greedy}))
    _statistics(sum(len(r.token_ids) for r in results), time.perf_counter() - began)


def perplexity(
    files: Annotated[list[str], typer.Argument(help="UTF-8 text files; - is stdin.")],
    window: Annotated[
        int | None, typer.Option(help="Tokens of a window; default: max-context.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next; default: half.")
    ] = None,
    model: Model = "demo",
    max_context: Context = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Perplexity and bits per byte of text files, every token after the first scored once."""
    texts = [(name, _read(name)) for name in files]
    engine = load(model, max_context=max_context, dtype=dtype, purpose="scoring")
    began, scored = time.perf_counter(), 0
    for name, text in texts:
        try:
            result = engine.perplexity(text, window=window, stride=stride)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        scored += result.scored
        if as_json:
            numbers = {
                "file": name,
                "tokens": len(result.logprobs),
                "scored": result.scored,
                "sum_logprob": result.sum_logprob,
                "perplexity": result.perplexity,
                "bits_per_byte": result.bits_per_byte,
            }
            print(json.dumps(numbers))
        else:
            print(
                f"{name}: {len(result.logprobs)} tokens, perplexity {result.perplexity:.4f}, "
                f"{result.bits_per_byte:.4f} bits per byte"
            )
    _statistics(scored, time.perf_counter() - began)


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 at byte {error.start}; convert it first") from error


def _pairs(name: str) -> tuple[list[Any], list[Any]]:
    contexts, continuations = [], []
    for number, line in _lines(_read(name)):
        try:
            pair = json.loads(line)
            context, continuation = pair["context"], pair["continuation"]
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f'{name}, line {number}: not an object {{"context": ..., "continuation": ...}}'
            ) from error
        contexts.append(context)
        continuations.append(continuation)
    if not contexts:
        raise InputError(f"{name}: no lines to score")
    return contexts, continuations


def _lines(text: str) -> Iterable[tuple[int, str]]:
    return ((i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip())


def _statistics(tokens: int, seconds: float) -> None:
    print(
        f"[{tokens} tokens scored in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s]",
        file=sys.stderr,
    )
