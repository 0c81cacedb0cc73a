"""Prompts ready for the engine."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer_jax.errors import InputError
from ninfer_jax.frontend.channels import Channel


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as ids, and what its output session has to know (FE-01). Names no model."""

    token_ids: tuple[int, ...]
    text: str | None = None
    """The text the ids came from; None if the caller gave ids."""
    channel: Channel | None = None
    """The channel in which a chat's output begins; None for a raw prompt, whose output is all
    text."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools offered in a chat."""
    recovery: int = 0
    """recovery_frontier: how many leading ids the next prompt surely has too (CAT-04); 0: none."""
    splits: tuple[int, ...] = ()
    """rewrite_execution_frontiers, ascending (CAT-06)."""
    anchors: tuple[int, ...] = ()
    """The caller's private long recovery points, ascending (CAT-09)."""
    markers: tuple[int, ...] = ()
    """Boundaries for shared entries, at most four, ascending (CAT-12)."""
    notes: tuple[str, ...] = ()
    """What became of boundaries that could not be kept as the caller gave them."""

    @property
    def array(self) -> np.ndarray:
        """The ids as int32 [T]."""
        return np.asarray(self.token_ids, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.token_ids)


def is_integral(value: Any) -> bool:
    """Whether a value is an integer; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_token_ids(ids: Any, vocab_size: int, name: str = "prompt") -> tuple[int, ...]:
    """Token ids as a tuple of Python integers.

    Args:
        ids: a sequence, or an integer array of one dimension.
        vocab_size: rows of the model's embedding.
        name: what messages call it.

    Raises:
        InputError: no sequence, empty, an entry that is no integer (a bool is none), an id outside
            the vocabulary.
    """
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InputError(
                f"{name} must be an integer array of one dimension, got {ids.dtype} {ids.shape}"
            )
        ids = ids.tolist()
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Sequence):
        raise InputError(f"{name} must be a list of token ids, got {type(ids).__name__}")
    if not ids:
        raise InputError(f"{name} is empty; give at least one token")
    for i, token_id in enumerate(ids):
        # `type is int` first: nearly every entry is one, and the general question is slow.
        if type(token_id) is not int and not is_integral(token_id):
            raise InputError(f"{name}[{i}] is no token id: {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise InputError(
                f"{name}[{i}] is {token_id}; the vocabulary has ids 0 to {vocab_size - 1}"
            )
    return tuple(int(token_id) for token_id in ids)
