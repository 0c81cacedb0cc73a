"""Second and third questions that lean on the answers before them."""

from __future__ import annotations

import random
from typing import Any

from scripts.demo_model.dialogues import arithmetic, basics, copying, extraction, passages, sorting
from scripts.demo_model.dialogues.arithmetic import Exercise
from scripts.demo_model.dialogues.dialogue import (
    Dialogue,
    Maker,
    Sources,
    assistant,
    is_held_out,
    user,
)

Turns = tuple[str, list[dict[str, Any]]]


def follow_ups(rng: random.Random, sources: Sources) -> Dialogue:
    """Two or three turns; now and then the second is about something else."""
    key, messages = rng.choices((_sum, _order, _record, _told, _change), (5, 3, 3, 2, 4))[0](rng)
    return Dialogue("follow-ups", key, messages)


def _sum(rng: random.Random) -> Turns:
    """The key is the first exercise's; no later one is held out, or training would show it."""
    first = arithmetic.exercise(rng)
    while first.operation == "div" or not 0 <= int(first.result) <= 99:
        first = arithmetic.exercise(rng)
    messages = [
        user(arithmetic.question(rng, first)),
        assistant(f"{first.equation}.", first.steps),
    ]
    value = int(first.result)
    for _ in range(rng.choice((1, 1, 2))):
        question, next_one = _further(rng, value)
        messages += [user(question), assistant(f"{next_one.equation}.", next_one.steps)]
        value = int(next_one.result)
        if value > 99:
            break
    return first.key, messages


def _further(rng: random.Random, value: int) -> tuple[str, Exercise]:
    while True:
        n = rng.randint(1, 49)
        question, one = rng.choice(
            (
                ("And twice that?", Exercise("add", value, value)),
                ("Double it.", Exercise("add", value, value)),
                (f"Add {n} to it.", Exercise("add", value, n)),
                (f"And plus {n}?", Exercise("add", value, n)),
                (f"Plus {n} more?", Exercise("add", value, n)),
                (f"Now subtract {n}.", Exercise("sub", value, n)),
                (f"And minus {n}?", Exercise("sub", value, n)),
                (f"Multiply it by {n % 9 + 1}.", Exercise("mul", value, n % 9 + 1)),
            )
        )
        if (one.operation != "sub" or value >= n) and not is_held_out(one.key):
            return question, one


def _order(rng: random.Random) -> Turns:
    draw = sorting.number_order if rng.random() < 0.2 else sorting.word_order
    order = draw(rng, rng.randint(3, 6))
    result = order.result
    back = list(reversed(result))
    choices = [
        ("Now in reverse.", "I reverse the list.", ", ".join(back)),
        ("And the other way round?", "I reverse the list.", ", ".join(back)),
        ("Which one is first?", "I take the first one.", result[0]),
        ("Which one is last?", "I take the last one.", result[-1]),
        ("How many are there?", f"{_numbered(result)}.", str(len(result))),
        ("Without the first one, please.", "I leave out the first one.", ", ".join(result[1:])),
    ]
    question, steps, answer = rng.choice(choices)
    messages = [user(sorting.question(rng, order)), assistant(order.answer, order.steps)]
    return order.key, [*messages, user(question), assistant(answer, steps)]


def _record(rng: random.Random) -> Turns:
    one = extraction.record(rng)
    name = rng.choice(one.asked)
    value = str(one.values[name])
    missing = [field for field in one.values if field not in one.asked]
    messages = [user(extraction.question(rng, one)), assistant(one.answer, one.steps)]
    if missing and rng.random() < 0.4:
        field = rng.choice(missing)
        question = rng.choice(("And the {f}?", "What about the {f}?")).format(f=field)
        value, name = str(one.values[field]), field
    else:
        question = rng.choice(("Only the {f}, please.", "Just the {f}.", "What was the {f}?"))
        question = question.format(f=name)
    messages += [user(question), assistant(value, f"{name} = {value}.")]
    if rng.random() < 0.3:
        messages += [user("Thanks!"), assistant("You are welcome!", "The user thanks me.")]
    return one.key, messages


def _told(rng: random.Random) -> Turns:
    one = passages.told(rng)
    messages = [
        user(passages.placed(rng, one.passage, one.question)),
        assistant(one.answer, one.steps),
        user(rng.choice(("Which sentence says so?", "How do you know?", "Where is that said?"))),
        assistant(f'It says: "{one.source}"', "I quote the sentence."),
    ]
    return one.key, messages


def _change(rng: random.Random) -> Turns:
    """One question after another that has nothing to do with it."""
    before, after = (rng.choice(_ALONE)(rng, Sources()) for _ in range(2))
    while is_held_out(before.key):
        before = rng.choice(_ALONE)(rng, Sources())
    while not after.thinking or after.messages[0]["role"] == "system":
        after = rng.choice(_ALONE)(rng, Sources())
    return after.key, [*before.messages, *after.messages]


_ALONE: tuple[Maker, ...] = (
    arithmetic.arithmetic,
    basics.basics,
    copying.copying,
    extraction.extraction,
    sorting.sorting,
)


def _numbered(items: tuple[str, ...]) -> str:
    return ", ".join(f"{i} {item}" for i, item in enumerate(items, 1))
