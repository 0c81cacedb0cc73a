"""Model mathematics: pure functions over parameter trees and immutable device state, one folder a family."""

from ninfer_jax.models.geometries import random_model
from ninfer_jax.models.model import (
    Model,
    SequenceState,
    decode,
    forward,
    init_model,
    load_model,
    model_from_checkpoint,
    prefill,
)

__all__ = [
    "Model",
    "SequenceState",
    "decode",
    "forward",
    "init_model",
    "load_model",
    "model_from_checkpoint",
    "prefill",
    "random_model",
]
