"""Rows of the sampler: who sits in which lane, with which parameters, and what sampling remembers of it."""

from __future__ import annotations

import numpy as np

from ninfer_jax.engine.request import Sequence
from ninfer_jax.program.plans import SamplingRows
from ninfer_jax.program.program import Program

_NEUTRAL = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


class Rows:
    """The lanes' occupants, and the device's sampling state of each lane kept up to date with them.

    A sampling step counts the token that it draws. What it cannot know makes a lane's memory out of date, and it is
    written anew from the committed tokens before the next step samples there: a new occupant or one that is back from
    a pause (PR-06), a control token in the place of the drawn one, and the end of `min_tokens`.
    """

    def __init__(self, program: Program, vocab: int) -> None:
        self._program = program
        self._vocab = vocab
        self._lanes: dict[int, Sequence] = {}
        self._written: set[int] = set()
        """Lanes whose memory on the device is not neutral."""
        self._sampling: SamplingRows | None = None

    def seat(self, sequence: Sequence, lane: int) -> None:
        """A sequence took a lane."""
        self._lanes[lane] = sequence
        sequence.lane, sequence.row_current = lane, False
        self._sampling = None

    def leave(self, sequence: Sequence) -> None:
        """A sequence gave up its lane, if it had one."""
        if self._lanes.get(sequence.lane) is sequence:
            del self._lanes[sequence.lane]
        sequence.lane = -1

    def prepare(self, sequence: Sequence) -> None:
        """Make the memory of a sequence's lane true before a step samples in it."""
        if sequence.row_current:
            return
        lane = sequence.lane
        if sequence.needs_row or lane in self._written:
            self._program.install_row(lane, **sampler_row(sequence, self._vocab))
            self._written.discard(lane)
            if sequence.needs_row:
                self._written.add(lane)
        sequence.row_current = True

    def sampling(self) -> SamplingRows:
        """Parameters of every lane, on the device; rebuilt when a lane has a new occupant."""
        if self._sampling is None:
            rows = self._program.limits.max_concurrency
            columns = {
                name: np.full(rows, value, np.int32 if name == "top_k" else np.float32)
                for name, value in _NEUTRAL.items()
            }
            seed = np.zeros((rows, 2), np.uint32)
            for lane, sequence in self._lanes.items():
                for name, column in columns.items():
                    column[lane] = getattr(sequence.request.sampling, name)
                seed[lane] = sequence.seed >> 32, sequence.seed & 0xFFFFFFFF
            self._sampling = self._program.put(SamplingRows(seed=seed, **columns))
        return self._sampling


def sampler_row(sequence: Sequence, vocab: int) -> dict[str, np.ndarray]:
    """What the sampler must remember of a sequence now: counts, prompt mask and bias, each [vocab]."""
    request = sequence.request
    counts = np.bincount(sequence.tokens, minlength=vocab).astype(np.int32)
    prompt = np.zeros(vocab, bool)
    prompt[request.ids] = True
    bias = np.zeros(vocab, np.float32)
    for token, value in request.sampling.logit_bias:
        bias[token] += value
    if len(sequence.tokens) < request.sampling.min_tokens:
        bias[sorted(t for t in sequence.session.ending_token_ids if t < vocab)] = -np.inf
    return {"counts": counts, "prompt": prompt, "bias": bias}
