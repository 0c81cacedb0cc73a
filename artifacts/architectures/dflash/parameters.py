"""The logical parameters of a DFlash draft: every name and shape, whatever a file calls them.

Linear weights are [out, in]. The order of the table is the order in which an artifact stores them.
"""

from __future__ import annotations

from artifacts.architectures.dflash.config import DFlashConfig

Shapes = dict[str, tuple[int, ...]]


def dflash_parameter_shapes(config: DFlashConfig) -> Shapes:
    """Context projection and norm, the draft's layers, final norm; no embedding and no head."""
    H = config.hidden_size
    shapes: Shapes = {"dflash.fc": (H, config.context_size), "dflash.hidden_norm": (H,)}
    for i in range(config.num_hidden_layers):
        shapes |= _layer(config, f"dflash.layers.{i}")
    shapes["dflash.norm"] = (H,)
    return shapes


def _layer(config: DFlashConfig, prefix: str) -> Shapes:
    H, D, F = config.hidden_size, config.head_dim, config.intermediate_size
    N, K = config.num_attention_heads, config.num_key_value_heads
    return {
        f"{prefix}.input_norm": (H,),
        f"{prefix}.self_attn.q_proj": (N * D, H),
        f"{prefix}.self_attn.k_proj": (K * D, H),
        f"{prefix}.self_attn.v_proj": (K * D, H),
        f"{prefix}.self_attn.o_proj": (H, N * D),
        f"{prefix}.self_attn.q_norm": (D,),
        f"{prefix}.self_attn.k_norm": (D,),
        f"{prefix}.post_attention_norm": (H,),
        f"{prefix}.mlp.gate_proj": (F, H),
        f"{prefix}.mlp.up_proj": (F, H),
        f"{prefix}.mlp.down_proj": (H, F),
    }
