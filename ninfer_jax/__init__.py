"""ninfer-jax: exact, reproducible inference for hybrid language models on one accelerator."""
