"""Frontiers of a prompt: how many of its tokens another prompt will surely have too.

The state of a recurrent layer can be kept at a position, and only a prompt that begins with the
very same tokens can go on from there. The front end alone knows where that can be expected, since
it renders the conversation (CAT-04). Two things make a frontier exact (CAT-16):

- Text that agrees up to a character has tokens that agree up to each special token wholly inside
  it: such tokens cut the text before anything is tokenised (`Tokenizer.cut_token_ids`).
- Where a template puts a message boundary between ordinary words, the texts on both sides of it
  are tokenised and the ids compared.

All but the last token of a prompt are prefilled, so the useful frontiers are 1 to len - 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ninfer_jax.errors import ArtifactError, InputError
from ninfer_jax.frontend.prompt import is_integral

MAX_BOUNDARIES = 4
"""Most markers of one prompt, and most anchors (CAT-01, CAT-12)."""

# Private-use characters, which no text means anything by: no conversation has this turn already.
_REPLY = {"role": "assistant", "content": "\ue0f4reply\ue0f5"}
_NEXT = {"role": "user", "content": "\ue0f4next\ue0f5"}


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation, and the means to compare it with other renderings."""

    text: str
    ids: tuple[int, ...]
    cuts: Sequence[tuple[int, int, int]]
    """Of `Tokenizer.encode_with_cuts`: token index, first character, character after."""
    encode: Callable[[str], Sequence[int]]
    render: Callable[..., str]
    """`ChatTemplate.render` with this chat's tools and variables."""

    def try_render(self, messages: Sequence[Mapping[str, Any]], header: bool = False) -> str | None:
        """The text of other messages; None if the template refuses them."""
        try:
            return self.render(messages, add_generation_prompt=header)
        except (ArtifactError, InputError):
            return None

    def last_cut(self, end: int) -> tuple[int, int]:
        """Token index and first character of the last cut that ends by character `end`; zeros if
        there is none."""
        found = bisect_right(self.cuts, end, key=lambda cut: cut[2])
        return self.cuts[found - 1][:2] if found else (0, 0)

    def frontier(self, end: int, other: str | None = None) -> int | None:
        """The tokens before character `end`, if it is an exact boundary here and in `other`, a text
        that agrees up to there."""
        found = bisect_right(self.cuts, end, key=lambda cut: cut[1]) - 1
        if found >= 0 and self.cuts[found][1] == end:
            index, _, after = self.cuts[found]
            if other is None or other.startswith(self.text[end:after], end):
                return index
        index, begin = self.last_cut(end)
        head = tuple(self.encode(self.text[begin:end]))
        count = index + len(head)
        if self.ids[index:count] != head:
            return None
        if other is not None and tuple(self.encode(other[begin:])[: len(head)]) != head:
            return None
        return count

    def useful(self, frontier: int) -> int:
        """A frontier of the prompt as one of its prefill; less of what agrees agrees too."""
        return min(frontier, len(self.ids) - 1)

    @cached_property
    def user_header(self) -> str:
        """What the template writes before a user's words, from its last cut on; empty if that
        cannot be told."""
        before, found, _ = (self.try_render([_NEXT]) or "").partition(_NEXT["content"])
        spellings = {self.text[begin:after] for _, begin, after in self.cuts}
        begin = max((before.rfind(spelling) for spelling in spellings), default=-1)
        return before[begin:] if found and begin >= 0 else ""


def chat_rewrite_points(
    chat: RenderedChat, history: Sequence[Mapping[str, Any]]
) -> tuple[int, tuple[int, ...]]:
    """The recovery frontier R of a chat, and its rewrite_execution_frontiers.

    The history is rendered without a header, which is the message boundary; with a reply
    (ResponseReplay: what a retry or a call whose arguments were written anew agrees with); and with
    a reply and a user's next turn (TurnClosure: templates take the thinking out of the turn before
    it). A point is the deepest exact frontier of a rendering up to the message boundary, R the one
    that suits both (CAT-02, CAT-03). A rendering that the template refuses is left out; without
    one of the message boundary there is no R. R itself is saved, never a C-point: a template does
    not tell where a message's content ends and its closing tokens begin.

    Args:
        chat: the whole prompt.
        history: its messages up to the assistant's answer.

    Returns:
        The frontier, 0 if there is none, and both points, ascending, as far as there are any.
    """
    plain = chat.try_render(history)
    if plain is None:
        return 0, ()
    end = common_prefix(chat.text, plain)
    renderings = (
        chat.try_render([*history, _REPLY]),
        chat.try_render([*history, _REPLY, _NEXT], header=True),
    )
    points = [
        _agreement(chat, end, end == len(plain), rendering)
        for rendering in [r for r in renderings if r is not None] or [plain]
    ]
    return min(points), tuple(sorted({*points} - {0}))


