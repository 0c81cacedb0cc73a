"""Engines of both purposes on the tiny dense checkpoint."""

import pytest

import ninfer_jax as nj


@pytest.fixture(scope="session")
def scoring(goldens):
    """The whole context of the checkpoint."""
    with nj.load(goldens / "tiny-qwen3.5-dense", purpose="scoring") as engine:
        yield engine


@pytest.fixture(scope="session")
def small(goldens):
    """Contexts of 320 tokens in chunks of 64."""
    with nj.load(
        goldens / "tiny-qwen3.5-dense", purpose="scoring", max_context=320, prefill_chunk=64
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def generating(goldens):
    with nj.load(
        goldens / "tiny-qwen3.5-dense",
        max_concurrency=2,
        max_context=320,
        kv_capacity=640,
        prefill_chunk=64,
    ) as engine:
        yield engine
