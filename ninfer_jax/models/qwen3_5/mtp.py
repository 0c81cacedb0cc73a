"""The multi-token-prediction head of Qwen3.5 (model_math section 7): drafts the token after the next one.

Row i of a sequence joins the trunk's hidden state h_i (after the final norm) with the embedding of token t_{i+1}, and
predicts t_{i+2}. For a longer draft the head runs again on its own output in the place of h.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.models.qwen3_5 import layers
from ninfer_jax.models.qwen3_5.params import MTPParameters
from ninfer_jax.models.qwen3_5.trunk import take_layer
from pallas_kernels.norms import rms_norm


def forward(
    config: Qwen3_5Config,
    mtp: MTPParameters,
    hidden: Float[Array, "B T H"],
    next_embeddings: Float[Array, "B T H"],
) -> Float[Array, "B T H"]:
    """The head over whole sequences from position 0, without a cache; differentiable.

    Args:
      config: the text configuration.
      mtp: the head's parameters.
      hidden: the trunk's hidden states after the final norm; in rows that recycle a draft, this function's own output
        of the row before.
      next_embeddings: row i holds the embedding of token i + 1.

    Returns:
      Hidden states after the head's norm; with the trunk's head (`trunk.logits`) row i predicts token i + 2.
    """
    B, T, _ = hidden.shape
    eps = config.rms_norm_eps
    joined = [
        rms_norm(next_embeddings, mtp.pre_fc_norm_embedding, eps=eps),
        rms_norm(hidden, mtp.pre_fc_norm_hidden, eps=eps),
    ]
    x = layers.linear(jnp.concatenate(joined, axis=-1), mtp.fc)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    rope = layers.rope_tables(positions, config.rotary_dim, config.rope_theta)
    scale = config.head_dim**-0.5

    def attend(q: Array, k: Array, v: Array) -> Array:
        return layers.causal_attention(q, k, v, scale)

    for i in range(config.mtp_num_hidden_layers):
        y = rms_norm(x, mtp.input_norm[i], eps=eps)
        x = x + layers.full_attention(config, take_layer(mtp.full_attention, i), y, rope, attend)
        y = rms_norm(x, mtp.post_attention_norm[i], eps=eps)
        if mtp.dense_mlp is not None:
            x = x + layers.dense_mlp(take_layer(mtp.dense_mlp, i), y)
        elif mtp.sparse_mlp is not None:
            x = x + layers.sparse_mlp(config, mtp.sparse_mlp, i, y, "reference")
    return rms_norm(x, mtp.final_norm, eps=eps)
