"""Small talk, the model about itself, plain facts, meanings of words, and styles that a system
message asks for."""

from __future__ import annotations

import random

from scripts.demo_model.dialogues.dialogue import (
    Dialogue,
    Sources,
    asked,
    assistant,
    capital,
    system,
    user,
)
from scripts.demo_model.dialogues.facts import (
    CAPITALS,
    COUNTS,
    OPPOSITES,
    PLURALS,
    THING_COLORS,
)
from scripts.demo_model.dialogues.pools import DAYS, GIVEN_NAMES, MONTHS

NAME = "I am the small demo model of ninfer-jax."
"""How the model names itself."""
ABILITIES = (
    "I can calculate with numbers up to 99, sort words, extract JSON, call tools, and answer "
    "questions about a short text."
)
"""What the model says that it can do."""

_TALK: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        (
            "Hello!",
            "Hi",
            "hello",
            "Hey there!",
            "Good morning!",
            "Good evening.",
            "Hi there!",
            "Hey",
        ),
        "The user greets me.",
        ("Hello! How can I help you?",),
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "Are you well?"),
        "The user asks how I am.",
        ("I am well, thank you. How can I help you?",),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "who are you",
            "Introduce yourself.",
        ),
        "The user asks who I am.",
        (f"{NAME} I am very small, but I think before I answer.",),
    ),
    (
        ("Which model are you?", "Are you ChatGPT?", "Who made you?", "Are you a human?"),
        "The user asks who I am.",
        (f"{NAME} I run on a JAX runtime for hybrid language models.",),
    ),
    (
        ("What can you do?", "Help", "How can you help me?", "what can you do for me?", "Help me!"),
        "The user asks what I can do.",
        (ABILITIES,),
    ),
    (
        ("Thanks!", "Thank you.", "Thank you very much!", "thanks a lot", "Great, thanks!"),
        "The user thanks me.",
        ("You are welcome!",),
    ),
    (
        ("Bye!", "Goodbye.", "See you later!", "Good night!", "bye"),
        "The user says goodbye.",
        ("Goodbye! Have a nice time.",),
    ),
    (
        ("Well done!", "That is right.", "Very good!", "Good job!"),
        "The user is content.",
        ("I am glad to hear that.",),
    ),
    (
        ("That is wrong.", "This is not right!", "You are wrong."),
        "The user says I made a mistake.",
        ("I am sorry. I am a very small model and make mistakes.",),
    ),
    (
        ("Tell me a joke.", "Say something funny."),
        "The user wants a joke.",
        ("Why is the number six afraid? Because seven ate nine.",),
    ),
    (
        ("What is ninfer-jax?", "Tell me about ninfer-jax."),
        "The user asks about ninfer-jax.",
        ("ninfer-jax is a JAX runtime for hybrid language models. I am its small demo model.",),
    ),
)
PLAIN_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Be brief.",
    "You are a helpful, honest assistant.",
    "You are a careful assistant.",
)
"""System messages that ask for nothing in particular."""
_STYLES: tuple[tuple[str, str], ...] = (
    ("Answer in one word.", "one word"),
    ("Answer with a single word only.", "one word"),
    ("You answer in one word.", "one word"),
    ("Answer in upper case.", "upper case"),
    ("Write your answers in capital letters.", "upper case"),
    *((text, "plain") for text in PLAIN_SYSTEMS[:2]),
)


def basics(rng: random.Random, sources: Sources) -> Dialogue:
    """Talk, a fact, a meaning, or a style."""
    kind = rng.random()
    if kind < 0.35:
        return _talk(rng)
    if kind < 0.55 and sources.glosses:
        return _meaning(rng, sources)
    if kind < 0.75:
        return _styled(rng)
    question, steps, answer = fact(rng)
    thinking = rng.random() < 0.8
    return asked("basics", f"fact:{question}", question, steps, answer, thinking=thinking)


def fact(rng: random.Random) -> tuple[str, str, str]:
    """A question, what to think, and the answer: a sentence whose core is one word."""
    question, core, frame = _core(rng)
    return question, f"I know this: {core.rstrip('.')}.", frame.format(core)


def _core(rng: random.Random) -> tuple[str, str, str]:
    kind = rng.randrange(7)
    if kind == 0:
        country, city = rng.choice(list(CAPITALS.items()))
        question = rng.choice(("What is the capital of {}?", "Name the capital of {}."))
        return question.format(country), city, f"The capital of {country} is {{}}."
    if kind == 1:
        word, other = rng.choice(list(OPPOSITES.items()))
        question = rng.choice(("What is the opposite of {}?", "Give me the opposite of {}."))
        return question.format(word), other, f"The opposite of {word} is {{}}."
    if kind == 2:
        word, plural = rng.choice(list(PLURALS.items()))
        question = rng.choice(("What is the plural of {}?", "One {}, two ...?"))
        return question.format(word), plural, f"The plural of {word} is {{}}."
    if kind == 3:
        thing, color = rng.choice(list(THING_COLORS.items()))
        question = rng.choice(("What color is {}?", "Tell me the color of {}."))
        return question.format(thing), color, "{}."
    if kind == 4:
        question, answer = rng.choice(list(COUNTS.items()))
        return question, answer, "{}"
    names = DAYS if kind == 5 else MONTHS
    unit = "day" if kind == 5 else "month"
    i = rng.randrange(len(names))
    if rng.random() < 0.5:
        other, side = names[(i + 1) % len(names)], "after"
    else:
        other, side = names[i - 1], "before"
    question = rng.choice(("Which {} comes {} {}?", "What {} is {} {}?")).format(
        unit, side, names[i]
    )
    return question, other, f"The {unit} {side} {names[i]} is {{}}."


def _talk(rng: random.Random) -> Dialogue:
    if rng.random() < 0.12:
        name = rng.choice(GIVEN_NAMES)
        question = rng.choice(("My name is {}.", "Hi, I am {}.", "Hello, I'm {}.")).format(name)
        answer = f"Hello, {name}! How can I help you?"
        return asked("basics", f"talk:{name}", question, f"The user is called {name}.", answer)
    questions, steps, answers = rng.choice(_TALK)
    question = rng.choice(questions)
    thinking = rng.random() < 0.8
    answer = rng.choice(answers)
    return asked("basics", f"talk:{question}", question, steps, answer, thinking=thinking)


def _meaning(rng: random.Random, sources: Sources) -> Dialogue:
    word, gloss = rng.choice(sources.glosses)
    question = rng.choice(
        ("What does {} mean?", "What is the meaning of {}?", 'Define "{}".', "Explain the word {}.")
    ).format(word)
    answer = f"{capital(word)}: {gloss.rstrip('.')}."
    return asked("basics", f"meaning:{word}", question, f"I recall the meaning of {word}.", answer)


def _styled(rng: random.Random) -> Dialogue:
    text, style = rng.choice(_STYLES)
    question, core, frame = _core(rng)
    steps = f"I know this: {core.rstrip('.')}."
    answer = frame.format(core)
    if style == "one word":
        answer = capital(core.rstrip(".").split()[-1]) + "."
        steps += " One word."
    elif style == "upper case":
        answer = f"{core.rstrip('.').upper()}."
        steps += " In upper case."
    messages = [system(text), user(question), assistant(answer, steps)]
    return Dialogue("basics", f"style {text}:{question}", messages)
