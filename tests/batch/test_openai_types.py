"""Answers as the `openai` package's own types read them: what a client that replaces a batch job's service sees.

Those types keep fields that they do not know, so these are looked for by name.
"""

import json

import pytest
from pydantic import BaseModel

import ninfer_jax as nj
from ninfer_jax.batch import run_batch
from ninfer_jax.batch.answers import answer_line, error_line, refusal_line
from ninfer_jax.batch.requests import parse_line
from ninfer_jax.frontend import ToolCall
from ninfer_jax.outputs import CompletionOutput, Logprob, RequestOutput
from tests.batch.lines import chat, completion, line, read, write
from tests.conftest import GOLDENS

openai_types = pytest.importorskip("openai.types", reason="openai is in the extra `eval`")
openai_chat = pytest.importorskip("openai.types.chat", reason="openai is in the extra `eval`")
pytestmark = pytest.mark.eval

OURS = {"reasoning_content"}
"""Fields beyond OpenAI's."""
TOP = {4: Logprob(-0.5, 1, "a"), 5: Logprob(-1.5, 2, "b"), 9: Logprob(-9.0, 30, "\ufffd")}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def unknown(value):
    """Names of the fields that a type did not declare, all the way down."""
    if isinstance(value, BaseModel):
        inner = [unknown(getattr(value, name)) for name in type(value).model_fields]
        return set(value.model_extra or ()).union(*inner)
    if isinstance(value, list):
        return set().union(*map(unknown, value))
    return set()


def answer(value):
    """A body as its type, and nothing converted, missing or unknown on the way."""
    value = json.loads(json.dumps(value))  # as it stands in the file
    assert set(value) == {"id", "custom_id", "response", "error"}
    assert value["error"] is None
    response = value["response"]
    assert set(response) == {"status_code", "request_id", "body"}
    assert response["status_code"] == 200
    kinds = {
        "chat.completion": openai_chat.ChatCompletion,
        "text_completion": openai_types.Completion,
    }
    body = kinds[response["body"]["object"]].model_validate(response["body"], strict=True)
    assert unknown(body) <= OURS
    return body


def failure(value):
    """An error line's `error`, and the one in its body, as their types."""
    value = json.loads(json.dumps(value))
    assert set(value) == {"id", "custom_id", "response", "error"}
    outer = openai_types.BatchError.model_validate(value["error"], strict=True)
    assert not unknown(outer)
    assert outer.code
    assert outer.message
    if value["response"] is None:
        return outer, None
    assert set(value["response"]) == {"status_code", "request_id", "body"}
    assert set(value["response"]["body"]) == {"error"}
    inner = openai_types.ErrorObject.model_validate(value["response"]["body"]["error"], strict=True)
    assert not unknown(inner)
    return outer, inner


