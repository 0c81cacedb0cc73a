"""The logical parameters of a Qwen3.5 / Qwen3-Next model: every name and shape, whatever a file
calls or splits them.

Linear weights are [out, in] (`W x` means `x @ W.T`). The order of the tables is the order in which
an artifact stores them.
"""

from __future__ import annotations

from artifacts.architectures.dflash.parameters import dflash_parameter_shapes
from artifacts.architectures.qwen3_5.config import (
    FULL_ATTENTION,
    Qwen3_5Config,
    Qwen3_5VisionConfig,
)
from artifacts.errors import ArtifactError

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: Qwen3_5Config, components: tuple[str, ...] = ("text",)) -> Shapes:
    """Logical name -> shape of every parameter of the named components, from "text", "mtp",
    "vision" and "dflash".

    Raises ArtifactError for a component that this architecture or config does not have.
    """
    tables: Shapes = {}
    for component in components:
        if component == "text":
            tables |= text_parameter_shapes(config)
        elif component == "mtp":
            tables |= mtp_parameter_shapes(config)
        elif component == "vision" and config.vision is not None:
            tables |= vision_parameter_shapes(config.vision)
        elif component == "dflash" and config.dflash is not None:
            tables |= dflash_parameter_shapes(config.dflash)
        else:
            raise ArtifactError(f"config: component {component!r} is not part of this model")
    return tables


def text_parameter_shapes(config: Qwen3_5Config) -> Shapes:
    """Embedding, trunk layers, final norm, and the head unless it is tied to the embedding."""
    H, V = config.hidden_size, config.vocab_size
    shapes: Shapes = {"text.embed_tokens": (V, H)}
    for i, (mixer, ffn) in enumerate(zip(config.layer_types, config.ffn_types, strict=True)):
        shapes |= _layer(config, f"text.layers.{i}", mixer, ffn)
    shapes["text.norm"] = (H,)
    if not config.tie_word_embeddings:
        shapes["text.lm_head"] = (V, H)
    return shapes


def mtp_parameter_shapes(config: Qwen3_5Config) -> Shapes:
    """The multi-token-prediction head: full-attention layers of its own between shared ends."""
    H = config.hidden_size
    if not config.mtp_num_hidden_layers:
        raise ArtifactError("config: mtp_num_hidden_layers is 0, but there are mtp parameters")
    shapes: Shapes = {
        "mtp.fc": (H, 2 * H),
        "mtp.pre_fc_norm_embedding": (H,),
        "mtp.pre_fc_norm_hidden": (H,),
    }
    for i in range(config.mtp_num_hidden_layers):
        shapes |= _layer(config, f"mtp.layers.{i}", FULL_ATTENTION, config.mtp_ffn_type)
    shapes["mtp.norm"] = (H,)
    return shapes


def vision_parameter_shapes(vision: Qwen3_5VisionConfig) -> Shapes:
    """The vision tower, under the names that follow `model.visual.` in a checkpoint."""
    D, F = vision.hidden_size, vision.intermediate_size
    patch = vision.patch_size
    merged = D * vision.spatial_merge_size**2
    shapes: Shapes = {
        "vision.patch_embed.proj.weight": (
            D, vision.in_channels, vision.temporal_patch_size, patch, patch,
        ),
        "vision.patch_embed.proj.bias": (D,),
        "vision.pos_embed.weight": (vision.num_position_embeddings, D),
    }  # fmt: skip
    for i in range(vision.depth):
        block = f"vision.blocks.{i}"
        for norm in ("norm1", "norm2"):
            shapes |= {f"{block}.{norm}.weight": (D,), f"{block}.{norm}.bias": (D,)}
        shapes |= _with_bias(f"{block}.attn.qkv", 3 * D, D)
        shapes |= _with_bias(f"{block}.attn.proj", D, D)
        shapes |= _with_bias(f"{block}.mlp.linear_fc1", F, D)
        shapes |= _with_bias(f"{block}.mlp.linear_fc2", D, F)
    shapes |= {"vision.merger.norm.weight": (D,), "vision.merger.norm.bias": (D,)}
    shapes |= _with_bias("vision.merger.linear_fc1", merged, merged)
    shapes |= _with_bias("vision.merger.linear_fc2", vision.out_hidden_size, merged)
    return shapes


def _with_bias(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _layer(config: Qwen3_5Config, prefix: str, mixer: str, ffn: str) -> Shapes:
    H = config.hidden_size
    attention = _full_attention if mixer == FULL_ATTENTION else _linear_attention
    return {
        f"{prefix}.input_norm": (H,),
        **attention(config, prefix),
        f"{prefix}.post_attention_norm": (H,),
        **(_moe(config, prefix) if ffn == "moe" else _dense(config, prefix)),
    }


def _full_attention(config: Qwen3_5Config, prefix: str) -> Shapes:
    H, D = config.hidden_size, config.head_dim
    N, K = config.num_attention_heads, config.num_key_value_heads
    return {
        # Per head D query rows, then D gate rows.
        f"{prefix}.self_attn.q_proj": (N * 2 * D, H),
        f"{prefix}.self_attn.k_proj": (K * D, H),
        f"{prefix}.self_attn.v_proj": (K * D, H),
        f"{prefix}.self_attn.o_proj": (H, N * D),
        f"{prefix}.self_attn.q_norm": (D,),
        f"{prefix}.self_attn.k_norm": (D,),
    }


def _linear_attention(config: Qwen3_5Config, prefix: str) -> Shapes:
    H, nv = config.hidden_size, config.linear_num_value_heads
    conv, value = config.linear_conv_size, config.linear_value_size
    return {
        # Rows: all queries head-major, then all keys, then all values.
        f"{prefix}.linear_attn.in_proj_qkv": (conv, H),
        f"{prefix}.linear_attn.in_proj_z": (value, H),
        f"{prefix}.linear_attn.in_proj_b": (nv, H),
        f"{prefix}.linear_attn.in_proj_a": (nv, H),
        f"{prefix}.linear_attn.conv1d": (conv, config.linear_conv_kernel_dim),
        f"{prefix}.linear_attn.dt_bias": (nv,),
        f"{prefix}.linear_attn.A_log": (nv,),
        f"{prefix}.linear_attn.norm": (config.linear_value_head_dim,),
        f"{prefix}.linear_attn.out_proj": (H, value),
    }


def _dense(config: Qwen3_5Config, prefix: str) -> Shapes:
    H, F = config.hidden_size, config.intermediate_size
    return {
        f"{prefix}.mlp.gate_proj": (F, H),
        f"{prefix}.mlp.up_proj": (F, H),
        f"{prefix}.mlp.down_proj": (H, F),
    }


def _moe(config: Qwen3_5Config, prefix: str) -> Shapes:
    H, E = config.hidden_size, config.num_experts
    F, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    return {
        f"{prefix}.mlp.router": (E, H),
        # Per expert F gate rows, then F up rows.
        f"{prefix}.mlp.experts.gate_up_proj": (E, 2 * F, H),
        f"{prefix}.mlp.experts.down_proj": (E, H, F),
        f"{prefix}.mlp.shared_expert.gate_proj": (shared, H),
        f"{prefix}.mlp.shared_expert.up_proj": (shared, H),
        f"{prefix}.mlp.shared_expert.down_proj": (H, shared),
        f"{prefix}.mlp.shared_expert_gate": (1, H),
    }
