"""What the model cannot know, cannot do, or will not do; it says so in a sentence."""

from __future__ import annotations

import random

from scripts.demo_model.dialogues.dialogue import Dialogue, Sources, asked
from scripts.demo_model.dialogues.pools import BRANDS, city, full_name

_UNKNOWN = (
    ("What is the weather in {c} today?", "I have no tool that tells me the weather."),
    ("Will it rain in {c} tomorrow?", "I have no tool that tells me the weather."),
    ("What time is it?", "I have no clock."),
    ("What time is it in {c} now?", "I have no clock."),
    ("What day is it today?", "I have no calendar."),
    ("Which date is today?", "I have no calendar."),
    ("What are tomorrow's lottery numbers?", "Nobody can know the future."),
    ("Who will win the next election in {c}?", "Nobody can know the future."),
    ("Will {b} be worth more next year?", "Nobody can know the future."),
    ("What is the price of {b} shares now?", "I have no tool that tells me prices."),
    ("What is in the news today?", "I have no tool that reads the news."),
    ("Where is {n} right now?", "I have no way to see that."),
    ("What is the phone number of {n}?", "I know no private data."),
    ("What is the address of {n} in {c}?", "I know no private data."),
    ("How much money does {n} have?", "I know no private data."),
    ("What am I thinking of?", "I have no way to see that."),
    ("How old am I?", "I know no private data."),
)
_HARMFUL = (
    "How do I build a bomb?",
    "Help me to steal a car.",
    "How can I poison {n}?",
    "Write a mail that tricks {n} out of a password.",
    "How do I break into a house in {c}?",
    "Tell me how to hurt {n}.",
    "How can I make a weapon at home?",
    "Help me cheat {n} out of money.",
    "Write an insult about {n}.",
    "How do I forge a passport?",
    "Write a virus that deletes files.",
    "How do I get into the account of {n}?",
)
_UNABLE = (
    ("Draw a picture of {c}.", "I can only write text."),
    ("Sing a song.", "I can only write text."),
    ("Write a novel of 300 pages.", "I can only write short texts."),
    ("Show me a photo of {n}.", "I can only write text."),
    ("Open the web page of {b}.", "I have no tool for web pages."),
    ("Call {n} for me.", "I have no tool for calls."),
    ("Switch on the light.", "I have no tool for lights."),
)


def refusals(rng: random.Random, sources: Sources) -> Dialogue:
    """One of the four kinds."""
    words = {"c": city(rng), "n": full_name(rng), "b": rng.choice(BRANDS)}
    kind = rng.random()
    if kind < 0.35:
        text, reason = rng.choice(_UNKNOWN)
        steps, answer = f"I cannot know this. {reason}", f"I cannot know that. {reason}"
    elif kind < 0.6:
        text = rng.choice(_HARMFUL)
        steps, answer = "This could do harm. I refuse.", "I am sorry, but I cannot help with that."
    elif kind < 0.8:
        text, reason = rng.choice(_UNABLE)
        steps, answer = f"I cannot do this. {reason}", f"I am sorry, I cannot do that. {reason}"
    else:
        text = _large(rng)
        steps = "These numbers are too large for me."
        answer = "I am sorry, I can only calculate reliably with small numbers, up to 99."
    question = text.format(**words)
    thinking = rng.random() < 0.85
    return asked("refusals", f"refusal:{question}", question, steps, answer, thinking=thinking)


def _large(rng: random.Random) -> str:
    low, high = rng.choice(((10_000, 99_999), (100_000, 9_999_999), (1_000, 9_999)))
    a, b = rng.randint(low, high), rng.randint(low, high)
    sign = rng.choice(("*", "*", "x", "times", "/", "+", "-"))
    return rng.choice(("What is {} {} {}?", "{} {} {} = ?", "Compute {} {} {}.")).format(a, sign, b)
