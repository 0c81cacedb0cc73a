"""These tests mean nothing on a CPU: they fail there instead of passing by mistake."""

import jax
import pytest

from pallas_kernels.dispatch import not_hopper


@pytest.fixture(autouse=True)
def _needs_an_accelerator(request):
    assert jax.devices()[0].platform != "cpu", "no accelerator: run these with `make test-gpu`"
    if request.path.name.startswith("test_gpu_") and (missing := not_hopper()):
        pytest.skip(f"the kernels are for Hopper: {missing}")
