"""What a scoring job computes: sequences with the span to score, cut into windows and chunks, grouped by context.

Pure and host-only. Numbers must not depend on what else is in a job, so how a sequence is cut depends on that sequence
alone: always at its branch point, then into chunks by their length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_jax.config import PAGE_TOKENS
from ninfer_jax.errors import InputError


@dataclass(frozen=True)
class Span:
    """A sequence from position 0 of which `tokens[first:]` are scored, each given all tokens before it."""

    tokens: np.ndarray
    """int32 [n]"""
    first: int
    """First token to score, 1..n-1."""
    branch: int
    """Tokens before the point from which sequences with an equal beginning go their own ways, 0..first-1."""

    @property
    def inputs(self) -> int:
        """Tokens the model runs on: all but the last."""
        return len(self.tokens) - 1

    @property
    def pages(self) -> int:
        """KV pages of its own: those from the branch point on, the one that the branch point cuts included."""
        return -(-self.inputs // PAGE_TOKENS) - self.branch // PAGE_TOKENS


@dataclass(frozen=True)
class Group:
    """Sequences that begin alike, up to a common branch point."""

    context: np.ndarray
    """int32: the tokens before the branch point; empty where every sequence begins by itself."""
    members: tuple[int, ...]
    """Which sequences of the job, the shortest first."""

    @property
    def pages(self) -> int:
        """KV pages of the context."""
        return -(-len(self.context) // PAGE_TOKENS)


@dataclass(frozen=True)
class Window:
    """Tokens `begin..end-1` of a text, run from an empty state; `first..end-1` are scored in it."""

    begin: int
    end: int
    first: int


def pair(context: Sequence[int], continuation: Sequence[int]) -> Span:
    """A continuation after a context. Its branch point is before the last token of the context, whose row scores the
    first token of the continuation."""
    tokens = np.asarray([*context, *continuation], np.int32)
    return Span(tokens, first=len(context), branch=len(context) - 1)


def text_windows(length: int, window: int, stride: int) -> list[Window]:
    """Windows over a text of `length` tokens in which every token after the first is scored exactly once.

    A window begins `stride` tokens after the one before it and scores what that did not reach, so from the second
    window on a scored token has at least `window - stride` tokens before it.

    Raises:
      InputError: the text is too short, or window and stride leave tokens unscored.
    """
    if length < 2:
        raise InputError(f"a text of {length} tokens has nothing to score; give at least 2")
    if window < 2:
        raise InputError(f"window must be at least 2 tokens; got {window}")
    if not 1 <= stride < window:
        raise InputError(
            f"stride must be 1..{window - 1}, less than the window of {window} tokens, or tokens between two windows "
            f"would have no context; got {stride}"
        )
    windows = [Window(0, min(window, length), 1)]
    while (last := windows[-1]).end < length:
        begin = last.begin + stride
        windows.append(Window(begin, min(begin + window, length), last.end))
    return windows


def window_span(ids: np.ndarray, window: Window) -> Span:
    """The sequence of one window; windows share nothing."""
    return Span(ids[window.begin : window.end], first=window.first - window.begin, branch=0)


def grouped(spans: Sequence[Span], *, share: bool = True) -> list[Group]:
    """Groups by equal contexts, the longest context first; those without one come last, together.

    `share=False` gives every sequence a context of its own, for tests: the numbers are the same.
    """
    found: dict[tuple[bytes, int], list[int]] = {}
    for index, span in enumerate(spans):
        own = -1 if share or not span.branch else index
        key = (span.tokens[: span.branch].tobytes(), own)
        found.setdefault(key, []).append(index)
    groups = [
        Group(
            spans[members[0]].tokens[: spans[members[0]].branch],
            tuple(sorted(members, key=lambda i: spans[i].inputs)),
        )
        for members in found.values()
    ]
    return sorted(groups, key=lambda g: -len(g.context))


def waves(
    groups: Iterable[Group], spans: Sequence[Span], *, rows: int, pages: int
) -> list[list[Group]]:
    """Groups whose contexts are held at the same time: at most `rows`, leaving pages for any one member.

    One group always fits where `pages` hold the longest sequence and one page more.
    """
    out: list[list[Group]] = []
    held = most = 0
    for group in groups:
        need = max(spans[i].pages for i in group.members)
        full = not out or len(out[-1]) == rows
        if full or held + group.pages + max(most, need) > pages:
            out.append([])
            held = most = 0
        out[-1].append(group)
        held += group.pages
        most = max(most, need)
    return out


def chunks(length: int, buckets: Sequence[int]) -> list[int]:
    """Lengths of the units that run `length` tokens: the largest bucket, then the rest."""
    whole, rest = divmod(length, buckets[-1])
    return [buckets[-1]] * whole + ([rest] if rest else [])


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket, of an ascending list, that holds a chunk."""
    return next(b for b in buckets if b >= length)
