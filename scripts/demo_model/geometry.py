"""The shape of the demo model and of its draft, as their Hugging Face config files say it."""

from __future__ import annotations

from typing import Any

from artifacts import Qwen3_5Config
from artifacts.architectures.dflash import DFlashConfig, parse_draft_config
from artifacts.architectures.qwen3_5 import parse_huggingface_config

VOCABULARY = 6144
ADDED_TOKENS = 27
"""Qwen's added tokens and the draft's mask token, at the end of the vocabulary."""
CONTEXT = 2048

FIRST_ADDED = VOCABULARY - ADDED_TOKENS
END_OF_TEXT, IM_START, IM_END = FIRST_ADDED, FIRST_ADDED + 1, FIRST_ADDED + 2
MASK = VOCABULARY - 1

TRUNK: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    },
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": END_OF_TEXT,
}

DRAFT: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_target_layers": 12,
    "layer_types": ["full_attention", "full_attention"],
    "use_sliding_window": False,
    "sliding_window": None,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "block_size": 8,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 5, 9]},
}


def trunk_config() -> Qwen3_5Config:
    """The trunk's normalised geometry (its MTP head included)."""
    return parse_huggingface_config(TRUNK)[1]


def draft_config() -> DFlashConfig:
    """The draft's normalised geometry."""
    return parse_draft_config(DRAFT)
