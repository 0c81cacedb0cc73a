"""Sums, differences, products and quotients of small numbers, plain and as stories."""

from __future__ import annotations

import random
from dataclasses import dataclass

from scripts.demo_model.dialogues import columns
from scripts.demo_model.dialogues.dialogue import Dialogue, Sources, asked
from scripts.demo_model.dialogues.pools import GIVEN_NAMES, THINGS

OPERATIONS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
"""The operations' names in keys, and their signs."""

_ANY = (
    "What is {e}?",
    "what is {e}",
    "{e} = ?",
    "{e}=",
    "{e}",
    "Compute {e}.",
    "Calculate {e}.",
    "How much is {e}?",
    "Please work out {e}.",
    "Can you tell me what {e} is?",
    "I need the result of {e}.",
    "What's {e}?",
    "Solve {e}.",
    "Tell me {e}, please.",
)
_WORDED = {
    "add": (
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "How much is {a} plus {b}?",
        "{a} plus {b}?",
    ),
    "sub": (
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "Take {b} away from {a}.",
        "How much is {a} minus {b}?",
        "What is the difference when you take {b} from {a}?",
    ),
    "mul": (
        "What is {a} times {b}?",
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
        "How much is {a} times {b}?",
        "{a} x {b} = ?",
        "{a} × {b}",
        "What is {a} × {b}?",
        "What is {a}x{b}?",
    ),
    "div": (
        "What is {a} divided by {b}?",
        "Divide {a} by {b}.",
        "{a} ÷ {b} = ?",
        "How often does {b} go into {a}?",
        "How much is {a} divided by {b}?",
        "Divide {a} by {b} with remainder.",
    ),
}
_STORIES = {
    "add": (
        ("{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?", "{n} has {r} {t}"),
        (
            "There are {a} {t} on the table. {n} puts {b} more there. How many {t} are there?",
            "there are {r} {t}",
        ),
        ("{n} found {a} {t} and {m} found {b}. How many {t} is that together?", "it is {r} {t}"),
        ("A shop sold {a} {t} today and {b} yesterday. How many in all?", "it sold {r} {t}"),
    ),
    "sub": (
        ("{n} has {a} {t} and gives {b} to {m}. How many {t} are left?", "{r} {t} are left"),
        ("There were {a} {t} in the box. {n} took {b}. How many are there now?", "there are {r}"),
        ("{n} had {a} {t} and lost {b} of them. How many does {n} have now?", "{n} has {r}"),
        ("{n} needs {a} {t} and has {b}. How many are missing?", "{r} are missing"),
    ),
    "mul": (
        ("{n} has {a} boxes with {b} {t} each. How many {t} is that?", "it is {r} {t}"),
        ("There are {a} rows of {b} {t}. How many {t} are there?", "there are {r} {t}"),
        ("One bag holds {b} {t}. How many {t} do {a} bags hold?", "they hold {r} {t}"),
    ),
    "div": (
        ("{n} shares {a} {t} fairly among {b} friends. How many does each get?", "{r}"),
        ("{a} {t} go into bags of {b}. How many bags are full, and what remains?", "{r}"),
    ),
}


@dataclass(frozen=True)
class Exercise:
    """Two numbers and an operation."""

    operation: str
    a: int
    b: int

    @property
    def key(self) -> str:
        """The same for both orders where the order does not matter."""
        a, b = self.a, self.b
        if self.operation in ("add", "mul"):
            a, b = min(a, b), max(a, b)
        return f"{self.operation}:{a}{OPERATIONS[self.operation]}{b}"

    @property
    def expression(self) -> str:
        """`47 + 38`."""
        return f"{self.a} {OPERATIONS[self.operation]} {self.b}"

    @property
    def result(self) -> str:
        """The number, of a division perhaps with its remainder."""
        a, b = self.a, self.b
        if self.operation == "div":
            return columns.quotient(a, b)
        return str({"add": a + b, "sub": a - b, "mul": a * b}[self.operation])

    @property
    def equation(self) -> str:
        """`47 + 38 = 85`."""
        return f"{self.expression} = {self.result}"

    @property
    def steps(self) -> str:
        """The thinking, which ends with the equation."""
        work = {
            "add": columns.added,
            "sub": columns.subtracted,
            "mul": columns.multiplied,
            "div": columns.divided,
        }[self.operation](self.a, self.b)
        ending = f"{self.equation}."
        return work if work == ending else f"{work} {ending}"


def exercise(rng: random.Random) -> Exercise:
    """Numbers of up to two digits; products are drawn more often, being harder."""
    operation = rng.choices(("add", "sub", "mul", "div"), (27, 27, 33, 13))[0]
    a, b = _number(rng), _number(rng)
    if operation == "div":
        b = rng.randrange(2, 11)
    elif operation == "sub" and a < b and rng.random() < 0.5:
        a, b = b, a
    return Exercise(operation, a, b)


def arithmetic(rng: random.Random, sources: Sources) -> Dialogue:
    """A question with its steps; sums of single digits sometimes without."""
    task = exercise(rng)
    if rng.random() < 0.05:
        task = Exercise("add", rng.randrange(10), rng.randrange(10))
        return asked(
            "arithmetic", task.key, question(rng, task), "", f"{task.equation}.", thinking=False
        )
    tellable = min(task.a, task.b) > 1 and (task.operation != "sub" or task.a >= task.b)
    if tellable and rng.random() < 0.2:
        return _story(rng, task)
    return asked("arithmetic", task.key, question(rng, task), task.steps, f"{task.equation}.")


def question(rng: random.Random, task: Exercise) -> str:
    """The exercise in plain words or signs."""
    if rng.random() < 0.5:
        return rng.choice(_WORDED[task.operation]).format(a=task.a, b=task.b)
    sign = OPERATIONS[task.operation]
    space = "" if rng.random() < 0.3 else " "
    return rng.choice(_ANY).format(e=f"{task.a}{space}{sign}{space}{task.b}")


def _story(rng: random.Random, task: Exercise) -> Dialogue:
    text, ending = rng.choice(_STORIES[task.operation])
    n, m = rng.sample(GIVEN_NAMES, 2)
    words = {"n": n, "m": m, "t": rng.choice(THINGS), "a": task.a, "b": task.b, "r": task.result}
    answer = f"{task.equation}."
    if task.operation != "div":
        answer = f"{task.equation}, so {ending.format(**words)}."
    steps = f"This is {task.expression}. {task.steps}"
    return asked("arithmetic", task.key, text.format(**words), steps, answer)


def _number(rng: random.Random) -> int:
    return rng.randrange(10) if rng.random() < 0.12 else rng.randrange(100)
