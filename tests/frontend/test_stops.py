"""Stop strings in pieces against the plain search of the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_jax.frontend import StopMatcher

SMALL = st.text("ab你", min_size=1, max_size=4)


def _oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character, the naive way: the first end at which the text so far ends with a
    stop, longest first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def _run(pieces: list[str], stops: list[str], include: bool) -> tuple[list[str], str | None]:
    matcher = StopMatcher(tuple(stops), include)
    shown = []
    for piece in pieces:
        matcher, text, match = matcher.push(piece)
        shown.append(text)
        if match:
            return shown, match.stop
    _, text = matcher.flush()
    return [*shown, text], None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab你", max_size=5), max_size=12),
    stops=st.lists(SMALL, max_size=4),
    include=st.booleans(),
)
def test_equals_the_search_of_the_whole_text(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    shown, stop = _run(pieces, stops, include)
    assert ("".join(shown), stop) == _oracle("".join(pieces), stops, include)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=20), stops=st.lists(SMALL, min_size=1, max_size=3))
def test_holds_back_only_what_may_still_match(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    sofar = ""
    for char in text:
        matcher, shown, match = matcher.push(char)
        if match:
            break
        sofar += shown
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        assert not matcher.held or matcher.held in beginnings
        full = sofar + matcher.held
        assert not any(full.endswith(b) for b in beginnings if len(b) > len(matcher.held))


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=10),
    free=st.integers(0, 10),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_a_match_completed_while_forbidden_does_not_count(
    pieces: list[str], free: int, stops: list[str]
) -> None:
    matcher = StopMatcher(tuple(stops))
    beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
    shown = ""
    match = None
    for i, piece in enumerate(pieces):
        matcher, text, match = matcher.push(piece, may_stop=i >= free)
        shown += text
        if match:
            break
        assert matcher.held in beginnings
    if match is None:
        shown += matcher.flush()[1]
    whole = "".join(pieces)
    bound = len("".join(pieces[:free]))
    expected = whole, None
    for end in range(len(whole), bound, -1):
        for stop in sorted(stops, key=len):
            if whole[:end].endswith(stop):
                expected = whole[: end - len(stop)], stop
    assert (shown, match.stop if match else None) == expected


def test_examples() -> None:
    assert _run(["Hello wo", "rld END", " more"], ["END", "\n"], False) == (
        ["Hello wo", "rld "],
        "END",
    )
    assert _run(["a EN", "D"], ["END"], True)[0] == ["a ", "END"]
    assert _run(["a EN", "T"], ["END"], False) == (["a ", "ENT", ""], None)
    # "abc" and "bc" are complete together: the longer, or its "a" would leak.
    assert _run(["xab", "c"], ["bc", "abc"], False) == (["x", ""], "abc")
    # "bc" is complete before "abcd" can be.
    assert _run(["abcd"], ["abcd", "bc"], False) == (["a"], "bc")
    assert _run(["aab"], ["ab"], False) == (["a"], "ab")
    assert _run(["x"], [], False) == (["x", ""], None)
