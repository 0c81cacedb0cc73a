"""A loaded model as one immutable tree, and the pure functions a research script needs.

`prefill`, `decode` and `forward` are pure and jittable; `forward` is differentiable. They run the same trunk as the
engine, on a state of their own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from artifacts import Checkpoint, open_checkpoint
from artifacts.architectures.qwen3_5 import Qwen3_5Config
from ninfer_jax.config import PAGE_TOKENS
from ninfer_jax.errors import CapacityError
from ninfer_jax.models.loading import load_tree
from ninfer_jax.models.qwen3_5 import trunk
from ninfer_jax.models.qwen3_5.params import TextParameters, parameter_layout, random_parameters
from ninfer_jax.models.qwen3_5.state import DeviceState, new_device_state

ArrayLike = Array | np.ndarray


@flax.struct.dataclass
class Model:
    """Configuration (static) and parameters (leaves) of a model."""

    params: TextParameters
    config: Qwen3_5Config = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class SequenceState:
    """Where B sequences of equal length stand: their KV pages, StateImages and common length."""

    device: DeviceState
    block_tables: Int[Array, "B L"]
    slots: Int[Array, " B"]
    length: Int[Array, ""]


def load_model(path: str | Path, *, dtype: Any = None, verify: bool = True) -> Model:
    """Read a checkpoint or artifact folder into device arrays.

    Args:
      path: a Hugging Face checkpoint folder or a model artifact.
      dtype: "float32" or "bfloat16"; None is bfloat16 on an accelerator and float32 on CPU.
      verify: check the SHA-256 of an artifact's files.

    Raises:
      ArtifactError: the folder is damaged, incomplete or of an unknown kind.
    """
    return model_from_checkpoint(open_checkpoint(path, verify=verify), dtype)


def model_from_checkpoint(checkpoint: Checkpoint, dtype: Any = None) -> Model:
    """The same for a checkpoint that is already open."""
    device = jax.devices()[0]
    if dtype is None:
        dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    layout = parameter_layout(checkpoint.config, jnp.dtype(dtype))
    return Model(params=load_tree(layout, checkpoint, device), config=checkpoint.config)


def init_model(config: Qwen3_5Config, *, dtype: Any = jnp.float32, seed: int = 0) -> Model:
    """A model with random parameters (see `random_parameters`)."""
    layout = parameter_layout(config, jnp.dtype(dtype))
    return Model(params=random_parameters(layout, seed), config=config)


def forward(model: Model, tokens: Int[ArrayLike, "B T"]) -> Float[Array, "B T V"]:
    """float32 logits of whole sequences, without a cache; differentiable with respect to the model."""
    hidden = trunk.forward(model.config, model.params, jnp.asarray(tokens, jnp.int32))
    return trunk.logits(model.params, hidden)


def prefill(
    model: Model, tokens: Int[ArrayLike, "B T"], *, capacity: int
) -> tuple[Float[Array, "B T V"], SequenceState]:
    """Run B prompts of T tokens from position 0.

    Args:
      model: a loaded model.
      tokens: token ids.
      capacity: tokens the state must be able to hold, prompt included (static under jit).

    Returns:
      float32 logits of every position, and the state for `decode`.

    Raises:
      CapacityError: capacity is smaller than T.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    B, T = tokens.shape
    if capacity < T:
        raise CapacityError(f"capacity={capacity} tokens cannot hold the prompt of {T} tokens")
    blocks = -(-capacity // PAGE_TOKENS)
    params = model.params
    device = new_device_state(model.config, pages=B * blocks, slots=B, dtype=params.embed.dtype)
    ids = jnp.arange(1, B * blocks + 1, dtype=jnp.int32).reshape(B, blocks)
    slots = jnp.arange(1, B + 1, dtype=jnp.int32)
    starts, lengths = jnp.zeros((B,), jnp.int32), jnp.full((B,), T, jnp.int32)
    device, hidden = trunk.prefill(
        model.config, params, device, tokens, starts, lengths, ids, slots
    )
    state = SequenceState(device, ids, slots, jnp.asarray(T, jnp.int32))
    return trunk.logits(params, hidden), state


def decode(
    model: Model, tokens: Int[ArrayLike, " B"], state: SequenceState
) -> tuple[Float[Array, "B V"], SequenceState]:
    """Run one more token of each sequence; the state must have room for it.

    Returns:
      float32 logits for the token after it, and the next state.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(state.length, tokens.shape)
    device, hidden = trunk.decode(
        model.config, model.params, state.device, tokens, positions, state.block_tables, state.slots
    )
    state = replace(state, device=device, length=state.length + 1)
    return trunk.logits(model.params, hidden), state
