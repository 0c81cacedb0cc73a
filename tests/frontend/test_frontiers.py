"""Frontiers: what the next prompt still agrees with, and where callers' boundaries lie.

The oracle is always the tokens of whole renderings. Real templates are tried where NINFER_TEMPLATES
names a folder with them; the small ones here behave like kinds of templates in the wild.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.resources import FrontendResources
from ninfer_jax.errors import InputError
from ninfer_jax.frontend import Frontend, PreparedPrompt, Tokenizer

REAL = os.environ.get("NINFER_TEMPLATES")
USER = {"role": "user", "content": "What is it?"}
YES = {"role": "assistant", "content": "Yes.", "reasoning": "Is it?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {"at": "it"}}]}
FOUND = {"role": "tool", "content": "found"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

_TURNS = "{% for m in messages %}"
_TEXT = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c|tojson }}{% endfor %}"
_SYSTEM = "{% if tools %}<|im_start|>system\n{{ tools|tojson }}<|im_end|>\n{% endif %}"
_HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SMALL = {
    # Every turn stays as it was.
    "append": _SYSTEM
    + _TURNS
    + f"<|im_start|>{{{{ m.role }}}}\n{_TEXT}<|im_end|>\n{{% endfor %}}{_HEADER}",
    # The header of the answer is another one once the answer is history.
    "header": _SYSTEM + _TURNS + f"<|im_start|>{{{{ m.role }}}}\n{_TEXT}<|im_end|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|box_start|>say<|box_end|>\n{% endif %}",
    # Thinking only where it follows the last user's message.
    "thinking": "{% set last = namespace(user=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    + _TURNS
    + "<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > last.user %}<think>{{ m.reasoning }}</think>"
    f"{{% endif %}}{_TEXT}<|im_end|>\n{{% endfor %}}{_HEADER}",
    # Words alone make the turns.
    "words": _TURNS
    + f"{{{{ m.role|upper }}}}: {_TEXT}{{{{ '\n' }}}}{{% endfor %}}"
    + "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    # No header of the answer at all.
    "brackets": _TURNS
    + "{% if m.role == 'assistant' %} "
    + _TEXT
    + "<|endoftext|>{% else %}[{{ m.role }}] "
    + _TEXT
    + " [/]{% endif %}{% endfor %}",
    # The tools stand before the last user's message, and go with it.
    "tools": "{% set last = namespace(user=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    + _TURNS
    + "{% if loop.index0 == last.user and tools %}<|box_start|>{{ tools|tojson }}<|box_end|>"
    f"{{% endif %}}<|im_start|>{{{{ m.role }}}}\n{_TEXT}<|im_end|>\n{{% endfor %}}{_HEADER}",
}
APPENDING = ("append", "header", "words", "brackets")
NAMES = [*SMALL, "own", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"]


@pytest.fixture(scope="module")
def load(resources: FrontendResources) -> Any:
    """The front end with a template by its name, or by its text."""

    def load(name: str) -> Frontend:
        text = SMALL.get(name, name)
        if name == "own":
            text = str(resources.chat_template)
        elif name.startswith("qwen"):
            if not REAL or not Path(REAL).is_dir():
                pytest.skip("NINFER_TEMPLATES names no folder with the real chat templates")
            text = (Path(REAL) / f"{name}.jinja").read_text()
        return Frontend.from_resources(resources, chat_template=text)

    return load


@pytest.fixture(scope="module", params=NAMES)
def named(request: pytest.FixtureRequest, load: Any) -> tuple[str, Frontend]:
    return request.param, load(request.param)


def _tokens(frontend: Frontend, messages: Any, **kwargs: Any) -> tuple[int, ...]:
    assert frontend.chat_template is not None
    return tuple(frontend.tokenizer.encode(frontend.chat_template.render(messages, **kwargs)))


def _text(frontend: Frontend, prompt: PreparedPrompt, frontier: int) -> str:
    return frontend.tokenizer.decode(prompt.token_ids[:frontier], skip_special_tokens=False)


def _conversation(tools: bool) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """The requests of twenty turns, and the last user's words in each. Some answers take one or two
    calls before, and each answer is kept as it came, with its thinking."""
    messages: list[dict[str, Any]] = [{"role": "developer", "content": " Be brief.\n"}]
    for turn in range(20):
        words = f"question {turn}{'?' * (turn % 3)} naïve 猫"
        messages.append({"role": "user", "content": words})
        for step in range(turn % 3 if tools else 0):
            yield list(messages), words
            arguments = {"at": f"thing {step}", "n": [turn]}
            call = {"id": "1", "function": {"name": "look", "arguments": arguments}}
            thought = f"I look {step}"
            messages.append({"role": "assistant", "reasoning": thought, "tool_calls": [call] * 2})
            messages.extend([{"role": "tool", "content": f"found {step}\n\n"}, FOUND])
        yield list(messages), words
        answer = {"role": "assistant", "content": f"  answer {turn}", "reasoning": f"hm {turn}\n"}
        messages.append(answer)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_next_prompt_begins_with_what_is_kept(
    named: tuple[str, Frontend], tools: Any, thinking: bool | None
) -> None:
    """CAT-02..04: over twenty turns, each prompt up to its recovery frontier begins the next."""
    name, frontend = named
    variables = {} if thinking is None else {"enable_thinking": thinking}
    before: PreparedPrompt | None = None
    for messages, words in _conversation(bool(tools)):
        prompt = frontend.prepare_chat(messages, tools=tools, **variables)
        assert 0 < prompt.recovery < len(prompt)
        assert prompt.recovery in prompt.splits
        assert all(0 < split < len(prompt) for split in prompt.splits)
        assert prompt.notes == ()
        if before is not None:
            kept = before.token_ids[: before.recovery]
            assert prompt.token_ids[: before.recovery] == kept
        before = prompt
        depth = _text(frontend, prompt, prompt.recovery)
        if name != "tools" or not tools:  # this one rewrites what stands before the user's words
            assert words in depth
        if name in APPENDING or (name == "qwen3_8" and thinking is not False):
            assert str(messages[-1]["content"]).strip() in depth
        history = _tokens(frontend, messages, tools=tools, add_generation_prompt=False, **variables)
        assert prompt.recovery <= len(history)


@pytest.mark.parametrize("name", APPENDING)
def test_where_turns_are_only_appended_it_is_the_message_boundary(load: Any, name: str) -> None:
    """CAT-03: R is before the answer's header, however much of that would agree as well."""
    frontend = load(name)
    for messages in ([USER], [SYSTEM, USER], [USER, YES, USER], [USER, CALL, FOUND]):
        prompt = frontend.prepare_chat(messages)
        history = _tokens(frontend, messages, add_generation_prompt=False)
        assert prompt.token_ids[: len(history)] == history
        assert prompt.recovery == min(len(history), len(prompt) - 1)
        assert prompt.splits == (prompt.recovery,)


