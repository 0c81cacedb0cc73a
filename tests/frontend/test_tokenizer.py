"""Loading, encoding, decoding, and errors of damaged files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.resources import FrontendResources
from ninfer_jax.errors import ArtifactError, InputError, NotYetError
from ninfer_jax.frontend import Tokenizer


def test_ids_of_the_tiny_checkpoint(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 1024
    assert tokenizer.eos_token_ids == {1000, 998}
    assert (tokenizer.think_start_id, tokenizer.think_end_id) == (1022, 1023)
    assert tokenizer.special_token_ids == set(range(998, 1012))
    assert tokenizer.token_to_id("<|im_start|>") == 999
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.id_to_token(1022) == "<think>"
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_special_tokens_are_recognised_in_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<think>\n")
    assert ids[0] == 999
    assert 1000 in ids
    assert 1022 in ids
    assert tokenizer.encode("") == []


def test_skipping_leaves_out_only_special_added_tokens(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>a<think>b</think><tool_call>c<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == "a<think>b</think><tool_call>c"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_of_any_text(tokenizer: Tokenizer, text: str) -> None:
    import unicodedata

    expected = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == expected


def test_ids_without_an_entry_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([5000, *tokenizer.encode("a"), 248319, -1]) == "a"
    assert tokenizer.token_bytes(5000) == b""
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.id_to_token(2**40) is None


@pytest.mark.parametrize("text", ["a\ud800b", b"bytes", None, 3])
def test_what_is_no_text_is_refused(tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(InputError):
        tokenizer.encode(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '{"model": {"type": "BPE"}}', "\x00"])
def test_damaged_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ArtifactError, match="not a valid tokenizer") as error:
        Tokenizer.from_resources(FrontendResources(path))
    assert str(path) in str(error.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot read"):
        Tokenizer.from_resources(FrontendResources(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match="cannot read"):
        Tokenizer.from_resources(FrontendResources(tmp_path / "tokenizer.json"))


def _edited(resources: FrontendResources, folder: Path, **changes: object) -> FrontendResources:
    content = json.loads(resources.tokenizer_json.read_text()) | changes
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return replace(resources, tokenizer_json=path)


def test_other_decoders_are_not_supported_yet(resources: FrontendResources, tmp_path: Path) -> None:
    for decoder in (None, {"type": "Fuse"}):
        with pytest.raises(NotYetError, match="decoder"):
            Tokenizer.from_resources(_edited(resources, tmp_path, decoder=decoder))


def test_truncation_and_padding_of_the_file_are_dropped(
    resources: FrontendResources, tmp_path: Path
) -> None:
    limits = {
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 16},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 998,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    }
    loaded = Tokenizer.from_resources(_edited(resources, tmp_path, **limits))
    for text in ("abcdefghijklmnop qrstuvw xyz", "a"):
        assert loaded.decode(loaded.encode(text)) == text


def test_tokens_that_only_the_config_lists_are_added(
    resources: FrontendResources, tmp_path: Path
) -> None:
    added = json.loads(resources.tokenizer_json.read_text())["added_tokens"]
    loaded = Tokenizer.from_resources(_edited(resources, tmp_path, added_tokens=added[:-2]))
    assert (loaded.think_start_id, loaded.think_end_id) == (1022, 1023)
    with pytest.raises(ArtifactError, match="different checkpoints"):
        Tokenizer.from_resources(_edited(resources, tmp_path, added_tokens=added[:-5] + added[-3:]))
    bad = replace(resources, tokenizer_config={"added_tokens_decoder": {"x": {}}})
    with pytest.raises(ArtifactError, match="added_tokens_decoder"):
        Tokenizer.from_resources(bad)


def test_the_config_can_make_a_token_special(resources: FrontendResources) -> None:
    listed = {"1022": {"content": "<think>", "special": True}}
    loaded = Tokenizer.from_resources(
        replace(resources, tokenizer_config={"added_tokens_decoder": listed})
    )
    assert 1022 in loaded.special_token_ids
    assert loaded.decode(loaded.encode("a<think>b")) == "ab"


def test_eos_comes_from_both_files(resources: FrontendResources) -> None:
    only_generation = replace(resources, tokenizer_config={}, generation_config={"eos_token_id": 7})
    assert Tokenizer.from_resources(only_generation).eos_token_ids == {7}
    only_config = replace(
        resources, tokenizer_config={"eos_token": {"content": "<|im_end|>"}}, generation_config={}
    )
    assert Tokenizer.from_resources(only_config).eos_token_ids == {1000}
    neither = replace(resources, tokenizer_config={}, generation_config={})
    assert Tokenizer.from_resources(neither).eos_token_ids == frozenset()
    for wrong in ("x", [True], [-1], 1.5):
        with pytest.raises(ArtifactError, match="eos_token_id"):
            Tokenizer.from_resources(replace(resources, generation_config={"eos_token_id": wrong}))
    with pytest.raises(ArtifactError, match="does not contain"):
        Tokenizer.from_resources(replace(resources, tokenizer_config={"eos_token": "<nowhere>"}))


def test_a_named_special_token_is_special_even_if_the_file_forgot(
    resources: FrontendResources,
) -> None:
    loaded = Tokenizer.from_resources(
        replace(resources, tokenizer_config={"eos_token": "<|fim_pad|>"})
    )
    assert loaded.token_to_id("<|fim_pad|>") in loaded.special_token_ids
    assert loaded.decode(loaded.encode("a<|fim_pad|>b")) == "ab"
