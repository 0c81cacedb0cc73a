"""How often the trunk accepts what its drafts propose, on greedy answers to held-out questions.

Everything is computed from whole sequences, without an engine: an answer's own tokens are what the trunk chose, so a
draft after each of them is accepted as far as it repeats the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from artifacts import Checkpoint
from ninfer_jax.models import Model
from ninfer_jax.models.dflash import draft
from ninfer_jax.models.dflash.params import draft_layout
from ninfer_jax.models.loading import load_tree
from ninfer_jax.models.qwen3_5 import mtp, trunk
from ninfer_jax.models.qwen3_5.params import mtp_layout

MTP_LENGTH = 3
_ROWS = 512
"""Longest sequence taken, and the shape that every shorter one is padded to."""
_BATCH = 16


@dataclass(frozen=True)
class Answer:
    """A prompt and the trunk's greedy continuation; `tokens[start:]` is the continuation."""

    tokens: np.ndarray
    start: int


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafts."""

    by_position: tuple[float, ...]
    """Share of drafts whose first j + 1 tokens were all accepted, over all places of all answers."""
    tokens_per_round: float
    """Mean tokens of a verification: those accepted and the trunk's own next one, rounds run one after another."""
    places: int

    @property
    def first(self) -> float:
        """Acceptance of the first drafted token."""
        return self.by_position[0]


def measure(checkpoint: Checkpoint, model: Model, answers: list[Answer]) -> dict[str, Acceptance]:
    """Acceptance of the MTP head (drafts of three) and the DFlash draft, for a checkpoint that has both.

    Answers longer than 512 tokens with their prompt, or shorter than a draft, are left out.
    """
    device = jax.devices()[0]
    dtype = model.params.embed.dtype
    config, block = checkpoint.config, checkpoint.config.dflash
    assert block is not None
    head = load_tree(mtp_layout(config, dtype), checkpoint, device)
    params = load_tree(draft_layout(block, dtype), checkpoint, device)

    @jax.jit
    def run_trunk(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden, outputs = trunk.forward_with_layers(config, model.params, tokens[None])
        return hidden[0], draft.context(block, params, draft.features(block, outputs))

    @jax.jit
    def run_head(hidden: jax.Array, next_tokens: jax.Array) -> jax.Array:
        return mtp.forward(config, head, hidden, model.params.embed[next_tokens])

    @jax.jit
    def run_blocks(context: jax.Array, ids: jax.Array, anchors: jax.Array) -> jax.Array:
        x = draft.draft_blocks(block, params, context, model.params.embed[ids][None], anchors[None])
        return jnp.argmax(trunk.logits(model.params, x[0, :, 1:]), axis=-1)

    best = jax.jit(lambda rows: jnp.argmax(trunk.logits(model.params, rows), axis=-1))
    counts = {"mtp": _Counts(MTP_LENGTH), "dflash": _Counts(block.block_size - 1)}
    for answer in answers:
        size = answer.tokens.size
        if size > _ROWS or size - answer.start < 2:
            continue
        tokens = np.pad(answer.tokens, (0, _ROWS - size)).astype(np.int32)
        hidden, context = run_trunk(tokens)
        anchors = np.arange(answer.start, size - 1)
        drafted = [
            _mtp_drafts(run_head, best, np.asarray(hidden), tokens, some)
            for some in _batches(anchors)
        ]
        counts["mtp"].add(answer, anchors, np.concatenate(drafted)[: anchors.size])
        drafted = []
        for some in _batches(anchors):
            ids = np.full((_BATCH, block.block_size), block.mask_token_id, np.int32)
            ids[:, 0] = tokens[some]
            drafted.append(np.asarray(run_blocks(context, ids, some.astype(np.int32))))
        counts["dflash"].add(answer, anchors, np.concatenate(drafted)[: anchors.size])
    return {name: count.result() for name, count in counts.items()}


def _batches(anchors: np.ndarray) -> Iterator[np.ndarray]:
    padded = np.pad(anchors, (0, -anchors.size % _BATCH), mode="edge")
    yield from padded.reshape(-1, _BATCH)


def _mtp_drafts(
    run_head: partial, best: partial, hidden: np.ndarray, tokens: np.ndarray, anchors: np.ndarray
) -> np.ndarray:
    """Drafts [B, 3] after each anchor: row i of the head joins hidden state i with token i + 1."""
    rows = np.arange(anchors.size)
    states = np.repeat(hidden[None], anchors.size, axis=0)
    following = np.repeat(np.append(tokens[1:], 0)[None], anchors.size, axis=0)
    drafts = []
    for step in range(MTP_LENGTH):
        at = np.minimum(anchors - 1 + step, _ROWS - 1)
        out = np.asarray(run_head(states, following))[rows, at]
        drafts.append(np.asarray(best(out)))
        after = np.minimum(at + 1, _ROWS - 1)
        states[rows, after], following[rows, after] = out, drafts[-1]
    return np.stack(drafts, axis=1)


class _Counts:
    def __init__(self, length: int) -> None:
        self.accepted = np.zeros(length)
        self.places = self.rounds = self.tokens = 0

    def add(self, answer: Answer, anchors: np.ndarray, drafts: np.ndarray) -> None:
        """Drafts [N, K] after the given positions of an answer."""
        length = drafts.shape[1]
        wanted = np.pad(answer.tokens, (0, length), constant_values=-1)
        right = [drafts[:, j] == wanted[anchors + 1 + j] for j in range(length)]
        runs = np.cumprod(right, axis=0)
        self.accepted += runs.sum(axis=1)
        self.places += anchors.size
        place = 0
        while place < anchors.size:
            taken = int(runs[:, place].sum()) + 1
            self.tokens += min(taken, anchors.size - place)
            self.rounds += 1
            place += taken

    def result(self) -> Acceptance:
        shares = tuple(float(share) for share in self.accepted / max(self.places, 1))
        return Acceptance(shares, self.tokens / max(self.rounds, 1), self.places)
