"""`ninfer score` and `ninfer perplexity` as a user runs them."""

import json

import pytest

from tests.cli.test_cli import run


@pytest.fixture(scope="module")
def model(goldens):
    return ("-m", goldens / "tiny-qwen3.5-dense", "--max-context", "64")


def test_score_of_arguments_and_of_a_file(model):
    done = run("score", "Hello world", " again", " and", *model)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["sum_logprob"] == pytest.approx(sum(first["logprobs"]))
    assert len(first["token_ids"]) == len(first["greedy"])
    assert "tokens/s" in done.stderr
    pairs = [
        {"context": "Hello world", "continuation": " and"},
        {"context": [1, 2], "continuation": [3]},
    ]
    lines = "\n".join(map(json.dumps, pairs)) + "\n"
    piped = run("score", "--file", "-", *model, stdin=lines)
    assert piped.returncode == 0, piped.stderr
    same, of_ids = map(json.loads, piped.stdout.splitlines())
    assert same == second
    assert of_ids["token_ids"] == [3]


def test_perplexity_of_a_file(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox. " * 10)
    plain = run("perplexity", text, *model, "--window", "32", "--stride", "16")
    assert plain.returncode == 0, plain.stderr
    assert "bits per byte" in plain.stdout
    done = run("perplexity", text, *model, "--window", "32", "--stride", "16", "--json")
    numbers = json.loads(done.stdout)
    assert numbers["scored"] == numbers["tokens"] - 1
    assert f"perplexity {numbers['perplexity']:.4f}" in plain.stdout


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        (("score",), None, "give a context"),
        (("score", "a"), None, "at least one continuation"),
        (("score", "a", "b", "--file", "-"), "{}", "not both"),
        (("score", "--file", "-"), "{}\n", "line 1: not an object"),
        (("score", "--file", "-"), "\n", "no lines"),
        (("score", "--file", "/no/such/file"), None, "/no/such/file"),
        (("perplexity", "/no/such/file"), None, "/no/such/file"),
        (("perplexity", "-", "MODEL"), "", "the text is empty"),
        (("perplexity", "-", "MODEL", "--window", "8", "--stride", "8"), "a b c", "stride must be"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(model, args, stdin, message):
    given = [x for a in args for x in (model if a == "MODEL" else (a,))]
    done = run(*given, stdin=stdin)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
