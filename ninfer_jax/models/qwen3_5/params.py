"""The parameter tree of the text trunk: few arrays, each stacked over all layers of its kind.

Projections that read the same activations are fused by rows (query | key | value, qkv | z, b | a, gate | up), so
that a step launches few matrix products and a jitted call has few arguments. `parameter_layout` says which logical
parameter of the artifact fills which rows; `load_parameters` streams them in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from artifacts.architectures.qwen3_5 import Qwen3_5Config

MAX_BLOCK_BYTES = 32 << 20
"""Largest piece of a parameter that is on the host at a time while loading."""


@flax.struct.dataclass
class LinearAttention:
    """Gated DeltaNet layers, stacked over the G layers of that kind."""

    in_proj_qkvz: Float[Array, "G conv_plus_val H"]
    in_proj_ba: Float[Array, "G two_nv H"]
    conv: Float[Array, "G C K"]
    dt_bias: Float[Array, "G nv"]
    a_log: Float[Array, "G nv"]
    norm: Float[Array, "G dv"]
    out_proj: Float[Array, "G H val"]


@flax.struct.dataclass
class FullAttention:
    """Gated full attention layers, stacked over the A layers of that kind."""

    qkv_proj: Float[Array, "A q_gate_k_v H"]
    q_norm: Float[Array, "A D"]
    k_norm: Float[Array, "A D"]
    o_proj: Float[Array, "A H q"]


@flax.struct.dataclass
class DenseMLP:
    """Gated MLPs, stacked over the layers that have one."""

    gate_up_proj: Float[Array, "F two_i H"]
    down_proj: Float[Array, "F H i"]


@flax.struct.dataclass
class SparseMLP:
    """Mixture-of-experts MLPs with a shared expert, stacked over the layers that have one."""

    router: Float[Array, "M E H"]
    experts_gate_up: Float[Array, "M E two_i H"]
    experts_down: Float[Array, "M E H i"]
    shared_gate_up: Float[Array, "M two_is H"]
    shared_down: Float[Array, "M H is"]
    shared_gate: Float[Array, "M 1 H"]


@flax.struct.dataclass
class TextParameters:
    """All parameters of the text trunk. Projections are [out, in]; a missing layer kind is None."""

    embed: Float[Array, "V H"]
    lm_head: Float[Array, "V H"] | None
    final_norm: Float[Array, " H"]
    input_norm: Float[Array, "N H"]
    post_attention_norm: Float[Array, "N H"]
    linear_attention: LinearAttention | None
    full_attention: FullAttention | None
    dense_mlp: DenseMLP | None
    sparse_mlp: SparseMLP | None


@dataclass(frozen=True)
class LeafLayout:
    """How one array of the tree is filled: logical parameters, in order, contiguous in C order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sources: tuple[str, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@runtime_checkable
class ParameterSource(Protocol):
    """What the loader needs of a checkpoint (`artifacts.open_checkpoint`)."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def blocks(self, name: str, max_bytes: int) -> Iterator[tuple[int, np.ndarray]]: ...


def parameter_layout(config: Qwen3_5Config, dtype: Any) -> TextParameters:
    """The tree of `LeafLayout`s for a configuration.

    Args:
      config: the text configuration.
      dtype: storage dtype of the parameters. `A_log`, `dt_bias` and the gated norm stay float32: they enter float32
        formulas, and checkpoints store them in either precision.
    """
    c = config
    H, V, L = c.hidden_size, c.vocab_size, c.num_hidden_layers
    dt, f32 = np.dtype(dtype), np.dtype(np.float32)
    layers = range(L)

    # Any: the tree's fields are annotated as the arrays they hold in a loaded model.
    def leaf(shape: tuple[int, ...], names: Iterator[str], dtype: np.dtype[Any] = dt) -> Any:
        return LeafLayout(shape, dtype, tuple(names))

    def stack(of: list[int], part: str, *names: str) -> Iterator[str]:
        return (f"text.layers.{i}.{part}.{name}" for i in of for name in names)

    linear = [i for i in layers if c.layer_types[i] == "linear_attention"]
    full = [i for i in layers if c.layer_types[i] == "full_attention"]
    dense = [i for i in layers if c.ffn_types[i] == "dense"]
    sparse = [i for i in layers if c.ffn_types[i] == "moe"]

    linear_attention = full_attention = dense_mlp = sparse_mlp = None
    if linear:
        G, nv, dv = len(linear), c.linear_num_value_heads, c.linear_value_head_dim
        val = nv * dv
        C = 2 * c.linear_num_key_heads * c.linear_key_head_dim + val
        a = "linear_attn"
        linear_attention = LinearAttention(
            in_proj_qkvz=leaf((G, C + val, H), stack(linear, a, "in_proj_qkv", "in_proj_z")),
            in_proj_ba=leaf((G, 2 * nv, H), stack(linear, a, "in_proj_b", "in_proj_a")),
            conv=leaf((G, C, c.linear_conv_kernel_dim), stack(linear, a, "conv1d")),
            dt_bias=leaf((G, nv), stack(linear, a, "dt_bias"), f32),
            a_log=leaf((G, nv), stack(linear, a, "A_log"), f32),
            norm=leaf((G, dv), stack(linear, a, "norm"), f32),
            out_proj=leaf((G, H, val), stack(linear, a, "out_proj")),
        )
    if full:
        A, D = len(full), c.head_dim
        q, kv = c.num_attention_heads * D, c.num_key_value_heads * D
        a = "self_attn"
        full_attention = FullAttention(
            qkv_proj=leaf((A, 2 * q + 2 * kv, H), stack(full, a, "q_proj", "k_proj", "v_proj")),
            q_norm=leaf((A, D), stack(full, a, "q_norm")),
            k_norm=leaf((A, D), stack(full, a, "k_norm")),
            o_proj=leaf((A, H, q), stack(full, a, "o_proj")),
        )
    if dense:
        F, width = len(dense), c.intermediate_size
        dense_mlp = DenseMLP(
            gate_up_proj=leaf((F, 2 * width, H), stack(dense, "mlp", "gate_proj", "up_proj")),
            down_proj=leaf((F, H, width), stack(dense, "mlp", "down_proj")),
        )
    if sparse:
        M, E = len(sparse), c.num_experts
        width, shared = c.moe_intermediate_size, c.shared_expert_intermediate_size
        sparse_mlp = SparseMLP(
            router=leaf((M, E, H), stack(sparse, "mlp", "router")),
            experts_gate_up=leaf(
                (M, E, 2 * width, H), stack(sparse, "mlp", "experts.gate_up_proj")
            ),
            experts_down=leaf((M, E, H, width), stack(sparse, "mlp", "experts.down_proj")),
            shared_gate_up=leaf(
                (M, 2 * shared, H),
                stack(sparse, "mlp.shared_expert", "gate_proj", "up_proj"),
            ),
            shared_down=leaf((M, H, shared), stack(sparse, "mlp.shared_expert", "down_proj")),
            shared_gate=leaf((M, 1, H), stack(sparse, "mlp", "shared_expert_gate")),
        )
    return TextParameters(
        embed=leaf((V, H), iter(["text.embed_tokens"])),
        lm_head=None if c.tie_word_embeddings else leaf((V, H), iter(["text.lm_head"])),
        final_norm=leaf((H,), iter(["text.norm"])),
        input_norm=leaf((L, H), (f"text.layers.{i}.input_norm" for i in layers)),
        post_attention_norm=leaf((L, H), (f"text.layers.{i}.post_attention_norm" for i in layers)),
        linear_attention=linear_attention,
        full_attention=full_attention,
        dense_mlp=dense_mlp,
        sparse_mlp=sparse_mlp,
    )


def load_parameters(
    source: ParameterSource, config: Qwen3_5Config, dtype: Any, device: jax.Device
) -> TextParameters:
    """Stream a checkpoint into device arrays.

    On an accelerator each leaf is allocated there once and filled block by block through a donated update; on CPU the
    leaf itself is the host buffer and is handed to JAX without a copy. Either way the host holds one block of at most
    `MAX_BLOCK_BYTES` beside the resident weights.
    """
    fill = _fill_in_place if device.platform == "cpu" else _fill_by_updates

    def load(leaf: LeafLayout) -> jax.Array:
        return fill(leaf, _leaf_blocks(leaf, source), device)

    layout = parameter_layout(config, dtype)
    return jax.tree.map(load, layout, is_leaf=lambda x: isinstance(x, LeafLayout))


def random_parameters(config: Qwen3_5Config, dtype: Any, seed: int) -> TextParameters:
    """Random parameters with sensible scales (for training from scratch, tests and benches).

    Matrices are normal with standard deviation 0.02, zero-centred norms are 0, the gated norm 1, `A_log` the log of
    uniform(1, 16) and `dt_bias` the inverse softplus of a log-uniform step in [1e-3, 1e-1] (Mamba's initialisation).
    """
    rng = np.random.default_rng(seed)

    def make(path: tuple[Any, ...], leaf: LeafLayout) -> jax.Array:
        name = path[-1].name
        value: np.ndarray
        if name in ("final_norm", "input_norm", "post_attention_norm", "q_norm", "k_norm"):
            value = np.zeros(leaf.shape)
        elif name == "norm":
            value = np.ones(leaf.shape)
        elif name == "a_log":
            value = np.log(rng.uniform(1.0, 16.0, leaf.shape))
        elif name == "dt_bias":
            step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), leaf.shape))
            value = step + np.log(-np.expm1(-step))
        else:
            value = 0.02 * rng.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(value.astype(leaf.dtype))

    layout = parameter_layout(config, dtype)
    return jax.tree_util.tree_map_with_path(
        make, layout, is_leaf=lambda x: isinstance(x, LeafLayout)
    )


def _leaf_blocks(leaf: LeafLayout, source: ParameterSource) -> Iterator[tuple[int, np.ndarray]]:
    """Pieces of one leaf as (flat element offset, 1-D values)."""
    base = 0
    for name in leaf.sources:
        for offset, values in source.blocks(name, MAX_BLOCK_BYTES):
            yield base + offset, values
        base += math.prod(source.shape(name))
    if base != leaf.size:
        raise AssertionError(f"{leaf.sources[0]}...: {base} elements for a leaf of {leaf.size}")


def _fill_in_place(
    leaf: LeafLayout, blocks: Iterator[tuple[int, np.ndarray]], device: jax.Device
) -> jax.Array:
    # JAX adopts a host buffer without copying it only if it is aligned to 64 bytes.
    item = leaf.dtype.itemsize
    raw = np.empty(leaf.size * item + 64, np.uint8)
    start = -raw.ctypes.data % 64
    flat = raw[start : start + leaf.size * item].view(leaf.dtype)
    for offset, values in blocks:
        flat[offset : offset + values.size] = values
    return jax.device_put(flat.reshape(leaf.shape), device, may_alias=True)


def _fill_by_updates(
    leaf: LeafLayout, blocks: Iterator[tuple[int, np.ndarray]], device: jax.Device
) -> jax.Array:
    width = leaf.shape[-1]
    with jax.default_device(device):
        array = jnp.zeros(leaf.shape, leaf.dtype)
    for offset, values in blocks:
        array = _update_rows(array, values.reshape(-1, width), np.int32(offset // width))
    return array


def _put_rows(array: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    flat = array.reshape(-1, array.shape[-1])
    flat = jax.lax.dynamic_update_slice(
        flat, rows.astype(array.dtype), (start, jnp.zeros_like(start))
    )
    return flat.reshape(array.shape)


_update_rows = jax.jit(_put_rows, donate_argnums=0)
