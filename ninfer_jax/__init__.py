"""ninfer-jax: exact, reproducible inference for hybrid language models on one accelerator."""

from ninfer_jax import ray
from ninfer_jax.api import generate, load
from ninfer_jax.batch import BatchSummary, run_batch
from ninfer_jax.config import EngineConfig
from ninfer_jax.engine import Engine, RequestHandle
from ninfer_jax.errors import (
    ArtifactError,
    CapacityError,
    ConstraintError,
    EngineFailure,
    InputError,
    NinferError,
    NotYetError,
    NumericError,
    OverloadError,
)
from ninfer_jax.models import (
    Model,
    SequenceState,
    decode,
    forward,
    init_model,
    load_model,
    prefill,
    random_model,
)
from ninfer_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from ninfer_jax.sampling_params import SamplingParams
from ninfer_jax.scoring import Perplexity, Score
from ninfer_jax.shipped import shipped_model

__all__ = [
    "ArtifactError",
    "BatchSummary",
    "CapacityError",
    "CompletionOutput",
    "ConstraintError",
    "Engine",
    "EngineConfig",
    "EngineFailure",
    "InputError",
    "Logprob",
    "Model",
    "NinferError",
    "NotYetError",
    "NumericError",
    "OverloadError",
    "Perplexity",
    "RequestHandle",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "SequenceState",
    "StreamChunk",
    "decode",
    "forward",
    "generate",
    "init_model",
    "load",
    "load_model",
    "prefill",
    "random_model",
    "ray",
    "run_batch",
    "shipped_model",
]
