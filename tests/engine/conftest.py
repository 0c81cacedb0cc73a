"""One engine on the tiny dense checkpoint for all engine tests."""

import numpy as np
import pytest

import ninfer_jax as nj


@pytest.fixture(scope="session")
def engine(goldens):
    """C = 4, contexts of 320 tokens, a pool that holds less than four of them."""
    return nj.load(
        goldens / "tiny-qwen3.5-dense", max_concurrency=4, max_context=320, kv_capacity=16 * 64
    )


@pytest.fixture(scope="session")
def golden(goldens):
    return np.load(goldens / "tiny-qwen3.5-dense" / "golden.npz")


@pytest.fixture(autouse=True)
def _everything_is_given_back(engine):
    yield
    assert engine.idle
