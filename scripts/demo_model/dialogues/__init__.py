"""Synthetic dialogues, made by program: half of what the demo model is trained on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from scripts.demo_model.dialogues import (
    arithmetic,
    basics,
    copying,
    extraction,
    follow_ups,
    refusals,
    sorting,
    tools,
)
from scripts.demo_model.dialogues import passages as passage_questions
from scripts.demo_model.dialogues.basics import PLAIN_SYSTEMS
from scripts.demo_model.dialogues.dialogue import (
    Dialogue,
    Maker,
    Sources,
    is_held_out,
    system,
)
from scripts.demo_model.dialogues.rendering import render

__all__ = ["FIXED", "TASKS", "Dialogue", "dialogues", "is_held_out", "render"]

TASKS: Mapping[str, tuple[int, Maker]] = {
    "arithmetic": (24, arithmetic.arithmetic),
    "sorting": (15, sorting.sorting),
    "copying": (8, copying.copying),
    "json": (15, extraction.extraction),
    "tools": (14, tools.tools),
    "passages": (10, passage_questions.passages),
    "follow-ups": (6, follow_ups.follow_ups),
    "refusals": (3, refusals.refusals),
    "basics": (5, basics.basics),
}
"""Weight and maker of each task."""
FIXED = frozenset(("basics", "refusals"))
"""Tasks with so few questions that holding some out would only leave gaps: none of them is."""


def dialogues(
    seed: int,
    count: int,
    passages: Sequence[str],
    glosses: Sequence[tuple[str, str]],
    *,
    held_out: bool = False,
) -> Iterator[Dialogue]:
    """Draw dialogues; the same for the same arguments.

    Args:
        seed: of the draw.
        count: how many.
        passages: real text for some of the questions about passages.
        glosses: words and their meanings.
        held_out: draw only questions that are held out, of the tasks that hold some out; otherwise
            only questions that are not.
    """
    rng = random.Random(seed)
    sources = Sources(passages, glosses)
    names = [name for name in TASKS if not (held_out and name in FIXED)]
    weights = [TASKS[name][0] for name in names]
    for name in rng.choices(names, weights, k=count):
        maker = TASKS[name][1]
        dialogue = maker(rng, sources)
        while name not in FIXED and is_held_out(dialogue.key) != held_out:
            dialogue = maker(rng, sources)
        yield _introduced(rng, dialogue)


def _introduced(rng: random.Random, dialogue: Dialogue) -> Dialogue:
    """Now and then with a system message that changes nothing."""
    if rng.random() >= 0.06 or dialogue.messages[0]["role"] == "system":
        return dialogue
    message = system(rng.choice(PLAIN_SYSTEMS))
    return replace(dialogue, messages=[message, *dialogue.messages])
