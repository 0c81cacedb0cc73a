"""`make demo`: what the runtime does, on the small trained model that ships with it, on CPU, in under two minutes."""

from __future__ import annotations

import time

import ninfer_jax as nj

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
OPENING = (
    "The family of Dashwood had long been settled in Sussex. Their estate was large, and their residence was at "
    "Norland Park, in the centre of their property,"
)
GREEDY = nj.SamplingParams(temperature=0, max_tokens=300)


def main() -> None:
    started = time.monotonic()
    engine = nj.load("demo")
    used = {name: f"{size / 2**20:.0f} MiB" for name, size in engine.memory().items() if size}
    print(f"Engine ready in {time.monotonic() - started:.1f} s. Memory: {used}\n")

    chat = [{"role": "user", "content": "What is 47 + 38?"}]
    print(f"User: {chat[0]['content']}")
    answer = _stream_chat(engine, chat)

    print(
        "The second turn starts from the state of the first, up to where the template rewrites its thinking:"
    )
    chat += [
        {"role": "assistant", "content": answer.outputs[0].text},
        {"role": "user", "content": "And twice that?"},
    ]
    print(f"User: {chat[-1]['content']}")
    answer = _stream_chat(engine, chat)
    print(f"{engine.explain(answer.request_id)}\n")

    print("A tool is offered, and called:")
    asked = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    print(f"User: {asked[0]['content']}")
    (answer,) = engine.chat(asked, GREEDY, tools=[WEATHER])
    (call,) = answer.outputs[0].tool_calls
    print(f"Call: {call.name}({call.arguments})")
    called = {
        "role": "assistant",
        "content": "",
        "reasoning_content": answer.outputs[0].reasoning,
        "tool_calls": [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        ],
    }
    weather = {"role": "tool", "content": '{"temperature": 21, "sky": "sunny"}'}
    print(f"Tool: {weather['content']}")
    (answer,) = engine.chat([*asked, called, weather], GREEDY, tools=[WEATHER])
    print(f"Model: {answer.outputs[0].text}")
    _report(answer)

    print("It goes on from the opening of a novel:")
    print(OPENING, end="", flush=True)
    for chunk in engine.stream(
        OPENING, nj.SamplingParams(max_tokens=80, temperature=0.7, top_p=0.9, seed=4)
    ):
        print(chunk.text, end="", flush=True)
    assert chunk.output is not None
    _report(chunk.output)

    print("Sixteen prompts together, eight at a time:")
    prompts = [f"{word}, n." for word in ("LOVE", "WAR", "TRUTH", "MONEY")] * 4
    params = nj.SamplingParams(max_tokens=64, temperature=0.7, seed=1)
    started = time.monotonic()
    results = engine.generate(prompts, params, use_tqdm=False)
    tokens = sum(len(r.outputs[0].token_ids) for r in results)
    print(f"{tokens} tokens, {tokens / (time.monotonic() - started):.0f} tokens/s")
    for result in results[:4]:
        print(f"  {result.prompt}{result.outputs[0].text.splitlines()[0]}")


def _stream_chat(engine: nj.Engine, chat: list[dict[str, str]]) -> nj.RequestOutput:
    """Print an answer as it comes, the thinking first."""
    part = ""
    for chunk in engine.stream_chat(chat, GREEDY):
        for name, text in (("Thinking", chunk.reasoning), ("Model", chunk.text)):
            if text and part != name:
                print(f"\n{name}: " if part else f"{name}: ", end="")
                part = name
            print(text or "", end="", flush=True)
    assert chunk.output is not None
    _report(chunk.output)
    return chunk.output


def _report(result: nj.RequestOutput) -> None:
    metrics, tokens = result.metrics, len(result.outputs[0].token_ids)
    assert metrics is not None
    rate = tokens / (metrics.finished - metrics.arrival)
    first = 1000 * metrics.time_to_first_token
    prompt, cached = len(result.prompt_token_ids), result.num_cached_tokens
    print(
        f"\n[{prompt} prompt tokens, {cached} of them cached; {tokens} tokens, {rate:.0f} tokens/s, "
        f"first after {first:.0f} ms]\n"
    )


if __name__ == "__main__":
    main()