@pytest.mark.parametrize("name", ["thinking", "own", "qwen3_5_think", "qwen3_6"])
def test_an_open_turn_keeps_the_point_before_its_first_answer(load: Any, name: str) -> None:
    """CAT-02: R is TurnClosure's, the same from step to step; CAT-06: both points are splits."""
    frontend = load(name)
    first = frontend.prepare_chat([SYSTEM, USER], tools=TOOLS)
    open_turn = [SYSTEM, USER]
    for _ in range(3):
        open_turn += [CALL, FOUND]
        prompt = frontend.prepare_chat(open_turn, tools=TOOLS)
        history = _tokens(frontend, open_turn, tools=TOOLS, add_generation_prompt=False)
        assert prompt.recovery == first.recovery
        assert prompt.splits == (first.recovery, len(history))
    closed = frontend.prepare_chat([*open_turn, YES, USER], tools=TOOLS)
    assert closed.token_ids[: prompt.recovery] == prompt.token_ids[: prompt.recovery]
    assert closed.token_ids[: prompt.splits[1]] != prompt.token_ids[: prompt.splits[1]]
    assert closed.splits == (closed.recovery,)


def test_prompts_without_a_header(named: tuple[str, Frontend]) -> None:
    """The whole of a prompt that ends with a message agrees; its last token is not prefilled."""
    _, frontend = named
    prompt = frontend.prepare_chat([USER], add_generation_prompt=False)
    assert prompt.recovery == len(prompt) - 1
    answered = frontend.prepare_chat([USER, YES], add_generation_prompt=False)
    after = frontend.prepare_chat([USER, YES, USER])
    assert "What is it?" in _text(frontend, answered, answered.recovery)
    assert after.token_ids[: answered.recovery] == answered.token_ids[: answered.recovery]


