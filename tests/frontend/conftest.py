"""Shared pieces: the tiny checkpoints' tokenizer and the test kit's own chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from artifacts.resources import FrontendResources
from ninfer_jax.frontend import Tokenizer

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def resources(goldens: Path) -> FrontendResources:
    """The tiny checkpoint's front-end files, with the test kit's template."""
    folder = goldens / "tiny-qwen3.5-dense"
    return FrontendResources(
        tokenizer_json=folder / "tokenizer.json",
        tokenizer_config=json.loads((folder / "tokenizer_config.json").read_text()),
        chat_template=(DATA / "chat.jinja").read_text(),
        generation_config=json.loads((folder / "generation_config.json").read_text()),
    )


@pytest.fixture(scope="session")
def tokenizer(resources: FrontendResources) -> Tokenizer:
    """The tiny checkpoints' tokenizer: 998 byte-level tokens and 26 added ones."""
    return Tokenizer.from_resources(resources)
