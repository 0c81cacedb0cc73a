"""What scoring gives back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Score:
    """One continuation given its context. Natural logarithms, raw model distribution, temperature 1."""

    token_ids: tuple[int, ...]
    """The continuation."""
    logprobs: tuple[float, ...]
    """float32 log-probability of each token of the continuation, given everything before it."""
    greedy: tuple[bool, ...]
    """For each token, whether it is the most probable one (of equal ones the lowest id)."""
    sum_logprob: float
    """float64 sum of `logprobs`."""

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding from the context gives this continuation."""
        return all(self.greedy)


@dataclass(frozen=True)
class Perplexity:
    """A whole text, every token after the first scored once in a window. Natural logarithms."""

    sum_logprob: float
    """float64 sum over the scored tokens."""
    scored: int
    """Tokens scored: all but the first."""
    perplexity: float
    """`exp(-sum_logprob / scored)`; inf where that is too large for a float."""
    bits_per_byte: float | None
    """-log2 of the probability of the scored tokens over their UTF-8 bytes; None where ids were given."""
    logprobs: np.ndarray
    """float32 [T], one a token; NaN for the first."""
    greedy: np.ndarray
    """bool [T]: whether the token is the most probable one; False for the first."""