def test_a_message_to_be_continued_counts_as_the_answer(named: tuple[str, Frontend]) -> None:
    """CAT-02: ResponseReplay lies before the answer, also where its beginning is given."""
    _, frontend = named
    begun = [USER, {"role": "assistant", "content": "The ans"}]
    prompt = frontend.prepare_chat(begun, continue_final_message=True, markers=[1, 2])
    asked = frontend.prepare_chat([USER])
    assert prompt.recovery == len(_tokens(frontend, [USER], add_generation_prompt=False))
    assert prompt.recovery - asked.recovery in (0, 1)  # 1: there is no header, nor a token after it
    assert prompt.markers == (prompt.recovery,)
    assert prompt.notes == (
        "markers: 2 messages end at no exact token boundary of this prompt; left out",
    )


def test_a_template_that_refuses_probes(load: Any) -> None:
    """CAT-04: what the template refuses is left out; without a message boundary there is no R."""
    turns = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    refuse = "{% if RULE %}{{ raise_exception('no') }}{% endif %}"
    header = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for rule in (
        "messages|length > 1",
        "messages|length > 2",
        "messages|length == 2",
        "messages[-1].role != 'user'",
        "messages|length > 1 and messages[-1].role == 'user'",
    ):
        prompt = load(refuse.replace("RULE", rule) + turns + header).prepare_chat([USER])
        history = _tokens(load(turns), [USER])
        assert prompt.recovery == len(history), rule
        assert prompt.splits == (len(history),)
    broken = load(refuse.replace("RULE", "not add_generation_prompt") + turns + header)
    prompt = broken.prepare_chat([SYSTEM, USER], markers=[1])
    assert (prompt.recovery, prompt.splits, prompt.markers) == (0, (), ())
    assert len(prompt.notes) == 1


def test_a_template_that_agrees_with_nothing(load: Any) -> None:
    """A prompt that tells its own length agrees with no other."""
    frontend = load("{{ messages|length }}{% for m in messages %}{{ m.content }}\n{% endfor %}>")
    prompt = frontend.prepare_chat([SYSTEM, USER], markers=[1])
    assert (prompt.recovery, prompt.splits, prompt.markers) == (0, (), ())


