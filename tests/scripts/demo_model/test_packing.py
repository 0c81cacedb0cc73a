"""Packing: what is written is what was given, and the mask is the assistant's."""

import lzma

import numpy as np
import pytest

from scripts.demo_model import chat, packing
from scripts.demo_model import tokenizer as tokens
from scripts.demo_model.document import Document

TEXTS = [f"user assistant word{chr(97 + i % 26)} sat\n\n" * 3 for i in range(40)]
DOCUMENTS = [Document("a" if i % 2 else "b", f"{i}", f"word{i} sat\n" * 3) for i in range(120)]
THINKS = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def learned():
    return tokens.train(TEXTS, 256 + 12 + len(tokens.ADDED))


def test_text(learned, tmp_path):
    counts = packing.pack_text(tmp_path, learned, DOCUMENTS, seed=1)
    ids = np.load(tmp_path / "text.npy")
    assert ids.dtype == np.uint16
    assert sum(counts.values()) == len(ids)
    read = learned.decode(ids.tolist(), skip_special_tokens=False).split("<|endoftext|>")
    given = [d.text for d in DOCUMENTS if not d.held_out]
    assert read[-1] == ""
    assert sorted(read[:-1]) == sorted(given)
    assert read[:-1] != given
    packing.pack_text(tmp_path, learned, DOCUMENTS, seed=1)
    np.testing.assert_array_equal(np.load(tmp_path / "text.npy"), ids)


def test_held_out(learned, tmp_path):
    kept = [d for d in DOCUMENTS if d.held_out]
    assert kept
    packing.pack_held_out(tmp_path, learned, DOCUMENTS)
    held_out = packing.read_held_out(tmp_path)
    assert [learned.decode(held_out.document(i).tolist()) for i in range(len(kept))] == [
        d.text for d in kept
    ]
    assert held_out.byte_counts.tolist() == [len(d.text.encode()) for d in kept]
    assert held_out.sources.tolist() == [d.source for d in kept]
    assert held_out.names.tolist() == [d.name for d in kept]


def test_mask_is_of_turns_that_think(learned):
    parts = [
        ("<|im_start|>system\nassistant <think><|im_end|>\n", False),
        ("<|im_start|>user\nsat<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        (THINKS + "word<tool_call>sat</tool_call><|im_end|>", True),
        ("\n<|im_start|>user\n<tool_response>\nsat\n</tool_response><|im_end|>\n", False),
        ("<|im_start|>assistant\nsat<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        ("<think>\nsat", True),
    ]
    encoded = [learned.encode(text).ids for text, _ in parts]
    ids = learned.encode("".join(text for text, _ in parts)).ids
    assert ids == [token for part in encoded for token in part]
    expected = np.repeat([mask for _, mask in parts], [len(part) for part in encoded])
    marks = packing.AssistantMarks.of(learned)
    np.testing.assert_array_equal(packing.assistant_mask(ids, marks), expected)
    assert packing.assistant_mask([], marks).shape == (0,)


def test_chat(tmp_path):
    dialogues = [
        (np.array([5, 6, 7]), np.array([False, True, True])),
        (np.array([8]), np.array([True])),
    ]
    assert packing.pack_chat(tmp_path, dialogues, end_of_text=9, name="held") == 6
    ids, mask = packing.read_chat(tmp_path, "held")
    assert ids.dtype == np.uint16
    assert ids.tolist() == [5, 6, 7, 9, 8, 9]
    assert mask.tolist() == [False, True, True, False, True, False]
    assert packing.pack_chat(tmp_path, [], end_of_text=9) == 0
    assert [len(part) for part in packing.read_chat(tmp_path)] == [0, 0]


def test_xz():
    texts = ["é" * 100, "b" * 300]
    whole = ("é" * 100 + "b" * 300).encode()
    assert packing.xz_bits_per_byte(texts) == 8 * len(lzma.compress(whole, preset=9)) / 500
    with pytest.raises(ValueError, match="no text"):
        packing.xz_bits_per_byte([])


def write(seed, count):
    """A stand-in for the dialogues."""
    for i in range(count):
        yield f"task{i % 2}", f"<|im_start|>assistant\n{THINKS}{seed} {i}<|im_end|>\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_dialogues_do_not_depend_on_the_processes(learned, monkeypatch, workers):
    monkeypatch.setattr(chat, "CHUNK", 2)
    found = list(chat.encode(learned, write, seed=3, count=5, workers=workers))
    seeds = [chat.chunk_seed(3, number) for number in range(3)]
    assert len(set(seeds)) == 3
    given = [text for seed, n in zip(seeds, (2, 2, 1), strict=True) for _, text in write(seed, n)]
    decoded = [learned.decode(one.ids.tolist(), skip_special_tokens=False) for one in found]
    assert decoded == given
    assert [one.task for one in found] == ["task0", "task1", "task0", "task1", "task0"]
    assert all(one.mask.any() and not one.mask.all() for one in found)
