"""Thinking and content: two channels of one output, split on token ids.

A chat model thinks between `<think>` and `</think>`. The split looks at ids, never at text: the
letters "</think>" typed out in ordinary tokens end nothing. The tags are in neither channel, and
the white space around them is dropped as Qwen's templates drop it when they render the turn again:
thinking is stripped at both ends, and the newlines that lead the content after `</think>` go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Channel(StrEnum):
    """Where text goes."""

    CONTENT = "content"
    REASONING = "reasoning"


class Tag(StrEnum):
    """What a token means to the channels."""

    OPEN = "open"
    CLOSE = "close"


def initial_channel(
    prompt_ids: Sequence[int],
    think_start_id: int | None,
    think_end_id: int | None,
    special_token_ids: Collection[int] = frozenset(),
) -> Channel:
    """The channel in which the output begins: what the end of the prompt left open.

    Qwen3.5's templates end a prompt with `<think>\\n` (thinking is open) or
    `<think>\\n\\n</think>\\n\\n` (it is over). The search goes back from the end of the prompt and
    stops at a special token, since a tag before the assistant's header is somebody's text.

    Args:
        prompt_ids: ids of the whole prompt.
        think_start_id: id of `<think>`, or None.
        think_end_id: id of `</think>`, or None.
        special_token_ids: ids that end a turn or begin one.
    """
    for token_id in reversed(prompt_ids):
        if token_id == think_end_id:
            return Channel.CONTENT
        if token_id == think_start_id:
            return Channel.REASONING
        if token_id in special_token_ids:
            break
    return Channel.CONTENT


@dataclass(frozen=True)
class ChannelState:
    """Which channel is open, and what white space waits. Immutable: each step returns the next
    state.

    - `<think>` opens thinking if thinking was not closed before and the content so far is blank;
      said again while the thinking is blank it is dropped.
    - `</think>` closes thinking.
    - Anywhere else a tag is text like any other: a model may write about its tags.
    """

    channel: Channel
    started: bool = False
    """Whether this channel has text other than white space."""
    closed: bool = False
    """Whether a `</think>` of this output closed the thinking."""
    blank: str = ""
    """Reasoning only: white space that goes out when more text follows, and goes nowhere if none
    does."""

    def tag(self, tag: Tag) -> tuple[ChannelState, bool]:
        """The state after a tag, and whether it acted as one; if it did not, push its text."""
        if tag is Tag.CLOSE and self.channel is Channel.REASONING:
            return ChannelState(Channel.CONTENT, closed=True), True
        if tag is Tag.OPEN and not self.started and not self.closed:
            return ChannelState(Channel.REASONING), True
        return self, False

    def push(self, text: str) -> tuple[ChannelState, str]:
        """The state after text in the open channel, and the part of it that is certain to belong to
        the output."""
        if self.channel is Channel.CONTENT:
            if self.closed and not self.started:
                text = text.lstrip("\n")
                started = bool(text)  # only the newlines right after the tag go
            else:
                started = self.started or bool(text.strip())
            return (self if started == self.started else replace(self, started=started)), text
        body = text.strip()
        if not body:
            return (replace(self, blank=self.blank + text) if self.started else self), ""
        lead = self.blank + text[: text.index(body[0])] if self.started else ""
        tail = text[len(text.rstrip()) :]
        return ChannelState(Channel.REASONING, True, False, tail), lead + body