def test_at_most_three_renderings_choose_it(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = load("own")
    assert frontend.chat_template is not None
    frontend.prepare_chat([USER])
    calls = []
    render = type(frontend.chat_template).render

    def counted(self: Any, *args: Any, **kwargs: Any) -> str:
        calls.append(args)
        return render(self, *args, **kwargs)

    monkeypatch.setattr(type(frontend.chat_template), "render", counted)
    frontend.prepare_chat([USER, YES, USER])
    assert len(calls) == 4


def test_a_cut_counts_only_where_all_of_it_agrees(load: Any) -> None:
    """CAT-16: the blank before `<|` is part of another token where no special token follows."""
    history = "<|im_start|>{{ messages[0].content }}<|im_end|>hello "
    rest = "{% if messages|length > 1 %}<|b{% else %}<|box_start|>{% endif %}\n"
    frontend = load(history + rest)
    prompt = frontend.prepare_chat([USER])
    assert _text(frontend, prompt, prompt.recovery).endswith("What is it?")
    for after in ([YES], [YES, USER]):
        assert (
            _tokens(frontend, [USER, *after])[: prompt.recovery]
            == (prompt.token_ids[: prompt.recovery])
        )


def test_words_grown_together_have_no_boundary(load: Any) -> None:
    """CAT-16: where the next turn goes on in the same word, the tokens do not end."""
    frontend = load("{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "the wat"}, {"role": "assistant", "content": "er is"}]
    prompt = frontend.prepare_chat(messages, markers=[1])
    assert prompt.token_ids[:2] != _tokens(frontend, messages[:1])[-2:]
    assert prompt.markers == ()
    assert len(prompt.notes) == 1


def test_a_header_that_depends_on_its_place_is_no_boundary(load: Any) -> None:
    """CAT-14: what cannot be told from a header is not taken for the end of a message."""
    frontend = load(
        "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ loop.index }}\n{{ m.content }}{% endfor %}"
    )
    prompt = frontend.prepare_chat([USER, YES, USER], markers=[2])
    assert (prompt.markers, len(prompt.notes)) == ((), 1)


WORDS = st.text(st.sampled_from("aB \n\t.:'é猫0<|") | st.characters(codec="utf-8"), max_size=9)
PIECES = st.lists(
    WORDS | st.sampled_from(["<|im_end|>", "<|im_start|>", "</think>", "<think>", "e\u0301"]),
    max_size=3,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_frontiers_are_exact_whatever_is_said(load: Any, data: st.DataObject) -> None:
    """CAT-16: with any words before, and any answer and question after."""
    name = data.draw(st.sampled_from([n for n in NAMES if not n.startswith("qwen") or REAL]))
    frontend = load(name)
    messages: list[dict[str, Any]] = [{"role": "user", "content": data.draw(PIECES)}]
    for _ in range(data.draw(st.integers(0, 2))):
        said, thought = data.draw(PIECES), data.draw(WORDS)
        messages.append({"role": "assistant", "content": said, "reasoning": thought})
        messages.append({"role": data.draw(st.sampled_from(["user", "tool"])), "content": "so"})
    prompt = frontend.prepare_chat(messages, anchors=[1], markers=[len(messages)])
    answer = {"role": "assistant", "content": data.draw(PIECES), "reasoning": data.draw(WORDS)}
    question = {"role": "user", "content": data.draw(PIECES)}
    kept = prompt.token_ids[: prompt.recovery]
    for after in ([answer], [answer, question]):
        if name == "brackets" and not str(answer["content"])[:1].isalpha():
            continue  # no header parts its prompts from the answer: a letter is what was tried
        assert _tokens(frontend, [*messages, *after])[: prompt.recovery] == kept
    for frontier in (*prompt.anchors, *prompt.markers):
        assert (
            tuple(frontend.tokenizer.encode(_text(frontend, prompt, frontier)))
            == (prompt.token_ids[:frontier])
        )


# Boundaries that callers give.


def test_raw_prompts(load: Any) -> None:
    """CAT-02: the P-point; CAT-12: markers in order, equal ones once."""
    frontend = load("own")
    prompt = frontend.prepare_prompt(list(range(9)), markers=(5, 2, np.int64(5)), anchors=[8])
    assert (prompt.recovery, prompt.splits) == (8, ())
    assert (prompt.markers, prompt.anchors, prompt.notes) == ((2, 5), (8,), ())
    prompt = frontend.prepare_prompt([1, 2, 3], markers=np.array([3, 2]), anchors=[3, 1])
    assert (prompt.markers, prompt.anchors) == ((2,), (1, 2))
    assert prompt.notes == tuple(
        f"{name}: the prompt's last token, 3, is not prefilled; kept at 2"
        for name in ("markers", "anchors")
    )
    one = frontend.prepare_prompt([7], markers=[1])
    assert (one.recovery, one.markers) == (0, ())
    assert one.notes == ("markers: the prompt's last token, 1, is not prefilled; left out",)
    assert frontend.prepare_prompt(one) is one
    with pytest.raises(InputError, match="markers of a prepared prompt"):
        frontend.prepare_prompt(one, markers=[1])


@pytest.mark.parametrize("name", ["markers", "anchors"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([0], "from 1 to 6"),
        ([-1], "from 1 to 6"),
        ([7], "from 1 to 6"),
        ([True], "True"),
        ([1.0], "1.0"),
        (["1"], "'1'"),
        ([1, 2, 3, 4, 5], "the limit is 4"),
        (3, "list of counts, got int"),
        ("3", "list of counts, got str"),
        (None, "list of counts, got NoneType"),
    ],
)
def test_bad_boundaries_are_refused(load: Any, name: str, given: Any, words: str) -> None:
    """CAT-12: at most four, and inside the prompt; CAT-01 bounds anchors alike."""
    frontend = load("own")
    with pytest.raises(InputError, match=name) as error:
        frontend.prepare_chat([USER, YES] * 3, **{name: given})
    assert words in str(error.value)
    assert "messages" in str(error.value) or "from" not in words
    with pytest.raises(InputError, match=words):
        frontend.prepare_prompt([1] * 6, **{name: given})
    assert frontend.prepare_prompt([1] * 6, **{name: [1, 2, 3, 4, 4]})


def test_boundaries_of_chats(named: tuple[str, Frontend]) -> None:
    """CAT-12, CAT-14: explicit boundaries lie exactly where the messages end in this prompt."""
    name, frontend = named
    messages = [SYSTEM, USER, YES, {"role": "user", "content": "Sure?"}]
    ends = ["Be brief.", "What is it?", "Yes.", "Sure?"]
    for boundaries in ({"markers": [1, 2, 3, 4]}, {"anchors": [4, 3, 2, 1]}):
        prompt = frontend.prepare_chat(messages, **boundaries)
        found = prompt.markers if "markers" in boundaries else prompt.anchors
        assert len(found) == 4
        assert prompt.notes == () if name != "brackets" else len(prompt.notes) == 1
        for frontier, end, later in zip(found, ends, [*ends[1:], "assistant"], strict=True):
            text = _text(frontend, prompt, frontier)
            assert end in text
            assert later not in text.partition(end)[2]
            assert tuple(frontend.tokenizer.encode(text)) == prompt.token_ids[:frontier]
    assert prompt.recovery == prompt.anchors[-1]


@pytest.mark.parametrize("name", ["own", "qwen3_5_think", "qwen3_8"])
def test_boundaries_inside_a_turn_of_calls(load: Any, name: str) -> None:
    """CAT-13: calls have their message's boundary; CAT-16: between results of calls made together
    there is none, since the template closes the turn elsewhere when only the first is there."""
    frontend = load(name)
    twice = {"role": "assistant", "tool_calls": CALL["tool_calls"] * 2}
    messages = [USER, twice, FOUND, {"role": "tool", "content": "lost"}]
    for more in ([], [YES], [YES, USER]):
        prompt = frontend.prepare_chat([*messages, *more], tools=TOOLS, markers=[2, 3, 4])
        assert len(prompt.markers) == 3  # with the automatic one
        assert [note[:18] for note in prompt.notes] == ["markers: 3 message"]
        assert _text(frontend, prompt, prompt.markers[1]).endswith("</tool_call><|im_end|>\n")
        assert "lost" in _text(frontend, prompt, prompt.markers[2])


def test_system_messages_that_become_one_have_one_boundary(load: Any) -> None:
    frontend = load("own")
    messages = [SYSTEM, {"role": "developer", "content": "Be kind."}, USER]
    prompt = frontend.prepare_chat(messages, markers=[1, 2])
    assert len(prompt.markers) == len(prompt.notes) == 1
    assert _text(frontend, prompt, prompt.markers[0]).endswith("Be kind.<|im_end|>\n")


def test_a_marker_after_the_instructions_comes_by_itself(named: tuple[str, Frontend]) -> None:
    """CAT-13..15: after the leading instructions and the tools; four explicit ones leave no room."""
    name, frontend = named
    messages = [SYSTEM, USER, YES, USER, YES, USER]
    for tools in (None, TOOLS):
        prompt = frontend.prepare_chat(messages, tools=tools)
        (marker,) = prompt.markers
        text = _text(frontend, prompt, marker)
        assert "Be brief." in text
        assert "What" not in text
        assert ("look" in text) == bool(tools) or name in ("thinking", "words", "brackets", "tools")
        other = frontend.prepare_chat([SYSTEM, {"role": "user", "content": "No."}], tools=tools)
        assert other.token_ids[:marker] == prompt.token_ids[:marker]
        assert frontend.prepare_chat(messages, tools=tools, markers=[1]).markers == (marker,)
        if name == "tools" and tools:
            continue  # fewer messages show the tools elsewhere
        full = frontend.prepare_chat(messages, tools=tools, markers=[2, 3, 4, 5])
        assert len(full.markers) == 4
        assert marker not in full.markers
        assert (
            full.markers
            == frontend.prepare_chat(messages, tools=tools, anchors=[2, 3, 4, 5]).anchors
        )
    assert frontend.prepare_chat([USER]).markers == ()


@pytest.mark.parametrize("name", ["append", "own", "qwen3_5_think", "qwen3_8"])
def test_tools_without_instructions_end_at_a_marker(load: Any, name: str) -> None:
    """CAT-13: the tools boundary."""
    frontend = load(name)
    prompt = frontend.prepare_chat([USER], tools=TOOLS)
    (marker,) = prompt.markers
    text = _text(frontend, prompt, marker)
    assert "look" in text
    assert text.endswith("<|im_end|>\n")
    assert (
        prompt.token_ids[marker:]
        == frontend.prepare_chat([USER]).token_ids[-len(prompt) + marker :]
    )


def test_cache_control_is_a_marker_after_its_message(load: Any) -> None:
    """CAT-12: counted and merged with the explicit ones; the template does not see it."""
    frontend = load("own")
    part = {"type": "text", "text": "What is it?", "cache_control": {"type": "ephemeral"}}
    marked = {"role": "user", "content": [{"type": "text", "text": ""}, part, part]}
    twice = {"role": "user", "content": "What is it?What is it?"}
    plain = frontend.prepare_chat([twice, YES, USER], markers=[1])
    assert len(plain.markers) == 1
    assert frontend.prepare_chat([marked, YES, USER]) == plain
    assert frontend.prepare_chat([marked, YES, USER], markers=[1]) == plain
    assert frontend.prepare_chat([marked, YES, USER], markers=[2]).markers > plain.markers
    off = {**part, "cache_control": None}
    assert not frontend.prepare_chat([{"role": "user", "content": [off]}]).markers
    with pytest.raises(InputError, match="5 markers are given; the limit is 4"):
        frontend.prepare_chat([marked, YES] * 4, markers=[2])
    for bad in ({"type": "forever"}, {}, {"type": "ephemeral", "ttl": "1h"}, True, "ephemeral"):
        with pytest.raises(InputError, match=r"messages\[1\]\.content\[0\] has cache_control"):
            frontend.prepare_chat(
                [USER, {"role": "user", "content": [{**part, "cache_control": bad}]}]
            )


def test_every_content_shape_has_its_frontier(named: tuple[str, Frontend]) -> None:
    """Shapes that mean the same give the same prompt and frontiers (CAT-04)."""
    _, frontend = named
    call = {"id": "1", "type": "function"}
    groups: list[list[Any]] = [
        [{"role": "assistant", **c, "tool_calls": [{**call, "function": {"name": "f", "arguments": a}}]}
         for c in ({}, {"content": None}, {"content": ""}, {"content": []})
         for a in ('{"a": 1}', {"a": 1})],
        [{"role": "assistant", "content": "Yes.", key: "Is it?"}
         for key in ("reasoning", "reasoning_content")],
        [{"role": "user", **c} for c in ({}, {"content": None}, {"content": ""}, {"content": []})],
        [{"role": role, "content": c} for role in ("system", "developer")
         for c in ("late", [{"type": "text", "text": "late"}])],
    ]  # fmt: skip
    for group in groups:
        prompts = [frontend.prepare_chat([USER, shape, USER], markers=[1, 2]) for shape in group]
        assert all(prompt == prompts[0] for prompt in prompts)
        assert len(prompts[0].markers) == 2
        assert prompts[0].recovery >= prompts[0].markers[1]


def test_only_tokens_that_cut_are_cuts() -> None:
    """CAT-16: a token that takes blanks along, may be part of a longer one, or is sought in
    normalised text does not part what stands around it."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "Ġ": 1}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    added = [
        ("<cut>", {}),
        ("<left>", {"lstrip": True}),
        ("<right>", {"rstrip": True}),
        ("<word>", {"single_word": True}),
        ("<norm>", {"normalized": True}),
        ("<part>", {}),
        ("<<part>>", {}),
    ]
    backend.add_special_tokens([tokenizers.AddedToken(t, **kwargs) for t, kwargs in added])
    backend.add_tokens([tokenizers.AddedToken("<plain>", normalized=False)])
    tokenizer = Tokenizer(backend)
    cuts = {tokenizer.token_to_id(t) for t in ("<cut>", "<<part>>")}
    assert tokenizer.cut_token_ids == cuts
    text = "a a<cut><plain> <<part>>a"
    ids, found = tokenizer.encode_with_cuts(text)
    assert ids == tokenizer.encode(text)
    assert [(ids[i], text[begin:after]) for i, begin, after in found] == [
        (tokenizer.token_to_id("<cut>"), "<cut>"),
        (tokenizer.token_to_id("<<part>>"), "<<part>>"),
    ]
