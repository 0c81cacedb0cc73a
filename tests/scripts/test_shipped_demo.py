"""The shipped model does what its card says, on few enough questions for every run of the tests."""

import re

import numpy as np
import pytest

import ninfer_jax as nj
from artifacts import open_checkpoint
from scripts import demo, eval_demo
from scripts.demo_model.questions import questions

MEGABYTE = 10**6


@pytest.fixture(scope="module")
def engine():
    with nj.load("demo", max_queue=32) as engine:
        yield engine


@pytest.fixture(scope="module")
def verdicts(engine):
    return eval_demo.ask(engine, questions(20), max_tokens=512)


def test_nine_of_ten_held_out_questions_are_answered(verdicts):
    total = eval_demo.scores(verdicts)[-1]
    assert total.total == 20
    assert total.right >= 18, eval_demo.failures(verdicts)


def test_drafts_are_accepted(engine, verdicts):
    short = sorted(verdicts, key=lambda v: len(v.output.token_ids))[4:6]
    found = eval_demo.acceptance(engine.model, "demo", short)
    assert found["mtp"].places > 20
    assert found["mtp"].first >= 0.6
    assert found["dflash"].first >= 0.6


def test_size_components_and_cards():
    folder = nj.shipped_model("demo")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.components == ("text", "mtp", "dflash")
    assert checkpoint.config.max_position_embeddings >= 2048
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 36 * MEGABYTE
    sizes = {
        c: sum(np.prod(checkpoint.shape(n)) for n in checkpoint.parameters(c))
        for c in checkpoint.components
    }
    card = (folder / "MODEL_CARD.md").read_text()
    for component, size in sizes.items():
        assert f"{size:,}" in card, f"{component} has {size:,} parameters"
    assert "held out" in (folder / "DATA_CARD.md").read_text()


def test_the_demo_runs(capsys):
    demo.main()
    shown = capsys.readouterr().out
    for needed in ("Thinking: ", "Model: 47 + 38 = 85.", "get_weather(", "tokens/s"):
        assert needed in shown
    cached = [int(number) for number in re.findall(r"(\d+) of them cached", shown)]
    assert cached[1] > 0  # the second turn starts from the first one's state
