import json

import pytest

from ninfer_jax.batch.requests import MAX_LINE_BYTES, BadLine, BatchRequest, parse_line
from tests.batch.lines import chat, completion


def parsed(value):
    return parse_line(json.dumps(value).encode())


def test_a_good_line():
    request = parsed(completion("a", "x", max_tokens=3))
    assert isinstance(request, BatchRequest)
    assert (request.custom_id, request.kind) == ("a", "completion")
    assert request.body == {"prompt": "x", "max_tokens": 3}
    assert 0 <= request.seed < 2**63


def test_the_key_is_of_the_value_and_not_of_its_spelling():
    value = chat("a", "hé", temperature=0.5)
    other = json.dumps(dict(reversed(value.items())), ensure_ascii=False, indent=1).replace(
        "\n", " "
    )
    assert parsed(value).key == parse_line(other.encode() + b"\r\n").key
    assert parsed(value).key != parsed(chat("b", "hé", temperature=0.5)).key
    assert parsed(value).key != parsed(chat("a", "hé", temperature=0.6)).key


@pytest.mark.parametrize(
    ("line", "code", "words", "custom_id"),
    [
        ("nonsense", "invalid_json", "not JSON", None),
        ('{"custom_id": NaN}', "invalid_json", "NaN", None),
        ("[" * 100_000, "invalid_json", "nested", None),
        ("[]", "invalid_line", "object, got list", None),
        ("null", "invalid_line", "object, got null", None),
        ("{}", "invalid_line", "custom_id", None),
        ('{"custom_id": 3}', "invalid_line", "custom_id", None),
        ('{"custom_id": ""}', "invalid_line", "custom_id", None),
        ('{"custom_id": "a"}', "invalid_line", 'method must be "POST", got None', "a"),
        ('{"custom_id": "a", "method": "POST"}', "unknown_url", "None", "a"),
        ('{"custom_id": "a", "method": "POST", "url": ["x"]}', "unknown_url", "x", "a"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/embeddings"}', "unknown_url", "/v1/score", "a"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/score"}', "missing_body", "no body", "a"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/score", "body": 3}', "invalid_line", "body", "a"),
        ('{"custom_id": "a", "priority": 1}', "invalid_line", "priority", "a"),
    ],
)  # fmt: skip
def test_bad_lines(line, code, words, custom_id):
    bad = parse_line(line.encode())
    assert isinstance(bad, BadLine)
    assert (bad.code, bad.custom_id) == (code, custom_id)
    assert words in bad.message


def test_line_ends_and_byte_order_marks_are_no_part_of_a_line():
    data = json.dumps(completion("a", "x")).encode()
    for spelling in (data + b"\r\n", b"\xef\xbb\xbf" + data, b" \xef\xbb\xbf " + data + b"\r"):
        assert parse_line(spelling) == parse_line(data)


def test_bytes_that_are_no_text():
    assert parse_line(b'{"custom_id": "\xff"}').code == "invalid_json"


def test_a_line_that_is_too_long():
    assert parse_line(b"x" * (MAX_LINE_BYTES + 1)).code == "line_too_long"
    data = json.dumps(completion("a", "x")).encode()
    assert isinstance(parse_line(data.ljust(MAX_LINE_BYTES) + b"\r\n"), BatchRequest)
    # Of a longer line only the beginning is read, so what follows the spaces is not known.
    assert parse_line(data.ljust(MAX_LINE_BYTES + 2)).code == "line_too_long"
