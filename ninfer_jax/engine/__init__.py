"""The engine: requests, the worker that runs them, and the public `Engine`."""

from ninfer_jax.engine.engine import Engine
from ninfer_jax.engine.handle import RequestHandle

__all__ = ["Engine", "RequestHandle"]
