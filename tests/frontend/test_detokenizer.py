"""The pieces of incremental decoding, joined, are what Hugging Face's decoder says of all ids."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_jax.frontend import Detokenizer, Tokenizer

# Ids below 256 are single bytes in the tiny vocabulary, so these lists are full of broken and split
# characters.
IDS = st.lists(
    st.one_of(st.integers(0, 255), st.integers(0, 1023), st.integers(996, 1100)), max_size=40
)


def _pieces(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    state = Detokenizer(tokenizer, skip)
    pieces = []
    for token_id in ids:
        state, piece = state.push(token_id)
        pieces.append(piece)
        assert len(state.pending) < 4
    state, piece = state.flush()
    assert state.flush() == (state, "")
    return [*pieces, piece]


@settings(max_examples=400, deadline=None)
@given(ids=IDS, skip=st.booleans())
def test_equals_full_decode_for_random_ids(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    assert "".join(_pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@settings(deadline=None)
@given(text=st.text(st.sampled_from("aé你😀🏳️‍🌈\u0301ก\n"), max_size=30))
def test_real_characters_never_show_a_replacement(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = _pieces(tokenizer, ids, True)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_is_held_until_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = [_byte_id(tokenizer, byte) for byte in "😀".encode()]
    assert _pieces(tokenizer, ids, True) == ["", "", "", "😀", ""]
    # A skipped special token between the bytes is as if it were not there; a shown one ends the
    # character.
    mixed = [ids[0], ids[1], 1000, ids[2], ids[3]]
    assert "".join(_pieces(tokenizer, mixed, True)) == "😀"
    assert "".join(_pieces(tokenizer, mixed, False)) == tokenizer.decode(mixed, False)
    assert _pieces(tokenizer, ids[:2], True) == ["", "", "\ufffd"]


def test_time_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    state = Detokenizer(tokenizer)
    begin = time.perf_counter()
    for i in range(100_000):
        state, _ = state.push(i % 998)
    # Decoding everything anew at each token would take minutes.
    assert time.perf_counter() - begin < 5


def _byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(998) if tokenizer.token_bytes(i) == bytes([byte]))
