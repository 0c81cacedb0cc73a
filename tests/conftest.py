"""Every test runs with shape-checked signatures, strict promotion, and rank promotion forbidden."""

import os

# `make test-gpu` sets the variable to nothing, which lets JAX choose.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook

# Array annotations of these modules' functions are checked at call (trace) time. Modules of PyTree classes are left
# out: JAX builds trees of other things than arrays (shapes, specifications, placeholders).
install_import_hook(
    [
        "ninfer_jax.models.qwen3_5.layers",
        "ninfer_jax.models.qwen3_5.trunk",
        "ninfer_jax.program.sampler",
        "ninfer_jax.program.units",
        "pallas_kernels",
    ],
    "beartype.beartype",
)

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

from pathlib import Path  # noqa: E402

# Engines of the same checkpoint start in many tests; each executable is compiled once.
CACHE = Path(__file__).parent.parent / ".cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

import pytest  # noqa: E402

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of tiny checkpoints with Hugging Face's outputs (see its README)."""
    return GOLDENS
