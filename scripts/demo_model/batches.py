"""Training batches, cut on the device out of the packed arrays of `scripts.demo_data`.

A window starts at the start of a document or dialogue, because that is where every real sequence starts; half of the
text windows start anywhere, so that the later part of a long document is seen as often as its first page.
"""

from __future__ import annotations

from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from scripts.demo_model.geometry import END_OF_TEXT
from scripts.demo_model.packing import read_chat

PROMPT_WEIGHT = 0.1
"""Share of the loss that tokens of a dialogue have which the model does not write itself."""


@flax.struct.dataclass
class Stream:
    """Documents joined by the end-of-text token, which also stands before the first one."""

    tokens: UInt[Array, " n"]
    weights: UInt[Array, " n"] | None
    """1 where a token counts fully in the loss; None: everywhere."""
    starts: Int[Array, " documents"]
    """Positions of the end-of-text tokens before each document (text), of the first tokens (dialogues)."""


@flax.struct.dataclass
class Windows:
    """Token windows [B, T + 1]: the model reads the first T and predicts the last T."""

    tokens: Int[Array, "B T1"]
    weights: Float[Array, "B T"]


def read_streams(folder: Path) -> tuple[Stream, Stream]:
    """The text and the dialogues of a data folder."""
    text = np.load(folder / "text.npy")
    chat, mask = read_chat(folder)
    return _stream(text, None, into=0), _stream(chat, mask, into=1)


def _stream(tokens: np.ndarray, mask: np.ndarray | None, into: int) -> Stream:
    # An end-of-text token leads in, so that the first document has one before it like every other.
    tokens = np.concatenate([np.array([END_OF_TEXT], tokens.dtype), tokens])
    starts = np.flatnonzero(tokens == END_OF_TEXT) + into
    weights = None if mask is None else jnp.asarray(np.concatenate([[0], mask]).astype(np.uint8))
    return Stream(jnp.asarray(tokens), weights, jnp.asarray(starts[:-1], jnp.int32))


def sample(key: Array, stream: Stream, rows: int, length: int, anywhere: float) -> Windows:
    """Random windows of `length` predictions each; a share `anywhere` of them starts at any token."""
    which, place, coin = jax.random.split(key, 3)
    last = stream.tokens.shape[0] - length - 1
    start = stream.starts[jax.random.randint(which, (rows,), 0, stream.starts.shape[0])]
    free = jax.random.randint(place, (rows,), 0, last)
    start = jnp.where(jax.random.uniform(coin, (rows,)) < anywhere, free, start)
    at = jnp.minimum(start, last)[:, None] + jnp.arange(length + 1)[None]
    tokens = stream.tokens[at].astype(jnp.int32)
    if stream.weights is None:
        weights = jnp.ones((rows, length), jnp.float32)
    else:
        counted = stream.weights[at[:, 1:]].astype(jnp.float32)
        weights = PROMPT_WEIGHT + (1.0 - PROMPT_WEIGHT) * counted
    return Windows(tokens, weights)
