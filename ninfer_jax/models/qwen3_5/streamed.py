"""Decode of the text trunk on Hopper GPUs: few kernels a layer, each reading its weights once at memory speed.

The same function as `trunk.decode` with `trunk.logits` after it, cut differently. A layer is its mixer between two
projections (one fused kernel) and everything from its output projection to the next layer's input projection, experts
included (one chain of products, `pallas_kernels.decode_chain`). All layers are unrolled: the kernels take whole stacks
and a layer index, are compiled once a kind, and the compiler launches a step as one graph.

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
from ninfer_jax.models.qwen3_5.params import (
    FullAttention,
    LinearAttention,
    SparseMLP,
    TextParameters,
)
from ninfer_jax.models.qwen3_5.state import DeviceState
from pallas_kernels.decode_chain import ROWS, Experts, Norm, Product, Stage, chain
from pallas_kernels.decode_chain import unfit as unfit_chain
from pallas_kernels.dispatch import not_hopper
from pallas_kernels.gated_delta import gated_delta_decode
from pallas_kernels.paged_attention import attention_decode


def unfit(config: Qwen3_5Config, params: TextParameters, rows: int) -> str | None:
    """Why this path cannot compute such a decode step here (device, dtype, sizes), or None."""
    linear, full = params.linear_attention, params.full_attention
    if linear is None or full is None:
        return "it takes models with both kinds of mixers"
    if rows > ROWS:
        return f"it takes up to {ROWS} rows, not {rows}"
    heads = (config.head_dim, config.linear_key_head_dim, config.linear_value_head_dim)
    if heads != (256, 128, 128):
        return f"it takes heads of 256, 128 and 128 channels, not {heads}"
    H, mlp = config.hidden_size, params.dense_mlp
    after = (linear.in_proj, full.qkv_proj, _head(params))
    stages: list[Stage] = [Product(w.shape[-2], w.shape[-1], "rows") for w in after]
    stages += [Product(H, proj.shape[2], "add") for proj in (linear.out_proj, full.o_proj)]
    if mlp is not None:
        width = mlp.down_proj.shape[2]
        stages += [Product(2 * width, H, "swiglu"), Product(H, width, "add")]
    if params.sparse_mlp is not None:
        if config.shared_expert_intermediate_size != config.moe_intermediate_size:
            return "it takes a shared expert of the width of the others"
        stages.append(_experts(config))
    return not_hopper() or unfit_chain(stages, H, ROWS, [params.embed.dtype])


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
    choosing = None if params.sparse_mlp is None else jnp.pad(running, (0, ROWS - B))
    where = (block_tables, positions, running, cos[:, 0], sin[:, 0], slots, read_slots)

    stream = jnp.pad(params.embed[tokens], ((0, ROWS - B), (0, 0))).T
    of_experts = None if params.sparse_mlp is None else _of_experts(params.sparse_mlp)
    H, eps = config.hidden_size, config.rms_norm_eps

    def projection_after(i: int) -> tuple[Product, Array, Array, list[int]]:
        """What follows layer i - 1, a mixer or the head, its weights and those of the norm before it; both indices."""
        if i == len(kinds):
            weight = _head(params)[None]
            return _product(weight, jnp.float32), params.final_norm[None], weight, [0, 0]
        mixer = _mixer(params, kinds[i])
        weight = mixer.in_proj if isinstance(mixer, LinearAttention) else mixer.qkv_proj
        return _product(weight, weight.dtype), params.input_norm, weight, [i, seen[kinds[i]]]

    def ffn_after(kind: str) -> tuple[list[Stage], list[tuple[Array, ...]], list[int]]:
        """Stages of a feed-forward network, their weights but for the norm after them, and the indices of these."""
        at = seen[kind]
        seen[kind] += 1
        if kind == "dense":
            mlp = params.dense_mlp
            assert mlp is not None
            width = mlp.down_proj.shape[2]
            up = Product(2 * width, H, "swiglu", stream.dtype)
            down = Product(H, width, "add", eps=eps)
            return [up, down], [(mlp.gate_up_proj,), (mlp.down_proj,)], [at, at]
        assert of_experts is not None
        return [_experts(config)], [of_experts], [at] * len(of_experts)

    next_projection, norm, weight, at = projection_after(0)
    enters = (Norm(eps), next_projection)
    projected, stream = _chain(enters, None, stream, ((norm,), (weight,)), _indices(*at), choosing)
    for i, (kind, mlp) in enumerate(zip(kinds, config.ffn_types, strict=True)):
        mixer, index = _mixer(params, kind), seen[kind]
        seen[kind] += 1
        if isinstance(mixer, LinearAttention):
            mixed, images = _linear(config, mixer, jnp.int32(index), projected, state.images, where)
            out_proj, state = mixer.out_proj, replace(state, images=images)
        else:
            mixed, kv = _full(config, mixer, jnp.int32(index), projected, state.kv, where)
            out_proj, state = mixer.o_proj, replace(state, kv=kv)
        stages, weights, ffn_at = ffn_after(mlp)
        next_projection, norm, weight, at = projection_after(i + 1)
        *others, last = weights
        projected, stream = _chain(
            (Product(H, mixed.shape[1], "add", eps=eps), *stages, next_projection),
            mixed,
            stream,
            ((out_proj, params.post_attention_norm), *others, (*last, norm), (weight,)),
            _indices(index, i, *ffn_at, *at),
            choosing,
        )
    return state, projected[:B]


def _head(params: TextParameters) -> Array:
    return params.embed if params.lm_head is None else params.lm_head


def _mixer(params: TextParameters, kind: str) -> LinearAttention | FullAttention:
    mixer = params.linear_attention if kind == "linear_attention" else params.full_attention
    assert mixer is not None
    return mixer


def _indices(*index: int) -> Array:
    return jnp.asarray(index, jnp.int32)


def _product(stack: Array, dtype: Any) -> Product:
    return Product(stack.shape[1], stack.shape[2], "rows", dtype)


def _experts(config: Qwen3_5Config) -> Experts:
    return Experts(
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        config.rms_norm_eps,
    )


def _of_experts(mlp: SparseMLP) -> tuple[Array, ...]:
    """Stacks of `Experts`, but for the norm. A step pads the shared gates of all layers once, a few MB."""
    gate = jnp.pad(mlp.shared_gate, ((0, 0), (0, ROWS - 1), (0, 0)))
    return (
        mlp.router,
        gate,
        mlp.experts_gate_up,
        mlp.experts_down,
        mlp.shared_gate_up,
        mlp.shared_down,
    )


@partial(jax.jit, static_argnums=0)
def _chain(
    stages: tuple[Stage, ...],
    first: Array | None,
    stream: Array,
    weights: Any,
    index: Array,
    running: Array | None,
) -> tuple[Array, Array]:
    """A last projection's result, and the residual stream.

    Only rows that run choose experts: the others would choose some of their own, whose weights cost time.
    """
    return chain(stages, first, stream, weights, index, running)


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
