"""`ninfer generate` and `ninfer chat`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ninfer_jax.api import load
from ninfer_jax.engine import Engine
from ninfer_jax.errors import InputError
from ninfer_jax.outputs import RequestOutput, StreamChunk
from ninfer_jax.sampling_params import SamplingParams

Model = Annotated[str, typer.Option("--model", "-m", help="demo, or a model folder.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this sum.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the draws.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")]
Context = Annotated[int | None, typer.Option(help="Most tokens of prompt plus output.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a result.")]


def generate(
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts; - reads stdin.")],
    model: Model = "demo",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    max_context: Context = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Continue one prompt (streamed) or several (together)."""
    texts = [sys.stdin.read() if p == "-" else p for p in prompts]
    params = _params(max_tokens, temperature, top_p, top_k, seed, stop)
    rows = 1 if len(texts) == 1 else 8
    engine = load(model, max_context=max_context, dtype=dtype, max_concurrency=rows)
    if len(texts) == 1 and not as_json:
        result = _print_stream(engine.stream(texts[0], params))
        _statistics([result])
        return
    results = engine.generate(texts, params)
    for result in results:
        print(json.dumps(_plain(result)) if as_json else result.outputs[0].text)
    _statistics(results)


def chat(
    message: Annotated[
        str | None, typer.Argument(help="One question; without it, a dialogue.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model think first.")] = True,
    model: Model = "demo",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    max_context: Context = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Answer one question, or hold a dialogue on the terminal (end it with Ctrl-D)."""
    params = _params(max_tokens, temperature, top_p, top_k, seed, stop)
    engine = load(model, max_context=max_context, dtype=dtype, max_concurrency=1)
    messages = [{"role": "system", "content": system}] if system else []
    for question in [message] if message is not None else _questions():
        messages.append({"role": "user", "content": question})
        result = _answer(engine, messages, params, thinking, as_json)
        _statistics([result])
        answer = result.outputs[0]
        messages.append(
            {
                "role": "assistant",
                "content": answer.text,
                **({"reasoning_content": answer.reasoning} if answer.reasoning else {}),
            }
        )


def _answer(
    engine: Engine,
    messages: list[dict[str, Any]],
    params: SamplingParams,
    thinking: bool,
    as_json: bool,
) -> RequestOutput:
    if as_json:
        (result,) = engine.chat(
            messages, params, session="dialogue", enable_thinking=thinking, use_tqdm=False
        )
        print(json.dumps(_plain(result)))
        return result
    return _print_stream(
        engine.stream_chat(messages, params, session="dialogue", enable_thinking=thinking)
    )


def _questions() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _print_stream(chunks: Iterator[StreamChunk]) -> RequestOutput:
    """Text to stdout as it comes, thinking to stderr; returns the complete result."""
    result = None
    for chunk in chunks:
        if chunk.reasoning:
            print(chunk.reasoning, end="", file=sys.stderr, flush=True)
        print(chunk.text, end="", flush=True)
        result = chunk.output or result
    print()
    assert result is not None
    return result


def _params(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or None,
    )


def _statistics(results: list[RequestOutput]) -> None:
    aborted = [o.error for r in results for o in r.outputs if o.error]
    metrics = [r.metrics for r in results if r.metrics]
    tokens = sum(len(o.token_ids) for r in results for o in r.outputs)
    seconds = max(m.finished for m in metrics) - min(m.arrival for m in metrics)
    first = min(m.time_to_first_token for m in metrics)
    prompt = sum(len(r.prompt_token_ids) for r in results)
    cached = sum(r.num_cached_tokens for r in results)
    print(
        f"[{prompt} prompt tokens, {cached} of them cached, {tokens} tokens in {seconds:.2f} s, "
        f"{tokens / seconds:.1f} tokens/s, first after {1000 * first:.0f} ms]",
        file=sys.stderr,
    )
    if aborted:
        raise InputError(f"generation was aborted: {aborted[0]}")


def _plain(result: RequestOutput) -> dict[str, Any]:
    return dataclasses.asdict(result)
