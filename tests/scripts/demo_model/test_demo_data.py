"""The command: all its files from a small corpus and a stand-in for the dialogues."""

import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from scripts import demo_data
from scripts.demo_model import card, corpus, packing
from scripts.demo_model import tokenizer as tokens
from scripts.demo_model.document import Document


@dataclass(frozen=True)
class Dialogue:
    task: str
    key: str


def dialogues(seed, count, passages, glosses, *, held_out=False):
    assert glosses == [("held" if held_out else "cat", "an animal")]
    assert passages
    for i in range(count):
        yield Dialogue(f"task{i % 2}", f"{seed} {i}")


def render(dialogue):
    return f"<|im_start|>assistant\n<think>\n\n</think>\n\n{dialogue.key}<|im_end|>\n"


@pytest.fixture
def small(monkeypatch):
    prose = "It is a truth universally acknowledged that it is so. " * 8
    documents = [
        Document(source, f"{i}", f"{i}\n\n{prose}{i}")
        for source in corpus.SOURCES
        for i in range(60)
    ]
    assert {d.source for d in documents if d.held_out} & corpus.PASSAGE_SOURCES
    gloss = {False: [("cat", "an animal")], True: [("held", "an animal")]}
    monkeypatch.setattr(corpus, "documents", lambda cache: iter(documents))
    monkeypatch.setattr(corpus, "glosses", lambda cache, held_out: gloss[held_out])
    monkeypatch.setattr(card, "notices", lambda cache: {"wordnet": "Keep this."})
    train = tokens.train
    monkeypatch.setattr(tokens, "train", lambda texts: train(texts, 256 + 30 + len(tokens.ADDED)))
    stand_in = SimpleNamespace(dialogues=dialogues, render=render)
    monkeypatch.setitem(sys.modules, "scripts.demo_model.dialogues", stand_in)


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_all_files_twice_the_same(small, tmp_path):
    for name in ("a", "b"):
        command = ["--out", str(tmp_path / name), "--dialogues", "60", "--workers", "1"]
        assert demo_data.main(command) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")
    ids, mask = packing.read_chat(tmp_path / "a")
    assert 0 < mask.sum() < len(ids)
    numbers = json.loads((tmp_path / "a" / "numbers.json").read_text())
    assert numbers["dialogues"]["task0"]["count"] == 30
    assert sum(task["tokens"] for task in numbers["dialogues"].values()) == len(ids)
    text = np.load(tmp_path / "a" / "text.npy")
    assert sum(source["tokens"] for source in numbers["sources"].values()) == len(text)
    assert len(packing.read_chat(tmp_path / "a", "held_out_chat")[0])
    shown = (tmp_path / "a" / "DATA_CARD.md").read_text()
    for part in (
        "| task0 | 30 |",
        "| all | 60 |",
        "| bible | bible-kjv-text | 4.38 |",
        "Keep this.",
    ):
        assert part in shown


def test_without_dialogues(small, tmp_path):
    assert demo_data.main(["--out", str(tmp_path)]) == 0
    assert not (tmp_path / "chat.npy").exists()
    assert "## Dialogues\n\nNone." in (tmp_path / "DATA_CARD.md").read_text()


def test_a_package_that_cannot_be_had(monkeypatch, tmp_path, capsys):
    def fail(cache):
        raise demo_data.PackageError("cannot fetch x")

    monkeypatch.setattr(corpus, "documents", fail)
    assert demo_data.main(["--out", str(tmp_path)]) == 1
    assert "cannot fetch x" in capsys.readouterr().err
