"""A conversation of twenty turns computes what is new in each turn and a bounded tail, whatever its template does.

Templates take thinking out of earlier answers or write the answer's header anew, so the next prompt seldom contains
the last output token for token: what is reused then is the input's recovery point (CAT-02..07). Real templates are
tried where NINFER_TEMPLATES names their folder.
"""

import itertools
import os
from pathlib import Path

import pytest

import ninfer_jax as nj

HERE = Path(__file__).parent
REAL = os.environ.get("NINFER_TEMPLATES")
STRIPS = """{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 > last.user %}<think>{{ m.reasoning_content }}</think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""
TURNS, ANSWER = 20, 10
HEADER = 32
"""Tokens of a message's frame and of an answer's header, at most."""


@pytest.fixture(
    scope="module", params=["strips", "own", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"]
)
def engine(goldens, request):
    if request.param == "strips":
        template = STRIPS
    elif request.param == "own":
        template = (HERE.parent / "frontend" / "data" / "chat.jinja").read_text()
    elif REAL and (Path(REAL) / f"{request.param}.jinja").is_file():
        template = (Path(REAL) / f"{request.param}.jinja").read_text()
    else:
        pytest.skip("NINFER_TEMPLATES names no folder with the real chat templates")
    with nj.load(
        goldens / "tiny-qwen3.5-dense",
        chat_template=template,
        max_concurrency=2,
        max_context=2048,
        dtype="float32",
    ) as engine:
        yield engine


@pytest.mark.parametrize("thinking", [None, False], ids=["default", "no thinking"])
def test_twenty_turns(engine, thinking):
    engine.clear_cache()
    params = nj.SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    messages, before = [{"role": "user", "content": "Start: alpha beta"}], 0
    for turn in range(TURNS):
        (out,) = engine.chat(messages, params, use_tqdm=False, session="s", **kwargs)
        (cold,) = engine.chat(messages, params, use_tqdm=False, cache="off", **kwargs)
        assert out.outputs[0].token_ids == cold.outputs[0].token_ids
        prompt = len(out.prompt_token_ids)
        if turn:
            # What the last turn added: its answer, the new message, their frames; and one header computed again.
            new = prompt - before
            assert prompt - out.num_cached_tokens <= new + HEADER, (
                turn,
                engine.explain(out.request_id),
            )
        before = prompt
        messages = [
            *messages,
            {
                "role": "assistant",
                "content": f"answer {turn}",
                "reasoning_content": out.outputs[0].text,
            },
            {"role": "user", "content": f"and item {turn}?"},
        ]


def test_a_loop_of_tool_calls(engine):
    """An open turn: each step adds a call and its result; the whole turn is never computed twice as it grows."""
    engine.clear_cache()
    params = nj.SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    messages = [{"role": "user", "content": "Look things up. " * 10}]
    computed, prompts = [], []
    for step in range(10):
        (out,) = engine.chat(messages, params, use_tqdm=False, session="t")
        (cold,) = engine.chat(messages, params, use_tqdm=False, cache="off")
        assert out.outputs[0].token_ids == cold.outputs[0].token_ids
        computed.append(len(out.prompt_token_ids) - out.num_cached_tokens)
        prompts.append(len(out.prompt_token_ids))
        call = {"name": "look", "arguments": {"at": f"shelf {step}"}}
        messages = [
            *messages,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            },
            {"role": "tool", "content": f"{step} books, all of them read and put back " * 3},
        ]
    step = max(b - a for a, b in itertools.pairwise(prompts))
    assert max(computed[1:]) <= 3 * step + 64 + HEADER, (computed, prompts)


def test_four_anchors_survive_as_ruled(engine):
    """CAT-01, CAT-09: a fifth anchor replaces the oldest published; the others still serve an edit after them."""
    engine.clear_cache()
    params = nj.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    words = [int(x) for x in range(100, 700)]
    engine.generate([words[:400]], params, anchors=[64, 128, 192, 256], session="a", use_tqdm=False)
    (out,) = engine.generate([words[:500]], params, anchors=[450], session="a", use_tqdm=False)
    assert (
        out.num_cached_tokens == 399
    )  # the recovery point: what was generated is not in the prompt
    hits = {}
    for anchor in (64, 128, 192, 256, 450):
        edited = [*words[:anchor], *[5] * 80]
        (out,) = engine.generate([edited], params, use_tqdm=False)
        hits[anchor] = out.num_cached_tokens
    assert hits == {64: 0, 128: 128, 192: 192, 256: 256, 450: 450}
