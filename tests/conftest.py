"""Every test runs with shape-checked signatures, strict promotion, and rank promotion forbidden."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook

# Array annotations in these packages are checked at call (trace) time.
install_import_hook(
    ["ninfer_jax.models", "ninfer_jax.program", "pallas_kernels"], "beartype.beartype"
)

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of tiny checkpoints with Hugging Face's outputs (see its README)."""
    return GOLDENS
