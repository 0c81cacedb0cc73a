"""Dialogues as the text a model is trained on: the runtime's own rendering."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ninfer_jax.frontend import ChatTemplate
from scripts.demo_model.dialogues.dialogue import Dialogue

TEMPLATE = Path(__file__).parent.parent / "chat_template.jinja"
"""The chat template that ships with the demo model."""


@cache
def template() -> ChatTemplate:
    """The compiled template."""
    return ChatTemplate(TEMPLATE.read_text(encoding="utf-8"))


def render(dialogue: Dialogue) -> str:
    """The whole conversation, each answer as the model would write it."""
    return template().render(
        dialogue.messages,
        tools=dialogue.tools,
        add_generation_prompt=False,
        enable_thinking=dialogue.thinking,
    )
