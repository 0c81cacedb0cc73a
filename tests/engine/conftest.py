"""One engine on the tiny dense checkpoint for all engine tests."""

import time

import numpy as np
import pytest

import ninfer_jax as nj
from planner.world import check_world


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
    wait_until_idle(engine)
    check_world(engine._worker.world)


def wait_until_idle(engine):
    """A request that was dropped ends at its next boundary."""
    deadline = time.monotonic() + 20
    while not engine.idle:
        assert time.monotonic() < deadline, "requests are still live"
        time.sleep(0.002)
