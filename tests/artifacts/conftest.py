from pathlib import Path

import pytest


@pytest.fixture
def dense(goldens: Path) -> Path:
    """Flat config, untied head, `model.` prefix, MTP."""
    return goldens / "tiny-qwen3.5-dense"


@pytest.fixture
def moe(goldens: Path) -> Path:
    """Fused expert tensors."""
    return goldens / "tiny-qwen3.5-moe"


@pytest.fixture
def vl(goldens: Path) -> Path:
    """Nested config, tied head, `model.language_model.` prefix, vision tower."""
    return goldens / "tiny-qwen3.5-vl"


@pytest.fixture
def qwen3_next(goldens: Path) -> Path:
    """Fused projections grouped by key head, per-expert tensors."""
    return goldens / "tiny-qwen3-next"
