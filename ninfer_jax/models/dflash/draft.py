"""A DFlash draft as pure functions: it predicts a whole block of tokens in one pass (model_math section 8).

The draft reads the target's residual stream through `context`, and a block of `block_size` tokens: the anchor (the last
known token) and mask tokens. Every mask row predicts the token at its own position.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from artifacts.architectures.dflash import DFlashConfig
from ninfer_jax.models.dflash.params import DraftParameters
from ninfer_jax.models.qwen3_5.layers import linear, rope_tables, rotate
from pallas_kernels.norms import rms_norm

_EXACT = jax.lax.Precision.HIGHEST


def features(
    config: DFlashConfig, layer_outputs: Float[Array, "N B T H"]
) -> Float[Array, "B T features"]:
    """What the draft reads of the target: the residual stream after its `target_layer_ids`, side by side."""
    return jnp.concatenate([layer_outputs[i] for i in config.target_layer_ids], axis=-1)


def context(
    config: DFlashConfig, p: DraftParameters, features: Float[Array, "B T features"]
) -> Float[Array, "B T H"]:
    """Context rows, one a target position; every draft layer reads the same."""
    return _norm(linear(features, p.fc), p.context_norm, config.rms_norm_eps)


def draft_blocks(
    config: DFlashConfig,
    p: DraftParameters,
    context: Float[Array, "B T H"],
    blocks: Float[Array, "B N K H"],
    anchors: Int[Array, "B N"],
) -> Float[Array, "B N K H"]:
    """Run N independent blocks of each row; differentiable.

    Args:
      config: the draft's configuration.
      p: its parameters.
      context: context rows of positions 0..T-1.
      blocks: target embeddings of the blocks' K tokens, the anchor first, then masks.
      anchors: position of each block's anchor. A block sees the context before its anchor, and itself.

    Returns:
      Hidden states after the last norm, for the target's head.
    """
    B, N, K, H = blocks.shape
    Nq, Nk, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps, T = config.rms_norm_eps, context.shape[1]
    flat = (B, N * K)
    step = jnp.arange(K, dtype=anchors.dtype)
    own = anchors[:, :, None] + step[None, None]
    past = jnp.broadcast_to(jnp.arange(T, dtype=anchors.dtype)[None], (B, T))
    own_rope = rope_tables(own.reshape(flat), D, config.rope_theta)
    past_rope = rope_tables(past, D, config.rope_theta)

    def keys_values(i: int, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array]:
        k, v = jnp.split(linear(x, p.kv_proj[i]).reshape(*x.shape[:2], 2 * Nk, D), 2, axis=2)
        return rotate(_norm(k, p.k_norm[i], eps), *rope), v

    x = (blocks * config.input_embedding_scale).astype(blocks.dtype)
    for i in range(config.num_hidden_layers):
        y = _norm(x, p.input_norm[i], eps).reshape(*flat, H)
        q = _norm(linear(y, p.q_proj[i]).reshape(*flat, Nq, D), p.q_norm[i], eps)
        q = rotate(q, *own_rope).reshape(B, N, K, Nk, Nq // Nk, D)
        k_own, v_own = (a.reshape(B, N, K, Nk, D) for a in keys_values(i, y, own_rope))
        k_past, v_past = keys_values(i, context, past_rope)
        scores = [
            _product("bnqkgd,btkd->bnkgqt", q, k_past),
            _product("bnqkgd,bnskd->bnkgqs", q, k_own),
        ]
        before = past[:, None, None] < anchors[:, :, None, None]
        seen_past = before & _visible(config, i, own[..., None], past[:, None, None])
        seen_own = _visible(config, i, own[..., None], own[:, :, None])
        seen = jnp.concatenate([seen_past, seen_own], axis=-1)[:, :, None, None]
        joined = jnp.concatenate(scores, axis=-1) * D**-0.5
        weights = jax.nn.softmax(jnp.where(seen, joined, -jnp.inf), axis=-1).astype(x.dtype)
        out = _product("bnkgqt,btkd->bnqkgd", weights[..., :T], v_past)
        out = out + _product("bnkgqs,bnskd->bnqkgd", weights[..., T:], v_own)
        out = out.reshape(B, N, K, Nq * D).astype(x.dtype)
        x = x + linear(out, p.o_proj[i])
        gate, up = jnp.split(
            linear(_norm(x, p.post_attention_norm[i], eps), p.gate_up_proj[i]), 2, axis=-1
        )
        x = x + linear(jax.nn.silu(gate) * up, p.down_proj[i])
    return _norm(x, p.final_norm, eps)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm with a plain weight."""
    return rms_norm(x, weight.astype(jnp.float32) - 1.0, eps=eps)


def _product(formula: str, a: Array, b: Array) -> Array:
    return jnp.einsum(formula, a, b, precision=_EXACT, preferred_element_type=jnp.float32)


def _visible(config: DFlashConfig, layer: int, query: Array, key: Array) -> Array:
    """Whether a layer's mask lets a query see a key, by their positions."""
    seen = jnp.ones(jnp.broadcast_shapes(query.shape, key.shape), bool)
    if config.causal[layer]:
        seen &= key <= query
    if config.layer_types[layer] == "sliding_attention":
        assert config.sliding_window is not None
        seen &= jnp.abs(query - key) < config.sliding_window
    return seen
