"""Dialogues: answers are right by another route, the split is clean, the text is the runtime's."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from ninfer_jax.frontend.tool_calls import parse_tool_calls
from scripts.demo_model.dialogues import FIXED, TASKS, Dialogue, dialogues, is_held_out, render
from scripts.demo_model.dialogues.rendering import template

PASSAGES = (
    "The old man walked down to the sea. He looked at the waves, and he thought of his brother. "
    "“Where are you?” he asked. Mr. Hill did not hear him. Nobody saw him again that day.",
    "It was late in the year when the ship left the harbor with nine sailors and a dog. The wind "
    "was strong! They sang a song about home.",
)
GLOSSES = (("oak", "a large tree"), ("harbor", "a safe place for ships."))
NUMBER = re.compile(r"-?\d+")
TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Dialogue]]:
    by_task = defaultdict(list)
    for dialogue in dialogues(3, 12000, PASSAGES, GLOSSES):
        by_task[dialogue.task].append(dialogue)
    return by_task


def _shown(dialogue: Dialogue) -> Iterator[tuple[int, dict[str, Any]]]:
    """The answers after the last question, with their places."""
    roles = [message["role"] for message in dialogue.messages]
    last = len(roles) - 1 - roles[::-1].index("user")
    for i in range(last + 1, len(roles)):
        if roles[i] == "assistant":
            yield i, dialogue.messages[i]


def _question(dialogue: Dialogue) -> str:
    return next(m["content"] for m in dialogue.messages if m["role"] == "user")


def _answer(dialogue: Dialogue) -> str:
    return dialogue.messages[-1]["content"]


def test_shares(drawn: dict[str, list[Dialogue]]) -> None:
    assert set(drawn) == set(TASKS)
    assert sum(weight for weight, _ in TASKS.values()) == 100
    for task, (weight, _) in TASKS.items():
        assert abs(len(drawn[task]) / 12000 - weight / 100) < 0.02


def test_arithmetic(drawn: dict[str, list[Dialogue]]) -> None:
    for dialogue in drawn["arithmetic"]:
        operation, a, sign, b = re.fullmatch(r"(\w+):(\d+)(\D)(\d+)", dialogue.key).groups()
        x, y = int(a), int(b)
        asked = [int(n) for n in re.findall(r"\d+", _question(dialogue))]
        assert sorted(asked) == sorted((x, y))
        expected = {"+": [x + y], "-": [x - y], "*": [x * y]}.get(sign)
        if operation == "div":
            expected = [x // y, x % y] if x % y else [x // y]
        numbers = [int(n) for n in NUMBER.findall(_answer(dialogue))]
        assert numbers[-len(expected) :] == expected, dialogue
        if not dialogue.thinking:
            assert operation == "add"
            assert x < 10
            assert y < 10


def test_sorting(drawn: dict[str, list[Dialogue]]) -> None:
    for dialogue in drawn["sorting"]:
        left = dialogue.key.removeprefix("sort:").split(", ")
        question = _question(dialogue)
        assert all(re.search(rf"\b{item}\b", question) for item in left)
        numbers = left[0].isdigit()
        expected = []
        while left:  # a selection, character by character
            least = left[0]
            for item in left:
                if (
                    (int(item) < int(least))
                    if numbers
                    else ([*map(ord, item)] < [*map(ord, least)])
                ):
                    least = item
            left.remove(least)
            expected.append(least)
        words = ("reverse", "descending", "Z to A", "largest to smallest", "high to low")
        if any(word in question for word in words):
            expected.reverse()
        assert _answer(dialogue) == ", ".join(expected), dialogue
        steps = dialogue.messages[-1]["reasoning_content"]
        heads = re.search(r"In order: ([\w ]+)\.", steps)[1].split()
        assert heads == sorted(heads)
        assert sorted(heads) == sorted(x.zfill(2)[0] if numbers else x[0] for x in expected)
        groups = re.findall(r"\b\w: (?:[^.;]*; )?([\w, ]*)\.", steps.partition("In order")[2])
        upward = sorted(expected, key=lambda item: (len(item), item) if numbers else item)
        assert ", ".join(groups) == ", ".join(upward), steps


def test_copying(drawn: dict[str, list[Dialogue]]) -> None:
    for dialogue in drawn["copying"]:
        kind, _, text = dialogue.key.removeprefix("copy ").partition(":")
        assert text in _question(dialogue)
        words = text.split()
        answer = _answer(dialogue)
        if kind == "count":
            assert answer.split()[0] == str(len(words))
            assert len(words) <= 9
        elif kind.startswith("word"):
            assert answer == words[int(kind.split()[1]) - 1]
        else:
            expected = {
                "repeat": text,
                "reverse": " ".join(words[::-1]),
                "last": words[-1],
                "spell": "-".join(text),
                "upper": text.upper(),
            }
            assert answer == expected[kind]


def test_json(drawn: dict[str, list[Dialogue]]) -> None:
    for dialogue in drawn["json"]:
        record = json.loads(dialogue.key.partition(":")[2])
        question, answer = _question(dialogue), _answer(dialogue)
        found = json.loads(answer)
        assert answer == json.dumps(found, ensure_ascii=False)
        names = list(found)
        forms = [", ".join(names), ", ".join(names[:-1]) + f" and {names[-1]}"]
        plain = re.sub(r"\bthe (?=\w+(,| and | as | from |\s*$|, please))", "", question)
        assert any(form in question or form in plain for form in forms), dialogue
        for name, value in found.items():
            assert value == record[name]
            assert type(value) is type(record[name])
            assert str(value) in question


def test_tool_calls_come_back_with_their_types(drawn: dict[str, list[Dialogue]]) -> None:
    calls = 0
    for dialogue in drawn["tools"]:
        schemas = {tool["function"]["name"]: tool["function"] for tool in dialogue.tools}
        assert len(schemas) == len(dialogue.tools)
        answers = [i for i, m in enumerate(dialogue.messages) if m["role"] == "assistant"]
        turns = render(dialogue).split("<|im_start|>assistant\n")[1:]
        for i, turn in zip(answers, turns, strict=True):
            question = dialogue.messages[i - 1]["content"]
            content = turn.split("<|im_end|>")[0].split("</think>\n\n")[-1]
            left, parsed = parse_tool_calls(content, dialogue.tools)
            made = dialogue.messages[i].get("tool_calls", [])
            assert left == dialogue.messages[i]["content"]
            assert len(made) == len(parsed)
            for call, back in zip(made, parsed, strict=True):
                calls += 1
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                assert back.name == name
                steps = dialogue.messages[i]["reasoning_content"]
                bare = [
                    f"{n} = {v if isinstance(v, str) else json.dumps(v)}"
                    for n, v in arguments.items()
                ]
                assert not steps or steps.endswith(f" I call {name}: {', '.join(bare)}.")
                assert back.arguments == json.dumps(arguments, ensure_ascii=False)
                schema = schemas[name]["parameters"]
                assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
                for key, value in arguments.items():
                    known = schema["properties"][key]
                    assert isinstance(value, TYPES[known["type"]])
                    assert isinstance(value, bool) == (known["type"] == "boolean")
                    assert value in known.get("enum", [value])
                    assert isinstance(value, bool) or str(value) in question, dialogue
    assert calls > len(drawn["tools"]) / 2


def test_switches_follow_their_words(drawn: dict[str, list[Dialogue]]) -> None:
    """Booleans are not in the question as such: their words are."""
    words = {"on": r"\bon\b", "locked": r"^(?!.*[Uu]nlock)", "open": r"\b[Oo]pen\b"}
    found = 0
    for dialogue in drawn["tools"]:
        for i, message in enumerate(dialogue.messages):
            for call in message.get("tool_calls", ()):
                for name, value in call["function"]["arguments"].items():
                    if isinstance(value, bool) and name in words:
                        found += 1
                        said = re.search(words[name], dialogue.messages[i - 1]["content"])
                        assert bool(said) is value, dialogue
    assert found > 20


def test_final_answers_use_what_the_tool_said(drawn: dict[str, list[Dialogue]]) -> None:
    for dialogue in drawn["tools"]:
        if dialogue.messages[-2]["role"] == "tool":
            result = json.loads(dialogue.messages[-2]["content"])
            values = [
                str(value)
                for value in result.values()
                if value not in ("done", "ready", "confirmed")
            ]
            assert all(value.lower() in _answer(dialogue).lower() for value in values), dialogue


def test_passages(drawn: dict[str, list[Dialogue]]) -> None:
    unsaid = 0
    for dialogue in drawn["passages"]:
        answer, question = _answer(dialogue), _question(dialogue)
        unsaid += answer == "The passage does not say."
        if answer != "The passage does not say.":
            assert answer.rstrip(".").lower() in question.lower()
        steps = dialogue.messages[-1]["reasoning_content"]
        if steps.startswith("It says"):
            assert steps.removeprefix('It says: "').removesuffix('"') in question
    assert 0 < unsaid < len(drawn["passages"]) / 5
    copied = {_answer(d) for d in drawn["passages"] if "first sentence" in _question(d)}
    assert copied == {
        "The old man walked down to the sea.",
        "It was late in the year when the ship left the harbor with nine sailors and a dog.",
    }


def test_follow_ups_lean_on_the_answer_before(drawn: dict[str, list[Dialogue]]) -> None:
    sums = 0
    for dialogue in drawn["follow-ups"]:
        answers = [m["content"] for m in dialogue.messages if m["role"] == "assistant"]
        assert 2 <= len(answers) <= 3
        equations = [re.fullmatch(r"(\d+) . \d+ = (\d+)\.", answer) for answer in answers]
        questions = [m["content"] for m in dialogue.messages if m["role"] == "user"]
        if all(equations) and len(NUMBER.findall(questions[1])) < 2:
            sums += 1
            assert all(b[1] == a[2] for a, b in pairwise(equations))
    assert sums > len(drawn["follow-ups"]) / 5


@pytest.mark.parametrize("task", TASKS)
def test_the_text_is_the_prompt_and_what_the_model_writes(
    task: str, drawn: dict[str, list[Dialogue]]
) -> None:
    for dialogue in drawn[task][:150]:
        text, at = render(dialogue), 0
        assert len(text) < 3600
        for i, message in _shown(dialogue):
            assert bool(message["reasoning_content"]) == dialogue.thinking
            prompt = template().render(
                dialogue.messages[:i], tools=dialogue.tools, enable_thinking=dialogue.thinking
            )
            written = message["content"]
            if dialogue.thinking:
                written = f"{message['reasoning_content']}\n</think>\n\n{written}"
            for call in message.get("tool_calls", ()):
                written += f"<tool_call>\n<function={call['function']['name']}>\n"
                for name, value in call["function"]["arguments"].items():
                    bare = value if isinstance(value, str) else json.dumps(value)
                    written += f"<parameter={name}>\n{bare}\n</parameter>\n"
                written += "</function>\n</tool_call>"
            assert text.startswith(f"{prompt}{written}<|im_end|>\n"), dialogue
            at = len(prompt) + len(written) + len("<|im_end|>\n")
        assert at == len(text)


def test_the_same_seed_gives_the_same_dialogues() -> None:
    first, second, other = (list(dialogues(s, 200, PASSAGES, GLOSSES)) for s in (1, 1, 2))
    assert first == second
    assert first != other


def test_one_key_in_fifty_is_held_out() -> None:
    keys = [f"add:{a}+{b}" for a in range(100) for b in range(a, 100)]
    held = [key for key in keys if int(hashlib.sha256(key.encode()).hexdigest(), 16) % 50 == 0]
    assert [key for key in keys if is_held_out(key)] == held
    assert 70 < len(held) < 130


def test_held_out_keys_are_never_drawn_for_training(drawn: dict[str, list[Dialogue]]) -> None:
    for task, ones in drawn.items():
        assert task in FIXED or not any(is_held_out(one.key) for one in ones)
    held = list(dialogues(3, 200, PASSAGES, GLOSSES, held_out=True))
    assert all(is_held_out(one.key) for one in held)
    assert {one.task for one in held} == set(TASKS) - FIXED


def test_no_later_turn_of_training_shows_a_held_out_sum(drawn: dict[str, list[Dialogue]]) -> None:
    names = {"+": "add", "-": "sub", "*": "mul"}
    for dialogue in drawn["follow-ups"]:
        for message in dialogue.messages:
            found = re.fullmatch(r"(\d+) ([-+*]) (\d+) = \d+\.", message["content"])
            if found:
                a, sign, b = int(found[1]), found[2], int(found[3])
                if sign != "-":
                    a, b = min(a, b), max(a, b)
                assert not is_held_out(f"{names[sign]}:{a}{sign}{b}")


def test_it_works_without_real_text() -> None:
    assert len([render(one) for one in dialogues(0, 300, (), ())]) == 300
