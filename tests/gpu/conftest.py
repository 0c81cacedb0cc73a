"""These tests mean nothing on a CPU: they fail there instead of passing by mistake."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _needs_an_accelerator():
    assert jax.devices()[0].platform != "cpu", "no accelerator: run these with `make test-gpu`"
