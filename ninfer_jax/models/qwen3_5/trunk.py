"""The text trunk: prefill over a chunk, decode of one token, and a plain forward without a cache.

All three are pure functions of parameters, state and inputs. The layers run as a scan over the repeating pattern of the
architecture (three Gated DeltaNet layers, one attention layer), with the parameters as stacked inputs, so compile time
does not grow with depth.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.models.qwen3_5 import layers
from ninfer_jax.models.qwen3_5.params import TextParameters
from ninfer_jax.models.qwen3_5.state import DeviceState
from pallas_kernels.norms import rms_norm
from pallas_kernels.paged_attention import append_kv, paged_attention


def logits(params: TextParameters, hidden: Float[Array, "*n H"]) -> Float[Array, "*n V"]:
    """float32 logits of final-norm hidden states; the head is the embedding where the checkpoint ties them."""
    head = params.embed if params.lm_head is None else params.lm_head
    return layers.project(hidden, head)


def prefill(
    config: Qwen3_5Config,
    params: TextParameters,
    state: DeviceState,
    tokens: Int[Array, "B T"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    block_tables: Int[Array, "B L"],
    slots: Int[Array, " B"],
) -> tuple[DeviceState, Float[Array, "B T H"]]:
    """Run T tokens of each row, continuing from the row's StateImage and pages.

    Args:
      state: slot `slots[b]` holds row b's image at position `starts[b]`; its pages hold positions 0..starts[b]-1. A row
        that starts at 0 reads zeros instead of its slot.
      tokens: token ids; columns past a row's length are ignored.
      starts: position of each row's first token.
      lengths: valid tokens of each row, 0..T.
      block_tables: physical pages, mapped at least up to `starts + lengths` (KV-24).
      slots: StateImage slot of each row.

    Returns:
      The state after `lengths` tokens, and final-norm hidden states (meaningless past a row's length).
    """
    return _cached(config, params, state, tokens, starts, lengths, block_tables, slots)


def decode(
    config: Qwen3_5Config,
    params: TextParameters,
    state: DeviceState,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    block_tables: Int[Array, "B L"],
    slots: Int[Array, " B"],
) -> tuple[DeviceState, Float[Array, "B H"]]:
    """Run one token of each row; arguments as in `prefill`.

    Returns:
      The next state, and final-norm hidden states. A row's result does not depend on the other rows.
    """
    ones = jnp.ones_like(positions)
    state, hidden = _cached(
        config, params, state, tokens[:, None], positions, ones, block_tables, slots
    )
    return state, hidden[:, 0]


def forward(
    config: Qwen3_5Config, params: TextParameters, tokens: Int[Array, "B T"]
) -> Float[Array, "B T H"]:
    """Final-norm hidden states of whole sequences from position 0, without a cache; differentiable."""
    B, T = tokens.shape
    scale = config.head_dim**-0.5
    lengths = jnp.full((B,), T, jnp.int32)
    nv, dk, dv = (
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )

    def mixer(kind: str, p: Any, _: Array, x: Array, carry: None) -> tuple[Array, None]:
        if kind == "full_attention":
            return layers.full_attention(
                config, p, x, rope, lambda q, k, v: layers.causal_attention(q, k, v, scale)
            ), None
        window = jnp.zeros((B, config.linear_conv_kernel_dim - 1, p.conv.shape[0]), x.dtype)
        memory = jnp.zeros((B, nv, dk, dv), jnp.float32)
        return layers.linear_attention(config, p, x, lengths, window, memory)[0], None

    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    rope = layers.rope_tables(config, positions)
    x, _ = _layers(config, params, params.embed[tokens], None, mixer)
    return rms_norm(x, params.final_norm, eps=config.rms_norm_eps)


def _cached(
    config: Qwen3_5Config,
    params: TextParameters,
    state: DeviceState,
    tokens: Int[Array, "B T"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    block_tables: Int[Array, "B L"],
    slots: Int[Array, " B"],
) -> tuple[DeviceState, Float[Array, "B T H"]]:
    T = tokens.shape[1]
    positions = starts[:, None] + jnp.arange(T, dtype=starts.dtype)[None, :]
    rope = layers.rope_tables(config, positions)
    continues = starts > 0

    def mixer(
        kind: str, p: Any, index: Array, x: Array, state: DeviceState
    ) -> tuple[Array, DeviceState]:
        kv, images = state.kv, state.images
        if kind == "full_attention":
            where = (index, block_tables, starts, lengths)

            def attend(q: Array, k: Array, v: Array) -> Array:
                nonlocal kv
                kv = kv.replace(k=append_kv(kv.k, k, *where), v=append_kv(kv.v, v, *where))
                return paged_attention(q, kv.k, kv.v, *where, scale=config.head_dim**-0.5)

            out = layers.full_attention(config, p, x, rope, attend)
            return out, state.replace(kv=kv)
        window = jnp.where(continues[:, None, None], images.window[slots, index], 0)
        memory = jnp.where(continues[:, None, None, None], images.recurrent[slots, index], 0)
        out, window, memory = layers.linear_attention(config, p, x, lengths, window, memory)
        images = images.replace(
            window=images.window.at[slots, index].set(window),
            recurrent=images.recurrent.at[slots, index].set(memory),
        )
        return out, state.replace(images=images)

    x, state = _layers(config, params, params.embed[tokens], state, mixer)
    return state, rms_norm(x, params.final_norm, eps=config.rms_norm_eps)


def layer_pattern(config: Qwen3_5Config) -> tuple[tuple[tuple[str, str], ...], int]:
    """The shortest (mixer, MLP) pattern that repeats to the whole depth, and how often."""
    kinds = tuple(zip(config.layer_types, config.ffn_types, strict=True))
    for period in range(1, len(kinds) + 1):
        repeats, rest = divmod(len(kinds), period)
        if rest == 0 and kinds == kinds[:period] * repeats:
            return kinds[:period], repeats
    raise AssertionError("a sequence repeats itself once")


def _layers(config: Qwen3_5Config, params: TextParameters, x: Array, carry: Any, mixer: Any) -> Any:
    """Run all layers. `mixer(kind, p, index, x, carry) -> (out, carry)`, index counted among layers of its kind."""
    pattern, repeats = layer_pattern(config)
    kinds = [kind for pair in pattern for kind in pair]
    stacks = {
        "linear_attention": params.linear_attention,
        "full_attention": params.full_attention,
        "dense": params.dense_mlp,
        "moe": params.sparse_mlp,
        "norms": (params.input_norm, params.post_attention_norm),
    }
    grouped = jax.tree.map(lambda w: w.reshape(repeats, -1, *w.shape[1:]), stacks)
    eps = config.rms_norm_eps

    def one_group(loop: tuple[Array, Any], xs: tuple[Array, Any]) -> tuple[tuple[Array, Any], None]:
        (x, carry), (group, w) = loop, xs
        seen = dict.fromkeys(stacks, 0)

        def take(kind: str) -> tuple[Any, Array]:
            i = seen[kind]
            seen[kind] += 1
            index = group * kinds.count(kind) + i
            return jax.tree.map(lambda stacked: stacked[i], w[kind]), index

        for mixer_kind, mlp_kind in pattern:
            (input_norm, post_norm), _ = take("norms")
            p, index = take(mixer_kind)
            out, carry = mixer(mixer_kind, p, index, rms_norm(x, input_norm, eps=eps), carry)
            x = x + out
            y = rms_norm(x, post_norm, eps=eps)
            p, _ = take(mlp_kind)
            x = x + (
                layers.dense_mlp(p, y) if mlp_kind == "dense" else layers.sparse_mlp(config, p, y)
            )
        return (x, carry), None

    groups = jnp.arange(repeats, dtype=jnp.int32)
    (x, carry), _ = jax.lax.scan(one_group, (x, carry), (groups, grouped))
    return x, carry
