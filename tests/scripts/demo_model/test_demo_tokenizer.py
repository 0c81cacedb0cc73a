"""The tokenizer: its tokens, its files, and that the same text gives the same one."""

import json
from pathlib import Path

import pytest

import artifacts
from artifacts.frontend import read_frontend
from ninfer_jax.frontend import Tokenizer
from scripts.demo_model import tokenizer as tokens
from scripts.demo_model.document import Document

SHIPPED = Path(artifacts.__file__).parent / "demo"
TEXTS = [f"word{chr(97 + i % 26)} the cat's {i} naïve sat\n\n" * 3 for i in range(60)]
SIZE = 256 + 20 + len(tokens.ADDED)


@pytest.fixture(scope="module")
def learned():
    return tokens.train(TEXTS, SIZE)


def test_the_same_texts_give_the_same_tokenizer(learned):
    assert tokens.train(iter(TEXTS), SIZE).to_str() == learned.to_str()


def test_added_tokens_are_the_last(learned):
    assert learned.get_vocab_size() == SIZE
    first = SIZE - len(tokens.ADDED)
    assert [learned.id_to_token(i) for i in range(first, SIZE)] == list(tokens.ADDED)
    assert learned.id_to_token(SIZE - 1) == "<|mask|>"
    content = json.loads(learned.to_str())
    assert {t["content"]: t["special"] for t in content["added_tokens"]} == tokens.ADDED


def test_every_byte_comes_back(learned):
    text = "".join(map(chr, range(1, 0x250))) + "€ 漢字 🙂\n"
    normal = text.replace("\u0340", "")
    ids = learned.encode(normal).ids
    assert learned.decode(ids, skip_special_tokens=False) == normal
    assert learned.encode("2026").tokens == ["2", "0", "2", "6"]
    assert learned.encode("e\u0301").ids == learned.encode("é").ids


def test_it_cuts_text_as_the_shipped_one(learned):
    shipped = json.loads((SHIPPED / "tokenizer.json").read_text())
    content = json.loads(learned.to_str())
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        assert content[part] == shipped[part]
    names, qwens = ([t["content"] for t in c["added_tokens"]] for c in (content, shipped))
    assert names[:26] == qwens[:26]


def test_files(learned, tmp_path):
    tokens.write_tokenizer(tmp_path, learned, "{{ messages }}")
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 2048
    assert "chat_template" not in config
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    ids = [learned.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    assert generation["eos_token_id"] == ids
    runtime = Tokenizer.from_resources(read_frontend(tmp_path))
    text = "<|im_start|>user\nthe cat's <think>"
    assert runtime.encode(text) == learned.encode(text).ids
    assert runtime.eos_token_ids == set(ids)
    assert runtime.vocab_size == SIZE


def test_too_little_text():
    with pytest.raises(ValueError, match="more text"):
        tokens.train(["a"], 1000)


def test_training_texts(monkeypatch):
    monkeypatch.setattr(tokens, "MOST_OF_A_SOURCE", 30)
    documents = [Document("a", f"{i}", "0123456789") for i in range(12)]
    documents += [Document("b", "x", "small")]
    kept = [d for d in documents if not d.held_out]
    texts = list(tokens.training_texts(documents, ["<|im_start|>user\nhi<|im_end|>\n"]))
    assert texts.count("0123456789") == -(-sum(d.source == "a" for d in kept) // 4)
    assert texts[-3:] == ["small", "user\nhi", "\n"]
