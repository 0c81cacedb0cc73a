"""DFlash block drafts: config, logical parameters, and how Hugging Face stores them."""

from artifacts.architectures.dflash.config import SLIDING_ATTENTION, DFlashConfig
from artifacts.architectures.dflash.config_huggingface import parse_draft_config
from artifacts.architectures.dflash.huggingface import bind_draft_tensors, draft_tensor_name
from artifacts.architectures.dflash.parameters import dflash_parameter_shapes

__all__ = [
    "SLIDING_ATTENTION",
    "DFlashConfig",
    "bind_draft_tensors",
    "dflash_parameter_shapes",
    "draft_tensor_name",
    "parse_draft_config",
]
