"""Front-end resources of an artifact: everything that turns text into token ids and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FrontendResources:
    """What the text front end needs from a checkpoint folder or an artifact.

    The JSON files are kept as parsed mappings; nothing is interpreted here.
    """

    tokenizer_json: Path
    """`tokenizer.json`, the complete fast tokenizer."""
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    """`tokenizer_config.json`, or empty."""
    chat_template: str | None = None
    """Jinja source: `chat_template.jinja`, else `tokenizer_config["chat_template"]`, else None."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """`generation_config.json`, or empty: sampling defaults and end-of-sequence ids."""
    preprocessor_config: Mapping[str, Any] | None = None
    """`preprocessor_config.json` of image inputs, if any."""
    video_preprocessor_config: Mapping[str, Any] | None = None
    """`video_preprocessor_config.json`, if any."""
