"""The parameter trees of the text trunk and its MTP head: few arrays, each stacked over all layers of its kind.

Projections that read the same activations are fused by rows (query | key | value, qkv | z | b | a, gate | up), so
that a step launches few matrix products and a jitted call has few arguments. The layouts say which logical parameter
of the artifact fills which rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.models.loading import LeafLayout

_FIELDS = {
    "linear_attention": "linear_attention",
    "full_attention": "full_attention",
    "dense": "dense_mlp",
    "moe": "sparse_mlp",
}
"""Where the stacks of a kind of mixer or MLP are."""


@flax.struct.dataclass
class LinearAttention:
    """Gated DeltaNet layers, stacked over the G layers of that kind."""

    in_proj: Float[Array, "G qkv_z_b_a H"]
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


@flax.struct.dataclass
class Layer:
    """Parameters of one layer: stacks that are one deep. It has one of the mixers and one of the MLPs."""

    input_norm: Float[Array, "1 H"]
    post_attention_norm: Float[Array, "1 H"]
    linear_attention: LinearAttention | None = None
    full_attention: FullAttention | None = None
    dense_mlp: DenseMLP | None = None
    sparse_mlp: SparseMLP | None = None


@flax.struct.dataclass
class SeparateLayers:
    """The text trunk layer by layer, for a step that is not a loop.

    XLA's CPU backend copies a layer's weights out of a stack before a product reads them, which makes three times the
    memory traffic of a step. Weights of their own are read where they are.
    """

    embed: Float[Array, "V H"]
    lm_head: Float[Array, "V H"] | None
    final_norm: Float[Array, " H"]
    layers: tuple[Layer, ...]


@flax.struct.dataclass
class MTPParameters:
    """The multi-token-prediction head (model_math section 7): its own full-attention layers; embedding and head are
    the trunk's."""

    fc: Float[Array, "H two_H"]
    pre_fc_norm_embedding: Float[Array, " H"]
    pre_fc_norm_hidden: Float[Array, " H"]
    input_norm: Float[Array, "M H"]
    post_attention_norm: Float[Array, "M H"]
    full_attention: FullAttention
    dense_mlp: DenseMLP | None
    sparse_mlp: SparseMLP | None
    final_norm: Float[Array, " H"]


def parameter_layout(config: Qwen3_5Config, dtype: Any) -> TextParameters:
    """The tree of `LeafLayout`s of the text trunk.

    Args:
      config: the text configuration.
      dtype: storage dtype of the parameters. `A_log`, `dt_bias` and the gated norm stay float32: they enter float32
        formulas, and checkpoints store them in either precision.
    """
    c, new = config, _Leaves(config, dtype)
    H, V, L = c.hidden_size, c.vocab_size, c.num_hidden_layers

    def of(kinds: tuple[str, ...], kind: str) -> list[str]:
        return [f"text.layers.{i}" for i in range(L) if kinds[i] == kind]

    layers = [f"text.layers.{i}" for i in range(L)]
    return TextParameters(
        embed=new.leaf((V, H), ["text.embed_tokens"]),
        lm_head=None if c.tie_word_embeddings else new.leaf((V, H), ["text.lm_head"]),
        final_norm=new.leaf((H,), ["text.norm"]),
        input_norm=new.stack(layers, (H,), "input_norm"),
        post_attention_norm=new.stack(layers, (H,), "post_attention_norm"),
        linear_attention=new.linear_attention(of(c.layer_types, "linear_attention")),
        full_attention=new.full_attention(of(c.layer_types, "full_attention")),
        dense_mlp=new.dense_mlp(of(c.ffn_types, "dense")),
        sparse_mlp=new.sparse_mlp(of(c.ffn_types, "moe")),
    )


def separate(config: Qwen3_5Config, params: TextParameters) -> SeparateLayers:
    """The same parameters layer by layer. On CPU they share the stacks' memory, but for a few small arrays."""
    place = {kind: itertools.count() for kind in _FIELDS}
    layers = []
    for i, kinds in enumerate(zip(config.layer_types, config.ffn_types, strict=True)):
        own = {_FIELDS[k]: _one_deep(getattr(params, _FIELDS[k]), next(place[k])) for k in kinds}
        norms = (params.input_norm, params.post_attention_norm)
        layers.append(Layer(*(_one_deep(norm, i) for norm in norms), **own))
    return SeparateLayers(params.embed, params.lm_head, params.final_norm, tuple(layers))


def _one_deep(stacks: Any, i: int) -> Any:
    """Layer i of a tree of stacks. A CPU device takes a view of its own memory as it is, where that is aligned."""
    return jax.tree.map(
        lambda stack: jax.device_put(np.asarray(stack)[i : i + 1], stack.device), stacks
    )


def mtp_layout(config: Qwen3_5Config, dtype: Any) -> MTPParameters:
    """The tree of `LeafLayout`s of the MTP head, `config.mtp_num_hidden_layers` > 0 layers deep."""
    c, new = config, _Leaves(config, dtype)
    H = c.hidden_size
    layers = [f"mtp.layers.{i}" for i in range(c.mtp_num_hidden_layers)]
    moe = c.mtp_ffn_type == "moe"
    return MTPParameters(
        fc=new.leaf((H, 2 * H), ["mtp.fc"]),
        pre_fc_norm_embedding=new.leaf((H,), ["mtp.pre_fc_norm_embedding"]),
        pre_fc_norm_hidden=new.leaf((H,), ["mtp.pre_fc_norm_hidden"]),
        input_norm=new.stack(layers, (H,), "input_norm"),
        post_attention_norm=new.stack(layers, (H,), "post_attention_norm"),
        full_attention=new.full_attention(layers),
        dense_mlp=None if moe else new.dense_mlp(layers),
        sparse_mlp=new.sparse_mlp(layers) if moe else None,
        final_norm=new.leaf((H,), ["mtp.norm"]),
    )


