"""The engine: requests, the generation loop, and the public `Engine`."""

from ninfer_jax.engine.engine import Engine

__all__ = ["Engine"]
