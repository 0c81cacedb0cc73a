"""The command line, `ninfer`."""

from ninfer_jax.cli.main import main

__all__ = ["main"]
