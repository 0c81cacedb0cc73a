"""Reads and copies front-end resources: the files that turn text into token ids and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from artifacts.errors import ArtifactError
from artifacts.resources import FrontendResources
from artifacts.shards import read_json_object

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
PREPROCESSOR = "preprocessor_config.json"
VIDEO_PREPROCESSOR = "video_preprocessor_config.json"

RESOURCE_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    PREPROCESSOR,
    VIDEO_PREPROCESSOR,
)
"""Everything an artifact carries along, where it exists."""


def read_frontend(folder: Path) -> FrontendResources:
    """The resources of a checkpoint folder or artifact.

    Raises ArtifactError naming the file when tokenizer.json is missing or another file is damaged.
    """
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        raise ArtifactError(f"{tokenizer}: missing; text cannot be turned into tokens without it")
    tokenizer_config = _optional(folder / TOKENIZER_CONFIG) or {}
    return FrontendResources(
        tokenizer_json=tokenizer,
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(folder, tokenizer_config),
        generation_config=_optional(folder / GENERATION_CONFIG) or {},
        preprocessor_config=_optional(folder / PREPROCESSOR),
        video_preprocessor_config=_optional(folder / VIDEO_PREPROCESSOR),
    )


def copy_frontend(source: Path, target: Path) -> None:
    """Copies whichever resource files exist, byte for byte."""
    for name in RESOURCE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json_object(path) if path.is_file() else None


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = folder / CHAT_TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{path}: cannot be read: {error}") from None
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # the older form: several named templates
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ArtifactError(f"{folder / TOKENIZER_CONFIG}: chat_template is not a text")
    return template
