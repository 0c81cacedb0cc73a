"""Many machines: the same jobs on Ray Data, one engine an actor. Needs the extra `ray`, imported when it is used."""

from ninfer_jax.ray.config import ProcessorConfig
from ninfer_jax.ray.processor import build_processor
from ninfer_jax.ray.run import run_batch

__all__ = ["ProcessorConfig", "build_processor", "run_batch"]
