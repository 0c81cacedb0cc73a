"""The parameter tree of a DFlash draft, stacked over its layers; embedding and head are the target's."""

from __future__ import annotations

from typing import Any

import flax.struct
import numpy as np
from jaxtyping import Array, Float

from artifacts.architectures.dflash import DFlashConfig
from ninfer_jax.models.loading import LeafLayout


@flax.struct.dataclass
class DraftParameters:
    """All parameters of a draft of L layers. Norm weights are plain: 1 means "scale by one"."""

    fc: Float[Array, "H features"]
    context_norm: Float[Array, " H"]
    input_norm: Float[Array, "L H"]
    post_attention_norm: Float[Array, "L H"]
    q_proj: Float[Array, "L q H"]
    kv_proj: Float[Array, "L two_kv H"]
    o_proj: Float[Array, "L H q"]
    q_norm: Float[Array, "L D"]
    k_norm: Float[Array, "L D"]
    gate_up_proj: Float[Array, "L two_i H"]
    down_proj: Float[Array, "L H i"]
    final_norm: Float[Array, " H"]


def draft_layout(config: DFlashConfig, dtype: Any) -> DraftParameters:
    """The tree of `LeafLayout`s of a draft; every parameter is stored in `dtype`."""
    c = config
    H, D, L, width = c.hidden_size, c.head_dim, c.num_hidden_layers, c.intermediate_size
    q, kv = c.num_attention_heads * D, c.num_key_value_heads * D

    # Any: the tree's fields are annotated as the arrays they hold in a loaded draft.
    def leaf(shape: tuple[int, ...], name: str) -> Any:
        return LeafLayout(shape, np.dtype(dtype), (f"dflash.{name}",))

    def stack(shape: tuple[int, ...], *names: str) -> Any:
        every = tuple(f"dflash.layers.{i}.{name}" for i in range(L) for name in names)
        return LeafLayout((L, *shape), np.dtype(dtype), every)

    return DraftParameters(
        fc=leaf((H, c.context_size), "fc"),
        context_norm=leaf((H,), "hidden_norm"),
        input_norm=stack((H,), "input_norm"),
        post_attention_norm=stack((H,), "post_attention_norm"),
        q_proj=stack((q, H), "self_attn.q_proj"),
        kv_proj=stack((2 * kv, H), "self_attn.k_proj", "self_attn.v_proj"),
        o_proj=stack((H, q), "self_attn.o_proj"),
        q_norm=stack((D,), "self_attn.q_norm"),
        k_norm=stack((D,), "self_attn.k_norm"),
        gate_up_proj=stack((2 * width, H), "mlp.gate_proj", "mlp.up_proj"),
        down_proj=stack((H, width), "mlp.down_proj"),
        final_norm=leaf((H,), "norm"),
    )