def made(request, *sequences):
    row = parse_line(json.dumps(request).encode())
    output = RequestOutput("r-1", "p", [1, 2, 3], None, list(sequences), True, None, 2)
    return answer_line(row, [output], "m", lambda token: f"<{token}>")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Of a real model: prompts that share 64 tokens, n, log-probabilities, and rows that are refused."""
    folder = tmp_path_factory.mktemp("openai")
    head = "Once upon a time. " * 12
    both = {"max_tokens": 4, "n": 2, "temperature": 1}
    jobs = [
        chat("chat", f"{head}a", **both, logprobs=True, top_logprobs=3),
        chat("chat-bare", f"{head}b", **both),
        chat("chat-chosen", "hi", max_tokens=4, logprobs=True),
        completion("text", f"{head}a", **both, logprobs=3),
        completion("text-bare", [f"{head}b", "hi"], **both),
        completion("text-chosen", "hi", max_tokens=4, logprobs=0),
        chat("refused", "x", foo=1),
        completion("long", "x", max_tokens=100_000),
        line("no-url", "/v1/embeddings"),
        chat("chat", "again"),
    ]
    source = write(folder / "in", [*jobs, "nonsense", json.dumps({"custom_id": 3})])
    with nj.load(
        GOLDENS / "tiny-qwen3.5-dense", max_context=320, max_concurrency=4, prefill_chunk=64
    ) as engine:
        summary = run_batch(source, folder / "out", engine, progress=False)
    assert (summary.answered, summary.errors) == (6, 6)
    return read(folder / "out")


def test_answers_of_a_model(lines):
    found = {x["custom_id"]: answer(x) for x in lines if x["error"] is None}
    assert len(found) == 6
    for body in found.values():
        usage = body.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert max(body.usage.prompt_tokens_details.cached_tokens for body in found.values()) >= 64
    for name, tops in [("chat", 3), ("chat-chosen", 0)]:
        for choice in found[name].choices:
            assert len(choice.logprobs.content) > 0
            assert all(len(t.top_logprobs) == tops for t in choice.logprobs.content)
    assert len(found["chat"].choices) == 2
    assert found["chat-bare"].choices[0].logprobs is None
    for choice in [*found["text"].choices, *found["text-chosen"].choices]:
        parts = choice.logprobs
        assert len(parts.tokens) == len(parts.token_logprobs) == len(parts.text_offset) > 0
        assert len(parts.top_logprobs) == len(parts.tokens)
    assert [c.index for c in found["text-bare"].choices] == [0, 1, 2, 3]


def test_errors_of_a_run(lines):
    found = [(x["custom_id"], *failure(x)) for x in lines if x["error"]]
    codes = {outer.code: inner for _, outer, inner in found}
    expected = "invalid_request unknown_url duplicate_custom_id invalid_json invalid_line"
    assert set(codes) == set(expected.split())
    assert codes["invalid_request"].type == "invalid_request_error"
    assert {name for name, _, inner in found if inner} == {"refused", "long"}


def test_tool_calls_and_thinking():
    calls = [ToolCall("x", "add", '{"x": 1}'), ToolCall("y", "add", "{}")]
    thinking = CompletionOutput(0, "", [9, 8], -9.0, [TOP, {}], "stop", None, "thought", calls)
    plain = CompletionOutput(1, "hi", [4], -0.5, [TOP], "length")
    body = answer(
        made(chat("a", "x", tools=[TOOL], n=2, logprobs=True, top_logprobs=2), thinking, plain)
    )
    first, second = body.choices
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "length")
    assert [type(call) for call in first.message.tool_calls] == [
        openai_chat.ChatCompletionMessageFunctionToolCall
    ] * 2
    assert len({call.id for call in first.message.tool_calls}) == 2
    assert first.message.content is None
    assert unknown(body) == OURS
    assert body.usage.prompt_tokens_details.cached_tokens == 2
    assert [t.bytes for t in first.logprobs.content] == [None, list(b"<8>")]
    assert second.message.tool_calls is None


def test_parts_of_characters():
    part = Logprob(-3.0, 3, "\ufffd")
    sequence = CompletionOutput(0, "\ufffd", [9], -9.0, [TOP | {7: part}], "length")
    body = answer(made(completion("a", "x", logprobs=4), sequence))
    assert body.choices[0].logprobs.top_logprobs == [{"a": -0.5, "b": -1.5, "\ufffd": -3.0}]
    assert body.choices[0].logprobs.token_logprobs == [-9.0]


def test_error_lines():
    row = parse_line(json.dumps(completion("a", "x")).encode())
    for status, kind in [(400, "invalid_request_error"), (500, "server_error")]:
        outer, inner = failure(refusal_line(row, status, "too long"))
        assert (outer.message, inner.message, inner.type) == ("too long", "too long", kind)
        assert outer.code == inner.code
    outer, inner = failure(error_line("batch_err_1", None, "invalid_json", "no JSON"))
    assert (outer.code, inner) == ("invalid_json", None)
