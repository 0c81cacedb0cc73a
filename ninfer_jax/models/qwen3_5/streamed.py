"""Decode of the text trunk on Hopper GPUs: few kernels a layer, each reading its weights once at memory speed.

The same function as `trunk.decode` with `trunk.logits` after it, cut differently. A layer is its mixer between two
projections (one fused kernel) and everything from its output projection to the next layer's input projection (one chain
of products, `pallas_kernels.decode_chain`); where experts are routed, the chain is cut in two around them. All layers
are unrolled: the kernels take whole stacks and a layer index, are compiled once a kind, and the compiler launches
a step as one graph.

Activations are held as the chain wants them: 8 rows, the residual stream transposed [H, 8]. Rows past the real ones are
computed and mean nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.models.qwen3_5 import layers
from ninfer_jax.models.qwen3_5.params import SparseMLP, TextParameters
from ninfer_jax.models.qwen3_5.state import DeviceState
from pallas_kernels.decode_chain import ROWS, Add, Product, chain, unavailable
from pallas_kernels.gated_delta import gated_delta_decode
from pallas_kernels.moe import sparse_layer
from pallas_kernels.paged_attention import attention_decode


def fits(config: Qwen3_5Config, params: TextParameters, rows: int) -> bool:
    """Whether this path computes such a decode step here: device, dtype and sizes."""
    linear, full, dense = params.linear_attention, params.full_attention, params.dense_mlp
    if rows > ROWS or linear is None or full is None or (dense or params.sparse_mlp) is None:
        return False
    H, V = config.hidden_size, config.vocab_size
    widths = {H, linear.out_proj.shape[2], full.o_proj.shape[2]}
    outputs = {H, V, linear.in_proj.shape[1], full.qkv_proj.shape[1]}
    if dense is not None:
        widths.add(dense.down_proj.shape[2])
        outputs.add(dense.down_proj.shape[2])
    heads = (config.head_dim, config.linear_key_head_dim, config.linear_value_head_dim)
    why_not = unavailable(params.embed.dtype, widths, hidden=H, outputs=outputs)
    return heads == (256, 128, 128) and why_not is None


def decode(
    config: Qwen3_5Config,
    params: TextParameters,
    state: DeviceState,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    block_tables: Int[Array, "B L"],
    slots: Int[Array, " B"],
    read_slots: Int[Array, " B"],
) -> tuple[DeviceState, Float[Array, "B V"]]:
    """One token of each row, B <= 8, from token ids to float32 logits; arguments as in `trunk.decode`.

    A row with slot 0 does not run: it computes nothing that counts and leaves null contents in page and slot 0.
    """
    B = tokens.shape[0]
    kinds = config.layer_types
    seen = {"linear_attention": 0, "full_attention": 0, "dense": 0, "moe": 0}
    running = (slots > 0).astype(jnp.int32)
    cos, sin = layers.rope_tables(positions[:, None], config.rotary_dim, config.rope_theta)
    where = (block_tables, positions, running, cos[:, 0], sin[:, 0], slots, read_slots)

    stream = jnp.pad(params.embed[tokens], ((0, ROWS - B), (0, 0))).T
    nothing = jnp.zeros((1, *stream.shape), jnp.float32)
    head = params.embed if params.lm_head is None else params.lm_head

    def projection_after(i: int) -> tuple[str, Array, Array, int, int]:
        """Name, norm and weights of what follows layer i - 1, with their indices: a mixer or the head."""
        if i == len(kinds):
            return "head", params.final_norm[None], head[None], 0, 0
        kind = kinds[i]
        stack = (
            params.linear_attention.in_proj
            if kind == "linear_attention" and params.linear_attention
            else params.full_attention.qkv_proj  # type: ignore[union-attr]
        )
        return kind, params.input_norm, stack, i, seen[kind]

    def enter(parts: Array, stream: Array, i: int) -> tuple[Array, Array]:
        name, norm, weight, norm_index, index = projection_after(i)
        return _enter(config, name, parts, stream, norm, weight, _indices(norm_index, index))

    projected, stream = enter(nothing, stream, 0)
    for i, (kind, mlp) in enumerate(zip(kinds, config.ffn_types, strict=True)):
        index = jnp.int32(seen[kind])
        if kind == "linear_attention":
            mixed, images = _linear(
                config, params.linear_attention, index, projected, state.images, where
            )
            out_proj = params.linear_attention.out_proj  # type: ignore[union-attr]
            state = replace(state, images=images)
        else:
            mixed, kv = _full(config, params.full_attention, index, projected, state.kv, where)
            out_proj = params.full_attention.o_proj  # type: ignore[union-attr]
            state = replace(state, kv=kv)
        at = (seen[kind], i, seen[mlp])
        seen[kind] += 1
        seen[mlp] += 1
        if mlp == "dense":
            name, norm, weight, norm_index, next_index = projection_after(i + 1)
            projected, stream = _dense_layer(
                config,
                name,
                mixed,
                stream,
                (out_proj, params.post_attention_norm),
                params.dense_mlp,
                (norm, weight),
                _indices(at[0], at[1], at[2], at[2], norm_index, next_index),
            )
        else:
            parts, stream = _sparse_layer(
                config,
                B,
                mixed,
                stream,
                (out_proj, params.post_attention_norm),
                params.sparse_mlp,
                _indices(*at),
            )
            projected, stream = enter(parts, stream, i + 1)
    return state, projected[:B]


def _indices(*index: int) -> Array:
    return jnp.asarray(index, jnp.int32)


def _product(name: str, weight: Array) -> Product:
    dtype = jnp.float32 if name == "head" else weight.dtype
    return Product(weight.shape[1], weight.shape[2], "rows", dtype)


@partial(jax.jit, static_argnums=(0, 1))
def _enter(
    config: Qwen3_5Config,
    name: str,
    parts: Array,
    stream: Array,
    norm: Array,
    weight: Array,
    index: Array,
) -> tuple[Array, Array]:
    """Add what the layer before computed, norm, and project."""
    stages = (Add(config.rms_norm_eps), _product(name, weight))
    out = chain(stages, parts, stream, ((norm,), (weight,)), index)
    return out.result, out.residual


@partial(jax.jit, static_argnums=0)
def _linear(
    config: Qwen3_5Config,
    p: Any,
    index: Array,
    projected: Array,
    images: Any,
    where: tuple[Array, ...],
) -> tuple[Array, Any]:
    _, positions, _, _, _, slots, read_slots = where
    window, recurrent = jax.new_ref(images.window), jax.new_ref(images.recurrent)
    mixed = gated_delta_decode(
        projected,
        p.conv,
        p.dt_bias,
        p.a_log,
        p.norm,
        index,
        window,
        recurrent,
        read_slots,
        slots,
        (positions > 0).astype(jnp.int32),
        eps=config.rms_norm_eps,
    )
    return mixed, replace(images, window=window[...], recurrent=recurrent[...])


@partial(jax.jit, static_argnums=0)
def _full(
    config: Qwen3_5Config, p: Any, index: Array, projected: Array, kv: Any, where: tuple[Array, ...]
) -> tuple[Array, Any]:
    tables, positions, running, cos, sin, _, _ = where
    k, v = jax.new_ref(kv.k), jax.new_ref(kv.v)
    mixed = attention_decode(
        projected,
        p.q_norm,
        p.k_norm,
        cos,
        sin,
        k,
        v,
        index,
        tables,
        positions,
        running,
        scale=config.head_dim**-0.5,
        eps=config.rms_norm_eps,
    )
    return mixed, replace(kv, k=k[...], v=v[...])


@partial(jax.jit, static_argnums=(0, 1))
def _dense_layer(
    config: Qwen3_5Config,
    name: str,
    mixed: Array,
    stream: Array,
    out: tuple[Array, Array],
    mlp: Any,
    after: tuple[Array, Array],
    index: Array,
) -> tuple[Array, Array]:
    """From a mixer's result to the next layer's input projection."""
    H, width = mlp.down_proj.shape[1:]
    eps = config.rms_norm_eps
    stages = (
        Product(H, mixed.shape[1], "add", eps=eps),
        Product(2 * width, H, "swiglu", stream.dtype),
        Product(H, width, "add", eps=eps),
        _product(name, after[1]),
    )
    weights = (out, (mlp.gate_up_proj,), (mlp.down_proj, after[0]), (after[1],))
    result = chain(stages, mixed, stream, weights, index)
    return result.result, result.residual


@partial(jax.jit, static_argnums=(0, 1))
def _sparse_layer(
    config: Qwen3_5Config,
    rows: int,
    mixed: Array,
    stream: Array,
    out: tuple[Array, Array],
    mlp: SparseMLP,
    index: Array,
) -> tuple[Array, Array]:
    """From a mixer's result to what the experts add to the stream, as the parts of one `Add`.

    Only the first `rows` count: the others would choose experts of their own, whose weights cost time.
    """
    H, eps = stream.shape[0], config.rms_norm_eps
    stages = (Product(H, mixed.shape[1], "add", eps=eps),)
    result = chain(stages, mixed, stream, (out,), index[:2])
    mean = jnp.sum(result.squares[: -(-H // 64)], axis=0) / H
    normed = result.normed.astype(jnp.float32) * jax.lax.rsqrt(mean + eps)[:, None]
    y = sparse_layer(
        normed[:rows].astype(mixed.dtype),
        mlp.router,
        mlp.shared_gate,
        mlp.experts_gate_up,
        mlp.experts_down,
        mlp.shared_gate_up,
        mlp.shared_down,
        index[2],
        top_k=config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
    )
    parts = jnp.pad(y, ((0, ROWS - rows), (0, 0))).T.astype(jnp.float32)[None]
    return parts, result.residual
