"""How well the demo model answers questions it has not seen.

`python -m scripts.eval_demo` asks greedily and prints right and total of each task.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ninfer_jax as nj
from scripts.demo_model.questions import Question, judge, questions


@dataclass(frozen=True)
class Verdict:
    """One question, what the model made of it, and whether that is right."""

    question: Question
    output: nj.CompletionOutput
    right: bool


@dataclass(frozen=True)
class Score:
    """Right answers of a task."""

    task: str
    right: int
    total: int

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self.right / self.total if self.total else 0.0


def ask(engine: nj.Engine, asked: Sequence[Question], max_tokens: int) -> list[Verdict]:
    """Greedy answers, as many at once as the engine takes."""
    params = nj.SamplingParams(temperature=0, max_tokens=max_tokens)
    handles = [engine.submit_chat(q.messages, params, tools=q.tools or None) for q in asked]
    outputs = [handle.wait().outputs[0] for handle in handles]
    return [Verdict(q, out, judge(q, out)) for q, out in zip(asked, outputs, strict=True)]


def scores(verdicts: Sequence[Verdict]) -> list[Score]:
    """One a task, in the order of the questions, and their sum."""
    tasks = list(dict.fromkeys(verdict.question.task for verdict in verdicts))
    rows = []
    for task in tasks:
        right = [verdict.right for verdict in verdicts if verdict.question.task == task]
        rows.append(Score(task, sum(right), len(right)))
    total = Score("all", sum(row.right for row in rows), sum(row.total for row in rows))
    return [*rows, total]


def report(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The results as JSON."""
    return {
        "questions": {
            row.task: {"right": row.right, "total": row.total, "share": row.share}
            for row in scores(verdicts)
        },
        "failures": [_failure(verdict) for verdict in verdicts if not verdict.right],
    }


def table(verdicts: Sequence[Verdict]) -> str:
    """The results as text."""
    lines = [f"{'task':<12} {'right':>6} {'total':>6} {'share':>7}"]
    for row in scores(verdicts):
        lines.append(f"{row.task:<12} {row.right:>6} {row.total:>6} {row.share:>7.1%}")
    return "\n".join(lines)


def failures(verdicts: Sequence[Verdict]) -> str:
    """The wrong answers as text."""
    return "\n\n".join(
        "\n".join(f"{name}: {value}" for name, value in _failure(verdict).items())
        for verdict in verdicts
        if not verdict.right
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--require", type=float, default=0.0, help="share that must be right")
    parser.add_argument("--failures", action="store_true", help="print the wrong answers")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    asked = questions(args.questions, args.seed)
    settings = {"max_context": args.context, "max_queue": max(1, len(asked))}
    with nj.load(args.model, **settings) as engine:
        verdicts = ask(engine, asked, args.max_tokens)
    if args.json:
        print(json.dumps(report(verdicts), ensure_ascii=False, indent=2))
    else:
        print(table(verdicts))
        if args.failures:
            print("\n" + failures(verdicts))
    return int(scores(verdicts)[-1].share < args.require)


def _failure(verdict: Verdict) -> dict[str, Any]:
    question, output = verdict.question, verdict.output
    return {
        "task": question.task,
        "question": question.messages[-1]["content"],
        "expected": question.expected,
        "thinking": output.reasoning,
        "answer": output.text,
        "calls": [[call.name, call.arguments] for call in output.tool_calls],
        "finish": output.finish_reason,
    }


if __name__ == "__main__":
    sys.exit(main())
