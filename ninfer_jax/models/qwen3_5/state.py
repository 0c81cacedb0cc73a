"""Device state of the text trunk: paged KV planes and StateImage slots, as immutable trees.

Page 0 and slot 0 are null: whatever does not belong to a running row is written there and never read by one.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.config import PAGE_TOKENS


@flax.struct.dataclass
class KVPool:
    """The Main pool: one plane of keys and one of values an attention layer (KV-05, KV-06), layers outermost.

    Keys are stored after norm and rope, values raw. X counts the null page.
    """

    k: Float[Array, "A X K P D"]
    v: Float[Array, "A X K P D"]


@flax.struct.dataclass
class StateImages:
    """StateImage slots (ST-01, ST-02): slot s of every array is one complete recurrent state.

    S counts the null slot.
    """

    window: Float[Array, "S G W C"]
    """Last K-1 raw inputs of each linear layer's convolution, oldest first."""
    recurrent: Float[Array, "S G nv dk dv"]
    """float32 state of each linear layer's delta rule."""


@flax.struct.dataclass
class DeviceState:
    """Everything a unit may change. Units take it donated and return its successor."""

    kv: KVPool
    images: StateImages


def new_device_state(config: Qwen3_5Config, *, pages: int, slots: int, dtype: Any) -> DeviceState:
    """A zeroed state.

    Args:
      config: the text configuration.
      pages: usable pages of the Main pool, the null page not counted.
      slots: usable StateImage slots, the null slot not counted.
      dtype: dtype of keys, values and convolution windows. The recurrent state is float32.
    """
    c = config
    linear = c.layer_types.count("linear_attention")
    full = c.layer_types.count("full_attention")
    nv, dk, dv = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    channels = 2 * c.linear_num_key_heads * dk + nv * dv
    plane = (full, pages + 1, c.num_key_value_heads, PAGE_TOKENS, c.head_dim)
    window = (slots + 1, linear, c.linear_conv_kernel_dim - 1, channels)
    return DeviceState(
        kv=KVPool(k=jnp.zeros(plane, dtype), v=jnp.zeros(plane, dtype)),
        images=StateImages(
            window=jnp.zeros(window, dtype),
            recurrent=jnp.zeros((slots + 1, linear, nv, dk, dv), jnp.float32),
        ),
    )
