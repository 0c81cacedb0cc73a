"""`make demo`: the main job on the shipped model, on CPU, in under two minutes."""

from __future__ import annotations

import time

import ninfer_jax as nj


def main() -> None:
    started = time.monotonic()
    engine = nj.load("demo", max_context=512)
    used = {name: f"{size / 2**20:.1f} MiB" for name, size in engine.memory().items()}
    print(f"engine ready in {time.monotonic() - started:.1f} s; memory: {used}")
    print(
        "The shipped model has random weights until a trained one takes its place: expect noise, not sense.\n"
    )

    print("A streamed continuation of 'Once upon a time':")
    for chunk in engine.stream("Once upon a time", nj.SamplingParams(max_tokens=48, seed=1)):
        print(chunk.text, end="", flush=True)
    assert chunk.output is not None
    _report(chunk.output)

    print("A chat answer, with thinking limited to 16 tokens:")
    chat = [{"role": "user", "content": "What is 17 + 25?"}]
    short = nj.SamplingParams(max_tokens=48, seed=2, thinking_budget=16)
    (answer,) = engine.chat(chat, short)
    print(f"thinking: {answer.outputs[0].reasoning!r}\nanswer: {answer.outputs[0].text!r}")
    _report(answer)

    print("The second turn of that chat starts from the first one's state:")
    chat += [
        {"role": "assistant", "content": answer.outputs[0].text},
        {"role": "user", "content": "And twice that?"},
    ]
    (answer,) = engine.chat(chat, short)
    print(f"answer: {answer.outputs[0].text!r}")
    _report(answer)
    print(f"{engine.explain(answer.request_id)}\n")

    print("Sixteen prompts together, eight at a time:")
    prompts = [f"Line {i}:" for i in range(16)]
    started = time.monotonic()
    results = engine.generate(
        prompts, nj.SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    )
    tokens = sum(len(r.outputs[0].token_ids) for r in results)
    print(f"{tokens} tokens, {tokens / (time.monotonic() - started):.0f} tokens/s")


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
