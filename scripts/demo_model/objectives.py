"""What the demo's training minimises: the trunk's next-token loss, then the drafts' distance from the frozen trunk.

The models are the runtime's own functions; only the losses stand here.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from artifacts import Qwen3_5Config
from artifacts.architectures.dflash import DFlashConfig
from ninfer_jax.models.dflash import draft
from ninfer_jax.models.dflash.params import DraftParameters, draft_layout
from ninfer_jax.models.loading import cast_tree
from ninfer_jax.models.qwen3_5 import mtp, trunk
from ninfer_jax.models.qwen3_5.params import (
    MTPParameters,
    TextParameters,
    mtp_layout,
    parameter_layout,
)
from scripts.demo_model.batches import Windows

BLOCK_DECAY = 4.0
"""A draft's j-th token weighs exp(-(j - 1) / BLOCK_DECAY): it is of use only if those before it were right."""


@flax.struct.dataclass
class Drafts:
    """Both draft heads, trained together on one frozen trunk."""

    mtp: MTPParameters
    dflash: DraftParameters


def trunk_loss(
    config: Qwen3_5Config, params: TextParameters, batches: tuple[Windows, ...], dtype: jnp.dtype
) -> Float[Array, ""]:
    """Weighted mean cross entropy, in nats a token, over windows of several lengths.

    `params` are the float32 master weights; the forward pass runs in `dtype`.
    """
    cast = cast_tree(parameter_layout(config, dtype), params)
    total = weight = jnp.zeros((), jnp.float32)
    for windows in batches:
        hidden = trunk.forward(config, cast, windows.tokens[:, :-1])
        losses = cross_entropy(trunk.logits(cast, hidden), windows.tokens[:, 1:])
        total += jnp.sum(losses * windows.weights)
        weight += jnp.sum(windows.weights)
    return total / weight


def cross_entropy(logits: Float[Array, "*n V"], targets: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """Negative log-likelihood of each target, in nats."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def draft_loss(
    config: Qwen3_5Config,
    draft_config: DFlashConfig,
    frozen: TextParameters,
    drafts: Drafts,
    windows: Windows,
    anchors: Int[Array, "B N"],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """How far both drafts are from what the trunk itself would say next, given the true text before.

    Args:
      config, draft_config: geometries.
      frozen: the trunk in the dtype of the forward pass.
      drafts: float32 master weights of both heads.
      windows: token windows of T predictions each.
      anchors: positions of the blocks' anchors, 1 .. T - block_size.

    Returns:
      The sum of both losses (cross entropy against the trunk's distribution, nats), and for each head the share of
      weighted rows where its first choice is the trunk's: `mtp_match`, `dflash_match` (first drafted token).
    """
    dtype = frozen.embed.dtype
    tokens = windows.tokens
    hidden, outputs = trunk.forward_with_layers(config, frozen, tokens[:, :-1])
    hidden, outputs = jax.lax.stop_gradient((hidden, outputs))
    target = jax.lax.stop_gradient(trunk.logits(frozen, hidden))

    # Row i of the head predicts what the trunk predicts at i + 1.
    head = cast_tree(mtp_layout(config, dtype), drafts.mtp)
    rows = mtp.forward(config, head, hidden[:, :-1], frozen.embed[tokens[:, 1:-1]])
    mtp_logits = trunk.logits(frozen, rows)
    weights = windows.weights[:, 1:]
    mtp_loss = _mean(_distance(mtp_logits, target[:, 1:]), weights)
    mtp_match = _mean(_agree(mtp_logits, target[:, 1:]), weights)

    # Mask row j of a block at anchor a predicts token a + j, as the trunk does at a + j - 1.
    block = cast_tree(draft_layout(draft_config, dtype), drafts.dflash)
    context = draft.context(draft_config, block, draft.features(draft_config, outputs))
    B, N = anchors.shape
    K = draft_config.block_size
    ids = jnp.full((B, N, K), draft_config.mask_token_id, tokens.dtype)
    ids = ids.at[:, :, 0].set(jnp.take_along_axis(tokens, anchors, axis=1))
    x = draft.draft_blocks(draft_config, block, context, frozen.embed[ids], anchors)
    block_logits = trunk.logits(frozen, x[:, :, 1:])
    at = (anchors[:, :, None] + jnp.arange(K - 1)[None, None]).reshape(B, N * (K - 1))
    wanted = jnp.take_along_axis(target, at[:, :, None], axis=1).reshape(block_logits.shape)
    decay = jnp.exp(-jnp.arange(K - 1, dtype=jnp.float32) / BLOCK_DECAY)
    counted = jnp.take_along_axis(windows.weights, at, axis=1).reshape(B, N, K - 1)
    dflash_loss = _mean(_distance(block_logits, wanted), counted * decay[None, None])
    first = (slice(None), slice(None), 0)
    dflash_match = _mean(_agree(block_logits, wanted)[first], counted[first])
    metrics = {
        "mtp_loss": mtp_loss,
        "mtp_match": mtp_match,
        "dflash_loss": dflash_loss,
        "dflash_match": dflash_match,
    }
    return mtp_loss + dflash_loss, metrics


def _distance(logits: Array, target: Array) -> Array:
    """Cross entropy against the target's distribution."""
    wanted = jax.nn.softmax(target, axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(wanted * logits, axis=-1)


def _agree(logits: Array, target: Array) -> Array:
    return (jnp.argmax(logits, axis=-1) == jnp.argmax(target, axis=-1)).astype(jnp.float32)


def _mean(values: Array, weights: Array) -> Array:
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-6)
