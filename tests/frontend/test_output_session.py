"""The whole way from token ids to deltas: rules of ending, channels, preview and commit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from artifacts.resources import FrontendResources
from ninfer_jax.errors import InputError
from ninfer_jax.frontend import Channel, OutputDelta, OutputSession, PreparedPrompt, Tokenizer
from ninfer_jax.sampling_params import SamplingParams

RAW = PreparedPrompt((1,))
CHAT = PreparedPrompt((1,), channel=Channel.CONTENT)
THINKING = PreparedPrompt((1,), channel=Channel.REASONING)
EOS, OTHER_EOS, THINK, UNTHINK = 1000, 998, 1022, 1023


def _session(tokenizer: Tokenizer, prompt: PreparedPrompt = RAW, **fields: Any) -> OutputSession:
    sampling = SamplingParams(**fields).resolve({}, vocab_size=2048)
    return OutputSession(tokenizer, sampling, prompt)


def _feed(session: OutputSession, ids: list[int], sizes: list[int]) -> list[OutputDelta]:
    """Commit ids in pieces of the given sizes, repeated, until they end or the output does."""
    deltas, at, turn = [], 0, 0
    while at < len(ids) and not session.finished:
        size = sizes[turn % len(sizes)]
        preview = session.preview(ids[at : at + size])
        assert 1 <= preview.accepted <= size  # UN-06
        assert preview.finished or preview.accepted == len(ids[at : at + size])
        deltas.append(session.commit(preview))
        at, turn = at + preview.accepted, turn + 1
    return deltas


def _run(tokenizer: Tokenizer, text: str | list[int], **fields: Any) -> tuple[str, Any, Any, int]:
    ids = tokenizer.encode(text) if isinstance(text, str) else text
    session = _session(tokenizer, **fields)
    _feed(session, ids, [1])
    out = session.final()
    return out.text, out.finish_reason, out.stop_reason, len(out.token_ids)


# Rules of ending.


def test_eos_ends_and_has_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi")
    n = len(ids)
    for eos in (EOS, OTHER_EOS):
        assert _run(tokenizer, [*ids, eos, *ids]) == ("hi", "stop", None, n + 1)
        shown = _run(tokenizer, [*ids, eos, *ids], skip_special_tokens=False)
        assert shown == ("hi", "stop", None, n + 1)
    kept = _run(tokenizer, [*ids, EOS], skip_special_tokens=False, include_stop_str_in_output=True)
    assert kept == ("hi<|im_end|>", "stop", None, n + 1)
    on = _run(tokenizer, [*ids, EOS, *ids], ignore_eos=True)
    assert on == ("hihi", None, None, 2 * n + 1)


def test_stop_token_ids(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(x)[0] for x in "abc")
    assert _run(tokenizer, [a, b, c], stop_token_ids=[b]) == ("a", "stop", b, 2)
    kept = _run(tokenizer, [a, b, c], stop_token_ids=[b], include_stop_str_in_output=True)
    assert kept == ("ab", "stop", b, 2)
    # An id that is an end token anyway ends as one, unless end tokens are ignored.
    assert _run(tokenizer, [a, EOS], stop_token_ids=[EOS]) == ("a", "stop", None, 2)
    assert _run(tokenizer, [a, EOS], stop_token_ids=[EOS], ignore_eos=True) == ("a", "stop", EOS, 2)


def test_stop_strings(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one. TWO three")
    text, reason, stop, _ = _run(tokenizer, ids, stop=["WO t", "zz"])
    assert (text, reason, stop) == ("one. T", "stop", "WO t")
    text, *_ = _run(tokenizer, ids, stop="WO t", include_stop_str_in_output=True)
    assert text == "one. TWO t"


def test_length(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    assert _run(tokenizer, [a] * 5, max_tokens=3) == ("aaa", "length", None, 3)
    # The end token as the last allowed one is an end, not a cut.
    assert _run(tokenizer, [a, a, EOS], max_tokens=3) == ("aa", "stop", None, 3)
    # A beginning of a stop string goes out when nothing can complete it.
    assert _run(tokenizer, [a] * 5, max_tokens=3, stop="aaaa") == ("aaa", "length", None, 3)


def test_an_unfinished_character_goes_out_at_the_end(tokenizer: Tokenizer) -> None:
    part = next(i for i in range(998) if tokenizer.token_bytes(i) == b"\xf0")
    assert _run(tokenizer, [part], max_tokens=1)[0] == "\ufffd"
    assert _run(tokenizer, [part, EOS])[0] == "\ufffd"
    # Even then a stop string does not leak.
    assert _run(tokenizer, [part, EOS], stop="\ufffd") == ("", "stop", "\ufffd", 2)


def test_min_tokens(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    assert _run(tokenizer, [EOS, a, EOS, a], min_tokens=2) == ("a", "stop", None, 3)
    assert _run(tokenizer, [a, a, a, a], min_tokens=2, stop="aa") == ("a", "stop", "aa", 3)
    assert _run(tokenizer, [a, a, a], min_tokens=2, stop_token_ids=[a]) == ("aa", "stop", a, 3)
    session = _session(tokenizer, stop_token_ids=[a])
    assert session.ending_token_ids == {a, EOS, OTHER_EOS}
    assert _session(tokenizer, ignore_eos=True).ending_token_ids == frozenset()


def test_ids_without_text(tokenizer: Tokenizer) -> None:
    assert _run(tokenizer, [2000, 1500], max_tokens=2) == ("", "length", None, 2)


# Channels.


def test_thinking_and_content(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\nhm, yes.\n\n</think>\n\nThe answer.")
    session = _session(tokenizer, THINKING)
    deltas = _feed(session, [*ids, EOS], [1])
    out = session.final()
    assert (out.reasoning, out.text, out.finish_reason) == ("hm, yes.", "The answer.", "stop")
    assert "".join(d.reasoning for d in deltas) == "hm, yes."
    assert all(not (d.reasoning and d.text) for d in deltas)


def test_a_raw_prompt_has_no_channels(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a</think>\n\nb<think>")
    session = _session(tokenizer, RAW)
    _feed(session, ids, [1])
    assert session.final().text == "a</think>\n\nb<think>"
    assert session.final().reasoning is None


def test_stop_strings_search_only_the_content_of_a_chat(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one STOP\n\n</think>\n\ntwo\n\nthree STOP four")
    session = _session(tokenizer, THINKING, stop=["STOP"])
    _feed(session, ids, [1])
    out = session.final()
    assert (out.reasoning, out.text, out.stop_reason) == ("one STOP", "two\n\nthree ", "STOP")
    # The newlines that belong to the tag are nobody's stop.
    session = _session(tokenizer, THINKING, stop=["\n\n"])
    _feed(session, ids, [1])
    assert session.final().text == "two"


def test_tool_calls_of_a_chat(tokenizer: Tokenizer) -> None:
    call = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    schema = {"properties": {"a": {"type": "integer"}}}
    tools = ({"type": "function", "function": {"name": "f", "parameters": schema}},)
    ids = [*tokenizer.encode("hm</think>\n\nLook: " + call), EOS]
    session = _session(tokenizer, replace(THINKING, tools=tools))
    _feed(session, ids, [4])
    out = session.final(scope="r")
    assert (out.reasoning, out.text, out.content) == ("hm", "Look: " + call, "Look:")
    assert [(c.name, c.arguments) for c in out.tool_calls] == [("f", '{"a": 1}')]
    session = _session(tokenizer, THINKING)
    _feed(session, ids, [4])
    assert session.final().content == "Look: " + call
    assert session.final().tool_calls == ()


def test_thinking_budget(tokenizer: Tokenizer, resources: FrontendResources) -> None:
    a = tokenizer.encode("a")[0]
    session = _session(tokenizer, THINKING, thinking_budget=2)
    assert session.control_tokens() == ()
    _feed(session, [a], [1])
    assert session.control_tokens() == ()
    _feed(session, [a], [1])
    assert session.control_tokens() == (UNTHINK,)
    session.commit(session.preview(session.control_tokens()))
    assert session.control_tokens() == ()
    _feed(session, [a, a, a], [1])
    assert (session.final().reasoning, session.final().text) == ("aa", "aaa")
    assert _session(tokenizer, THINKING, thinking_budget=0).control_tokens() == (UNTHINK,)
    assert _session(tokenizer, CHAT, thinking_budget=0).control_tokens() == ()
    with pytest.raises(InputError, match="thinking_budget"):
        _session(tokenizer, RAW, thinking_budget=2)


# Preview and commit.


def test_preview_changes_nothing(tokenizer: Tokenizer) -> None:
    session = _session(tokenizer, stop="ab")
    a, b = (tokenizer.encode(x)[0] for x in "ab")
    assert session.preview([a, b]).finished
    assert session.preview([a]).delta.text == ""
    assert session.num_tokens == 0
    assert session.final().token_ids == ()
    session.commit(session.preview([b, b]))
    assert session.final().text == "bb"


def test_misuse_is_refused(tokenizer: Tokenizer) -> None:
    session = _session(tokenizer)
    with pytest.raises(ValueError, match="at least one"):
        session.preview([])
    first, second = session.preview([5]), session.preview([6])
    session.commit(first)
    for stale in (first, second):
        with pytest.raises(ValueError, match="once"):
            session.commit(stale)
    session.commit(session.preview([EOS]))
    with pytest.raises(ValueError, match="finished"):
        session.preview([5])


# Bytes of split characters, whole tokens, tags, special and end tokens, ids without an entry.
IDS = st.lists(
    st.one_of(
        st.sampled_from([64, 65, 68, 0, 198, 220]),  # a b e ! newline space
        st.integers(0, 255),
        st.integers(0, 997),
        st.sampled_from([EOS, 999, 1005, 1012, THINK, UNTHINK, 198, 1500]),
    ),
    min_size=1,
    max_size=30,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(10, 30),
        "min_tokens": st.integers(0, 10),
        "stop": st.lists(st.text("ab \n!e", min_size=1, max_size=2), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, 300), max_size=2),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
    },
)
PROMPTS = st.sampled_from([RAW, CHAT, THINKING])


@settings(max_examples=300, deadline=None)
@given(
    ids=IDS,
    fields=FIELDS,
    prompt=PROMPTS,
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
)
def test_many_at_once_is_one_by_one(
    tokenizer: Tokenizer,
    ids: list[int],
    fields: dict[str, Any],
    prompt: PreparedPrompt,
    sizes: list[int],
) -> None:
    one = _session(tokenizer, prompt, **fields)
    many = _session(tokenizer, prompt, **fields)
    _feed(one, ids, [1])
    deltas = _feed(many, ids, sizes)
    assert one.final() == many.final()
    assert one.finished == many.finished
    assert "".join(d.text for d in deltas) == many.final().text
    assert tuple(i for d in deltas for i in d.token_ids) == many.final().token_ids


@settings(max_examples=200, deadline=None)
@given(thoughts=IDS, answer=IDS, skip=st.booleans(), sizes=st.lists(st.integers(1, 7), min_size=1))
def test_channels_against_decoding_each_part(
    tokenizer: Tokenizer, thoughts: list[int], answer: list[int], skip: bool, sizes: list[int]
) -> None:
    thoughts, answer = (
        [i for i in part if i not in (EOS, THINK, UNTHINK)] for part in (thoughts, answer)
    )
    ids = [*thoughts, UNTHINK, *answer, EOS]
    session = _session(tokenizer, THINKING, skip_special_tokens=skip)
    _feed(session, ids, sizes)
    out = session.final()
    assert (out.reasoning or "") == tokenizer.decode(thoughts, skip).strip()
    assert out.text == tokenizer.decode(answer, skip).lstrip("\n")
    assert out.token_ids == tuple(ids)


def _oracle(tokenizer: Tokenizer, ids: list[int], fields: dict[str, Any]) -> tuple[Any, ...]:
    """The rules on the whole output of a raw prompt, by decoding every prefix anew."""
    params = SamplingParams(**fields)
    stops, low = params.stop or (), params.min_tokens or 0
    skip = params.skip_special_tokens is not False
    keep = bool(params.include_stop_str_in_output)
    eos = set() if params.ignore_eos else {EOS, OTHER_EOS}
    stop_ids = set(params.stop_token_ids or ())
    before = ""
    for k in range(1, len(ids) + 1):
        last = ids[k - 1]
        ends = k > low and (last in eos or last in stop_ids)
        cut = k > params.max_tokens - 1 if params.max_tokens else False
        shown = ids[: k - 1] if ends and not keep else ids[:k]
        text = tokenizer.decode(shown, skip)
        if not (ends or cut):
            text = _certain(tokenizer, shown, skip)
        if k > low:
            for end in range(len(before) + 1, len(text) + 1):
                for stop in sorted(stops, key=len, reverse=True):
                    if text[:end].endswith(stop):
                        return text[: end if keep else end - len(stop)], "stop", stop, k
        if ends:
            return text, "stop", None if last in eos else last, k
        if cut:
            return text, "length", None, k
        before = text
    return None, None, None, len(ids)


def _certain(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """The decoding without an unfinished character: what every continuation agrees on."""
    continued = [
        tokenizer.decode(ids + more, skip)
        for more in ([0], *([i] for i in range(256) if tokenizer.token_bytes(i)[:1] >= b"\x80"))
    ]
    prefix = continued[0]
    for other in continued[1:]:
        size = next(
            (i for i, (a, b) in enumerate(zip(prefix, other, strict=False)) if a != b),
            min(len(prefix), len(other)),
        )
        prefix = prefix[:size]
    return prefix


@settings(max_examples=200, deadline=None)
@given(ids=IDS, fields=FIELDS)
def test_raw_output_against_the_oracle(
    tokenizer: Tokenizer, ids: list[int], fields: dict[str, Any]
) -> None:
    text, reason, stop, count = _oracle(tokenizer, ids, fields)
    got = _run(tokenizer, ids, **fields)
    assert got[1:] == (reason, stop, count)
    if text is not None:
        assert got[0] == text


class Sessions(RuleBasedStateMachine):
    """A session that is previewed at will and committed now and then, beside one that only
    commits."""

    tokenizer: Tokenizer

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    @rule()
    def begin(self) -> None:
        fields = {"stop": ["ab", "b!"], "max_tokens": 25, "min_tokens": 3}
        self.session = _session(self.tokenizer, THINKING, **fields)
        self.plain = _session(self.tokenizer, THINKING, **fields)
        self.shown = ["", ""]

    @precondition(lambda self: not self.session.finished)
    @rule(ids=IDS)
    def only_look(self, ids: list[int]) -> None:
        before = self.session.final()
        assert self.session.preview(ids) == self.session.preview(ids)
        assert self.session.final() == before

    @precondition(lambda self: not self.session.finished)
    @rule(ids=st.lists(st.sampled_from([0, 64, 65, 130, 198, UNTHINK]), min_size=1, max_size=4))
    def commit(self, ids: list[int]) -> None:
        delta = self.session.commit(self.session.preview(ids))
        self.shown[0] += delta.text
        self.shown[1] += delta.reasoning
        _feed(self.plain, ids, [1])

    @invariant()
    def agrees(self) -> None:
        out = self.session.final()
        assert out == self.plain.final()
        assert [out.text, out.reasoning or ""] == self.shown
        assert out.reasoning is None or out.reasoning == out.reasoning.lstrip()


def test_sessions_statefully(tokenizer: Tokenizer) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    Sessions.tokenizer = tokenizer
    run_state_machine_as_test(
        Sessions, settings=settings(max_examples=30, stateful_step_count=12, deadline=None)
    )
