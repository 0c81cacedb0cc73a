"""Thinking and content."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.frontend import Channel, Tokenizer, initial_channel
from ninfer_jax.frontend.channels import ChannelState, Tag


def _initial(tokenizer: Tokenizer, text: str) -> Channel:
    return initial_channel(
        tokenizer.encode(text),
        tokenizer.think_start_id,
        tokenizer.think_end_id,
        tokenizer.special_token_ids,
    )


def test_the_end_of_the_prompt_decides(tokenizer: Tokenizer) -> None:
    turn = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert _initial(tokenizer, turn) is Channel.CONTENT
    assert _initial(tokenizer, turn + "<think>\n") is Channel.REASONING
    assert _initial(tokenizer, turn + "<think>\nhm, let me") is Channel.REASONING
    assert _initial(tokenizer, turn + "<think>\n\n</think>\n\n") is Channel.CONTENT
    assert _initial(tokenizer, turn + "<think>\nhm\n</think>\n\nThe ans") is Channel.CONTENT
    # What a user typed opens nothing.
    asked = "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert _initial(tokenizer, asked) is Channel.CONTENT
    assert initial_channel([1, 2], None, None) is Channel.CONTENT
    assert initial_channel([], 1, 2) is Channel.CONTENT


def _run(state: ChannelState, parts: list[str | Tag]) -> dict[Channel, str]:
    out = {Channel.CONTENT: "", Channel.REASONING: ""}
    for part in parts:
        if isinstance(part, Tag):
            state, acted = state.tag(part)
            if acted:
                continue
            part = {Tag.OPEN: "<think>", Tag.CLOSE: "</think>"}[part]
        where = state.channel
        state, text = state.push(part)
        out[where] += text
    return out


PIECES = st.lists(st.text("a \n\t你", max_size=4), max_size=8)


@given(thoughts=PIECES, answer=PIECES)
def test_white_space_around_the_tags(thoughts: list[str], answer: list[str]) -> None:
    out = _run(ChannelState(Channel.REASONING), [*thoughts, Tag.CLOSE, *answer])
    assert out[Channel.REASONING] == "".join(thoughts).strip()
    assert out[Channel.CONTENT] == "".join(answer).lstrip("\n")


@given(PIECES)
def test_content_without_thinking_is_untouched(answer: list[str]) -> None:
    assert _run(ChannelState(Channel.CONTENT), list(answer))[Channel.CONTENT] == "".join(answer)


def test_tags_that_act_and_tags_that_are_text() -> None:
    def run(channel: Channel, *parts: str | Tag) -> tuple[str, str]:
        out = _run(ChannelState(channel), list(parts))
        return out[Channel.REASONING], out[Channel.CONTENT]

    # The model opens thinking itself.
    assert run(Channel.CONTENT, Tag.OPEN, "\nhm\n", Tag.CLOSE, "\n\nyes") == ("hm", "yes")
    # It says the header again.
    assert run(Channel.REASONING, Tag.OPEN, "\nhm\n", Tag.CLOSE, "\n\nyes") == ("hm", "yes")
    # It writes about its tags.
    assert run(Channel.CONTENT, "the tag ", Tag.OPEN, " and ", Tag.CLOSE) == (
        "",
        "the tag <think> and </think>",
    )
    assert run(Channel.REASONING, "a", Tag.OPEN, "b", Tag.CLOSE, Tag.OPEN, "c", Tag.CLOSE) == (
        "a<think>b",
        "<think>c</think>",
    )
