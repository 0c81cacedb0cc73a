"""Reads a Hugging Face `config.json`, flat or nested, into a `Qwen3_5Config`.

Fall-backs are exactly those of the model classes (model_math.md section 10); every other key must
be there. A feature that would change the formulas without changing any shape is refused by name,
never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifacts.architectures.huggingface_keys import Keys, huggingface_architecture
from artifacts.architectures.qwen3_5.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Qwen3_5Config,
    Qwen3_5VisionConfig,
)
from artifacts.architectures.registry import MOE, normalise_architecture
from artifacts.errors import ArtifactError, NotYetError

DEFAULT_ROPE_THETA = 10000.0
DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25
DEFAULT_MROPE_SECTION = (11, 11, 10)
DEFAULT_FULL_ATTENTION_INTERVAL = 4
_PLAIN_ROPE = ("default", "mrope")


def parse_huggingface_config(
    raw: Mapping[str, Any], where: str = "config.json"
) -> tuple[str, Qwen3_5Config]:
    """`(architecture entry, config)` of a parsed `config.json`.

    Raises ArtifactError naming the file and key for a missing or impossible value and for an
    unknown architecture; NotYetError for a known feature or architecture that is not implemented.
    """
    public_name = huggingface_architecture(raw, where)
    architecture = normalise_architecture(public_name, where)
    top = Keys(raw, where)
    text = top.section("text_config") if raw.get("text_config") is not None else top
    _refuse_unsupported(top, text)
    layers = text.integer("num_hidden_layers")
    is_moe = architecture == MOE
    try:
        config = Qwen3_5Config(
            vocab_size=text.integer("vocab_size"),
            hidden_size=text.integer("hidden_size"),
            num_hidden_layers=layers,
            layer_types=_layer_types(text, layers),
            num_attention_heads=text.integer("num_attention_heads"),
            num_key_value_heads=text.integer("num_key_value_heads"),
            rms_norm_eps=text.number("rms_norm_eps"),
            linear_num_key_heads=text.integer("linear_num_key_heads"),
            linear_num_value_heads=text.integer("linear_num_value_heads"),
            linear_key_head_dim=text.integer("linear_key_head_dim"),
            linear_value_head_dim=text.integer("linear_value_head_dim"),
            linear_conv_kernel_dim=text.integer("linear_conv_kernel_dim"),
            # Qwen3.5-MoE always renormalises; only Qwen3-Next has a switch.
            norm_topk_prob=(
                text.get("norm_topk_prob", bool, True)
                if public_name.startswith("Qwen3Next")
                else is_moe
            ),
            tie_word_embeddings=_tie_flag(top, text),
            max_position_embeddings=text.integer("max_position_embeddings"),
            mtp_num_hidden_layers=text.integer("mtp_num_hidden_layers", 1),
            vision=_vision(top),
            image_token_id=top.integer("image_token_id", None),
            video_token_id=top.integer("video_token_id", None),
            vision_start_token_id=top.integer("vision_start_token_id", None),
            vision_end_token_id=top.integer("vision_end_token_id", None),
            bos_token_id=text.integer("bos_token_id", None),
            eos_token_ids=_eos_ids(text),
            pad_token_id=text.integer("pad_token_id", None),
            **_rope(text, plain=public_name.startswith("Qwen3Next")),
            **_ffn(text, layers, is_moe),
        )
    except (NotYetError, ArtifactError) as error:
        if str(error).startswith(where):
            raise
        raise ArtifactError(f"{where}: {error}") from None
    return architecture, config


def _refuse_unsupported(top: Keys, text: Keys) -> None:
    for keys in (top, text):
        keys.refuse_quantization()
    text.only("attention_bias", (False,))
    text.only("hidden_act", ("silu", "swish"))
    text.only("attn_output_gate", (True,))
    text.only("output_gate_type", ("swish", "silu"))
    text.only("layer_scale", (False,))
    text.only("mtp_use_dedicated_embeddings", (False,))
    text.only("use_sliding_window", (False,))


def _tie_flag(top: Keys, text: Keys) -> bool:
    """In the nested form the flag stands at both levels and the top one counts."""
    inner = text.get("tie_word_embeddings", bool, False)
    return bool(top.get("tie_word_embeddings", bool, inner))


def _layer_types(text: Keys, layers: int) -> tuple[str, ...]:
    given = text.get("layer_types", list, None)
    if given is not None:
        for kind in given:
            if kind not in (LINEAR_ATTENTION, FULL_ATTENTION):
                raise text.fail("layer_types", f"holds {kind!r}, which is not a known layer type")
        return tuple(given)
    interval = text.integer("full_attention_interval", DEFAULT_FULL_ATTENTION_INTERVAL)
    if interval < 1:
        raise text.fail("full_attention_interval", f"must be positive, not {interval}")
    return tuple(
        FULL_ATTENTION if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(layers)
    )


def _rope(text: Keys, plain: bool) -> dict[str, Any]:
    """The fields about heads and rope. `plain`: the family has no multi-axis positions."""
    rope = text.section("rope_parameters")
    scaling = text.section("rope_scaling")
    for keys in (rope, scaling):
        keys.only("rope_type", _PLAIN_ROPE)
        keys.only("type", _PLAIN_ROPE)
        keys.only("factor", (1, 1.0))
        keys.only("mrope_interleaved", (True,))
    head_dim = text.integer("head_dim")
    if head_dim < 1:
        raise text.fail("head_dim", f"must be positive, not {head_dim}")
    theta = rope.number("rope_theta", text.number("rope_theta", DEFAULT_ROPE_THETA))
    partial = rope.number(
        "partial_rotary_factor", text.number("partial_rotary_factor", DEFAULT_PARTIAL_ROTARY_FACTOR)
    )
    if not 0 < partial <= 1:
        raise text.fail("partial_rotary_factor", f"must lie in (0, 1], not {partial}")
    rotary_dim = int(head_dim * partial)
    section = rope.integers("mrope_section", ()) or scaling.integers("mrope_section", ())
    if section and sum(section) * 2 != rotary_dim:
        raise rope.fail(
            "mrope_section", f"{list(section)} does not add up to half of {rotary_dim} rotated dims"
        )
    if not section:
        section = (rotary_dim // 2, 0, 0) if plain else DEFAULT_MROPE_SECTION
    return {
        "head_dim": head_dim,
        "rope_theta": theta,
        "rotary_dim": rotary_dim,
        "mrope_section": section,
    }


def _ffn(text: Keys, layers: int, is_moe: bool) -> dict[str, Any]:
    if not is_moe:
        return {
            "ffn_types": ("dense",) * layers,
            "intermediate_size": text.integer("intermediate_size"),
            "num_experts": 0,
            "num_experts_per_tok": 0,
            "moe_intermediate_size": 0,
            "shared_expert_intermediate_size": 0,
        }
    dense_layers = text.integers("mlp_only_layers", ())
    step = text.integer("decoder_sparse_step", 1)
    if step < 1:
        raise text.fail("decoder_sparse_step", f"must be positive, not {step}")
    kinds = tuple(
        "moe" if i not in dense_layers and (i + 1) % step == 0 else "dense" for i in range(layers)
    )
    experts = text.integer("num_experts")
    if experts < 1:
        raise text.fail("num_experts", f"must be positive, not {experts}")
    return {
        "ffn_types": kinds,
        "intermediate_size": text.integer("intermediate_size") if "dense" in kinds else 0,
        "num_experts": experts,
        "num_experts_per_tok": text.integer("num_experts_per_tok"),
        "moe_intermediate_size": text.integer("moe_intermediate_size"),
        "shared_expert_intermediate_size": text.integer("shared_expert_intermediate_size"),
    }


def _vision(top: Keys) -> Qwen3_5VisionConfig | None:
    if top.values.get("vision_config") is None:
        return None
    vision = top.section("vision_config")
    if vision.get("deepstack_visual_indexes", list, []):
        raise vision.not_yet("deepstack_visual_indexes")
    vision.only("hidden_act", ("gelu_pytorch_tanh",))
    names = (
        "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size",
        "spatial_merge_size", "temporal_patch_size", "out_hidden_size", "num_position_embeddings",
    )  # fmt: skip
    return Qwen3_5VisionConfig(**{name: vision.integer(name) for name in names})


def _eos_ids(text: Keys) -> tuple[int, ...]:
    if isinstance(text.values.get("eos_token_id"), list):
        return text.integers("eos_token_id")
    single = text.integer("eos_token_id", None)
    return () if single is None else (single,)
