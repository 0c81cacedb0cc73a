"""Qwen3.5 and Qwen3-Next: config, logical parameters, and how Hugging Face stores them."""

from artifacts.architectures.qwen3_5.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Qwen3_5Config,
    Qwen3_5VisionConfig,
)
from artifacts.architectures.qwen3_5.config_huggingface import parse_huggingface_config
from artifacts.architectures.qwen3_5.huggingface import bind_tensors
from artifacts.architectures.qwen3_5.parameters import (
    mtp_parameter_shapes,
    parameter_shapes,
    text_parameter_shapes,
    vision_parameter_shapes,
)

__all__ = [
    "FULL_ATTENTION",
    "LINEAR_ATTENTION",
    "Qwen3_5Config",
    "Qwen3_5VisionConfig",
    "bind_tensors",
    "mtp_parameter_shapes",
    "parameter_shapes",
    "parse_huggingface_config",
    "text_parameter_shapes",
    "vision_parameter_shapes",
]
