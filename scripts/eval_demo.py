"""How good the demo model is: right answers, bits per byte, and how often its drafts are accepted.

    python -m scripts.eval_demo [--questions 100] [--drafts] [--data DATA] [--json]

Asks held-out questions greedily and prints right and total of each task. `--drafts` also measures the acceptance of
the MTP head and the DFlash draft on those answers, `--data` the bits per byte on the held-out text of a folder that
`scripts.demo_data` wrote, beside what `xz -9` needs for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ninfer_jax as nj
from artifacts import open_checkpoint
from ninfer_jax.models.qwen3_5 import trunk
from scripts.demo_model.acceptance import Acceptance, Answer, measure
from scripts.demo_model.bits import bits_per_byte
from scripts.demo_model.objectives import cross_entropy
from scripts.demo_model.packing import read_held_out
from scripts.demo_model.questions import Question, judge, questions
from scripts.provenance import measured_with


@dataclass(frozen=True)
class Verdict:
    """One question, what the model made of it, and whether that is right."""

    question: Question
    result: nj.RequestOutput
    right: bool

    @property
    def output(self) -> nj.CompletionOutput:
        """The one answer."""
        return self.result.outputs[0]


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
    results = [handle.wait() for handle in handles]
    return [Verdict(q, r, judge(q, r.outputs[0])) for q, r in zip(asked, results, strict=True)]


def acceptance(model: nj.Model, name: str, verdicts: Sequence[Verdict]) -> dict[str, Acceptance]:
    """Acceptance of both drafts on the answers, right or wrong."""
    answers = []
    for verdict in verdicts:
        prompt = verdict.result.prompt_token_ids
        tokens = np.array([*prompt, *verdict.output.token_ids], np.int32)
        answers.append(Answer(tokens, len(prompt)))
    return measure(open_checkpoint(nj.shipped_model(name)), model, answers)


def held_out_bits(model: nj.Model, data: Path) -> dict[str, float]:
    """Bits per byte of the model on each source's held-out text, and what `xz -9` needs for all of it."""

    @jax.jit
    def nats(tokens: jax.Array) -> jax.Array:
        hidden = trunk.forward(model.config, model.params, tokens[:, :-1])
        return cross_entropy(trunk.logits(model.params, hidden), tokens[:, 1:])

    bits = bits_per_byte(read_held_out(data), lambda tokens: np.asarray(nats(tokens)), batch=4)
    xz = json.loads((data / "numbers.json").read_text())["held_out_xz_bits_per_byte"]
    return bits | {"xz": xz}


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


def acceptance_table(found: dict[str, Acceptance]) -> str:
    """Acceptance as text."""
    return "\n".join(
        f"{name}: first draft accepted {a.first:.1%}, {a.tokens_per_round:.2f} tokens a round, "
        f"by draft length {', '.join(f'{share:.0%}' for share in a.by_position)}"
        for name, a in found.items()
    )


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
    parser.add_argument("--drafts", action="store_true", help="measure the drafts' acceptance")
    parser.add_argument("--data", type=Path, help="folder of scripts.demo_data: bits per byte")
    args = parser.parse_args(arguments)
    asked = questions(args.questions, args.seed)
    settings = {"max_context": args.context, "max_queue": max(1, len(asked))}
    with nj.load(args.model, **settings) as engine:
        verdicts = ask(engine, asked, args.max_tokens)
        model = engine.model
    drafts = acceptance(model, args.model, verdicts) if args.drafts else {}
    bits = held_out_bits(model, args.data) if args.data else {}
    if args.json:
        found = report(verdicts)
        found["acceptance"] = {name: asdict(a) for name, a in drafts.items()}
        found["bits_per_byte"] = bits
        found |= measured_with()
        print(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        print(table(verdicts))
        if drafts:
            print("\n" + acceptance_table(drafts))
        if bits:
            print("\nbits per byte: " + ", ".join(f"{k} {v:.3f}" for k, v in bits.items()))
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
