"""The command line as a user runs it: in a process of its own, or where its modules are loaded already."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest

from ninfer_jax.cli import main
from tests.conftest import CACHE

SMALL = ("--max-context", "64")
"""An engine of few executables."""


def run(*args, stdin=None):
    code = "from ninfer_jax.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        env={"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(CACHE), "COLUMNS": "200"},
        check=False,
    )


def run_here(*args):
    """`run` without what a new process spends on imports."""
    out, err = io.StringIO(), io.StringIO()
    command = ["ninfer", *map(str, args)]
    with patch.object(sys, "argv", command), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main()
        except SystemExit as stopped:
            code = stopped.code
    return subprocess.CompletedProcess(command, code or 0, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def artifact(goldens, tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "tiny"
    done = run("convert", goldens / "tiny-qwen3.5-dense", out, "--name", "tiny")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out)
    return out


def test_inspect_and_verify(artifact):
    shown = json.loads(run_here("inspect", artifact, "--json").stdout)
    assert shown["name"] == "tiny"
    assert shown["components"]["text"]["parameters"] == 109
    plain = run_here("inspect", artifact)
    assert "Qwen3_5ForCausalLM" in plain.stdout
    assert "bf16" in plain.stdout
    report = run_here("verify", artifact, "--json")
    assert report.returncode == 0
    assert json.loads(report.stdout)["ok"]


def test_convert_with_a_draft(goldens, tmp_path):
    draft, out = goldens / "tiny-dflash-full", tmp_path / "out"
    done = run_here("convert", goldens / "tiny-qwen3.5-dense", out, "--draft", draft)
    assert done.returncode == 0, done.stderr
    shown = json.loads(run_here("inspect", out, "--json").stdout)
    assert shown["components"]["dflash"]["parameters"] == 25
    assert json.loads(run_here("verify", out, "--json").stdout)["ok"]
    alone = run_here("inspect", draft)
    assert alone.returncode == 2
    assert "is a draft" in alone.stderr


def test_verify_finds_a_flipped_bit(artifact, tmp_path):
    import shutil

    copy = shutil.copytree(artifact, tmp_path / "copy")
    victim = max((p for p in copy.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = run_here("verify", copy)
    assert done.returncode == 2
    assert victim.name in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_generate_streams_and_prints_json(artifact):
    options = ("-m", artifact, "--max-tokens", "8", "--temperature", "0", *SMALL)
    args = ("generate", "Hello", *options)
    plain = run(*args)
    assert plain.returncode == 0, plain.stderr
    assert "tokens/s" in plain.stderr
    as_json = run(*args, "--json")
    result = json.loads(as_json.stdout)
    assert result["outputs"][0]["text"] == plain.stdout.rstrip("\n")
    assert len(result["outputs"][0]["token_ids"]) <= 8
    piped = run("generate", "-", *options, stdin="Hello")
    assert piped.stdout == plain.stdout


def test_chat_answers_a_question_and_holds_a_dialogue(artifact):
    options = ("-m", artifact, "--max-tokens", "6", "--temperature", "0", "--no-thinking")
    options += ("--max-context", "128")
    one = run("chat", "hi", *options)
    assert one.returncode == 0, one.stderr
    dialogue = run("chat", *options, "--json", stdin="hi\nand now?\n")
    first, second = map(json.loads, dialogue.stdout.splitlines())
    assert first["outputs"][0]["text"] == one.stdout.rstrip("\n")
    assert first["outputs"][0]["text"] in second["prompt"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "x", "-m", "/no/such/folder"), "no such folder"),
        (("generate", "", "-m", "ARTIFACT", *SMALL), "empty"),
        (("generate", "x", "-m", "ARTIFACT", "--temperature", "-1", *SMALL), "temperature"),
        (("generate", "x", "-m", "ARTIFACT", "--max-tokens", "100000", *SMALL), "max_tokens"),
        (("convert", "/no/such/folder", "/tmp/never-made"), "no such folder"),
        (("verify", "/no/such/folder"), "no such folder"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(artifact, args, message):
    done = run_here(*(artifact if a == "ARTIFACT" else a for a in args))
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ninfer: ")
    assert message in last
    assert "Traceback" not in done.stderr
