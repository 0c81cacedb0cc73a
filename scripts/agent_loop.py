"""Three agents at once, twenty turns each, with tools: what the cache saves, turn by turn.

Every turn the model answers and a tool replies; the next prompt is the whole conversation again. Prints a table: turn,
prompt tokens, cached tokens and time to the first token, each over the sessions of that turn.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import ninfer_jax as nj

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a text file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Path of the file."}},
                "required": ["path"],
            },
        },
    }
]
SYSTEM = "You are a careful programmer. Read files with the tool before you answer."


async def converse(
    engine: nj.Engine, name: str, turns: int, max_tokens: int, cache: Any
) -> list[nj.RequestOutput]:
    """One session: answers in order."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Session {name}: why does the build fail?"},
    ]
    params = nj.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    results = []
    for turn in range(turns):
        handle = engine.submit_chat(
            messages, params, tools=TOOLS, session=name, cache=cache, enable_thinking=False
        )
        result = await handle.wait_async()
        results.append(result)
        # The demo model cannot call tools, so the call that an agent would make is written for it.
        call = {"name": "read_file", "arguments": {"path": f"{name}/part{turn}.txt"}}
        messages += [
            {
                "role": "assistant",
                "content": result.outputs[0].text,
                "tool_calls": [{"id": f"call-{turn}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call-{turn}", "content": f"line {turn} of {name}"},
        ]
    return results


async def sessions(engine: nj.Engine, args: argparse.Namespace) -> list[list[nj.RequestOutput]]:
    """All sessions at once."""
    names = [f"agent-{i}" for i in range(args.sessions)]
    return await asyncio.gather(
        *(converse(engine, n, args.turns, args.max_tokens, args.cache) for n in names)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--cache", choices=("read_write", "off"), default="read_write")
    args = parser.parse_args()
    with nj.load(args.model, max_context=args.context, max_concurrency=args.sessions) as engine:
        started = time.monotonic()
        results = asyncio.run(sessions(engine, args))
        elapsed = time.monotonic() - started
        print(f"{'turn':>4} {'prompt':>8} {'cached':>8} {'TTFT ms':>8}   (mean of {args.sessions})")
        for turn in range(args.turns):
            row = [r[turn] for r in results]
            prompt = sum(len(r.prompt_token_ids) for r in row) / len(row)
            cached = sum(r.num_cached_tokens for r in row) / len(row)
            first = sum(r.metrics.time_to_first_token for r in row if r.metrics) / len(row)
            print(f"{turn + 1:>4} {prompt:>8.0f} {cached:>8.0f} {1000 * first:>8.1f}")
        tokens = engine.stats()["tokens"]
        share = tokens["cached"] / tokens["prompt"]
        print(
            f"{elapsed:.1f} s; {tokens['prompt']} prompt tokens, {tokens['cached']} reused ({share:.0%}), "
            f"{tokens['computed']} computed, {tokens['replayed']} replayed"
        )
        last = results[0][-1]
        print(f"\nWhy, for the last turn of agent-0:\n{engine.explain(last.request_id)}")


if __name__ == "__main__":
    main()
