import json

from ninfer_jax.batch.answers import answer_line, error_line, refusal_line
from ninfer_jax.batch.requests import parse_line
from ninfer_jax.frontend import ToolCall
from ninfer_jax.outputs import CompletionOutput, Logprob, RequestOutput
from tests.batch.lines import chat, completion

TOP = {4: Logprob(-0.5, 1, "a"), 5: Logprob(-1.5, 2, "b"), 9: Logprob(-9.0, 30, "\ufffd")}


def request(value):
    return parse_line(json.dumps(value).encode())


def output(*sequences, cached=0):
    return RequestOutput("r-1", "p", [1, 2, 3], None, list(sequences), True, None, cached)


def test_a_chat_answer():
    row = request(chat("a", "x", logprobs=True, top_logprobs=2))
    call = ToolCall("call_x", "add", '{"x": 1}')
    sequence = CompletionOutput(
        0, "", [9, 8], -9.0, [TOP, {}], "stop", None, "thought", [call]
    )  # fmt: skip
    line = answer_line(row, [output(sequence, cached=2)], "m", lambda token: f"<{token}>")
    assert line["custom_id"] == "a"
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    body = line["response"]["body"]
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 0, "m")
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == "thought"
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"x": 1}'}
    assert made["id"] != "call_x"  # that one depends on the run
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("\ufffd", -9.0, None)
    assert [t["token"] for t in first["top_logprobs"]] == ["a", "b"]
    assert first["top_logprobs"][0]["bytes"] == [97]
    assert (second["token"], second["logprob"], second["top_logprobs"]) == ("<8>", 0.0, [])


def test_several_prompts_give_their_choices_in_order():
    row = request(completion("a", ["x", "y"], n=2, logprobs=2))
    outputs = [
        output(*(CompletionOutput(i, f"{p}{i}", [4], -0.5, [TOP], "length") for i in range(2)))
        for p in "xy"
    ]
    body = answer_line(row, outputs, "m", str)["response"]["body"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in body["choices"]] == ["x0", "x1", "y0", "y1"]
    assert body["usage"]["completion_tokens"] == 4
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a"]
    assert logprobs["token_logprobs"] == [-0.5]
    assert logprobs["text_offset"] == [0]
    assert list(logprobs["top_logprobs"][0]) == ["a", "b", "\ufffd"]


def test_tokens_that_read_alike_keep_the_most_probable():
    """Parts of characters: OpenAI's shape has one number for a text."""
    entry = TOP | {7: Logprob(-3.0, 3, "\ufffd"), 8: Logprob(-4.0, 4, "b")}
    sequence = CompletionOutput(0, "a", [4], -0.5, [entry], "length")
    line = answer_line(request(completion("a", "x", logprobs=5)), [output(sequence)], "m", str)
    (choice,) = line["response"]["body"]["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -1.5, "\ufffd": -3.0}]


def test_errors():
    row = request(completion("a", "x"))
    line = refusal_line(row, 400, "too long")
    assert line["id"] == row.line_id
    assert line["response"]["status_code"] == 400
    assert line["error"] == {"code": "invalid_request", "message": "too long"}
    assert refusal_line(row, 500, "NaN")["error"]["code"] == "aborted"
    assert error_line("batch_err_1", None, "c", "m")["response"] is None
