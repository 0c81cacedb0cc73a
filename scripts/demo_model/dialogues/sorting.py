"""Words and numbers put in order: first by a letter each, then ties by the letters after it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.demo_model.dialogues.dialogue import Dialogue, Sources, asked, listed
from scripts.demo_model.dialogues.pools import syllables
from scripts.demo_model.dialogues.words import WORDS

_WORD_QUESTIONS = {
    False: (
        "Sort these words alphabetically: {x}",
        "Sort alphabetically: {x}",
        "Put these words in alphabetical order: {x}",
        "Please sort these {n} words from A to Z: {x}",
        "Arrange in alphabetical order: {x}",
        "What is the alphabetical order of these words? {x}",
        "sort these words: {x}",
        "Bring the words {x} into alphabetical order",
    ),
    True: (
        "Sort these words in reverse alphabetical order: {x}",
        "Sort from Z to A: {x}",
        "Put these words in descending order: {x}",
        "Please sort these {n} words from Z to A: {x}",
    ),
}
_NUMBER_QUESTIONS = {
    False: (
        "Sort these numbers: {x}",
        "Sort these numbers from smallest to largest: {x}",
        "Put these numbers in ascending order: {x}",
        "Order the numbers {x} from low to high",
    ),
    True: (
        "Sort these numbers from largest to smallest: {x}",
        "Put these numbers in descending order: {x}",
        "Order the numbers {x} from high to low",
    ),
}


@dataclass(frozen=True)
class Order:
    """Items in the order asked about."""

    items: tuple[str, ...]
    """As given: words, or numbers in decimal."""
    descending: bool = False

    @property
    def numbers(self) -> bool:
        """Whether the items are numbers."""
        return self.items[0].isdigit()

    @property
    def key(self) -> str:
        """The same for each arrangement of the items."""
        return "sort:" + ", ".join(sorted(self.items))

    @property
    def result(self) -> tuple[str, ...]:
        """The items in order."""
        by = int if self.numbers else str
        return tuple(sorted(self.items, key=by, reverse=self.descending))

    @property
    def answer(self) -> str:
        """`ant, bee, cat`."""
        return ", ".join(self.result)

    @property
    def steps(self) -> str:
        """`Letters: bee b, cow c, cat c. In order: b c c. b: bee. c: cow o, cat a; cat, cow. ...`"""
        heads = {item: self._head(item) for item in self.items}
        ordered = sorted(heads.values())
        groups = []
        for head in dict.fromkeys(ordered):
            group = [item for item in self.items if heads[item] == head]
            groups.append(f"{head}: {self._group(group)}.")
        tags = ", ".join(f"{item} {head}" for item, head in heads.items())
        kind = "Tens" if self.numbers else "Letters"
        text = f"{kind}: {tags}. In order: {' '.join(ordered)}. {' '.join(groups)}"
        if self.descending:
            upward = sorted(self.items, key=int if self.numbers else str)
            text += f" Upward: {', '.join(upward)}. Now reversed."
        return text

    def _head(self, item: str) -> str:
        return str(int(item) // 10) if self.numbers else item[0]

    def _group(self, group: list[str]) -> str:
        if len(group) == 1:
            return group[0]
        if self.numbers:
            tags = ", ".join(f"{item} {item[-1]}" for item in group)
            return f"{tags}; {', '.join(sorted(group, key=int))}"
        length = tie_length(group)
        tags = ", ".join(f"{item} {' '.join(item[1:length])}" for item in group)
        return f"{tags}; {', '.join(sorted(group))}"


def tie_length(words: Sequence[str]) -> int:
    """How many letters tell the words apart."""
    length = 1
    while len({word[:length] for word in words}) < len(words):
        length += 1
    return length


def word_order(rng: random.Random, count: int, *, descending: bool = False) -> Order:
    """Words that three letters tell apart."""
    while True:
        items = tuple(rng.sample(WORDS, count))
        if tie_length(items) <= 3:
            return Order(items, descending)


def number_order(rng: random.Random, count: int, *, descending: bool = False) -> Order:
    """Different numbers of up to two digits."""
    return Order(tuple(str(n) for n in rng.sample(range(100), count)), descending)


def sorting(rng: random.Random, sources: Sources) -> Dialogue:
    """Mostly five words; also three to seven, downward, and numbers."""
    count = 5 if rng.random() < 0.6 else rng.randrange(3, 8)
    descending = rng.random() < 0.15
    draw = number_order if rng.random() < 0.2 else word_order
    order = draw(rng, count, descending=descending)
    if not order.numbers and rng.random() < 0.15:
        order = _with_stranger(rng, order)
    return asked("sorting", order.key, question(rng, order), order.steps, order.answer)


def _with_stranger(rng: random.Random, order: Order) -> Order:
    """With a word that nobody knows in place of the first."""
    items = (syllables(rng), *order.items[1:])
    if len(items[0]) < 3 or len(set(items)) < len(items) or tie_length(items) > 3:
        return order
    shuffled = tuple(rng.sample(items, len(items)))
    return Order(shuffled, order.descending)


def question(rng: random.Random, order: Order) -> str:
    """The items within a request."""
    phrases = _NUMBER_QUESTIONS if order.numbers else _WORD_QUESTIONS
    phrase = rng.choice(phrases[order.descending])
    style = rng.random()
    if style < 0.65 or not phrase.endswith("{x}"):
        items = ", ".join(order.items)
    elif style < 0.8:
        items = listed(order.items)
    elif style < 0.93:
        items = " ".join(order.items)
    else:
        items = "\n" + "\n".join(order.items)
        return phrase.format(x=items, n=len(order.items)).replace(": \n", ":\n")
    end = "." if rng.random() < 0.5 else ""
    return phrase.format(x=items, n=len(order.items)) + end