class _Leaves:
    """Layouts of one layer kind, stacked over the layers with the given names; None where there are none.

    The trees' fields are annotated as the arrays they hold in a loaded model, hence Any.
    """

    def __init__(self, config: Qwen3_5Config, dtype: Any) -> None:
        self.config, self.dtype = config, np.dtype(dtype)

    def leaf(self, shape: tuple[int, ...], names: list[str], dtype: Any = None) -> Any:
        return LeafLayout(shape, np.dtype(dtype or self.dtype), tuple(names))

    def stack(
        self, layers: list[str], shape: tuple[int, ...], *names: str, dtype: Any = None
    ) -> Any:
        every = [f"{layer}.{name}" for layer in layers for name in names]
        return self.leaf((len(layers), *shape), every, dtype)

    def linear_attention(self, layers: list[str]) -> LinearAttention | None:
        if not layers:
            return None
        c, f32 = self.config, np.float32
        H, nv, C, val = (
            c.hidden_size,
            c.linear_num_value_heads,
            c.linear_conv_size,
            c.linear_value_size,
        )

        def stack(shape: tuple[int, ...], *names: str, dtype: Any = None) -> Any:
            return self.stack(layers, shape, *(f"linear_attn.{n}" for n in names), dtype=dtype)

        return LinearAttention(
            in_proj=stack(
                (C + val + 2 * nv, H),
                *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            ),
            conv=stack((C, c.linear_conv_kernel_dim), "conv1d"),
            dt_bias=stack((nv,), "dt_bias", dtype=f32),
            a_log=stack((nv,), "A_log", dtype=f32),
            norm=stack((c.linear_value_head_dim,), "norm", dtype=f32),
            out_proj=stack((H, val), "out_proj"),
        )

    def full_attention(self, layers: list[str]) -> Any:
        if not layers:
            return None
        c = self.config
        H, D = c.hidden_size, c.head_dim
        q, kv = c.num_attention_heads * D, c.num_key_value_heads * D

        def stack(shape: tuple[int, ...], *names: str) -> Any:
            return self.stack(layers, shape, *(f"self_attn.{n}" for n in names))

        return FullAttention(
            qkv_proj=stack((2 * q + 2 * kv, H), "q_proj", "k_proj", "v_proj"),
            q_norm=stack((D,), "q_norm"),
            k_norm=stack((D,), "k_norm"),
            o_proj=stack((H, q), "o_proj"),
        )

    def dense_mlp(self, layers: list[str]) -> DenseMLP | None:
        if not layers:
            return None
        H, width = self.config.hidden_size, self.config.intermediate_size
        return DenseMLP(
            gate_up_proj=self.stack(layers, (2 * width, H), "mlp.gate_proj", "mlp.up_proj"),
            down_proj=self.stack(layers, (H, width), "mlp.down_proj"),
        )

    def sparse_mlp(self, layers: list[str]) -> SparseMLP | None:
        if not layers:
            return None
        c = self.config
        H, E = c.hidden_size, c.num_experts
        width, shared = c.moe_intermediate_size, c.shared_expert_intermediate_size

        def stack(shape: tuple[int, ...], *names: str) -> Any:
            return self.stack(layers, shape, *(f"mlp.{n}" for n in names))

        gate, up = "shared_expert.gate_proj", "shared_expert.up_proj"
        return SparseMLP(
            router=stack((E, H), "router"),
            experts_gate_up=stack((E, 2 * width, H), "experts.gate_up_proj"),
            experts_down=stack((E, H, width), "experts.down_proj"),
            shared_gate_up=stack((2 * shared, H), gate, up),
            shared_down=stack((H, shared), "shared_expert.down_proj"),
            shared_gate=stack((1, H), "shared_expert_gate"),
        )


def random_parameters(layout: Any, seed: int) -> Any:
    """Random arrays for a layout, with sensible scales (for training from scratch, tests and benches).

    Matrices are normal with standard deviation 0.02, zero-centred norms are 0, plain norms 1, `A_log` the log of
    uniform(1, 16) and `dt_bias` the inverse softplus of a log-uniform step in [1e-3, 1e-1] (Mamba's initialisation).
    """
    rng = np.random.default_rng(seed)

    def make(path: tuple[Any, ...], leaf: LeafLayout) -> jax.Array:
        name = path[-1].name
        value: np.ndarray
        if name == "norm":
            value = np.ones(leaf.shape)
        elif "norm" in name:
            value = np.zeros(leaf.shape)
        elif name == "a_log":
            value = np.log(rng.uniform(1.0, 16.0, leaf.shape))
        elif name == "dt_bias":
            step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), leaf.shape))
            value = step + np.log(-np.expm1(-step))
        else:
            value = 0.02 * rng.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(value.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(
        make, layout, is_leaf=lambda x: isinstance(x, LeafLayout)
    )
