"""Public model geometries, and models of these shapes with random weights, built on the device.

For benches: speed depends on shapes, not on values. The numbers are those of the public checkpoints (model_math
section 10); vision towers are left out.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.errors import InputError
from ninfer_jax.models.loading import LeafLayout, map_leaves
from ninfer_jax.models.model import Model
from ninfer_jax.models.qwen3_5.params import parameter_layout

_COMMON: dict[str, Any] = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "rope_theta": 1e7,
    "rotary_dim": 64,
    "mrope_section": (11, 11, 10),
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "mtp_num_hidden_layers": 1,
    "eos_token_ids": (248_044,),
}


def _geometry(
    hidden: int, layers: int, heads: tuple[int, int], value_heads: int, tied: bool, **ffn: Any
) -> Qwen3_5Config:
    kinds = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
    sparse = "num_experts" in ffn
    sizes: dict[str, Any] = {
        "intermediate_size": 0,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "moe_intermediate_size": 0,
        "shared_expert_intermediate_size": 0,
    }
    return Qwen3_5Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        layer_types=kinds * (layers // 4),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        linear_num_value_heads=value_heads,
        tie_word_embeddings=tied,
        ffn_types=("moe" if sparse else "dense",) * layers,
        norm_topk_prob=sparse,
        **_COMMON,
        **(sizes | ffn),
    )


GEOMETRIES: dict[str, Qwen3_5Config] = {
    "0.8B": _geometry(1024, 24, (8, 2), 16, True, intermediate_size=3584),
    "4B": _geometry(2560, 32, (16, 4), 32, True, intermediate_size=9216),
    "9B": _geometry(4096, 32, (16, 4), 32, False, intermediate_size=12288),
    "27B": _geometry(5120, 64, (24, 4), 48, False, intermediate_size=17408),
    "35B-A3B": _geometry(
        2048,
        40,
        (16, 2),
        32,
        False,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
}
"""Text geometry by the size in the model's name."""


def random_model(name: str, *, dtype: Any = jnp.bfloat16, seed: int = 0) -> Model:
    """A model of a public shape with random weights, made on the default device, one array at a time.

    Matrices are normal with standard deviation 0.02, norms neutral, decays as at the start of training.

    Raises:
      InputError: the name is not one of `GEOMETRIES`.
    """
    if name not in GEOMETRIES:
        raise InputError(f"no geometry {name!r}; known: {', '.join(GEOMETRIES)}")
    config = GEOMETRIES[name]
    return Model(params=random_weights(config, dtype=dtype, seed=seed), config=config)


def random_weights(config: Qwen3_5Config, *, dtype: Any, seed: int) -> Any:
    """Parameters as in `random_model` for any configuration."""
    # Values differ between platforms, as the generator does: the portable one takes minutes to compile and draw.
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 64))

    def make(leaf: LeafLayout) -> jax.Array:
        key, name = next(keys), leaf.sources[0].rsplit(".", 1)[-1]
        if name == "norm" and "linear_attn" in leaf.sources[0]:
            return jnp.ones(leaf.shape, leaf.dtype)  # the gated norm has a plain weight
        if "norm" in name:
            return jnp.zeros(leaf.shape, leaf.dtype)
        if name == "A_log":
            return jnp.log(jax.random.uniform(key, leaf.shape, leaf.dtype, 1.0, 16.0))
        if name == "dt_bias":
            low, high = jnp.log(1e-3), jnp.log(1e-1)
            step = jnp.exp(jax.random.uniform(key, leaf.shape, leaf.dtype, low, high))
            return step + jnp.log(-jnp.expm1(-step))
        return _normal(key, leaf.shape, leaf.dtype)

    return map_leaves(make, parameter_layout(config, dtype))


_BLOCK = 1 << 24
"""Most values drawn by one call: float32 draws are little beside the result, and few programs draw for all shapes."""


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    rows, width = math.prod(shape[:-1]), shape[-1]
    count = min(_BLOCK, 1 << (rows * width - 1).bit_length())
    block = min(rows, count // width)
    array = jnp.zeros((rows, width), dtype)
    firsts = range(0, rows, block)
    for first, k in zip(firsts, jax.random.split(key, len(firsts)), strict=True):
        # The last block moves back to end with the array.
        array = _put(array, _draw(k, count), jnp.int32(min(first, rows - block)), block)
    return array.reshape(shape)


@partial(jax.jit, static_argnums=1)
def _draw(key: jax.Array, count: int) -> jax.Array:
    return 0.02 * jax.random.normal(key, (count,), jnp.float32)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _put(array: jax.Array, drawn: jax.Array, first: jax.Array, rows: int) -> jax.Array:
    new = drawn[: rows * array.shape[1]].reshape(rows, -1).astype(array.dtype)
    return jax.lax.dynamic_update_slice(array, new, (first, jnp.zeros_like(first)))
