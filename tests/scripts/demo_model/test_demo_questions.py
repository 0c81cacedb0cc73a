"""Held-out questions: the judge takes the right answer and nothing near it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import eval_demo
from scripts.demo_model.dialogues import is_held_out
from scripts.demo_model.questions import Question, judge, questions


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str


@dataclass(frozen=True)
class Output:
    text: str = ""
    tool_calls: list[Call] = field(default_factory=list)
    reasoning: str | None = None
    finish_reason: str = "stop"


def _right(question: Question) -> Output:
    expected: Any = question.expected
    if question.task == "tools":
        return Output("", [Call(expected["name"], json.dumps(expected["arguments"]))])
    if question.task == "json":
        return Output(json.dumps(expected))
    if question.task == "sorting":
        return Output(", ".join(expected))
    return Output("1 + 2 = " + " remainder ".join(str(n) for n in expected) + ".")


def test_a_quarter_each_held_out_and_different() -> None:
    asked = questions(100)
    assert Counter(q.task for q in asked) == dict.fromkeys(
        ("arithmetic", "json", "sorting", "tools"), 25
    )
    assert len({q.key for q in asked}) == 100
    assert all(is_held_out(q.key) for q in asked)
    assert asked == questions(100)
    assert asked != questions(100, seed=1)
    assert all(len(q.expected) == 5 for q in asked if q.task == "sorting")
    assert len(questions(7)) == 7


def test_what_is_right_is_right() -> None:
    assert all(judge(q, _right(q)) for q in questions(200))


def test_what_is_wrong_is_wrong() -> None:
    for question in questions(100):
        right = _right(question)
        assert not judge(question, Output())
        if question.task == "tools":
            call = right.tool_calls[0]
            assert not judge(question, Output("", [call, call]))
            assert not judge(question, Output("", [Call(call.name + "x", call.arguments)]))
            more = {**json.loads(call.arguments), "extra": 1}
            assert not judge(question, Output("", [Call(call.name, json.dumps(more))]))
            assert not judge(question, Output("", [Call(call.name, "{}")]))
        else:
            assert not judge(question, Output(right.text + " 1000"))
            assert not judge(question, Output(right.text, [Call("f", "{}")]))


@pytest.mark.parametrize(
    ("task", "expected", "text", "right"),
    [
        ("arithmetic", [-9], "3 - 12 = -9.", True),
        ("arithmetic", [9], "3 - 12 = -9.", False),
        ("arithmetic", [85], "47 + 38 = 85, so Tom has 85 apples.", True),
        ("arithmetic", [7, 5], "47 / 6 = 7 remainder 5.", True),
        ("arithmetic", [7, 5], "47 / 6 = 7.", False),
        ("sorting", ["ant", "bee"], "ant, bee", True),
        ("sorting", ["ant", "bee"], "bee, ant", False),
        ("sorting", ["ant", "bee"], "Sorted: ant, bee", False),
        ("json", {"age": 41, "name": "Bo"}, '{"name": "Bo", "age": 41}', True),
        ("json", {"age": 41}, '{"age": "41"}', False),
        ("json", {"age": 1}, '{"age": true}', False),
        ("json", {"age": 41}, '{"age": 41} ok', False),
    ],
)
def test_the_judge(task: str, expected: Any, text: str, right: bool) -> None:
    assert judge(Question(task, "", [], expected), Output(text)) is right


def test_the_report_counts_by_task() -> None:
    asked = questions(8)
    outputs = [_right(q) if i % 2 else Output("no") for i, q in enumerate(asked)]
    verdicts = [
        eval_demo.Verdict(q, SimpleNamespace(outputs=[out]), judge(q, out))
        for q, out in zip(asked, outputs, strict=True)
    ]
    report = eval_demo.report(verdicts)
    assert report["questions"]["all"] == {"right": 4, "total": 8, "share": 0.5}
    assert report["questions"]["json"] == {"right": 1, "total": 2, "share": 0.5}
    assert len(report["failures"]) == 4
    json.dumps(report)
    assert "all               4      8   50.0%" in eval_demo.table(verdicts)
    assert eval_demo.failures(verdicts).count("answer: no") == 4
