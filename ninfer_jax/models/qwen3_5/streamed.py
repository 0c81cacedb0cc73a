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
from ninfer_jax.models.qwen3_5.params import SparseMLP, TextParameters
from ninfer_jax.models.qwen3_5.state import DeviceState
from pallas_kernels.decode_chain import ROWS, Add, Experts, Product, Stage, chain, unavailable
from pallas_kernels.gated_delta import gated_delta_decode
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
    experts = None if params.sparse_mlp is None else _experts(config)
    why_not = unavailable(params.embed.dtype, widths, hidden=H, outputs=outputs, experts=experts)
    same_width = config.shared_expert_intermediate_size == config.moe_intermediate_size
    return heads == (256, 128, 128) and why_not is None and (experts is None or same_width)


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
    choosing = jnp.pad(running, (0, ROWS - B))
    where = (block_tables, positions, running, cos[:, 0], sin[:, 0], slots, read_slots)

    stream = jnp.pad(params.embed[tokens], ((0, ROWS - B), (0, 0))).T
    nothing = jnp.zeros((1, *stream.shape), jnp.float32)
    head = params.embed if params.lm_head is None else params.lm_head
    of_experts = None if params.sparse_mlp is None else _of_experts(params.sparse_mlp)
    H, eps = config.hidden_size, config.rms_norm_eps

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

    def ffn_after(kind: str, norm: Array, norm_at: int) -> tuple[Any, Any, list[int]]:
        """Stages of a feed-forward network, their weights with the norm after it, and the indices of all."""
        at = seen[kind]
        seen[kind] += 1
        if kind == "dense":
            mlp = params.dense_mlp
            assert mlp is not None
            width = mlp.down_proj.shape[2]
            up, down = (
                Product(2 * width, H, "swiglu", stream.dtype),
                Product(H, width, "add", eps=eps),
            )
            return (up, down), ((mlp.gate_up_proj,), (mlp.down_proj, norm)), [at, at, norm_at]
        assert of_experts is not None
        return (_experts(config),), ((*of_experts, norm),), [at] * len(of_experts) + [norm_at]

    name, norm, weight, norm_at, next_at = projection_after(0)
    entry = (Add(eps), _product(name, weight))
    projected, stream = _chain(
        entry, nothing, stream, ((norm,), (weight,)), _indices(norm_at, next_at), choosing
    )
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
        seen[kind] += 1
        name, norm, weight, norm_at, next_at = projection_after(i + 1)
        feed_forward, ffn_weights, ffn_at = ffn_after(mlp, norm, norm_at)
        stages = (Product(H, mixed.shape[1], "add", eps=eps), *feed_forward, _product(name, weight))
        of_stages = ((out_proj, params.post_attention_norm), *ffn_weights, (weight,))
        at = _indices(seen[kind] - 1, i, *ffn_at, next_at)
        projected, stream = _chain(stages, mixed, stream, of_stages, at, choosing)
    return state, projected[:B]


def _indices(*index: int) -> Array:
    return jnp.asarray(index, jnp.int32)


def _product(name: str, weight: Array) -> Product:
    dtype = jnp.float32 if name == "head" else weight.dtype
    return Product(weight.shape[1], weight.shape[2], "rows", dtype)


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
    """Stacks of `Experts`, but for the norm."""
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
    first: Array,
    stream: Array,
    weights: Any,
    index: Array,
    running: Array,
) -> tuple[Array, Array]:
    """A last projection's result, and the residual stream.

    Only rows that run choose experts: the others would choose some of their own, whose weights cost time.
    """
    out = chain(stages, first, stream, weights, index, running)
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