def _agreement(chat: RenderedChat, end: int, closed: bool, rendering: str) -> int:
    """The deepest exact frontier of a rendering up to character `end`; that itself can be one if
    it is the end of a message (`closed`)."""
    agreed = min(end, common_prefix(chat.text, rendering))
    found = chat.frontier(end, rendering) if closed and agreed == end else None
    return chat.useful(chat.last_cut(agreed)[0] if found is None else found)


def chat_boundaries(
    chat: RenderedChat,
    messages: Sequence[Mapping[str, Any]],
    *,
    markers: Iterable[int],
    anchors: Iterable[int],
    has_tools: bool,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """The anchors and markers of a chat as frontiers, and notes on those left out or moved.

    Beside the caller's markers there is an automatic one, if fewer than four are left: after the
    system messages that lead, and the tools (CAT-13..15).

    Args:
        chat: the whole prompt.
        messages: its messages.
        markers: message counts.
        anchors: message counts.
        has_tools: whether tools are offered.
    """
    notes: list[str] = []
    known: dict[int, int | None] = {}

    def resolve(count: int) -> int | None:
        if count not in known:
            known[count] = _boundary(chat, messages[:count])
        return known[count]

    def all_of(name: str, counts: Iterable[int]) -> set[int]:
        found = set()
        for count in counts:
            frontier = resolve(count)
            if frontier is None:
                notes.append(
                    f"{name}: {count} messages end at no exact token boundary of this prompt; "
                    "left out"
                )
            else:
                found |= _in_prefill(name, frontier, len(chat.ids), notes)
        return found

    shared, private = all_of("markers", markers), all_of("anchors", anchors)
    leading = next(
        (i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")),
        len(messages),
    )
    if len(shared) < MAX_BOUNDARIES and (leading or has_tools):
        frontier = resolve(leading)
        if frontier is not None:
            shared |= _in_prefill("markers", frontier, len(chat.ids), [])
    return tuple(sorted(private)), tuple(sorted(shared)), tuple(notes)


def _boundary(chat: RenderedChat, messages: Sequence[Mapping[str, Any]]) -> int | None:
    """The exact frontier at which these first messages of the chat end."""
    plain = chat.try_render(messages) if messages else None
    if plain and chat.text.startswith(plain):
        frontier = chat.frontier(len(plain))
        if frontier is not None:
            return frontier
    # The template shows them otherwise when nobody speaks after them (thinking of an open turn), or
    # not at all (nobody asked anything): let a user speak, and cut before their header.
    header = chat.user_header
    before, found, _ = (chat.try_render([*messages, _NEXT]) or "").partition(_NEXT["content"])
    if not (header and found and before.endswith(header)):
        return None
    before = before.removesuffix(header)
    return chat.frontier(len(before)) if before and chat.text.startswith(before) else None


def raw_boundaries(
    length: int, *, markers: Iterable[int], anchors: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """The anchors and markers of a raw prompt as frontiers, and notes on those moved."""
    notes: list[str] = []
    shared = {f for count in markers for f in _in_prefill("markers", count, length, notes)}
    private = {f for count in anchors for f in _in_prefill("anchors", count, length, notes)}
    return tuple(sorted(private)), tuple(sorted(shared)), tuple(notes)


def _in_prefill(name: str, frontier: int, length: int, notes: list[str]) -> set[int]:
    if frontier < length:
        return {frontier} - {0}
    what = f"kept at {length - 1}" if length > 1 else "left out"
    notes.append(f"{name}: the prompt's last token, {length}, is not prefilled; {what}")
    return {length - 1} - {0}


def check_boundaries(
    name: str, given: Any, limit: int, unit: str, more: Iterable[int] = ()
) -> tuple[int, ...]:
    """A caller's boundaries, equal ones merged, ascending (CAT-12).

    Args:
        name: what messages call them.
        given: integers from 1 to `limit`.
        limit: how many units there are.
        unit: what is counted.
        more: boundaries given by other means.

    Raises:
        InputError: no list, not integers, outside the prompt, or more than four.
    """
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise InputError(f"{name} must be a list of counts, got {type(given).__name__}")
    for count in given:
        if not is_integral(count) or not 1 <= count <= limit:
            raise InputError(f"{name} has {count!r}; give counts of {unit} from 1 to {limit}")
    counts = sorted({*map(int, given), *more})
    if len(counts) > MAX_BOUNDARIES:
        raise InputError(f"{len(counts)} {name} are given; the limit is {MAX_BOUNDARIES}")
    return tuple(counts)


def common_prefix(first: str, second: str) -> int:
    """How many characters two texts have in common from their beginning."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
